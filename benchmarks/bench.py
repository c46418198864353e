# SPDX-License-Identifier: Apache-2.0
"""Measure the recipes on this machine: `make bench`, about ten minutes.

    python benchmarks/bench.py
    python benchmarks/bench.py --recipes plain_ddp_cifar "ddp_cifar --compile" --processes 1 2 --data cifar10
    python benchmarks/bench.py --predict 450
    python benchmarks/bench.py --memory
    accelerate launch --config_file accelerate_configs/2gpu.yaml benchmarks/bench.py --overhead amp_cifar

A configuration is a recipe, with flags, on a number of processes. All of them run once per round, so that a machine
whose speed drifts treats them alike, and ratios are taken within a round. A run is the recipe's own `main` under
`accelerate launch`, with two changes (see `run_recipe`): the epoch lasts as long as the measurement, and there is no
evaluation. `--overhead` instead times parts of the training step, in turn, in the same processes.

Writes every sample (JSON, after each run), a table (Markdown) and a picture (SVG). Exits with 1 if a run failed.
"""

import argparse
import gc
import importlib.util
import json
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
from types import SimpleNamespace

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
RECIPES = [BASELINE, "data_parallel_cifar", "ddp_cifar", "amp_cifar", "pipeline_cifar", "sharded_cifar"]
GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VERSIONS = {name: version(name) for name in ("torch", "torchvision", "accelerate")}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
UNAVAILABLE = re.compile(r"fp16 needs a GPU|has no bf16")  # what recipes say of hardware
BUCKET_BYTES = 25 * 2**20  # DDP's default
COLUMNS = {
    "recipe": "",
    "N": "processes (DataParallel: GPUs)",
    "images/s": "median over the rounds; n/a: this hardware cannot run it",
    "range": "least and most of the rounds",
    "ratio": f"images/s over those of {BASELINE} on the same N in the same round, median",
    "each": "images/s per GPU" if GPUS else "images/s per core",
    "scaling": "images/s over N times those of one" if GPUS else "images/s over those of one process on the same cores",
    "GiB": "peak memory, " + ("of the GPU" if GPUS else "resident") + ", the maximum over the processes",
    "start": "seconds from the launch to the end of the warm-up",
}
PALETTE = ["#888888", "#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756"]


# ------------------------------------------------------------------------------------------------ configurations
class Configuration:
    """A recipe, perhaps with variables and flags as in a shell, on a number of processes; and what was measured."""

    def __init__(self, recipe, processes):
        self.recipe, self.processes, words = recipe, processes, shlex.split(recipe)
        self.environment = dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))
        self.name, *self.flags = words[len(self.environment) :]
        if self.name == "data_parallel_cifar" and GPUS:  # which takes all GPUs that it sees
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
            self.environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(visible.split(",")[:processes]))
        self.label = recipe.replace("_cifar", "")
        self.samples, self.failure, self.unavailable = [], None, None

    def outcome(self):
        """Return what a table says instead of figures."""
        return "failed" if self.failure else "n/a" if self.unavailable else ""

    def fits(self):
        """Whether the recipe can have this many devices at all."""
        if self.name == "data_parallel_cifar":  # one process, whose devices are GPUs
            return self.processes == 1 or GPUS > 0
        return self.name not in ("pipeline_cifar", "sharded_cifar") or self.processes % 2 == 0

    def command(self, args, output_dir):
        flags = ["--data", args.data, "--data-dir", args.data_dir, "--model", args.model, "--stem", args.stem]
        flags += ["--batch-size", args.batch_size, "--output-dir", output_dir, *(() if GPUS else ["--cpu"])]
        processes, least = self.processes, [args.steps, args.seconds]
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
            line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
            line += [__file__, "run", *least, self.name, "--log-every", args.warmup_steps, "--epochs", 1]
        return list(map(str, [*line, *flags, *self.flags]))

    def run(self, args):
        """Run it once, unless it could not run before; keep the sample, or the end of its log if it fails."""
        if self.outcome():
            return
        with tempfile.TemporaryDirectory() as directory:
            log, launched, environment = Path(directory, "log"), time.time(), {**os.environ, **self.environment}
            with log.open("w") as file:
                command, streams = self.command(args, directory), {"stdout": file, "stderr": file}
                process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
                try:
                    code = process.wait(args.timeout)
                except subprocess.TimeoutExpired:
                    code = f"none after {args.timeout} s"
                finally:  # also where Ctrl-C came
                    if process.poll() is None:
                        stop(process)
            if code != 0:
                lines = log.read_text().splitlines()
                # The recipe's own words, which the launcher's traceback would hide.
                said = [line for line in lines if line.startswith(f"{self.name}: ")]
                reason = f"exit code {code}\n" + "\n".join(said or lines[-15:])
                self.failure, self.unavailable = (None, reason) if UNAVAILABLE.search(reason) else (reason, None)
                return
            summary = json.loads(Path(directory, "summary.json").read_text())
            if (warmed_up_at := summary.get("warmed_up_at")) is None:  # the recipes' first line of metrics
                warmed_up_at = json.loads(Path(directory, "metrics.jsonl").open().readline())["time"]
        names = "samples_per_second", "measured_samples", "measured_seconds", "peak_memory_bytes", "device"
        self.samples.append({name: summary[name] for name in names} | {"start_seconds": warmed_up_at - launched})

    def results(self, configurations):
        """Return the figures: medians over the rounds, and ratios to other configurations within each round."""
        if self.failure or not self.samples:
            return {}

        def ratio(recipe, processes):
            for other in configurations:
                if (other.recipe, other.processes) == (recipe, processes) and other.samples and not other.failure:
                    pairs = zip(self.samples, other.samples, strict=False)
                    return statistics.median(a["samples_per_second"] / b["samples_per_second"] for a, b in pairs)

        rates = [sample["samples_per_second"] for sample in self.samples]
        one = ratio(self.recipe, 1)
        return {
            "samples_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "ratio": ratio(BASELINE, self.processes),
            # N processes on CPU share all cores, as one does; N GPUs are N times the hardware of one.
            "per_device": statistics.median(rates) / (self.processes if GPUS else CORES),
            "efficiency": one and one / (self.processes if GPUS else 1),
            **{
                name: statistics.median(sample[name] for sample in self.samples)
                for name in ("peak_memory_bytes", "start_seconds")
            },
        }


