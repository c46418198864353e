# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: ddp_cifar.py in bf16, or in fp16 with dynamic loss scaling.

    accelerate launch --config_file accelerate_configs/4gpu.yaml recipes/amp_cifar.py
    torchrun --nproc_per_node 2 recipes/amp_cifar.py --precision fp16 --clip-norm 1

Weights, optimizer and loss stay in fp32; autocast computes convolutions and matrix products in bf16
or, with a scaled loss, fp16 (Micikevicius et al. 2018, arXiv:1710.03740). The same command resumes.

To make this file yours, replace `load_data`, `build_model`, `compute_loss` and `add_flags`. All
above the banner "machinery" is to be edited; below it, only the part CIFAR-10 is the example's.
"""

import argparse
import faulthandler
import gc
import json
import math
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count, islice
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from pickle import UnpicklingError

import accelerate
import numpy
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches, utils
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def add_flags(add):
    """Declare the example's flags; a resumed run may change those that may_differ. Replace this."""
    add("--data", "synthetic: no download", choices=("cifar10", "synthetic"), default="cifar10")
    add("--data-dir", "where CIFAR-10 is, or is downloaded to", default="data", may_differ=True)
    add("--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    add("--stem", "3x3, or 7x7 and max-pooling", choices=("cifar", "imagenet"), default="cifar")


def load_data(args, accelerator):
    """Return the DataLoaders of (images, labels) for training and test. Replace this.

    Write them as for one process, without DistributedSampler: Accelerate divides the batches among
    the processes. Any map-style Dataset works, also with random transforms and workers: see
    `SeededSamples`. To download, see `cifar10`.
    """
    if args.data == "synthetic":
        train_images, test_images = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
    else:
        train_images, test_images = cifar10(args.data_dir, accelerator)
    train_set = ImageTensors(*train_images, accelerator.device, augmentation_seed=args.seed)
    test_set = ImageTensors(*test_images, accelerator.device)
    options = {"batch_size": args.batch_size, "collate_fn": tuple}  # ImageTensors makes batches
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) in, (B, classes) logits out. Replace this."""
    if args.model == "simple_cnn":
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    else:
        model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True)
        if args.stem == "cifar":
            # 32 x 32 images are small already: do not shrink them fourfold before the first block.
            model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)  # in which convolutions are fastest


def compute_loss(model, batch):
    """Return {"loss": (B,) float, "your metric": (B,) float or bool, ...}. Replace this.

    Call `model` itself, not its methods: its forward pass is what synchronises the gradients. The
    mean of "loss" is minimised, the means of all are reported. For samples that count unequally add
    "weight": (B,), which weights all means, over the whole global batch: of a sequence "loss" is
    the mean over its tokens, "weight" their number. For class weights multiply the loss instead.
    """
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate."""
    peak = args.lr * args.global_batch_size / 128
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "fused": can_fuse(args)}
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)
    factor = partial(lr_lambda, total_steps=max(1, total_steps))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def lr_lambda(step, total_steps):
    """Return the factor on the peak learning rate at optimizer step `step`, from 0: linear warm-up
    over the first fifth of the run, then linear decay to zero. The peak scales linearly with the
    global batch, which needs the warm-up (Goyal et al. 2017, arXiv:1706.02677)."""
    warmup = max(1, total_steps // 5)
    return min((step + 1) / warmup, (total_steps - step) / max(1, total_steps - warmup))


def train_step(accelerator, model, optimizer, scheduler, microbatches, step_key, clip_norm):
    """Take one optimizer step over the batches `microbatches`. Return the metrics of each, and the
    gradient's norm before clipping to `clip_norm` (inf: only measured; None: neither). All stay on
    the device: reading them here would make the host wait for it in every step."""
    metrics = []
    for index, batch in enumerate(microbatches):
        seed_rng(*step_key, index, accelerator.process_index)  # a resumed run repeats dropout
        with accelerator.accumulate(model):  # gradients are averaged in the last microbatch
            metrics.append(checked(compute_loss(model, batch)))
            accelerator.backward(mean_loss(metrics[-1]))
    divide_by_mean_weight(accelerator, model, metrics)
    grad_norm = None
    if clip_norm is not None:
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    if not accelerator.optimizer_step_was_skipped:  # in fp16, when gradients overflow
        scheduler.step()
    optimizer.zero_grad()
    return metrics, grad_norm


@torch.no_grad()
def evaluate(accelerator, model, loader, hang):
    """Return {"test_loss": mean, ..., "samples": n}, each sample of the test set counted once."""
    set_epoch(loader, 0)  # the same random transforms in each evaluation
    sums = 0
    with eval_mode(model):
        utils.broadcast(list(model.buffers()))  # in place: all use rank 0's BatchNorm statistics
        for index, batch in enumerate(loader):
            seed_rng("evaluation", index, accelerator.process_index)
            metrics = checked(compute_loss(model, batch))
            rows = accelerator.gather_for_metrics(sample_rows(metrics))  # drops the padding
            sums += rows.sum(0)
            hang.made_progress()
    return test_metrics(metrics, sums, len(loader.dataset))


def main():
    args = parse_args(add_flags, add_technique_flags)
    lock_output_directory(args.output_dir)
    args.precision, chosen_by = choose_precision(args)
    ddp = utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = make_accelerator(args, args.precision, ddp)
    hang = HangDetector(accelerator, args.hang_timeout)
    accumulation = divide_global_batch(args, accelerator, accelerator.num_processes)
    utils.set_seed(args.seed)  # for the initial weights; each step calls `seed_rng`
    loaders = reproducible(load_data(args, accelerator), args.seed)
    train_loader, test_loader = accelerator.prepare(*loaders)
    steps = Steps(train_loader, accumulation, args)

    model = load_weights(accelerator, build_model(args), args)
    check_weights_are_fp32(model, args.precision)
    if args.compile:  # in place: keeps the state dict's names
        # No CUDA graphs when accumulating: each replay would overwrite the gradients before.
        model.compile(mode="reduce-overhead" if accumulation == 1 else "default")
    optimizer, scheduler = make_optimizer(model, args, steps.total)
    # Not the scheduler: Accelerate would advance it once per process in each step.
    model, optimizer = accelerator.prepare(model, optimizer)
    skip_batchnorm_broadcasts(model)
    check_evaluation(model, test_loader)

    plain_model = accelerator.unwrap_model(model)
    states = {"model": plain_model, "optimizer": optimizer, "scheduler": scheduler}
    states |= {"scaler": accelerator.scaler} if accelerator.scaler else {}
    config = describe(args, accelerator, steps, optimizer, precision_chosen=chosen_by)
    checkpoints = Checkpoints(accelerator, config, states)
    checkpoint = checkpoints.find()
    if checkpoint:
        rebuild_ddp_buckets(accelerator, model, train_loader)
        steps.done = checkpoints.load(checkpoint)
    metrics = Metrics(accelerator, config, steps, checkpoint)
    del checkpoint  # on each process a copy of the whole state, in host memory
    stop = StopSignal(accelerator)

    for epoch in steps.epochs_left():
        metrics.start_clock()
        for step, microbatches in steps.left_in(epoch):
            learning_rate = scheduler.get_last_lr()[0]
            line_due = metrics.due(step)
            clip_norm = args.clip_norm or (math.inf if line_due else None)
            values, grad_norm = train_step(
                accelerator, model, optimizer, scheduler, microbatches, (args.seed, step), clip_norm
            )
            metrics.add(step, values)
            hang.made_progress(step)
            stop_signal = stop.requested()  # the same on all ranks
            if line_due or stop_signal:
                # Exits if loss or weights are not finite, so that they are not saved.
                weight_norm = torch.nn.utils.get_total_norm(model.parameters())
                scaling = loss_scaling(accelerator, scheduler, step)
                metrics.log(weight_norm, learning_rate, grad_norm, **scaling)
            if stop_signal or checkpoints.due(step, steps):
                with hang.paused():
                    checkpoints.save(step, metrics)
                metrics.start_clock()
            if stop_signal:
                message = f"stopped after step {step}, which is saved: the same command continues"
                exit_together(metrics, 128 + stop_signal, message)
        test = evaluate(accelerator, model, test_loader, hang)
        metrics.write("evaluation", test)

    if checkpoints.last_step != metrics.step:  # the loop was left early
        with hang.paused():
            checkpoints.save(metrics.step, metrics)
    if metrics.evaluated_step != metrics.step:
        test = evaluate(accelerator, model, test_loader, hang)
        metrics.write("evaluation", test)
    with hang.paused():
        accelerator.save_model(model, args.output_dir, max_shard_size="10000GB")  # in one file
        metrics.finish(test, **loss_scaling(accelerator, scheduler, metrics.step))
    hang.close()
    # DDP's wrapper goes before the process group that it uses: at exit, gloo may abort.
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    accelerator.end_training()


# ========================================= machinery: the same text, byte for byte, in all recipes
RECIPE = Path(__file__).stem
LAUNCHER = os.getppid()  # asked early: once it has died, the parent is another
TIMEOUT = timedelta(hours=2)  # of every process group: for downloading, and reading a checkpoint


# ------------------------------------------------------------------------------------------ metrics
ONE_PER_SAMPLE = (
    'return {"loss": loss}, with one value per sample (reduction="none"), also in evaluations; '
    'for tokens, each sequence\'s mean and their number as "weight"'
)


def checked(metrics):
    """Return what `compute_loss` returned; exit with an error unless it is {name: (B,) tensor}."""
    if not isinstance(metrics, dict) or "loss" not in metrics:
        found = sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__
        exit_with_error(f"compute_loss returned {found}: {ONE_PER_SAMPLE}")
    for name in ("loss", *metrics):
        value = metrics[name]
        shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
        if len(shape) != 1 or shape != tuple(metrics["loss"].shape):
            exit_with_error(f'compute_loss: "{name}" is {shape} and not (B,): {ONE_PER_SAMPLE}')
    return metrics


def mean_loss(metrics):
    """Return the scalar to backpropagate: the mean of the loss, times the weights if there are any.
    Then `divide_by_mean_weight` makes its gradient that of the weighted mean."""
    if "weight" in metrics:
        return (metrics["loss"] * metrics["weight"]).mean()
    return metrics["loss"].mean()


def divide_by_mean_weight(accelerator, model, metrics):
    """Divide the gradients by the mean weight of the global batch, if there are weights: over all
    microbatches of all processes, so that it does not matter how samples are spread over them."""
    if "weight" not in metrics[0]:
        return
    weights = torch.cat([one["weight"].detach().float() for one in metrics])
    sums = torch.stack([weights.sum(), torch.ones_like(weights).sum()])
    total, samples = accelerator.reduce(sums)
    mean_weight = total / samples
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= mean_weight.to(parameter.grad.device)


def sample_rows(metrics):
    """Return (B, M + 2) float32, a row per sample: its M metrics times its weight, its weight, 1.
    `means` divides their sums."""
    weight = metrics.get("weight", torch.ones_like(metrics["loss"])).detach()
    columns = [value.detach() * weight for name, value in metrics.items() if name != "weight"]
    return torch.stack([*columns, weight, torch.ones_like(weight)], dim=1).float()


def means(metrics, sums):
    """Return {name: mean} and the number of samples, from the names of the metrics and the sums of
    `sample_rows`, (M + 2,)."""
    *totals, weight, samples = sums.tolist()
    names = [name for name in metrics if name != "weight"]
    values = {name: total / (weight or math.nan) for name, total in zip(names, totals, strict=True)}
    return values, round(samples)


def test_metrics(metrics, sums, samples):
    """Return the means of an evaluation; exit with an error unless all `samples` were counted."""
    values, counted = means(metrics, sums)
    if counted != samples:
        found = f"{counted} of {samples} samples counted"
        exit_with_error(f"evaluate: {found}: return one value per sample, no drop_last")
    return {**{f"test_{name}": value for name, value in values.items()}, "samples": samples}


def check_evaluation(model, loader):
    """Evaluate one batch, so that a mistake is found now and not after an epoch."""
    with torch.no_grad(), eval_mode(model):
        metrics = checked(compute_loss(model, next(iter(loader))))
    values = len(sample_rows(metrics))
    samples = loader.batch_sampler.batch_size
    if values not in (samples, len(loader.dataset)):  # a test set smaller than a batch
        found = f"{values} values for a batch of {samples} samples"
        exit_with_error(f"compute_loss: {found}: {ONE_PER_SAMPLE}")


@contextmanager
def eval_mode(model):
    """In eval mode; after it, modules that were in eval mode already (frozen ones) stay in it."""
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    yield
    model.train()  # undoes what a module may do in `eval`, such as merging weights
    for module in frozen:
        module.training = False


class Metrics:
    """The metrics of a training: summed up on the device, then averaged over all processes and
    written to the screen, metrics.jsonl, summary.json and trackers, by the main process.

    Throughput is over all processes, without evaluations, checkpoints and the first line of
    metrics, which is warm-up.
    """

    def __init__(self, accelerator, config, steps, checkpoint):
        self.accelerator = accelerator
        self.config = config
        self.steps = steps
        self.step = steps.done
        self.last_line = steps.done  # at which step it was
        self.evaluated_step = None
        self.names = []
        self.sums = 0  # of `sample_rows`, since the last line
        self.warned = set()
        self.measured_samples = 0
        self.measured_seconds = 0.0
        self.started = time.time()
        self.text = checkpoint["metrics"] if checkpoint else ""  # what is in metrics.jsonl
        self.run_id = checkpoint["run_id"] if checkpoint else os.urandom(16).hex()
        self.open_outputs()

    def open_outputs(self):
        is_main = self.accelerator.is_main_process
        path = Path(self.config["output_dir"], "metrics.jsonl") if is_main else os.devnull
        self.file = open(path, "w", buffering=1)
        for stream in filter(None, (sys.stdout, sys.stderr, self.file)):
            survive_errors(stream)
        self.file.write(self.text)
        scalars = {k: v for k, v in self.config.items() if isinstance(v, int | float | str)}
        one_run = {  # a resumed run is the same run for a tracker
            "wandb": {"id": self.run_id, "resume": "allow"},
            "tensorboard": {"purge_step": self.step + 1},
        }
        self.accelerator.init_trackers(RECIPE, scalars, one_run)
        self.display = Display(is_main, self.step, self.steps.total)
        self.display.show("run", {**self.config, "resumed_from": self.step})
        self.display.progress.start()

    def start_clock(self):
        """Begin to measure throughput, where training continues after something else."""
        self.clock = time.perf_counter()
        self.steps.waited = 0.0

    def due(self, step):
        """Whether a line is due after this step: also before each checkpoint, which contains it."""
        every = self.config["checkpoint_every"]
        saves = every is not None and step % every == 0
        return saves or self.steps.ends_epoch(step) or step % self.config["log_every"] == 0

    def add(self, step, microbatches):
        """Add the metrics of a step's microbatches to this process's sums."""
        for metrics in microbatches:
            if self.names not in ([], list(metrics)):
                exit_with_error("compute_loss: return the same keys for every batch")
            self.names = list(metrics)
            self.sums = self.sums + sample_rows(metrics).sum(0)
        self.step = step
        self.display.advance()

    def log(self, weight_norm, learning_rate, grad_norm, **more):
        """Write a line: means over all processes since the last one. This waits for the device.

        Exit if loss or weights are not finite. The gradient's norm does not show it: a step whose
        gradients overflow may be skipped, and weights without a gradient in it can be NaN.
        """
        weight_norm = float(weight_norm)  # waits for the device, in this frame: see `own_report`
        own = [weight_norm, self.steps.waited, peak_memory(self.accelerator) / 2**30]
        own = torch.tensor(own, device=self.accelerator.device)
        row = torch.cat([self.sums, own])[None]
        by_rank = self.accelerator.gather(row)
        by_rank = by_rank.double().cpu()
        seconds = time.perf_counter() - self.clock
        sums, norms, waited, memory = by_rank.split([by_rank.shape[1] - 3, 1, 1, 1], dim=1)
        values, _ = means(self.names, sums.sum(0))
        loss = list(values).index("loss")
        self.exit_if_not_finite(values, sums[:, loss], norms[:, 0])
        values["learning_rate"] = learning_rate
        values["grad_norm"] = None if grad_norm is None else float(grad_norm)
        values["samples_per_second"] = self.throughput(seconds)
        values["data_wait"] = waited.mean().item() / seconds
        values["peak_memory_gib"] = round(memory.max().item(), 3)
        slowest = {
            "slowest_data_wait": waited.max().item() / seconds,
            "slowest_data_rank": waited.argmax().item(),
        }
        self.write("train", {**values, **more}, slowest)
        self.sums = 0
        self.last_line = self.step
        self.start_clock()

    def exit_if_not_finite(self, values, losses, weight_norms):
        """Exit if the loss or the weights of a rank are not; warn of other metrics."""
        # A gradient that is not finite spoils all ranks' weights: the losses say whose it was.
        suspects = weight_norms if losses.isfinite().all() else losses
        wrong = ~suspects.isfinite()
        if wrong.any():
            ranks = wrong.nonzero().flatten().tolist()
            where = f"on ranks {ranks}, since a step between {self.last_line + 1} and {self.step}"
            remedy = "lower --lr, or set --clip-norm 1 (--log-every 1 shows the step)"
            message = f"error: loss or weights are not finite {where}, not saved: {remedy}"
            exit_together(self, 1, message)
        self.warn_if_not_finite(values)

    def warn_if_not_finite(self, values):
        for name, value in values.items():
            metric = name.removeprefix("test_")
            if not math.isfinite(value) and metric not in self.warned:
                self.warned.add(metric)
                text = f"{RECIPE}: warning: {name} is {value} at step {self.step}"
                self.accelerator.print(text, file=sys.stderr)

    def last_event(self):
        line = json.loads(self.text.splitlines()[-1])
        return line["event"], line["step"]

    def throughput(self, seconds):
        """Return the samples per second since the last line, or None where it is warm-up."""
        if self.last_line == self.steps.done:
            return None
        samples = (self.step - self.last_line) * self.config["global_batch_size"]
        self.measured_samples += samples
        self.measured_seconds += seconds
        return samples / seconds

    def write(self, event, values, details=None):
        """Put a line into metrics.jsonl, to the trackers and, without `details`, on the screen.

        An evaluation that is repeated, since the loop was left early and the same command given
        again, is not written again.
        """
        shown = {name: x for name, x in values.items() if isinstance(x, int | float)}
        if event == "evaluation":
            self.evaluated_step = self.step
            self.warn_if_not_finite(shown)
            if self.text and self.last_event() == (event, self.step):
                return
        epoch = self.steps.epoch_of(self.step) + 1
        numbers = {**shown, **(details or {})}
        # JSON has neither NaN nor infinity.
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        head = {"event": event, "epoch": epoch, "step": self.step, "time": time.time()}
        line = json.dumps({**head, **values, **finite}) + "\n"
        self.text += line
        self.file.write(line)
        self.accelerator.log({f"{event}/{k}": x for k, x in numbers.items()}, step=self.step)
        self.display.line(f"step {self.step}/{self.steps.total} epoch {epoch}", shown)

    def finish(self, test, **more):
        """Print the results and write summary.json, unless a run that had ended, at the last step
        or early, was evaluated again."""
        self.display.progress.stop()
        peaks = utils.gather_object([peak_memory(self.accelerator)])
        lines = [json.loads(line) for line in self.text.splitlines()]
        losses = [line["loss"] for line in lines if line["event"] == "train"]
        measured = self.measured_samples / self.measured_seconds if self.measured_samples else None
        results = {
            "resumed_from": self.steps.done,
            "train_loss": losses[-1] if losses else None,
            **test,
            "seconds": time.time() - self.started,
            "samples_per_second": measured,
            "measured_samples": self.measured_samples,
            "measured_seconds": self.measured_seconds,
            "peak_memory_bytes": max(peaks),
            "rank_peak_memory_bytes": peaks,
            **more,
        }
        self.display.show("results", results)
        path = Path(self.config["output_dir"], "summary.json")
        evaluated_again = path.exists() and 0 < self.steps.done == self.step
        if self.accelerator.is_main_process and not evaluated_again:
            temporary = path.with_suffix(".tmp")  # a torn summary.json would stay for good
            temporary.write_text(json.dumps({**self.config, **results}, indent=2) + "\n")
            temporary.replace(path)


class Display:
    """The screen: a progress bar below the lines on a terminal, plain lines elsewhere."""

    def __init__(self, is_main, done, total):
        self.console = Console(quiet=not is_main, highlight=False, markup=False, soft_wrap=True)
        self.progress = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=self.console,
            disable=not (is_main and self.console.is_interactive),
            redirect_stderr=os.isatty(2),
        )
        self.task = self.progress.add_task("steps", total=total, completed=done)

    def advance(self):
        self.progress.advance(self.task)

    def show(self, title, values):
        """Print a block of `name: value`, without what is not set."""
        shown = {name: x for name, x in values.items() if x is not None and x is not False}
        self.console.print(title, *[f"  {name}: {x}" for name, x in shown.items()], sep="\n")

    def line(self, head, values):
        shown = [f"{x:,}" if isinstance(x, int) else f"{x:,.4g}" for x in values.values()]
        self.console.print(head, *map(" ".join, zip(values, shown, strict=True)))


