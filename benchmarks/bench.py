# SPDX-License-Identifier: Apache-2.0
"""Measure the recipes on this machine: `make bench`, about ten minutes.

    python benchmarks/bench.py
    python benchmarks/bench.py --recipes plain_ddp_cifar "ddp_cifar --compile" --data cifar10
    python benchmarks/bench.py --predict 450
    python benchmarks/bench.py --memory
    accelerate launch --config_file accelerate_configs/2gpu.yaml benchmarks/bench.py \\
        --overhead amp_cifar

A configuration is a recipe, with flags, on a number of processes. All of them run once per round,
so that a machine whose speed drifts treats them alike, and ratios are taken within a round. A run
is the recipe's own `main` under `accelerate launch`, with two changes (see `measure_training`): the
epoch lasts as long as the measurement, and there is neither an evaluation nor a checkpoint.
`--overhead` instead times parts of the training step, in turn, in the same processes.

Writes every sample (JSON, after each run), a table (Markdown) and a picture (SVG) to --output-dir;
`make_results.py --publish` copies them to benchmarks/results/. What this hardware cannot run, or
has no memory for, is "n/a" with the reason. Exits with 1 if a run failed.
"""

import argparse
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from html import escape
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import torch
from accelerate import DistributedDataParallelKwargs, utils
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "plain_ddp_cifar"
RECIPES = [
    BASELINE,
    "data_parallel_cifar",
    "ddp_cifar",
    "amp_cifar",
    "pipeline_cifar",
    "sharded_cifar",
]
GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VERSIONS = {name: version(name) for name in ("torch", "torchvision", "accelerate")}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
UNAVAILABLE = re.compile(r"fp16 needs a GPU|has no bf16")  # what recipes say of hardware
# What torch, CUDA and its libraries say; of the CPU's memory, too.
OUT_OF_MEMORY = re.compile(
    r".*(?:OutOfMemoryError|out of memory|can't allocate memory|STATUS_ALLOC_FAILED).*"
)
LOADER_SECONDS = 2  # for which the baseline's DataLoader is measured alone
BUCKET_BYTES = 25 * 2**20  # DDP's default
COLUMNS = {
    "recipe": "",
    "N": "processes (DataParallel: GPUs)",
    "images/s": "median over the rounds; n/a: this hardware cannot run it, see the reason below",
    "range": "least and most of the rounds",
    "ratio": f"images/s over those of {BASELINE} on the same N in the same round, median",
    "each": "images/s per GPU" if GPUS else "images/s per core",
    "scaling": "images/s over "
    + ("N times those of one" if GPUS else "those of one process on the same cores"),
    "GiB": f"peak memory, {'of the GPU' if GPUS else 'resident'}, the maximum over the processes",
    "start": "seconds from the launch to the end of the warm-up",
}
PALETTE = ["#888888", "#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756"]