def stop(process):
    """End a run with all of its processes. Ranks have sessions of their own: the launcher has to be asked to end them,
    for which it takes up to 30 seconds."""
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
    """What the launcher runs in each process: the recipe's `main`, but with one epoch that draws from the data as often
    as it needs, until so many steps and seconds are measured, and without an evaluation."""
    sys.argv[1:] = flags
    recipe = load(name)
    load_data, steps_of_epoch = recipe.load_data, recipe.Run.steps

    def load_endless_data(args, accelerator):
        loader, test_loader = load_data(args, accelerator)
        sampler = RandomSampler(loader.dataset, num_samples=10**6 * args.batch_size * accelerator.num_processes)
        options = {"sampler": sampler, "drop_last": True, "collate_fn": loader.collate_fn}
        return DataLoader(loader.dataset, args.batch_size, **options), test_loader

    def steps(run, epoch, loader):
        for step, microbatches in steps_of_epoch(run, epoch, loader):
            yield step, microbatches
            if step == run.logged:
                enough = step >= float(least_steps) and run.seconds >= float(least_seconds)
                if utils.broadcast_object_list([enough])[0]:
                    return
                run.interval_start = time.perf_counter()

    recipe.load_data, recipe.Run.steps = load_endless_data, steps
    recipe.evaluate = lambda *_: {}
    recipe.main()


# ------------------------------------------------------------------------------------------------ the prediction
def predicted_rate(rate, batch, devices, gradient_bytes, bandwidth, overlap=2 / 3):
    """Return the images/s of `devices` GPUs, computed from one's `rate`.

    A ring all-reduce sends 2 (N - 1) / N times the gradient over each link (Patarasuk & Yuan 2009), `bandwidth` in
    bytes/s. It hides behind the backward pass, a share `overlap` of the step (backward is twice forward), all but the
    last bucket, whose gradients are there only at its end.
    """
    step = batch / rate
    ring = 2 * (devices - 1) / devices * gradient_bytes / bandwidth
    last = ring * min(1, BUCKET_BYTES / gradient_bytes)
    exposed = ring - min(ring - last, overlap * step)
    return devices * batch / (step + exposed)


def predictions(configurations, args):
    """Return [(label, devices, images/s)] for 2, 4 and 8 devices, from the recipes that were measured on one."""
    with torch.device("meta"):
        gradient_bytes = 4 * sum(parameter.numel() for parameter in load("ddp_cifar").build_model(args).parameters())
    computed = []
    for one in configurations:
        rate = one.results(configurations).get("samples_per_second")
        if rate and one.processes == 1 and one.name in (BASELINE, "ddp_cifar", "amp_cifar"):
            for devices in (2, 4, 8) if GPUS else [n for n in (2, 4, 8) if n <= CORES]:
                # On CPU the processes share the cores, which have no time to spare for the exchange either.
                share, overlap = (1, 2 / 3) if GPUS else (devices, 0)
                figures = rate / share, args.batch_size, devices, gradient_bytes, args.predict * 1e9, overlap
                computed.append((one.label, devices, predicted_rate(*figures)))
    return computed


