# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: parts of it, timed in turn in the same processes.

    accelerate launch --config_file accelerate_configs/2gpu.yaml benchmarks/overhead.py ddp_cifar \\
        --rounds 5 --steps 2 --stem imagenet

The other flags are the recipe's. The loops:

    recipe        the recipe's train_step, fed by its loader
    cached        the same, fed one batch again and again
    plain torch   without Accelerate and the recipe's own code, on that batch
    without DDP   plain torch, each process for itself
    convolutions  the model's convolutions alone, forward and backward
"""

import argparse
import gc
import statistics
import sys
import time

import torch
from accelerate import DistributedDataParallelKwargs
from bench import GPUS, ROOT, hardware, load
from torch import nn
from torch.nn import functional as F

COMPARISONS = [
    ("recipe", "cached", "with its data / fed one batch"),
    ("cached", "plain torch", "with Accelerate and the recipe's own code / plain torch"),
    ("plain torch", "without DDP", "with DDP / without"),
    ("recipe", "convolutions", "of the recipe / of the convolutions alone"),
]


class Training:
    """A recipe's model and optimizer, in Accelerate, in plain DDP and without DDP."""

    def __init__(self, recipe, run):
        self.recipe = recipe
        self.run = run
        self.args = run.args
        self.accelerator = accelerator = run.accelerator
        self.loader, _ = run.prepare_data(recipe.load_data(run.args, accelerator))
        self.batches = self.endless_batches()
        self.cached = next(self.batches)

        model, optimizer, self.scheduler = self.make()
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.in_ddp = self.make()
        self.alone = self.make()
        if accelerator.use_distributed:
            devices = [accelerator.device] if GPUS else None
            ddp = nn.parallel.DistributedDataParallel
            model = ddp(self.in_ddp[0], devices, gradient_as_bucket_view=True)
            self.in_ddp = model, *self.in_ddp[1:]
        self.convolve = convolutions(self.alone[0], self.cached[0], self.dtype())

    def make(self):
        model = self.recipe.build_model(self.args).to(self.accelerator.device)
        return model, *self.recipe.make_optimizer(model, self.args, total_steps=10**9)

    def dtype(self):
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return types.get(self.accelerator.mixed_precision, torch.float32)

    def endless_batches(self):
        while True:
            yield from self.loader

    def train_step(self, batch):
        arguments = self.run, self.model, self.optimizer, self.scheduler
        self.recipe.train_step(*arguments, [batch])

    def plain_step(self, model, optimizer, scheduler):
        images, labels = self.cached
        dtype = self.dtype()
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loops(self):
        return {
            "recipe": lambda: self.train_step(next(self.batches)),
            "cached": lambda: self.train_step(self.cached),
            "plain torch": lambda: self.plain_step(*self.in_ddp),
            "without DDP": lambda: self.plain_step(*self.alone),
            "convolutions": self.convolve,
        }


def convolutions(model, images, dtype):
    """Return a function: the model's convolutions of these images, forward and backward, on random
    numbers."""
    calls, tensors = [], {}

    def remember(convolution, inputs, output):
        weight = convolution.weight.detach().to(dtype).requires_grad_()
        # One of each shape; gradients of all of them but the images are needed.
        for tensor in (inputs[0], output):
            needs_gradient = inputs[0] is not images or tensor is output
            random = torch.randn_like(tensor, dtype=dtype).requires_grad_(needs_gradient)
            tensors.setdefault(tensor.shape, random)
        gradient = tensors[output.shape].detach()
        calls.append((convolution, tensors[inputs[0].shape], weight, gradient))

    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    hooks = [module.register_forward_hook(remember) for module in found]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()

    def step():
        for convolution, inputs, weight, gradient in calls:
            output = F.conv2d(inputs, weight, None, convolution.stride, convolution.padding)
            torch.autograd.grad(output, [x for x in (inputs, weight) if x.requires_grad], gradient)

    return step


def seconds_per_step(training, rounds, steps):
    """Return {loop: [seconds of a step in each round]}. The loops take turns."""
    accelerator = training.accelerator
    loops = training.loops()
    seconds = {name: [] for name in loops}
    order = list(loops)
    for index in range(rounds + 1):
        for name in order:
            accelerator.wait_for_everyone()
            before = time.perf_counter()
            for _ in range(steps):
                loops[name]()
            if GPUS:
                torch.cuda.synchronize()
            accelerator.wait_for_everyone()
            if index:  # the first round is warm-up
                seconds[name].append((time.perf_counter() - before) / steps)
        order = order[1:] + order[:1]
    return seconds


def span(values, form):
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("recipe", choices=("ddp_cifar", "amp_cifar"))
    parser.add_argument("--rounds", type=int, default=5, help="of all loops (5)")
    parser.add_argument("--steps", type=int, default=2, help="of a loop in a round (2)")
    own, sys.argv[1:] = parser.parse_known_args()

    recipe = load(ROOT / f"recipes/{own.recipe}.py")
    args = recipe.parse_args(recipe.add_flags, recipe.add_technique_flags)
    args.lr = 1e-6  # nothing is learnt
    args.output_dir = "runs/overhead"
    precision = "fp32"
    if own.recipe == "amp_cifar":
        recipe.set_precision(args)
        precision = args.precision
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    run = recipe.Run(args, precision, ddp)
    run.line_due = False
    accelerator = run.accelerator
    processes = accelerator.num_processes
    training = Training(recipe, run)
    seconds = seconds_per_step(training, own.rounds, own.steps)

    say = accelerator.print
    say(f"{own.recipe}, {precision}, {processes} processes, {hardware()}")
    say(f"batch {args.batch_size}, {own.rounds} rounds, torch {torch.__version__}")
    for name, values in seconds.items():
        rate = args.batch_size * processes / statistics.median(values)
        say(f"  {name:12} {span([1000 * x for x in values], '.1f')} ms, {rate:,.0f} images/s")
    for slow, fast, meaning in COMPARISONS:
        ratios = [b / a for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        say(f"  {span(ratios, '.3f')} speed {meaning}")
    # As in the recipes: gloo may abort where models outlive the process group.
    accelerator.free_memory()
    del training
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