# ----------------------------------------------------------------------------------- configurations
class Configuration:
    """A recipe, perhaps with variables and flags as in a shell, on a number of processes; and what
    was measured."""

    def __init__(self, recipe, processes):
        self.recipe = recipe
        self.processes = processes
        words = shlex.split(recipe)
        self.environment = dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))
        self.name, *self.flags = words[len(self.environment) :]
        if self.name == "data_parallel_cifar" and GPUS:  # which takes all GPUs that it sees
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
            own = ",".join(visible.split(",")[:processes])
            self.environment.setdefault("CUDA_VISIBLE_DEVICES", own)
        self.label = recipe.replace("_cifar", "")
        self.samples = []
        self.loader_rate = None  # images/s of the baseline's DataLoader alone
        self.failure = None
        self.unavailable = self.why_not()

    def why_not(self):
        """Return why a run would say nothing, or None: bf16 that is emulated, or amp without it."""
        if GPUS or has_bf16():  # the recipes say themselves what a GPU cannot do
            return None
        words = " ".join(self.flags).replace("=", " ").split()
        precision = "bf16" if self.name == "amp_cifar" else "fp32"
        if "--precision" in words[:-1]:
            precision = words[words.index("--precision") + 1]
        if precision != "bf16":
            return None
        return "this CPU has no bf16 instructions: emulated, it is much slower than fp32"

    def outcome(self):
        """Return what a table says instead of figures."""
        return "failed" if self.failure else "n/a" if self.unavailable else ""

    def fits(self):
        """Whether the recipe can have this many devices at all."""
        if self.name == "data_parallel_cifar":  # one process, whose devices are GPUs
            return self.processes == 1 or GPUS > 0
        return self.name not in ("pipeline_cifar", "sharded_cifar") or self.processes % 2 == 0

    def command(self, args, output_dir):
        flags = ["--data", args.data, "--data-dir", args.data_dir]
        flags += ["--model", args.model, "--stem", args.stem]
        flags += ["--batch-size", args.batch_size, "--output-dir", output_dir]
        flags += [] if GPUS else ["--cpu"]
        processes = self.processes
        least = [args.steps, args.seconds]
        if self.name == BASELINE:
            line = [sys.executable, ROOT / "recipes" / f"{BASELINE}.py", "--world_size", processes]
            line += ["--warmup-steps", args.warmup_steps, "--measure", *least]
        else:
            if self.name == "data_parallel_cifar":
                flags += ["--batch-size", args.batch_size * processes]  # that of all GPUs
                processes = 1
            if self.name == "pipeline_cifar":  # whose batch is that of a pipeline, two processes
                flags += ["--batch-size", 2 * args.batch_size]
            config = ROOT / "accelerate_configs" / f"{processes}gpu.yaml"
            line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
            line += ["--config_file", config, __file__, "run", *least, self.name]
            line += ["--log-every", args.warmup_steps, "--epochs", 1]
        return list(map(str, [*line, *flags, *self.flags]))

    def run(self, args):
        """Run it once, unless it could not run before; keep the sample, or the end of its log if it
        fails. After the baseline's first run, time its DataLoader alone."""
        if self.outcome():
            return
        with tempfile.TemporaryDirectory() as directory:
            launched = time.time()
            command = self.command(args, directory)
            if self.execute(command, Path(directory, "log"), args.timeout):
                self.samples.append(sample(Path(directory), launched))
            if self.name == BASELINE and len(self.samples) == 1 and not self.outcome():
                log = Path(directory, "loader.log")
                if self.execute(loader_command(command[2:]), log, args.timeout):
                    self.loader_rate = float(log.read_text().split()[-1])

    def execute(self, command, log, timeout):
        """Run a command; return whether it succeeded, or else note why it did not."""
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"none after {timeout} s"
            finally:  # also where Ctrl-C came
                if process.poll() is None:
                    stop(process)
        if code == 0:
            return True
        text = log.read_text()
        # The recipe's own words, which the launcher's traceback would hide.
        said = [line for line in text.splitlines() if line.startswith(f"{self.name}: ")]
        reason = f"exit code {code}\n" + "\n".join(said or text.splitlines()[-15:])
        out_of_memory = OUT_OF_MEMORY.search(text)
        if out_of_memory:
            self.unavailable = out_of_memory[0].strip()
        elif UNAVAILABLE.search(reason):
            self.unavailable = reason
        else:
            self.failure = reason
        return False

    def results(self, configurations):
        """Return the figures: medians over the rounds, and ratios to other configurations within
        each round."""
        if self.failure or not self.samples:
            return {}

        def ratio(recipe, processes):
            for other in configurations:
                if (
                    (other.recipe, other.processes) == (recipe, processes)
                    and other.samples
                    and not other.failure
                ):
                    pairs = zip(self.samples, other.samples, strict=False)
                    return statistics.median(
                        a["samples_per_second"] / b["samples_per_second"] for a, b in pairs
                    )

        rates = [sample["samples_per_second"] for sample in self.samples]
        one = ratio(self.recipe, 1)
        return {
            "samples_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "ratio": ratio(BASELINE, self.processes),
            # N processes on CPU share all cores, as one does; N GPUs are N times the hardware of
            # one.
            "per_device": statistics.median(rates) / (self.processes if GPUS else CORES),
            "efficiency": one and one / (self.processes if GPUS else 1),
            **{
                name: statistics.median(sample[name] for sample in self.samples)
                for name in ("peak_memory_bytes", "start_seconds")
            },
        }