# ------------------------------------------------------------------------------------------------------ overhead
def overhead(args):
    """Print what data, Accelerate, DDP and everything but the convolutions add to a step."""
    recipe = load(args.overhead)
    vars(args).update(seed=0, cpu=not GPUS, tracker=None, log_every=1, precision=None)
    precision = recipe.choose_precision(args)[0] if args.overhead == "amp_cifar" else "fp32"
    accelerator = recipe.make_accelerator(args, precision, DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    seconds = seconds_per_step(args, recipe, accelerator)
    accelerator.print(f"{args.overhead}, {accelerator.num_processes} processes, {hardware(args)}, {workload(args)}")
    accelerator.print(f"{args.rounds} rounds of {args.steps} steps each; median, least and most over the rounds")
    for name, values in seconds.items():
        rate = args.batch_size * accelerator.num_processes / statistics.median(values)
        accelerator.print(f"  {name:12} {span([1000 * value for value in values], '.1f')} ms, {rate:,.0f} images/s")
    for slow, fast, meaning in (
        ("full", "cached", "of the recipe with its data / fed one cached batch"),
        ("cached", "bare", "with Accelerate and the recipe's own code / bare torch"),
        ("bare", "alone", "with DDP / without"),
        ("full", "convolutions", "of the recipe / of the convolutions alone"),
    ):
        ratios = [b / a for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        accelerator.print(f"  {span(ratios, '.3f')} speed {meaning}")
    # As in the recipes: gloo may abort where models outlive the process group.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def seconds_per_step(args, recipe, accelerator):
    """Return {loop: [seconds of a step in each round]} of five loops that take turns in the same processes.

    full: the recipe's, with its data; cached: the same fed one batch over and over; bare: torch alone, with DDP;
    alone: bare without DDP, each process for itself; convolutions: nothing but those of the model, likewise.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    train_loader, _ = accelerator.prepare(*recipe.reproducible(recipe.load_data(args, accelerator), args.seed))

    def training():
        torch.manual_seed(0)
        model = recipe.build_model(args).to(accelerator.device)
        options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
        return model, torch.optim.SGD(model.parameters(), fused=None if accelerator.scaler else True, **options)

    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.broadcast_buffers = False
    signals, sums = recipe.SignalHandler(accelerator), SimpleNamespace(names=[], totals=0)

    def endless():
        while True:
            train_loader.dataset.set_epoch(0)
            yield from train_loader

    def full(batch):
        recipe.seed_rng(args.seed, 0, 0, accelerator.process_index)
        recipe.Run.add(sums, recipe.train_step(accelerator, model, optimizer, scheduler, batch, None))
        if signals.should_stop():
            os._exit(130)

    def bare(model, optimizer):
        with torch.autocast(accelerator.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(cached[0])
        F.cross_entropy(logits.float(), cached[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = endless()
    cached = next(batches)
    alone, reduced = training(), training()
    if accelerator.use_distributed:
        devices = [accelerator.device] if GPUS else None
        ddp = nn.parallel.DistributedDataParallel(reduced[0], devices, gradient_as_bucket_view=True)
        ddp.broadcast_buffers = False  # as in the recipes
        reduced = ddp, reduced[1]
    loops = {
        "full": lambda: full(next(batches)),
        "cached": lambda: full(cached),
        "bare": lambda: bare(*reduced),
        "alone": lambda: bare(*alone),
        "convolutions": convolutions(alone[0], cached[0], dtype),
    }
    seconds = {name: [] for name in loops}
    for index in range(args.rounds + 1):
        order = list(loops)
        for name in order[index % 5 :] + order[: index % 5]:
            accelerator.wait_for_everyone()
            before = time.perf_counter()
            for _ in range(args.steps):
                loops[name]()
            if GPUS:
                torch.cuda.synchronize()
            accelerator.wait_for_everyone()
            if index:  # the first round is warm-up
                seconds[name].append((time.perf_counter() - before) / args.steps)
    return seconds


def convolutions(model, images, dtype):
    """Return a function: the model's convolutions of these images, forward and backward, on random numbers."""
    calls, tensors = [], {}

    def remember(convolution, inputs, output):
        weight = convolution.weight.detach().to(dtype).requires_grad_()
        for tensor in (inputs[0], output):  # one of each shape; gradients of all of them but the images are needed
            random = torch.randn_like(tensor, dtype=dtype).requires_grad_(inputs[0] is not images or tensor is output)
            tensors.setdefault(tensor.shape, random)
        calls.append((convolution, tensors[inputs[0].shape], weight, tensors[output.shape].detach()))

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


# --------------------------------------------------------------------------------------------------- the results
def gpu_name():
    """Return the GPU's name, or None; exit where it cannot be used. In a process of its own, so that this one takes no
    GPU memory from the runs."""
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
            ratio, scaling = (format(got[name], ".2f") if got[name] else "-" for name in ("ratio", "efficiency"))
            cells = [f"{got['samples_per_second']:,.0f}", f"{got['least']:,.0f}-{got['most']:,.0f}", ratio]
            cells += [f"{got['per_device']:,.0f}", scaling, f"{got['peak_memory_bytes'] / 2**30:.1f}"]
            cells += [f"{got['start_seconds']:.0f} s"]
        else:
            cells = [one.outcome(), *[""] * 6]
        lines.append([one.label, str(one.processes), *cells])
    return lines + [[label, str(n), f"{rate:,.0f}", "computed", *["-"] * 5] for label, n, rate in computed]


def table(configurations, computed=()):
    shown = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for index, name in enumerate(COLUMNS):
        shown.add_column(name, justify="right" if index else "left", no_wrap=index > 0, min_width=0 if index else 13)
    for cells in rows(configurations, computed):
        shown.add_row(*cells, style="red" if cells[2] == "failed" else "dim" if cells[3] == "computed" else None)
    return shown


def notes(args):
    """Return the lines that say how the figures came about."""
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    least = f"{args.steps} steps" + (f" and {args.seconds:g} s" if args.seconds else "")
    lines = [
        f"{hardware(args)}; {versions}; Python {platform.python_version()}; {date.today()}; commit {args.commit}.",
        f"{workload(args)}. {args.measured}, configurations in turn; runs of at least {least}, "
        f"the first {args.warmup_steps} steps are warm-up and left out.",
        *(f"{name}: {meaning}." for name, meaning in COLUMNS.items() if meaning),
    ]
    if args.predict:
        end = ", overlapping the backward pass." if GPUS else "; the processes share the cores, nothing overlaps."
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
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *rows(configurations, computed)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\n`{command}`\n\n" + "\n".join(f"- {line}" for line in notes(args)) + "\n"


def picture(configurations, computed, args):
    """Return an SVG: a bar for each configuration, a line from its least to its most, computed ones dashed."""
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
        y, label = 56 + index * height, escape(f"{name}, {n}" + (" (computed)" if is_computed else ""))
        look = f'fill="none" stroke="{colours[name]}" stroke-dasharray="4 3"' if is_computed else ""
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{rate * scale:.1f}" height="{height - 8}" '
            + (look or f'fill="{colours[name]}"')
            + "/>",
            f'<path d="M{left + least * scale:.1f} {y + 10}H{left + most * scale:.1f}" stroke="black"/>',
            f'<text x="{left + most * scale + 6:.1f}" y="{y + 14}">{rate:,.0f}</text>',
        ]
    size = f'width="{left + width + 80}" height="{70 + len(bars) * height}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    return "\n".join([f"<svg {style} {size}>", '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def write(configurations, args, computed=()):
    """Write all samples as JSON, named after the hardware, and return its path."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{args.gpu or 'cpu'}-x{GPUS or CORES}".lower())
    path = Path(args.output_dir, f"{slug}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = "recipe", "processes", "failure", "unavailable", "samples"
    content = {
        "date": str(date.today()),
        "hardware": hardware(args),
        "python": platform.python_version(),
        "versions": VERSIONS,
        "settings": vars(args),
        "configurations": [
            {name: getattr(one, name) for name in names} | one.results(configurations) for one in configurations
        ],
        "computed": [{"recipe": label, "processes": n, "samples_per_second": rate} for label, n, rate in computed],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


# ---------------------------------------------------------------------------------------------------------- main
def parse_args():
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, usage="\n" + rest.partition("\n\n")[0])

    def add(group, name, help, **options):
        default = "" if options.get("default") is None else " (default: %(default)s)"
        group.add_argument(name, help=help + default, **options)

    # Launching kernels from Python must not be what a GPU is measured by: a large batch, large images, CUDA graphs.
    gpu_recipes = [*RECIPES[:3], "ddp_cifar --compile", "amp_cifar", "amp_cifar --compile", *RECIPES[-2:]]
    counts = [n for n in (1, 2, 4, 8) if n <= (GPUS or CORES)]
    what = parser.add_argument_group("configurations")
    names = {"nargs": "+", "metavar": "RECIPE", "default": gpu_recipes if GPUS else RECIPES}
    add(what, "--recipes", "names; in quotes, with own flags or variables", **names)
    default = sorted({1, counts[-1]})
    add(what, "--processes", "processes, or GPUs", nargs="+", type=int, choices=(1, 2, 4, 8), default=default)
    what = parser.add_argument_group("data and model")
    add(what, "--data", "synthetic needs no files, no network", choices=("cifar10", "synthetic"), default="synthetic")
    add(what, "--data-dir", "where CIFAR-10 is, or is downloaded to", default="data")
    add(what, "--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    stem = {"choices": ("cifar", "imagenet"), "default": "cifar" if GPUS else "imagenet"}
    add(what, "--stem", "of resnet50: 3x3, or ImageNet's 7x7", **stem)
    add(what, "--batch-size", "samples per process", type=int, default=512 if GPUS else 128)
    how = parser.add_argument_group("measuring")
    add(how, "--rounds", "how often each configuration is run", type=int, default=3)
    add(how, "--minutes", "no further round begins where it would end after this", type=float, default=9.7)
    add(how, "--steps", "of a run, at least; of a loop of --overhead", type=int, default=40 if GPUS else 8)
    add(how, "--seconds", "measured in each run, at least", type=float, default=10 if GPUS else 0)
    add(how, "--warmup-steps", "the first of them, which are not measured", type=int, default=20 if GPUS else 2)
    add(how, "--timeout", "seconds after which a run is given up", type=float, default=900)
    add(how, "--output-dir", "for the result files", default="benchmarks/results")
    more = parser.add_argument_group("beyond the configurations")
    add(more, "--predict", "what more devices should give on links of this bandwidth", type=float, metavar="GB/S")
    recipes = ("ddp_cifar", "amp_cifar")
    add(more, "--overhead", "under accelerate launch: what parts of a step cost", choices=recipes)
    memory = {"nargs": argparse.REMAINDER, "metavar": "RECIPE ..."}
    add(more, "--memory", "GPU memory, computed: of all recipes, or of a file and its flags", **memory)
    args = parser.parse_args()
    for recipe in args.recipes:
        if next((word for word in shlex.split(recipe) if not ASSIGNMENT.match(word)), None) not in RECIPES:
            parser.error(f"argument --recipes: {recipe!r} is none of {', '.join(RECIPES)}")
    if min(args.batch_size, args.rounds, args.warmup_steps) < 1 or args.steps <= args.warmup_steps:
        parser.error("--batch-size, --rounds and --warmup-steps begin at 1, and --steps at one more than the warm-up")
    if GPUS and max(args.processes) > GPUS:
        parser.error(f"argument --processes: {max(args.processes)} processes but {GPUS} GPU(s), choose fewer")
    if args.predict is not None and args.predict <= 0:
        parser.error("argument --predict: give the bandwidth of a link in GB/s, such as 25 (PCIe 4) or 450 (NVLink 4)")
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
    configurations = [one for name in args.recipes for n in args.processes if (one := Configuration(name, n)).fits()]
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    started, interrupted, args.measured = time.perf_counter(), False, "No whole round"
    try:
        for done in range(1, args.rounds + 1):
            for one in configurations:
                text = f"round {done}/{args.rounds}: {one.recipe} on {one.processes}"
                with console.status(text):
                    one.run(args)
                write(configurations, args)
                rate = f"{one.samples[-1]['samples_per_second']:,.0f} images/s" if one.samples else ""
                console.print(f"{text}: {one.outcome() or rate}")
            args.measured, minutes = f"{done} of {args.rounds} rounds", (time.perf_counter() - started) / 60 / done
            if done == 1:
                console.print(f"a round takes {minutes:.1f} minutes, those that fit into {args.minutes:g} are run")
            if minutes * (done + 1) > args.minutes:
                break
    except KeyboardInterrupt:
        interrupted = True
        args.measured += ", then interrupted"
    computed = predictions(configurations, args) if args.predict else []
    console.print(table(configurations, computed))
    console.print("\n".join(notes(args)))
    if any(one.samples for one in configurations):
        path = write(configurations, args, computed)
        path.with_suffix(".md").write_text(markdown(configurations, computed, args))
        path.with_suffix(".svg").write_text(picture(configurations, computed, args))
        console.print(f"written: {path}, .md, .svg")
    for one in configurations:
        if one.outcome():
            reason = one.failure or one.unavailable
            print(f"bench: {one.recipe} on {one.processes} {one.outcome()}: {reason}", file=sys.stderr)
    sys.exit(130 if interrupted else any(one.failure for one in configurations))


if __name__ == "__main__":
    run_recipe(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main()