def survive_errors(stream):
    """Drop a stream's errors: a terminal or the reader of a pipe may go, the disk be full, which
    must not end a training before its next checkpoint."""

    def quiet(method):
        def call(*arguments):
            with suppress(OSError):
                return method(*arguments)

        return call

    stream.write = quiet(stream.write)
    stream.flush = quiet(stream.flush)


def peak_memory(accelerator):
    """Return this process's peak memory in bytes: torch's allocations on the GPU or, on CPU, the
    resident set size."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# -------------------------------------------------------------------------------- reproducible data
def divide_global_batch(args, accelerator, replicas, multiple=1):
    """Divide the global batch among `replicas` of the model, and then into microbatches.

    Set `args.global_batch_size`, `args.batch_size` (samples per microbatch and replica, a multiple
    of `multiple`) and `accelerator.gradient_accumulation_steps`; return the number of microbatches
    per step. Exit with an error that names the nearest possible sizes if it cannot be divided.
    """
    if args.global_batch_size is None:
        args.global_batch_size = args.batch_size * replicas
    largest = args.batch_size // multiple
    units = replicas * multiple  # a step has at least one sample for each

    def microbatches(share):
        """Return the smallest number of equal microbatches, or None if it is twice the necessary
        one: small microbatches are slow."""
        needed = -(-share // largest)
        return next((n for n in range(needed, 2 * needed) if share % n == 0), None)

    share, rest = divmod(args.global_batch_size, units)
    accumulation = None if rest else microbatches(share)
    if accumulation is None:
        below = next(filter(microbatches, range(share, 0, -1)), None)
        above = next(filter(microbatches, count(share + 1)))
        nearest = " or ".join(str(n * units) for n in (below, above) if n)
        unit = f", each a multiple of {multiple}" if multiple > 1 else ""
        exit_with_error(
            f"argument --global-batch-size: {args.global_batch_size} cannot be divided among "
            f"{replicas} replica(s) in equal microbatches close to {args.batch_size}{unit}: "
            f"choose {nearest}"
        )
    args.batch_size = share // accumulation * multiple
    accelerator.gradient_accumulation_steps = accumulation
    return accumulation


class Steps:
    """The optimizer steps of a training, numbered from 1, each with its microbatches.

    An incomplete last global batch of an epoch is dropped, so that any number of processes takes
    the same steps.
    """

    def __init__(self, loader, accumulation, args):
        self.loader = loader
        self.accumulation = accumulation  # microbatches per step
        self.per_epoch = len(loader) // accumulation
        if self.per_epoch == 0:
            samples = f"{len(loader.dataset)} training samples"
            remedy = "lower --batch-size or --global-batch-size"
            exit_with_error(
                f"{samples} do not fill a global batch of {args.global_batch_size}: {remedy}"
            )
        self.total = min(args.epochs * self.per_epoch, args.max_steps or math.inf)
        self.done = 0  # before this run, which resumes from there
        self.waited = 0.0  # seconds that this process waited for data

    def epoch_of(self, step):
        return max(step - 1, 0) // self.per_epoch

    def ends_epoch(self, step):
        return step % self.per_epoch == 0 or step == self.total

    def epochs_left(self):
        """Return the epochs left, also one saved after its last step: its evaluation is missing."""
        return range(self.epoch_of(self.done), self.epoch_of(self.total) + 1)

    def left_in(self, epoch):
        """Yield (step, its microbatches) for what is left of an epoch."""
        before = epoch * self.per_epoch
        done = max(before, self.done)
        last = min(before + self.per_epoch, self.total)
        set_epoch(self.loader, epoch)
        skipped = (done - before) * self.accumulation
        batches = self.timed(skip_first_batches(self.loader, skipped) if skipped else self.loader)
        for step in range(done + 1, last + 1):
            yield step, islice(batches, self.accumulation)

    def timed(self, loader):
        """Yield the batches, and add up the time spent waiting for them."""
        began = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - began
            yield batch
            began = time.perf_counter()


def set_epoch(loader, epoch):
    """Set the epoch of the order of the samples, and of their random transforms."""
    loader.set_epoch(epoch)
    repeatable(loader.dataset).set_epoch(epoch)  # some prepared loaders do not pass it on


def repeatable(dataset):
    """Return the dataset, or that of which it is a Subset, if it can repeat an epoch, or None."""
    dataset = without_subset(dataset)
    return dataset if hasattr(dataset, "set_epoch") else None


def without_subset(dataset):
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset


def seed_rng(*key):
    """Make what torch, NumPy and Python draw from here on a function of `key` alone."""
    random.seed(repr(key))
    seed = random.getrandbits(32)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class SeededSamples(Dataset):
    """A map-style dataset that seeds the random numbers of each sample by (seed, epoch, index): its
    random transforms do not depend on rank or worker, and are the same in a resumed run."""

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        # Shared, so that persistent workers see it change.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __getitem__(self, index):
        seed_rng(self.seed, self.epoch.item(), index)
        return self.dataset[index]


def reproducible(loaders, seed):
    """Return the loaders, for training and test, with datasets that can repeat an epoch: in a
    `SeededSamples`, unless they have a `set_epoch`, and then have to seed themselves. Exit with an
    error if one cannot be divided among processes and resumed exactly."""
    loaders = loaders if isinstance(loaders, tuple | list) else [loaders]
    if [isinstance(loader, DataLoader) for loader in loaders] != [True, True]:
        found = ", ".join(type(loader).__name__ for loader in loaders)
        exit_with_error(f"load_data returned {found}: return two DataLoaders, training and test")
    for loader, drop_last in zip(loaders, (True, False), strict=True):
        check_loader(loader, drop_last)
        if repeatable(loader.dataset) is None:
            # DataLoader forbids an assignment, since a sampler may belong to the dataset.
            object.__setattr__(loader, "dataset", SeededSamples(loader.dataset, seed))
        repeatable(loader.dataset).set_epoch(0)
    return loaders


def check_loader(loader, drop_last):
    """Exit with an error if a loader of `load_data` cannot be resumed or counted exactly."""
    batches = loader.batch_sampler
    samples = getattr(batches, "sampler", loader.sampler)
    known = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    if type(batches) is not torch.utils.data.BatchSampler or type(samples) not in known:
        names = [type(x).__name__ for x in (loader.dataset, batches, samples)]
        remedy = "use a Dataset or Subset, batch_size, shuffle"
        exit_with_error(f"load_data: cannot resume {' and '.join(names)} exactly: {remedy}")
    if batches.drop_last != drop_last or len(loader.dataset) == 0:
        rule = "training needs drop_last=True, the test drop_last=False and some samples"
        exit_with_error(f"load_data: {rule}")
    dataset = without_subset(loader.dataset)
    attributes = getattr(dataset, "__dict__", {})  # a list has none
    tensors = [(name, x) for name, x in attributes.items() if torch.is_tensor(x)]
    on_gpu = [name for name, tensor in tensors if tensor.device.type != "cpu"]
    if on_gpu and (loader.num_workers or loader.pin_memory):
        what = f"{type(dataset).__name__}.{on_gpu[0]} is on the GPU"
        remedy = "set num_workers=0 and pin_memory=False, or keep it on the CPU"
        exit_with_error(f"load_data: {what}, where workers and pinning fail: {remedy}")


# -------------------------------------------------------------------------------------- checkpoints
class CheckpointError(Exception):
    """A checkpoint cannot be used, for the reason given."""


class Checkpoints:
    """The checkpoints step-N.pt in the output directory, each whole or not there.

    `states`: {name: what has a state_dict}. A recipe whose state is not whole on the main process
    overrides the methods from `collect_states` to `delete`.
    """

    format = 4
    pattern = f"step-{'[0-9]' * 8}.pt"
    # What a run that resumes may have otherwise, besides flags that say so in `parse_args`.
    may_differ = {"world_size", "batch_size", "accumulation", "device", "versions", "date"}
    follows_from_flags = {"peak_learning_rate", "steps", "steps_per_epoch"}

    def __init__(self, accelerator, config, states):
        self.accelerator = accelerator
        self.config = config
        self.states = states
        self.directory = Path(config["output_dir"])
        self.last_step = 0
        self.saved_at = time.monotonic()

    def collect_states(self):
        """Return what the main process writes."""
        return {name: thing.state_dict() for name, thing in self.states.items()}

    def load_states(self, saved):
        for name, thing in self.states.items():
            thing.load_state_dict(saved[name])

    def read(self, path):
        """Return the content of a checkpoint. Raise any error at all if it is not intact."""
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums
        if damaged:
            raise ValueError(f"{damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True)  # runs no code

    def write(self, content, path):
        """Write a checkpoint: on the disk, whole and readable before it gets its name."""
        if not self.accelerator.is_main_process:
            return
        temporary = self.directory / "checkpoint.tmp"
        try:
            save_to_disk(content, temporary)
            os.replace(temporary, path)
        finally:
            if temporary.is_file():
                temporary.unlink()
        sync_directory(self.directory)

    def delete(self, path):
        path.unlink(missing_ok=True)

    def find(self):
        """Return, on all processes, the newest intact checkpoint of this run, or None if there is
        no checkpoint. Exit with an error if none is intact, or if it is of another run."""
        found = [None, None]
        if self.accelerator.is_main_process:
            try:
                found = [self.choose(), None]
            except CheckpointError as error:
                found = [None, str(error)]
        if self.accelerator.cpu_group:  # the default one may take it through the GPUs' memory
            distributed.broadcast_object_list(found, 0, self.accelerator.cpu_group)
        checkpoint, problem = found
        if problem:
            exit_with_error(f"argument --resume: {problem}")
        return checkpoint

    def choose(self):
        """Return the content of the newest intact checkpoint in the output directory or, where
        there are none, that of `--resume PATH`."""
        own = sorted(self.directory.glob(self.pattern), reverse=True)
        resume = self.config["resume"]
        paths = own
        if resume != "auto":
            path = Path(resume)
            inside = self.contains(path)
            if inside and own and path.exists() and path.name < own[0].name:
                remedy = "choose another --output-dir to begin there, or leave --resume out"
                raise CheckpointError(f"{own[0]} is later than {path}: {remedy}")
            if own and not inside:
                text = f"{self.directory} has checkpoints of its own, which count before {path}"
                print(f"{RECIPE}: {text}", file=sys.stderr)
            else:
                paths = [path]
        checkpoint = self.first_intact(paths)
        if checkpoint:
            self.check_same_run(checkpoint)
            if not self.contains(Path(checkpoint["path"])):
                checkpoint["run_id"] = os.urandom(16).hex()  # trackers: two runs, which begin alike
        return checkpoint

    def contains(self, path):
        return path.absolute().parent == self.directory.absolute()

    def first_intact(self, paths):
        problems = []
        for path in paths:
            try:
                checkpoint = self.read(path)
                if checkpoint["format"] != self.format:
                    raise ValueError(f"not of format {self.format}")
            except Exception as error:  # whatever a torn file makes the readers stumble over
                problems.append(f"cannot load {path} ({error!r:.200})")
                continue
            for problem in problems:
                print(f"{RECIPE}: warning: {problem}, trying an older one", file=sys.stderr)
            print(f"{RECIPE}: resuming from {path}", file=sys.stderr)
            return {**checkpoint, "path": str(path)}
        if problems:
            remedy = "choose another checkpoint, or another --output-dir to start afresh"
            raise CheckpointError(f"{'; '.join(problems)}: {remedy}")
        return None

    def check_same_run(self, checkpoint):
        """Raise CheckpointError if flags differ, and say it if the versions of packages do."""
        ours = self.config
        theirs = checkpoint["config"]
        names = ours.keys() & theirs.keys()
        differing = [name for name in sorted(names) if ours[name] != theirs[name]]
        wrong = [name for name in differing if name not in self.may_differ]
        flags = [name for name in wrong if name not in self.follows_from_flags]
        if wrong:
            differences = [
                f"{name} is {theirs[name]} there, {ours[name]} here" for name in flags or wrong
            ]
            remedy = ""
            if flags and "recipe" not in flags:
                remedy = f"continue it {to_type({name: theirs[name] for name in flags})}, or "
            raise CheckpointError(
                f"{checkpoint['path']} is of another run: {'; '.join(differences)}: "
                f"{remedy}choose another --output-dir"
            )
        if "versions" in differing:
            text = f"it was written by {theirs['versions']}, and this is {ours['versions']}"
            print(f"{RECIPE}: warning: {text}", file=sys.stderr)

    def load(self, checkpoint):
        """Load the states, and return the step at which they were saved. Exit with an error if they
        do not fit the model."""
        problem = None
        try:
            self.load_states(checkpoint["states"])
        except (torch.OutOfMemoryError, distributed.DistError):  # RuntimeErrors, too
            raise
        except (KeyError, RuntimeError, ValueError) as error:
            problem = f"{checkpoint['path']} does not fit this model ({error!r:.200})"
        problem = first_problem(self.accelerator, problem)
        if problem:
            exit_with_error(f"argument --resume: {problem}")
        self.last_step = checkpoint["step"]
        if self.last_step == self.config["steps"]:
            text = "this run is complete: it is only evaluated again"
            self.accelerator.print(f"{RECIPE}: {text}", file=sys.stderr)
        return self.last_step

    def due(self, step, steps):
        """Every `--checkpoint-every` steps, at the end, and at an epoch's end if the last one is
        over a minute ago: on a fast machine saving takes as long as an epoch."""
        every = self.config["checkpoint_every"]
        if step == steps.total or (every and step % every == 0):
            return True
        if not steps.ends_epoch(step):
            return False
        long_ago = [time.monotonic() - self.saved_at > 60]
        if self.accelerator.cpu_group:  # the main process decides: clocks differ
            distributed.broadcast_object_list(long_ago, 0, self.accelerator.cpu_group)
        return long_ago[0]

    def save(self, step, metrics):
        """Write a checkpoint, then delete all but the newest `--keep`."""
        content = {
            "format": self.format,
            "config": self.config,
            "step": step,
            "metrics": metrics.text,
            "run_id": metrics.run_id,
            "states": self.collect_states(),
        }
        path = self.directory / self.pattern.replace("[0-9]" * 8, f"{step:08}")
        problem = None
        try:
            self.write(without_numpy(content), path)
            if self.accelerator.is_main_process:
                # Later ones were skipped, because they are damaged: they do not count.
                saved = [x for x in self.directory.glob(self.pattern) if x <= path]
                for old in sorted(saved)[: -self.config["keep"]]:
                    self.delete(old)
        except (OSError, RuntimeError, UnpicklingError) as error:
            problem = f"error: cannot write {path.name} ({error.__context__ or error!r})"
        problem = first_problem(self.accelerator, problem)
        if problem:
            message = f"{problem}, earlier ones stay: the same command continues"
            exit_together(metrics, 1, message)
        self.last_step = step
        self.saved_at = time.monotonic()


def to_type(values):
    """Return what to type to have these values of flags: "with --lr 0.1 and without --compile"."""
    given = []
    left_out = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            left_out.append(flag)
        else:
            given.append(flag if value is True else f"{flag} {value}")
    parts = {"with": given, "without": left_out}
    return " and ".join(" ".join([word, *flags]) for word, flags in parts.items() if flags)


def save_to_disk(content, path):
    """Write a file whose content, after a power failure, is on the disk, and see that it loads."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(path, "cpu", weights_only=True, mmap=True)  # or no resume could