def sample(directory, launched):
    """Return what is kept of a run, from its files."""
    summary = json.loads(Path(directory, "summary.json").read_text())
    warmed_up_at = summary.get("warmed_up_at")
    if warmed_up_at is None:  # the recipes' first line of metrics
        lines = Path(directory, "metrics.jsonl").read_text().splitlines()
        warmed_up_at = json.loads(lines[0])["time"]
    names = ["samples_per_second", "measured_samples", "measured_seconds", "peak_memory_bytes"]
    kept = {name: summary[name] for name in [*names, "device"]}
    return {**kept, "start_seconds": warmed_up_at - launched}


@functools.cache
def has_bf16():
    """Whether this CPU has instructions for bf16, by the recipes' rule."""
    return load("ddp_cifar").has_bf16(on_gpu=False)


def stop(process):
    """End a run with all of its processes. Ranks have sessions of their own: the launcher has to be
    asked to end them, for which it takes up to 30 seconds."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def load(name):
    """Import a recipe from its file."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    recipe = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def run_recipe(least_steps, least_seconds, name, *flags):
    """What the launcher runs in each process."""
    sys.argv[1:] = flags
    measure_training(load(name), least_steps, least_seconds)


def measure_training(recipe, least_steps, least_seconds):
    """Run a recipe's `main`, but with one epoch that draws from the data as often as it needs,
    until so many steps and seconds are measured, and without an evaluation and a checkpoint."""
    load_data = recipe.load_data

    def load_endless_data(args, accelerator):
        loader, test_loader = load_data(args, accelerator)
        samples = 10**6 * args.batch_size * accelerator.num_processes
        sampler = RandomSampler(loader.dataset, num_samples=samples)
        options = {"sampler": sampler, "drop_last": True, "collate_fn": loader.collate_fn}
        return DataLoader(loader.dataset, args.batch_size, **options), test_loader

    class Metrics(recipe.Metrics):
        def log(self, *values, **more):
            super().log(*values, **more)
            steps_done = self.step >= float(least_steps)
            enough = [steps_done and self.measured_seconds >= float(least_seconds)]
            self.steps.enough = utils.broadcast_object_list(enough)[0]
            self.start_clock()

    class Steps(recipe.Steps):
        enough = False

        def left_in(self, epoch):
            for step, microbatches in super().left_in(epoch):
                yield step, microbatches
                if self.enough:
                    return

    recipe.load_data = load_endless_data
    recipe.Metrics = Metrics
    recipe.Steps = Steps
    recipe.Checkpoints.save = lambda *_: None
    recipe.evaluate = lambda *_: {}
    recipe.main()


# ---------------------------------------------------------------------------- the baseline's loader
def loader_command(flags):
    """Return the command that prints the images/s of the baseline's DataLoader with these flags."""
    return [sys.executable, __file__, "loader", *map(str, flags)]