def sync_directory(directory):
    """Make what was renamed in a directory last through a power failure."""
    entry = os.open(directory, os.O_RDONLY)
    os.fsync(entry)
    os.close(entry)


def without_numpy(content):
    """Return the content with Python numbers for NumPy's, as a learning rate may be: those could
    not be read again without running code. A model's state dict, an OrderedDict, stays as it is: a
    copy would lose the versions of its modules."""
    if isinstance(content, numpy.generic):
        return content.item()
    if type(content) is dict:
        return {name: without_numpy(value) for name, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(without_numpy(value) for value in content)
    return content


def load_weights(accelerator, model, args):
    """Return the model, with `--weights` as far as names and shapes fit: a head for other classes
    stays as it is."""
    if not model.training:
        remedy = "as from_pretrained returns it: return model.train()"
        exit_with_error(f"build_model: the model is in eval mode, {remedy}")
    if args.weights is None:
        return model
    own = model.state_dict()
    try:
        weights = utils.load_state_dict(args.weights)  # runs no code
        for wrapper in ("module.", "_orig_mod.", "module."):  # of DDP, torch.compile: any order
            weights = {k if k in own else k.removeprefix(wrapper): x for k, x in weights.items()}
        fitting = {k: x for k, x in weights.items() if k in own and own[k].shape == x.shape}
    except Exception as error:  # whatever another kind of file makes the readers stumble over
        exit_with_error(f"argument --weights: cannot load {args.weights} ({error!r:.200})")
    model.load_state_dict(fitting, strict=False)
    loaded = {own[name].data_ptr() for name in fitting}  # one of several names of tied weights does
    missing = {name for name in own if own[name].data_ptr() not in loaded}
    misfits = ", ".join(sorted(missing | (weights.keys() - fitting.keys())))
    if not fitting or (misfits and args.epochs == 0):
        exit_with_error(f"argument --weights: {args.weights} does not fit this model: {misfits}")
    accelerator.print(f"loaded {args.weights}; names that do not fit: {misfits or 'none'}")
    return model


# -------------------------------------------------------------------------------- signals and hangs
class StopSignal:
    """On SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any process, or when the launcher dies, all stop
    after the same step. They vote by an all-reduce on the CPU, which overlaps a step."""

    received = 0  # the first signal

    def __init__(self, accelerator):
        self.group = accelerator.cpu_group
        self.vote = torch.zeros(1, dtype=torch.int64)
        self.pending = None
        self.signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            self.signals.remove(signal.SIGHUP)
        for number in self.signals:
            signal.signal(number, self.receive)
        # Blocked, which DataLoader's workers inherit: a signal to the whole process group must not
        # kill them before the next checkpoint.
        resource_tracker.ensure_running()  # started later, with a worker, it would unblock them
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        # A launcher may die without passing a signal on.
        self.launcher = LAUNCHER if has_launcher() else None

    def receive(self, number, frame=None):
        StopSignal.received = self.received or number

    def look(self):
        """Note a blocked signal, or that the launcher has died."""
        self.receive(max(signal.sigpending() & self.signals, default=0))
        if self.launcher and os.getppid() != self.launcher:
            self.receive(signal.SIGTERM)

    def requested(self):
        """Return the signal on which all processes stop now, or 0: the result of the vote that
        was begun one call ago."""
        self.look()
        if self.group is None:
            return self.received
        if self.pending:
            self.pending.wait()
        result = self.vote.item()
        self.vote.fill_(self.received)
        maximum = distributed.ReduceOp.MAX
        self.pending = distributed.all_reduce(self.vote, maximum, self.group, async_op=True)
        return result


class HangDetector:
    """Ends the run when a rank stalls, and says which one, on which machine, and where it is.

    One thread of each process writes a report every few seconds to the store of the process groups,
    and reads those of the others; another thread decides. A rank has stalled if there was no new
    report of it for `timeout` seconds (it was stopped, or its machine is gone), or if its main
    thread has completed no step and no batch of an evaluation for so long. The latter does not
    count before the first step is complete and while checkpoints are saved: it is only printed.
    Seconds are counted, so that a run stopped by Ctrl-Z and continued is no hang.
    """

    # In these files and functions a rank waits for others, or for the device.
    waiting_files = ("torch/distributed/", "torch/autograd/", "accelerate/utils/operations")
    waiting_functions = ("requested", "log", "means", "divide_by_mean_weight")

    def __init__(self, accelerator, timeout):
        self.rank = accelerator.process_index
        self.processes = accelerator.num_processes
        self.timeout = timeout
        self.tick = min(5.0, timeout / 20)  # seconds
        self.armed = False
        self.progress = 0
        self.step = 0
        self.reports = {}  # {rank: its newest report}
        self.has_store = True
        run = [os.urandom(16).hex()]  # a restarted run may have the store of the one before
        if accelerator.cpu_group:  # not over NCCL, whose first collective may hang
            distributed.broadcast_object_list(run, 0, accelerator.cpu_group)
        self.keys = [f"{run[0]}/{rank}" for rank in range(self.processes)]
        self.closed = threading.Event()
        self.threads = [threading.Thread(target=self.watch, daemon=True)]
        if self.processes > 1:
            self.threads.append(threading.Thread(target=self.exchange, daemon=True))
        for thread in self.threads:
            thread.start()
        faulthandler.cancel_dump_traceback_later()

    def made_progress(self, step=None):
        """Call this after each step, and after each batch of an evaluation."""
        self.step = step or self.step
        self.progress += 1
        self.armed = True

    @contextmanager
    def paused(self):
        self.armed = False
        yield
        self.made_progress()

    def close(self):
        self.closed.set()
        for thread in self.threads:
            thread.join(2 * self.tick)

    def own_report(self, number):
        """Return how far this rank is, and what its main thread does."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        own = [entry for entry in stack if entry.filename == __file__] or stack
        in_file = any(part in stack[-1].filename for part in self.waiting_files)
        return {
            "number": number,
            "step": self.step,
            "host": socket.gethostname(),
            "where": f"line {own[-1].lineno}, in {own[-1].name}",
            "waits": in_file or stack[-1].name in self.waiting_functions,
        }

    def exchange(self):
        """Write and read reports, until the process that has the store ends."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with suppress(RuntimeError):
            store = distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT)
            for number in count():
                store.set(self.keys[self.rank], json.dumps(self.own_report(number)))
                for rank, key in enumerate(self.keys):
                    if store.check([key]):
                        self.reports[rank] = json.loads(store.get(key))
                if self.closed.wait(self.tick):
                    return
        self.has_store = False

    def watch(self):
        """End the process when a rank was silent, or this one made no progress, for too long."""
        numbers = {}
        silence = {}  # {rank: seconds}
        idle = 0.0
        progress = 0
        while not self.closed.wait(self.tick):
            idle = idle + self.tick if self.progress == progress else 0.0
            progress = self.progress
            for rank, report in list(self.reports.items()):
                known = numbers.get(rank) == report["number"] and rank != self.rank
                silence[rank] = silence.get(rank, 0.0) + self.tick if known else 0.0
                numbers[rank] = report["number"]
            if not self.has_store:
                silence = {}
            longest = max(silence.values(), default=0.0)
            if longest >= self.timeout or (self.armed and idle >= self.timeout):
                # Half: a rank that was stopped has written its last report after its last step.
                self.end([rank for rank, x in silence.items() if x >= self.timeout / 2])
            if self.timeout <= idle < self.timeout + self.tick:
                self.print_stack(" (no error before the first step or while saving)")

    def end(self, silent):
        """Print where this rank is and, on the first rank that is not silent, which have stalled;
        end the process."""
        self.print_stack()
        reports = {**self.reports, self.rank: self.own_report(0)}
        if self.rank == min(reports.keys() - silent):
            os.write(2, f"{RECIPE}: error: {self.diagnose(reports, silent)}\n".encode())
        time.sleep(2 * self.tick)  # until the other ranks have come here: one that ends, ends them
        kill_workers()
        os._exit(1)

    def diagnose(self, reports, silent):
        """Return which ranks have stalled, on which machines, where, and for how long."""
        busy = [rank for rank, report in reports.items() if not report["waits"]]
        step = max(report["step"] for report in reports.values()) + 1
        found = []
        for rank in silent or busy or reports:
            where = f"it is at {reports[rank]['where']}"
            if rank in silent:
                where = "it was stopped or killed, or its machine or network is gone"
            found.append(f"rank {rank} on {reports[rank]['host']} ({where})")
        how = f"not reached the end of step {step} for {self.timeout:g} s"
        if not silent and not busy:
            how += ": all wait for others, or for the device: one has left out a collective "
            how += "operation, or a step takes longer than this"
        return f"{', '.join(found)} has {how}"

    def print_stack(self, note=""):
        """Print the main thread's stack in one piece: those of the ranks must not mix."""
        frame = sys._current_frames()[threading.main_thread().ident]
        where = f"rank {self.rank} on {socket.gethostname()}"
        head = f"{RECIPE}: {where}: no progress for {self.timeout:g} s{note}"
        os.write(2, "".join([head + ", at\n", *traceback.format_stack(frame)]).encode())


def kill_workers():
    """Kill the DataLoaders' workers, which would outlive this process."""
    with suppress(ValueError):  # only the main thread may set a handler
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise an error
    for worker in active_children():
        worker.kill()


def exit_together(metrics, status, message):
    """Exit before the training is complete, once all processes have come here."""
    accelerator = metrics.accelerator
    metrics.display.progress.stop()
    accelerator.print(f"{RECIPE}: {message}", file=sys.stderr, flush=True)
    for tracker in accelerator.trackers:
        tracker.finish()  # before the barrier: the others wait for the main process
    if accelerator.cpu_group:
        distributed.barrier(accelerator.cpu_group)
    kill_workers()
    os._exit(status)  # all at once, or the launcher would kill the slower ones


def first_problem(accelerator, problem):
    """Return what went wrong on the first process that has a problem, or None, on all processes;
    all of them have to come here."""
    problems = [problem]
    if accelerator.cpu_group:
        problems *= accelerator.num_processes
        distributed.all_gather_object(problems, problem, accelerator.cpu_group)
    return next(filter(None, problems), None)


def exit_with_error(message):
    """Print an error in one line and exit with status 2. Any process may come here. The first one
    of each machine prints at once; another one 4 s + its local rank later, unless its launcher ends
    it before that: then the first one has printed the same error."""
    rank = os.environ.get("RANK", "0")
    let_first_rank_exit()
    if rank != "0":
        message = f"rank {rank}: {message}"
    print(f"{RECIPE}: error: {message}".replace("\n", " "), file=sys.stderr, flush=True)
    sys.stdout.flush()
    kill_workers()
    os._exit(2)  # without the tear-down, in which gloo may abort