def time_loader(*flags):
    """Print the images/s of the baseline's DataLoader, without a model, in as many processes side
    by side as would train. Where it is not well above that of training, the loader is the limit."""
    baseline = load(BASELINE)
    fork = multiprocessing.get_context("fork")

    def time_in_each(train, args, nprocs):
        ready = fork.Barrier(nprocs)
        rates = fork.SimpleQueue()
        arguments = [(baseline, args[0], rank, ready, rates) for rank in range(nprocs)]
        processes = [fork.Process(target=draw_batches, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)
        print(sum(rates.get() for _ in processes))

    baseline.mp.spawn = time_in_each
    sys.argv[1:] = flags
    baseline.main()


def draw_batches(baseline, args, rank, ready, rates):
    torch.set_num_threads(args.threads)
    train_set, _ = baseline.make_datasets(args)
    sampler = baseline.EndlessSampler(train_set, args.world_size, rank)
    options = {"sampler": sampler, "num_workers": args.workers}
    batches = iter(DataLoader(train_set, args.batch_size, **options))
    next(batches)
    ready.wait()
    for _ in range(2 * args.workers):  # what the workers have made while waiting
        next(batches)
    began = time.perf_counter()
    images = 0
    while time.perf_counter() < began + LOADER_SECONDS:
        images += len(next(batches)[1])
    rates.put(images / (time.perf_counter() - began))


# ----------------------------------------------------------------------------------- the prediction
def predicted_rate(rate, batch, devices, gradient_bytes, bandwidth, overlap=2 / 3):
    """Return the images/s of `devices` GPUs, computed from one's `rate`.

    A ring all-reduce sends 2 (N - 1) / N times the gradient over each link (Patarasuk & Yuan 2009),
    `bandwidth` in bytes/s. It hides behind the backward pass, a share `overlap` of the step
    (backward is twice forward), all but the last bucket, whose gradients are there only at its end.
    """
    step = batch / rate
    ring = 2 * (devices - 1) / devices * gradient_bytes / bandwidth
    last = ring * min(1, BUCKET_BYTES / gradient_bytes)
    exposed = ring - min(ring - last, overlap * step)
    return devices * batch / (step + exposed)


def predictions(configurations, args):
    """Return [(label, devices, images/s)] for 2, 4 and 8 devices, from the recipes that were
    measured on one."""
    with torch.device("meta"):
        model = load("ddp_cifar").build_model(args)
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    bandwidth = args.predict * 1e9
    computed = []
    for one in configurations:
        rate = one.results(configurations).get("samples_per_second")
        if rate and one.processes == 1 and one.name in (BASELINE, "ddp_cifar", "amp_cifar"):
            for devices in (2, 4, 8) if GPUS else [n for n in (2, 4, 8) if n <= CORES]:
                # On CPU the processes share the cores, which have no time for the exchange either.
                share, overlap = (1, 2 / 3) if GPUS else (devices, 0)
                figures = rate / share, args.batch_size, devices, gradient_bytes, bandwidth, overlap
                computed.append((one.label, devices, predicted_rate(*figures)))
    return computed


# ----------------------------------------------------------------------------------------- overhead
def overhead(args):
    """Print what metrics, hang detection, data, Accelerate, DDP and everything but the convolutions
    add to a step."""
    recipe = load(args.overhead)
    vars(args).update(seed=0, cpu=not GPUS, tracker=None, log_every=args.steps, threads=None)
    args.hang_timeout = 600.0
    args.precision = "fp32"
    if args.overhead == "amp_cifar":
        args.precision = None
        args.precision, _ = recipe.choose_precision(args)
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = recipe.make_accelerator(args, args.precision, ddp)
    with tempfile.TemporaryDirectory() as directory:
        seconds = seconds_per_step(args, recipe, accelerator, directory)
    processes = accelerator.num_processes
    say = accelerator.print
    say(f"{args.overhead}, {args.precision}, {processes} processes, {hardware(args)}")
    say(f"{workload(args)}, {args.rounds} rounds of {args.steps} steps each;")
    say("median, least and most over the rounds")
    for name, values in seconds.items():
        rate = args.batch_size * processes / statistics.median(values)
        milliseconds = span([1000 * value for value in values], ".1f")
        say(f"  {name:12} {milliseconds} ms, {rate:,.0f} images/s")
    for slow, fast, meaning in (
        ("recipe", "full", f"with a line of metrics per {args.steps} steps, hang detection / none"),
        ("full", "cached", "of the recipe with its data / fed one cached batch"),
        ("cached", "bare", "with Accelerate and the recipe's own code / bare torch"),
        ("bare", "alone", "with DDP / without"),
        ("full", "convolutions", "of the recipe / of the convolutions alone"),
    ):
        ratios = [b / a for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        say(f"  {span(ratios, '.3f')} speed {meaning}")
    # As in the recipes: gloo may abort where models outlive the process group.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def seconds_per_step(args, recipe, accelerator, directory):
    """Return {loop: [seconds of a step in each round]} of six loops that take turns in the same
    processes.

    recipe: as in the recipe's `main`, with a line of metrics (the gradient's norm, the wait for
    data) after the last step, and hang detection; full: without those; cached: the same fed one
    batch over and over; bare: torch alone, with DDP; alone: bare without DDP, each process for
    itself; convolutions: nothing but those of the model, likewise.
    """
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = types.get(accelerator.mixed_precision, torch.float32)
    loaders = recipe.reproducible(recipe.load_data(args, accelerator), args.seed)
    train_loader, _ = accelerator.prepare(*loaders)

    def training():
        torch.manual_seed(0)
        model = recipe.build_model(args).to(accelerator.device)
        options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
        fused = None if accelerator.scaler else True
        return model, torch.optim.SGD(model.parameters(), fused=fused, **options)

    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.broadcast_buffers = False
    global_batch = args.batch_size * accelerator.num_processes
    vars(args).update(epochs=10**6, max_steps=None, global_batch_size=global_batch)
    steps = recipe.Steps(train_loader, 1, args)
    metrics = quiet_metrics(recipe, accelerator, steps, args, directory)
    stop_signal = recipe.StopSignal(accelerator)

    def endless():
        while True:
            recipe.set_epoch(train_loader, 0)
            yield from train_loader

    def full(batch, step, clip_norm=None):
        seed = args.seed, step
        taken = recipe.train_step(
            accelerator, model, optimizer, scheduler, [batch], seed, clip_norm
        )
        metrics.add(step, taken[0])
        if stop_signal.requested():
            os._exit(130)
        return taken[1]

    def whole(step, hang):
        line_due = step == args.steps
        grad_norm = full(next(batches), step, math.inf if line_due else None)
        hang.made_progress(step)
        if line_due:
            weight_norm = torch.nn.utils.get_total_norm(model.parameters())
            metrics.log(weight_norm, scheduler.get_last_lr()[0], grad_norm)

    def bare(model, optimizer):
        with torch.autocast(accelerator.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(cached[0])
        F.cross_entropy(logits.float(), cached[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = steps.timed(endless())
    cached = next(batches)
    alone, reduced = training(), training()
    if accelerator.use_distributed:
        devices = [accelerator.device] if GPUS else None
        ddp = nn.parallel.DistributedDataParallel(reduced[0], devices, gradient_as_bucket_view=True)
        ddp.broadcast_buffers = False  # as in the recipes
        reduced = ddp, reduced[1]
    convolve = convolutions(alone[0], cached[0], dtype)
    loops = {
        "recipe": whole,
        "full": lambda step, _: full(next(batches), step),
        "cached": lambda step, _: full(cached, step),
        "bare": lambda *_: bare(*reduced),
        "alone": lambda *_: bare(*alone),
        "convolutions": lambda *_: convolve(),
    }
    seconds = {name: [] for name in loops}
    order = list(loops)
    for index in range(args.rounds + 1):
        for name in order:
            hang = recipe.HangDetector(accelerator, 600) if name == "recipe" else None
            metrics.sums = 0
            metrics.start_clock()
            accelerator.wait_for_everyone()
            before = time.perf_counter()
            for step in range(1, args.steps + 1):
                loops[name](step, hang)
            if GPUS:
                torch.cuda.synchronize()
            accelerator.wait_for_everyone()
            if index:  # the first round is warm-up
                seconds[name].append((time.perf_counter() - before) / args.steps)
            if hang:
                hang.close()
        order = order[1:] + order[:1]
    return seconds


def quiet_metrics(recipe, accelerator, steps, args, directory):
    """Return a recipe's Metrics that print nothing, and write to a file in a directory."""
    config = {"output_dir": directory, "checkpoint_every": None, "log_every": args.steps}
    config["global_batch_size"] = args.global_batch_size
    display = recipe.Display
    recipe.Display = lambda is_main, *more: display(False, *more)
    return recipe.Metrics(accelerator, config, steps, None)


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


def span(values, form):
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# -------------------------------------------------------------------------------------- the results
def gpu_name():
    """Return the GPU's name, or None; exit where it cannot be used. In a process of its own, so
    that this one takes no GPU memory from the runs."""
    if GPUS:
        command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode:
            sys.exit(f"bench: {GPUS} GPU(s), but {answer.stderr.strip().splitlines()[-1]}")
        return answer.stdout.strip()


def hardware(args):
    if args.gpu:
        return f"{GPUS} x {args.gpu}"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{CORES} cores of {found[1] if found else platform.processor() or platform.machine()}"


def workload(args):
    stem = {"imagenet": "ImageNet", "cifar": "CIFAR"}[args.stem]
    model = args.model if args.model != "resnet50" else f"ResNet-50 with the {stem} stem"
    return f"{model}, batch {args.batch_size} per process, data {args.data}"


def rows(configurations, computed):
    """Return the cells of each configuration and prediction, in the order of COLUMNS."""
    lines = []
    for one in configurations:
        got = one.results(configurations)
        if got:
            ratio, scaling = [
                format(got[name], ".2f") if got[name] else "-" for name in ("ratio", "efficiency")
            ]
            cells = [
                f"{got['samples_per_second']:,.0f}",
                f"{got['least']:,.0f}-{got['most']:,.0f}",
                ratio,
                f"{got['per_device']:,.0f}",
                scaling,
                f"{got['peak_memory_bytes'] / 2**30:.1f}",
                f"{got['start_seconds']:.0f} s",
            ]
        else:
            cells = [one.outcome(), *[""] * 6]
        lines.append([one.label, str(one.processes), *cells])
    return lines + [
        [label, str(n), f"{rate:,.0f}", "computed", *["-"] * 5] for label, n, rate in computed
    ]


def table(configurations, computed=()):
    shown = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for index, name in enumerate(COLUMNS):
        shown.add_column(
            name,
            justify="right" if index else "left",
            no_wrap=index > 0,
            min_width=0 if index else 13,
        )
    for cells in rows(configurations, computed):
        style = "red" if cells[2] == "failed" else "dim" if cells[3] == "computed" else None
        shown.add_row(*cells, style=style)
    return shown


def notes(args, configurations=()):
    """Return the lines that say how the figures came about."""
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    least = f"{args.steps} steps" + (f" and {args.seconds:g} s" if args.seconds else "")
    python = f"Python {platform.python_version()}"
    lines = [
        f"{hardware(args)}; {versions}; {python}; {date.today()}; commit {args.commit}.",
        f"{workload(args)}. {args.measured}, configurations in turn; runs of at least {least}, "
        f"the first {args.warmup_steps} steps are warm-up and left out.",
        *(f"{name}: {meaning}." for name, meaning in COLUMNS.items() if meaning),
    ]
    loaders = [
        f"{one.label} on {one.processes}: {one.loader_rate:,.0f}"
        for one in configurations
        if one.loader_rate
    ]
    if loaders:
        lines.append(f"images/s of the DataLoader alone, without training: {'; '.join(loaders)}.")
    for one in configurations:
        if one.unavailable:
            reason = " ".join(one.unavailable.split())
            lines.append(f"n/a: {one.label} on {one.processes}: {reason:.300}")
    if args.predict:
        end = ", overlapping the backward pass."
        if not GPUS:
            end = "; the processes share the cores, nothing overlaps."
        source = "From the one-process rate, a ring all-reduce of the gradient over links of"
        lines.append(f"computed: not measured. {source} {args.predict:g} GB/s{end}")
    return lines


def commit():
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def markdown(configurations, computed, args):
    command = shlex.join(["python", "benchmarks/bench.py", *sys.argv[1:]])
    lines = [
        list(COLUMNS),
        ["---", *["---:"] * (len(COLUMNS) - 1)],
        *rows(configurations, computed),
    ]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return (
        f"{text}\n\n`{command}`\n\n"
        + "\n".join(f"- {line}" for line in notes(args, configurations))
        + "\n"
    )


def picture(configurations, computed, args):
    """Return an SVG: a bar for each configuration, a line from its least to its most, computed ones
    dashed."""
    bars = [
        (one.label, one.processes, got["samples_per_second"], got["least"], got["most"], False)
        for one in configurations
        if (got := one.results(configurations))
    ]
    bars += [(label, n, rate, rate, rate, True) for label, n, rate in computed]
    left, width, height = 250, 400, 24
    scale = width / max(most for *_, most, _ in bars)
    colours = dict(zip(dict.fromkeys(name for name, *_ in bars), PALETTE * len(bars), strict=False))
    parts = [f'<text x="10" y="22" font-weight="bold">images/s: {escape(workload(args))}</text>']
    parts.append(f'<text x="10" y="40" fill="#555">{escape(hardware(args))}, {date.today()}</text>')
    for index, (name, n, rate, least, most, is_computed) in enumerate(bars):
        y = 56 + index * height
        end = left + most * scale
        label = escape(f"{name}, {n}" + (" (computed)" if is_computed else ""))
        look = f'fill="none" stroke="{colours[name]}" stroke-dasharray="4 3"' if is_computed else ""
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{rate * scale:.1f}" height="{height - 8}" '
            + (look or f'fill="{colours[name]}"')
            + "/>",
            f'<path d="M{left + least * scale:.1f} {y + 10}H{end:.1f}" stroke="black"/>',
            f'<text x="{end + 6:.1f}" y="{y + 14}">{rate:,.0f}</text>',
        ]
    size = f'width="{left + width + 80}" height="{70 + len(bars) * height}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"<svg {style} {size}>", background, *parts, "</svg>\n"])


def write(configurations, args, computed=()):
    """Write all samples as JSON, named after the hardware, and return its path."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{args.gpu or 'cpu'}-x{GPUS or CORES}".lower())
    path = Path(args.output_dir, f"{slug}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = "recipe", "processes", "failure", "unavailable", "samples", "loader_rate"
    content = {
        "date": str(date.today()),
        "hardware": hardware(args),
        "python": platform.python_version(),
        "versions": VERSIONS,
        "settings": vars(args),
        "configurations": [
            {name: getattr(one, name) for name in names} | one.results(configurations)
            for one in configurations
        ],
        "computed": [
            {"recipe": label, "processes": n, "samples_per_second": rate}
            for label, n, rate in computed
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


# --------------------------------------------------------------------------------------------- main
def parse_args():
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, usage="\n" + rest.partition("\n\n")[0])

    def add(group, name, help, **options):
        default = "" if options.get("default") is None else " (default: %(default)s)"
        group.add_argument(name, help=help + default, **options)

    # Launching kernels from Python must not be what a GPU is measured by: a large batch, large
    # images, CUDA graphs. Two workers may be too few for it: the baseline with eight, too.
    compiled = ["ddp_cifar", "ddp_cifar --compile", "amp_cifar", "amp_cifar --compile"]
    gpu_recipes = [BASELINE, f"{BASELINE} --workers 8", RECIPES[1], *compiled, *RECIPES[-2:]]
    counts = [n for n in (1, 2, 4, 8) if n <= (GPUS or CORES)]
    what = parser.add_argument_group("configurations")
    names = {"nargs": "+", "metavar": "RECIPE", "default": gpu_recipes if GPUS else RECIPES}
    add(what, "--recipes", "names; in quotes, with own flags or variables", **names)
    numbers = {"nargs": "+", "type": int, "choices": (1, 2, 4, 8)}
    default = sorted({1, counts[-1]})
    add(what, "--processes", "processes, or GPUs", default=default, **numbers)

    what = parser.add_argument_group("data and model")
    data = {"choices": ("cifar10", "synthetic"), "default": "synthetic"}
    add(what, "--data", "synthetic needs no files, no network", **data)
    add(what, "--data-dir", "where CIFAR-10 is, or is downloaded to", default="data")
    add(what, "--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    stem = {"choices": ("cifar", "imagenet"), "default": "cifar" if GPUS else "imagenet"}
    add(what, "--stem", "of resnet50: 3x3, or ImageNet's 7x7", **stem)
    add(what, "--batch-size", "samples per process", type=int, default=512 if GPUS else 128)

    how = parser.add_argument_group("measuring")
    add(how, "--rounds", "how often each configuration is run", type=int, default=3)
    minutes = {"type": float, "default": 9.7}
    add(how, "--minutes", "no further round begins where it would end after this", **minutes)
    steps = {"type": int, "default": 40 if GPUS else 8}
    add(how, "--steps", "of a run, at least; of a loop of --overhead", **steps)
    add(how, "--seconds", "measured in each run, at least", type=float, default=10 if GPUS else 0)
    warmup = {"type": int, "default": 20 if GPUS else 2}
    add(how, "--warmup-steps", "the first of them, which are not measured", **warmup)
    add(how, "--timeout", "seconds after which a run is given up", type=float, default=900)
    add(how, "--output-dir", "for the result files", default="runs/bench")

    more = parser.add_argument_group("beyond the configurations")
    bandwidth = {"type": float, "metavar": "GB/S"}
    add(more, "--predict", "what more devices should give on links of this bandwidth", **bandwidth)
    recipes = ("ddp_cifar", "amp_cifar")
    add(more, "--overhead", "under accelerate launch: what parts of a step cost", choices=recipes)
    memory = {"nargs": argparse.REMAINDER, "metavar": "RECIPE"}
    add(more, "--memory", "GPU memory, computed: of all recipes, or with a file's model", **memory)
    args = parser.parse_args()
    for recipe in args.recipes:
        words = [word for word in shlex.split(recipe) if not ASSIGNMENT.match(word)]
        if not words or words[0] not in RECIPES:
            parser.error(f"argument --recipes: {recipe!r} is none of {', '.join(RECIPES)}")
    if min(args.batch_size, args.rounds, args.warmup_steps) < 1 or args.steps <= args.warmup_steps:
        rule = "begin at 1, and --steps at one more than the warm-up"
        parser.error(f"--batch-size, --rounds and --warmup-steps {rule}")
    if GPUS and max(args.processes) > GPUS:
        what = f"{max(args.processes)} processes but {GPUS} GPU(s)"
        parser.error(f"argument --processes: {what}, choose fewer")
    if args.predict is not None and args.predict <= 0:
        example = "such as 25 (PCIe 4) or 450 (NVLink 4)"
        parser.error(f"argument --predict: give the bandwidth of a link in GB/s, {example}")
    return args


def main():
    args = parse_args()
    if args.memory is not None:
        import memory

        return memory.main(args.memory)
    args.gpu = gpu_name()
    if args.overhead:
        return overhead(args)
    args.commit = commit()  # before the measurement, during which somebody may go on working
    configurations = [
        one
        for name in args.recipes
        for n in args.processes
        if (one := Configuration(name, n)).fits()
    ]
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    # Set for SIGINT, too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    args.measured = "No whole round"
    interrupted = False
    started = time.perf_counter()
    try:
        for done in range(1, args.rounds + 1):
            for one in configurations:
                text = f"round {done}/{args.rounds}: {one.recipe} on {one.processes}"
                with console.status(text):
                    one.run(args)
                write(configurations, args)
                rate = one.samples[-1]["samples_per_second"] if one.samples else 0
                console.print(f"{text}: {one.outcome() or f'{rate:,.0f} images/s'}")
            args.measured = f"{done} of {args.rounds} rounds"
            minutes = (time.perf_counter() - started) / 60 / done
            if done == 1:
                plan = f"those that fit into {args.minutes:g} are run"
                console.print(f"a round takes {minutes:.1f} minutes, {plan}")
            if minutes * (done + 1) > args.minutes:
                break
    except KeyboardInterrupt:
        interrupted = True
        args.measured += ", then interrupted"
    computed = predictions(configurations, args) if args.predict else []
    console.print(table(configurations, computed))
    console.print("\n".join(notes(args, configurations)))
    if any(one.samples for one in configurations):
        path = write(configurations, args, computed)
        path.with_suffix(".md").write_text(markdown(configurations, computed, args))
        path.with_suffix(".svg").write_text(picture(configurations, computed, args))
        console.print(f"written: {path}, .md, .svg")
    for one in configurations:
        if one.outcome():
            reason = one.failure or one.unavailable
            what = f"{one.recipe} on {one.processes} {one.outcome()}"
            print(f"bench: {what}: {reason}", file=sys.stderr)
    sys.exit(130 if interrupted else any(one.failure for one in configurations))


if __name__ == "__main__":
    modes = {"run": run_recipe, "loader": time_loader}
    modes[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] in (["run"], ["loader"]) else main()