def let_first_rank_exit():
    """Give the first process of the machine time to print the same error, and so end this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank != 0:
        wait_for_launcher(4 + local_rank)


def wait_for_launcher(seconds):
    """Exit if the launcher ends this process within so many seconds, since another has ended."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if StopSignal.received:  # it has been sent already
        os._exit(2)
    time.sleep(seconds)


def report_exception(kind, error, trace):
    """Print an error that nothing has caught and exit; of one that only says that another process
    has ended, a line, and only if that one's error does not end this process first."""
    sys.stderr = sys.__stderr__  # torch's hook calls this one, and would print only after it
    rank = os.environ.get("RANK", "0")
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    if isinstance(error, RuntimeError) and any(text in str(error) for text in lost):
        wait_for_launcher(10)
        text = f"{RECIPE}: rank {rank} ends: another process has ended"
        print(f"{text} ({error!s:.200})".replace("\n", " "), file=sys.stderr, flush=True)
    else:
        let_first_rank_exit()  # with the same error, perhaps
        if "RANK" in os.environ:
            print(f"{RECIPE}: rank {rank} on {socket.gethostname()}:", file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    kill_workers()
    os._exit(1)


# ------------------------------------------------------------------------- command line and launch
def describe(args, accelerator, steps, optimizer, **more):
    """Return what summary.json and each checkpoint say about a run: its flags, and where it ran."""
    on_gpu = accelerator.device.type == "cuda"
    packages = (torch, torchvision, accelerate)
    config = {
        "recipe": RECIPE,
        **vars(args),
        "accumulation": steps.accumulation,
        "peak_learning_rate": optimizer.defaults["lr"],
        "steps": steps.total,
        "steps_per_epoch": steps.per_epoch,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "world_size": accelerator.num_processes,
        "versions": {package.__name__: package.__version__ for package in packages},
        "date": time.strftime("%Y-%m-%d"),
        **more,
    }
    # As it will be read again; a NumPy number becomes a float.
    as_json = json.dumps(config, default=lambda x: float(x) if hasattr(x, "item") else str(x))
    return json.loads(as_json)


def number_above(low, kind):
    """Return a type for a flag: an int or float above `low`."""

    def parse(text):
        value = kind(text)
        if not low < value < 2**32:
            raise argparse.ArgumentTypeError(
                f"{text}, choose a number above {low} and below {2**32}"
            )
        return value

    parse.__name__ = kind.__name__  # for "invalid int value"
    return parse


positive_int = number_above(0, int)
positive_float = number_above(0, float)


def parse_args(*declarations):
    """Return the parsed flags: those that each of `declarations` adds, by calling its argument, and
    those of all recipes. Exit with an error, in one line, if one is wrong."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.error = exit_with_error

    def add(name, help, may_differ=False, **options):
        """Add a flag; with `may_differ`, a run that is resumed may have another value of it."""
        default = "" if options.get("default") is None else " (default: %(default)s)"
        flag = parser.add_argument(name, help=help + default, **options)
        if may_differ:
            Checkpoints.may_differ.add(flag.dest)

    for declare in declarations:
        declare(add)
    natural = number_above(-1, int)
    free = {"may_differ": True}
    trackers = [x.value for x in accelerate.tracking.get_available_trackers()]
    add("--weights", "start from model.safetensors, or a state dict", metavar="PATH", **free)
    add("--epochs", "passes over the training set; 0: only evaluate", type=natural, default=30)
    add("--max-steps", "stop after this many optimizer steps", type=positive_int)
    add("--batch-size", "samples per process and microbatch", type=positive_int, default=128)
    add("--global-batch-size", "samples per optimizer step, all processes", type=positive_int)
    add("--lr", "peak learning rate per 128 samples of a step", type=positive_float, default=0.1)
    add("--clip-norm", "clip the gradient to this norm", type=positive_float)
    add("--seed", "for weights, order and augmentation", type=natural, default=0)
    add("--cpu", "train on CPU, also where there are GPUs", action="store_true", **free)
    add("--threads", "CPU threads per process", type=positive_int, **free)
    add("--output-dir", "for checkpoints and results", default=f"runs/{RECIPE}", **free)
    add("--checkpoint-every", "optimizer steps between checkpoints", type=positive_int, **free)
    add("--keep", "how many checkpoints to keep", type=positive_int, default=2, **free)
    add("--resume", "checkpoint; auto: the newest", default="auto", metavar="{auto,PATH}", **free)
    add("--log-every", "steps between lines (50 on GPUs, 10 on CPU)", type=positive_int, **free)
    add("--tracker", "log metrics there, too", choices=trackers, **free)
    add("--hang-timeout", "seconds a rank may stall", type=positive_float, default=600, **free)
    return parser.parse_args()


def lock_output_directory(directory):
    """Exit with an error if another run uses the directory: they would destroy each other's files.
    The lock lasts until this process ends."""
    try:
        os.makedirs(directory, exist_ok=True)
        if int(os.environ.get("RANK", 0)) != 0:
            return
        lock = os.open(Path(directory, "run.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        os.lockf(lock, os.F_TLOCK, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".ljust(99).encode())
    except BlockingIOError:
        owner = os.read(lock, 99).decode().strip()
        remedy = "stop it, or choose another --output-dir"
        exit_with_error(f"{directory} is in use by {owner}: {remedy}")
    except OSError as error:
        reason = f"cannot write to {directory} ({error.strerror})"
        exit_with_error(f"argument --output-dir: {reason}, choose another")


def make_accelerator(args, precision, *handlers):
    """Return the Accelerator, on GPUs or, where there are none, on CPU, with `cpu_group`, a gloo
    process group, or None for a single process. Exit with an error where that cannot work."""
    sys.excepthook = report_exception
    faulthandler.dump_traceback_later(args.hang_timeout)  # until a HangDetector watches
    mixed_precision = "no" if precision == "fp32" else precision
    check_launcher(mixed_precision)
    on_gpus = choose_device(args)
    args.log_every = args.log_every or (50 if on_gpus else 10)
    if precision == "bf16":
        check_bf16(on_gpus)
    separate_restarts("nccl" if on_gpus else "gloo")
    # Accelerate adds the epoch: the runs' seeds must not overlap.
    data_seed = random.Random(args.seed).getrandbits(31)
    accelerator = Accelerator(
        cpu=not on_gpus,  # or processes on a machine without GPUs would not see each other
        mixed_precision=mixed_precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=data_seed, non_blocking=True
        ),
        kwargs_handlers=[utils.InitProcessGroupKwargs(timeout=TIMEOUT), *handlers],
    )
    names = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
    started = utils.get_int_from_env(names, 1)
    if started != accelerator.num_processes:
        seen = f"{started} processes were started, this one sees {accelerator.num_processes}"
        exit_with_error(f"{seen}: start them with accelerate launch")
    # For votes, checkpoints and errors: NCCL's collectives wait for a process that died.
    in_group = accelerator.use_distributed
    accelerator.cpu_group = distributed.new_group(None, TIMEOUT, "gloo") if in_group else None
    return accelerator


def check_launcher(mixed_precision):
    """Exit with an error where the launcher was told something that this recipe does not do, or
    has ended, or could not restart this run."""
    names = ("USE_FSDP", "USE_DEEPSPEED", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG")
    supported = dict.fromkeys(names, "false")
    supported["GRADIENT_ACCUMULATION_STEPS"] = "1"
    supported["DYNAMO_BACKEND"] = "no"
    supported["MIXED_PRECISION"] = mixed_precision
    for name, ours in supported.items():
        told = os.environ.get(f"ACCELERATE_{name}", ours).lower()
        if told not in ("no", ours):
            what = f"the launcher's {name.lower()} is {told}"
            exit_with_error(f"{what}, which this recipe does not do: see its --help")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.create_connection(address, 60).close()
    except OSError as error:  # torch would look for its store until TIMEOUT
        what = "the launcher, or that of the first machine, has ended"
        exit_with_error(f"{what} ({error}): its output says why")
    several_machines = os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]
    if several_machines and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        # The processes of the next attempt would find the addresses of those that have died.
        remedy = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before the command, and --rdzv_backend c10d"
        exit_with_error(f"restarts on several machines need a new store each: {remedy}")


def has_launcher():
    """Return whether accelerate launch or torchrun has started this process: they set these."""
    return not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)


def separate_restarts(backend):
    """After a restart by the launcher, keep what this process reads from the launcher's store apart
    from what the processes that died have left there: it would dial their addresses."""
    attempt = utils.get_int_from_env(["TORCHELASTIC_RESTART_COUNT"], 0)
    if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world_size = next(distributed.rendezvous("env://"))
        store = distributed.PrefixStore(f"attempt {attempt}", store)
        distributed.init_process_group(backend, None, TIMEOUT, world_size, rank, store)


def choose_device(args):
    """Select this process's GPU and its number of CPU threads; return whether there are GPUs. Exit
    with an error where processes and GPUs do not match."""
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or Accelerate's barriers would go to the GPUs
    processes = utils.get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
    gpus = torch.cuda.device_count()
    if not gpus and not args.cpu and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        remedy = "srun --gpus-per-node=N, or --cpu to do without"
        exit_with_error(f"this Slurm job has GPUs and this step none: {remedy}")
    if 0 < gpus < processes:
        remedy = f"launch with --num_processes {gpus}, or use --cpu"
        exit_with_error(f"{processes} processes, {gpus} GPU(s): {remedy}")
    if gpus:
        torch.cuda.set_device(utils.get_int_from_env(["LOCAL_RANK"], 0))
        torch.backends.cudnn.benchmark = True  # shapes rarely change: time the algorithms once
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    told = utils.get_int_from_env(["OMP_NUM_THREADS"], 0)
    if told == 1 and has_launcher():  # its default, and not the user's choice
        told = 0
    torch.set_num_threads(args.threads or told or max(1, cores // processes))
    return gpus > 0


def check_bf16(on_gpu):
    """Exit with an error if this GPU has no bf16; say so if this CPU has not, and emulates it."""
    if has_bf16(on_gpu):
        return
    if on_gpu:
        exit_with_error(f"{torch.cuda.get_device_name()} has no bf16, choose another --precision")
    if int(os.environ.get("RANK", 0)) == 0:
        text = "this CPU has no bf16 instructions: it is emulated, and much slower than fp32"
        print(f"{RECIPE}: warning: {text}", file=sys.stderr)


def has_bf16(on_gpu):
    """Return whether the device has instructions for bf16."""
    if on_gpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())


# ----------------------------------------------------------------------------------------- CIFAR-10
class ImageTensors(Dataset):
    """Images as one tensor on the device; one indexing operation selects, crops, flips and
    normalises a whole batch.

    (N, H, W, 3) uint8 and (N,) int64 in; batches of (B, 3, H, W) float32, channels_last, and (B,)
    int64 out. With `augmentation_seed`: zero padding by 4, a random crop back to H x W, and a
    horizontal flip with probability 1/2.
    """

    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels = labels.to(device)
        self.seed = augmentation_seed
        self.height, self.width = images.shape[1:3]
        self.statistics = torch.tensor([self.mean, self.std], device=device)
        self.padding = 0 if augmentation_seed is None else 4
        pad = self.padding
        padded = F.pad(images, (0, 0, pad, pad, pad, pad))  # of the last dimension first: 3, W, H
        self.images = padded.contiguous().to(device)
        # Shared, for persistent workers: top, left and flip of each sample.
        self.augmentation = torch.zeros(3, len(labels), dtype=torch.int64, device=device)
        self.augmentation.share_memory_()

    def __len__(self):
        return len(self.labels)

    def set_epoch(self, epoch):
        """Draw each sample's crop and flip from (seed, epoch, index), whoever holds it."""
        if self.seed is None:
            return
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.randint(2 * self.padding + 1, (2, len(self)), generator=generator)
        flips = torch.randint(2, (1, len(self)), generator=generator)
        self.augmentation[:] = torch.cat((offsets, flips))

    def __getitems__(self, indices):
        device = self.labels.device
        index = torch.tensor(indices).to(device, non_blocking=True)
        top, left, flip = self.augmentation[:, index, None]
        rows = top + torch.arange(self.height, device=device)
        columns = torch.arange(self.width, device=device)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)
        images = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        mean, std = self.statistics
        images = images.float().div_(255).sub_(mean).div_(std)
        return images.permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, accelerator):
    """CIFAR-10 by torchvision, which downloads it where it is missing and verifies it, one process
    per machine first: (N, 32, 32, 3) uint8 and (N,) int64 for training, and for the test."""
    problem = None  # told below: no process may exit while others wait for it
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            train_set = torchvision.datasets.CIFAR10(directory, train=True, download=True)
            test_set = torchvision.datasets.CIFAR10(directory, train=False, download=True)
        except (OSError, RuntimeError) as error:
            missing = f"no intact CIFAR-10 in --data-dir {directory}, download failed ({error})"
            problem = f"{missing}: to train without it, use --data synthetic"
    problem = first_problem(accelerator, problem)
    if problem:
        exit_with_error(problem)
    return [(torch.from_numpy(x.data), torch.tensor(x.targets)) for x in (train_set, test_set)]


def synthetic_images(samples, seed):
    """Ten classes that a network can learn, each a smooth pattern under noise: (N, 32, 32, 3) uint8
    and (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
    patterns = 128 + 32 * patterns.contiguous()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = torch.randn(samples, 32, 32, 3, generator=generator).mul_(48).add_(patterns[labels])
    return images.clamp_(0, 255).byte(), labels


# =============================================================================== this recipe's own
def add_technique_flags(add):
    """Declare the flags of this technique, whatever is trained."""
    add(
        "--precision",
        "default: the launch config's, or bf16 or fp16",
        choices=("bf16", "fp16", "fp32"),
    )
    add("--compile", "use torch.compile (slow first step)", action="store_true", may_differ=True)


def skip_batchnorm_broadcasts(model):
    """Keep DDP from broadcasting buffers before each forward pass if all are BatchNorm's, which
    training does not read: `evaluate` broadcasts those."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):  # a single process
        return
    batchnorm = nn.modules.batchnorm._BatchNorm
    others = [module for module in model.modules() if not isinstance(module, batchnorm)]
    model.broadcast_buffers = any(list(module.buffers(recurse=False)) for module in others)


def rebuild_ddp_buckets(accelerator, model, loader):
    """Run a backward pass without effect. After its first one DDP rebuilds its buckets, in which
    it sums gradients: a run that resumes has to round as one that was not interrupted."""
    accelerator.backward(mean_loss(compute_loss(model, next(iter(loader)))))
    model.zero_grad()


Checkpoints.may_differ |= {"precision_chosen"}
HangDetector.waiting_files += ("torch/amp/grad_scaler",)


def choose_precision(args):
    """Return the precision and who chose it: the command line before the launch config, or else
    this recipe. What cannot be had is an error: Accelerate would train in fp32 and not say so."""
    config = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # Asked first, CUDA would see the GPUs that --cpu hides.
    on_gpu = not args.cpu and torch.cuda.is_available()
    if args.precision:
        precision = args.precision
        chosen_by = "by --precision"
        if config != "no":
            chosen_by += f", over the config's {config}"
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # or Accelerate would take that one
    elif config != "no":
        precision = config
        chosen_by = "by the config"
    elif has_bf16(on_gpu):
        precision = "bf16"
        chosen_by = "by default"
    elif on_gpu:
        precision = "fp16"
        chosen_by = "because this GPU has no bf16"
    else:
        precision = "fp32"
        chosen_by = "because this CPU has no bf16 instructions, and would emulate it slowly"
    if precision not in ("bf16", "fp16", "fp32"):
        remedy = "choose --precision bf16 or fp16"
        exit_with_error(f"mixed_precision {precision} in the config: {remedy}")
    if precision == "fp16" and not on_gpu:
        exit_with_error("fp16 needs a GPU, on CPU choose --precision bf16")
    return precision, chosen_by


def check_weights_are_fp32(model, precision):
    """Exit with an error if weights are in 16 bits, as those of pretrained models often are: then
    fp16's gradients cannot be unscaled, and bf16's small updates are rounded away."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if precision != "fp32" and types - {torch.float32, torch.float64}:
        remedy = "mixed precision needs fp32: return model.float()"
        exit_with_error(f"build_model: weights are {', '.join(map(str, types))}, {remedy}")


def can_fuse(args):
    """Return whether the optimizer may be fused: not in fp16, in which GradScaler always calls a
    fused one, so that Accelerate could not see skipped steps. None, not False, which would turn
    off the multi-tensor (foreach) kernels, too."""
    return None if args.precision == "fp16" else True


def loss_scaling(accelerator, scheduler, step):
    """Return the loss scale, and how many of `step` steps were skipped: those in which the schedule
    stayed where it was."""
    scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
    return {"loss_scale": scale, "skipped_steps": step - scheduler.last_epoch}


if __name__ == "__main__":
    main()
