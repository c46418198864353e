"""Measure the recipes on this machine: `make bench`, under ten minutes.

    python recipes/bench.py
    python recipes/bench.py --recipes plain_ddp_cifar "ddp_cifar --compile" --processes 1 2 --data cifar10
    python recipes/bench.py --predict 450
    accelerate launch --config_file accelerate_configs/2gpu.yaml recipes/bench.py --overhead amp_cifar

Every arm, a recipe on a number of processes, is the real script under the launcher that a user takes. Rounds take the
arms in turn, so that a machine that drifts hits all alike, and ratios are taken within a round. The first steps of each
run are warm-up and left out. `--overhead` looks inside one process instead: what data, Accelerate and DDP cost there.

Writes a table (Markdown), every sample (JSON) and a picture (SVG) into bench_results/. Exits with 1 if an arm failed.
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
from contextlib import nullcontext
from datetime import date
from html import escape
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import torch
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
YARDSTICK = "plain_ddp_cifar"
RECIPES = [YARDSTICK, "data_parallel_cifar", "ddp_cifar", "amp_cifar", "pipeline_cifar"]
GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VERSIONS = {name: version(name) for name in ("torch", "torchvision", "accelerate")}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
BUCKET_BYTES = 25 * 2**20  # DDP's default
STEMS = {"imagenet": "stock", "cifar": "CIFAR"}
COLUMNS = {
    "recipe": "",
    "N": "processes (DataParallel: GPUs)",
    "images/s": "median over the rounds",
    "range": "least and most of the rounds",
    "ratio": f"images/s over those of {YARDSTICK} on the same N in the same round, median",
    "each": "images/s per GPU" if GPUS else "images/s per core",
    "scaling": "images/s over N times those of one" if GPUS else "images/s over those of one process on the same cores",
    "GiB": "peak memory of the hungriest process, " + ("on its GPU" if GPUS else "resident"),
    "data": "share of the time in which the loop waits for its next batch",
    "start": "seconds from the launch to the end of the first step",
}
PALETTE = ["#888888", "#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756"]


# ------------------------------------------------------------------------------------------------------ the arms
class Arm:
    """A recipe, perhaps with variables and flags as in a shell, on a number of processes; and what was measured."""

    def __init__(self, recipe, processes):
        self.recipe, self.processes = recipe, processes
        words = shlex.split(recipe)
        self.environment = dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))
        self.name, *self.flags = words[len(self.environment) :]
        self.label = recipe.replace("_cifar", "")
        self.samples, self.failure = [], None

    def runs(self):
        """Whether the recipe can run on this many devices at all."""
        if self.name == "data_parallel_cifar":  # one process, whose devices are GPUs
            return self.processes == 1 or GPUS > 0
        return self.name != "pipeline_cifar" or self.processes % 2 == 0

    def command(self, args, output_dir):
        flags = ["--data", args.data, "--data-dir", args.data_dir, "--model", args.model, "--stem", args.stem]
        flags += ["--batch-size", args.batch_size, "--max-steps", args.steps, "--epochs", 10**6]
        flags += ["--output-dir", output_dir, *(["--cpu"] if not GPUS else [])]
        script = HERE / f"{self.name}.py"
        if self.name == YARDSTICK:
            line = [sys.executable, script, "--world_size", self.processes, "--warmup-steps", args.warmup_steps]
            return list(map(str, [*line, *flags, *self.flags]))
        processes = self.processes
        if self.name == "data_parallel_cifar":
            flags += ["--batch-size", args.batch_size * processes]  # that of all GPUs
            flags += ["--gpus", ",".join(map(str, range(processes)))] if GPUS else []
            processes = 1
        if self.name == "pipeline_cifar":  # whose batch is that of a pipeline, two processes
            flags += ["--batch-size", 2 * args.batch_size]
        config = HERE.parent / "accelerate_configs" / f"{processes}gpu.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
        return list(map(str, [*launch, script, "--log-every", args.warmup_steps, *flags, *self.flags]))

    def run(self, args):
        """Run it once and keep the sample, or the end of its log if it fails."""
        with tempfile.TemporaryDirectory() as directory:
            log, launched = Path(directory, "log"), time.time()
            with log.open("w") as file:
                process = subprocess.Popen(
                    self.command(args, directory),
                    env={**os.environ, **self.environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
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
                self.failure = f"exit code {code}\n" + "\n".join(said or lines[-15:])
                return
            summary = json.loads(Path(directory, "summary.json").read_text())
        if summary["images_per_second"] is None:
            self.failure = "nothing was measured: all of its steps were warm-up"
            return
        names = "images_per_second", "peak_memory_bytes", "data_wait_share", "device"
        sample = {name: summary[name] for name in names}
        self.samples.append({**sample, "seconds_to_first_step": summary["first_step_at"] - launched})

    def results(self, arms):
        """Return the figures of this arm: medians over the rounds, and ratios to other arms within each round."""
        if self.failure or not self.samples:
            return {}

        def ratio(other):
            if not other or other.failure:
                return None
            pairs = zip(self.samples, other.samples, strict=False)
            return statistics.median(ours["images_per_second"] / theirs["images_per_second"] for ours, theirs in pairs)

        def find(recipe, processes):
            return next((arm for arm in arms if (arm.recipe, arm.processes) == (recipe, processes)), None)

        rates = [sample["images_per_second"] for sample in self.samples]
        # N processes on CPU share all cores, as one does; N GPUs are N times the hardware of one.
        devices = self.processes if GPUS else CORES
        one = ratio(find(self.recipe, 1))
        return {
            "images_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "ratio": ratio(find(YARDSTICK, self.processes)),
            "per_device": statistics.median(rates) / devices,
            "efficiency": one and one / (self.processes if GPUS else 1),
            **{
                name: statistics.median(sample[name] for sample in self.samples)
                for name in ("peak_memory_bytes", "data_wait_share", "seconds_to_first_step")
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


def predictions(arms, args):
    """Return [(label, devices, images/s)] for 2, 4 and 8 devices, from the recipes that were measured on one."""
    recipe = load("ddp_cifar")
    with torch.device("meta"):
        gradient_bytes = 4 * sum(parameter.numel() for parameter in recipe.build_model(args).parameters())
    computed = []
    for arm in arms:
        rate = arm.results(arms).get("images_per_second")
        if rate and arm.processes == 1 and arm.name in (YARDSTICK, "ddp_cifar", "amp_cifar"):
            for devices in (2, 4, 8) if GPUS else [n for n in (2, 4, 8) if n <= CORES]:
                # On CPU the processes share the cores, which have no time to spare for the exchange either.
                share, overlap = (1, 2 / 3) if GPUS else (devices, 0)
                each = predicted_rate(
                    rate / share, args.batch_size, devices, gradient_bytes, args.predict * 1e9, overlap
                )
                computed.append((arm.label, devices, each))
    return computed


# ------------------------------------------------------------------------------------------------------ overhead
def load(name):
    """Import a recipe from its file."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def overhead(args):
    """Print what data, Accelerate and DDP add to a step, as ratios of the four loops of `seconds_per_step`."""
    recipe = load(args.overhead)
    args.seed, args.cpu, args.tracker = 0, not GPUS, None
    accelerator = recipe.make_accelerator(args, mixed_precision="bf16" if args.overhead == "amp_cifar" else "no")
    seconds = seconds_per_step(args, recipe, accelerator)
    accelerator.print(f"{args.overhead}, {accelerator.num_processes} processes, {hardware()}, {stem_of(args)}")
    accelerator.print(
        f"{args.rounds} rounds of {args.steps} steps of each loop; median, least and most over the rounds"
    )
    for name, values in seconds.items():
        accelerator.print(f"  {name:6} {span([1000 * value for value in values], '.1f')} ms a step")
    for slow, fast, meaning in (
        ("full", "cached", "loop with its data / fed one cached batch"),
        ("cached", "bare", "with Accelerate and the recipe's own code / bare torch"),
        ("bare", "alone", "with DDP / without"),
    ):
        ratios = [b / a for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        accelerator.print(f"  {span(ratios, '.3f')} speed {meaning}")
    # As in the recipes: gloo may abort where models outlive the process group.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def seconds_per_step(args, recipe, accelerator):
    """Return {loop: [seconds of a step in each round]} of four loops that take turns in the same processes.

    full: the recipe's, with its data; cached: the same fed one batch over and over; bare: torch alone, with DDP;
    alone: bare without DDP, each process for itself.
    """
    mixed = accelerator.mixed_precision == "bf16"
    train_loader, _ = accelerator.prepare(*recipe.load_data(args, accelerator))

    def training():
        torch.manual_seed(0)
        model = recipe.build_model(args).to(accelerator.device, memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, nesterov=True)

    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    interruption, own = recipe.Interruption(accelerator), (None,) if mixed else ()
    train_step = recipe.amp_train_step if mixed else recipe.train_step
    totals = torch.zeros(4, device=accelerator.device)

    def endless():
        while True:
            train_loader.set_epoch(0)
            train_loader.dataset.set_epoch(0)
            yield from train_loader

    def full(batch):
        totals[:3] += train_step(accelerator, model, optimizer, scheduler, *batch, *own)
        totals[3] += ~totals[0].isfinite()
        interruption.agreed()

    def bare(model, optimizer):
        def step(batch):
            images, labels = batch
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=mixed):
                logits = model(images)
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    alone_model, alone_optimizer = training()
    bare_model, bare_optimizer = training()
    if accelerator.use_distributed:
        devices = [accelerator.device] if GPUS else None
        bare_model = nn.parallel.DistributedDataParallel(bare_model, devices, gradient_as_bucket_view=True)
    batches = endless()
    cached = next(batches)
    arms = {
        "full": lambda: full(next(batches)),
        "cached": lambda: full(cached),
        "bare": lambda: step_bare(cached),
        "alone": lambda: step_alone(cached),
    }
    step_bare, step_alone = bare(bare_model, bare_optimizer), bare(alone_model, alone_optimizer)
    seconds = {name: [] for name in arms}
    for index in range(args.rounds + 1):
        order = list(arms)
        for name in order[index % 4 :] + order[: index % 4]:
            accelerator.wait_for_everyone()
            before = time.perf_counter()
            for _ in range(args.steps):
                arms[name]()
            if GPUS:
                torch.cuda.synchronize()
            accelerator.wait_for_everyone()
            if index:  # the first round is warm-up
                seconds[name].append((time.perf_counter() - before) / args.steps)
    return seconds


def span(values, form):
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# --------------------------------------------------------------------------------------------------- the results
def hardware():
    if GPUS:
        return f"{GPUS} x {torch.cuda.get_device_name()}"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{CORES} cores of {found[1] if found else platform.processor() or platform.machine()}"


def stem_of(args):
    model = args.model if args.model != "resnet50" else f"ResNet-50 with the {STEMS[args.stem]} stem"
    return f"{model}, batch {args.batch_size} per process, data {args.data}"


def row(arm, arms):
    """Return an arm's cells, in the order of COLUMNS."""
    if arm.failure or not arm.samples:
        return [arm.label, str(arm.processes), "failed" if arm.failure else "", *[""] * 7]
    got = arm.results(arms)

    def show(value, form):
        return "-" if value is None else format(value, form)

    return [
        arm.label,
        str(arm.processes),
        show(got["images_per_second"], ",.0f"),
        f"{got['least']:,.0f}-{got['most']:,.0f}",
        show(got["ratio"], ".2f"),
        show(got["per_device"], ",.0f"),
        show(got["efficiency"], ".2f"),
        f"{got['peak_memory_bytes'] / 2**30:.1f}",
        show(got["data_wait_share"], ".1%"),
        f"{got['seconds_to_first_step']:.0f} s",
    ]


def rows(arms, computed):
    extra = [[recipe, str(n), f"{rate:,.0f}", "computed", *["-"] * 6] for recipe, n, rate in computed]
    return [row(arm, arms) for arm in arms] + extra


def table(arms, computed=()):
    shown = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for index, name in enumerate(COLUMNS):
        shown.add_column(name, justify="right" if index else "left", no_wrap=index > 0, min_width=0 if index else 13)
    for cells in rows(arms, computed):
        shown.add_row(*cells, style="red" if cells[2] == "failed" else "dim" if cells[3] == "computed" else None)
    return shown


def notes(args, rounds):
    """Return the lines that say how the figures came about."""
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    lines = [
        f"{hardware()}; {versions}; Python {platform.python_version()}; {date.today()}; commit {args.commit}.",
        f"{stem_of(args)}. {rounds} rounds, arms in turn; of each run's {args.steps} steps the first "
        f"{args.warmup_steps} are warm-up and left out.",
        *(f"{name}: {meaning}." for name, meaning in COLUMNS.items() if meaning),
    ]
    if args.predict:
        lines.append(
            f"computed: not measured. From the one-process rate, a ring all-reduce of the gradient over links of "
            f"{args.predict:g} GB/s"
            + (", overlapping the backward pass." if GPUS else "; the processes share the cores, nothing overlaps.")
        )
    return lines


def commit():
    command = ["git", "-C", HERE, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def markdown(arms, computed, args, rounds):
    command = shlex.join(["python", "recipes/bench.py", *sys.argv[1:]])
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *rows(arms, computed)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\n`{command}`\n\n" + "\n".join(f"- {line}" for line in notes(args, rounds)) + "\n"


def picture(arms, computed, args):
    """Return an SVG: a bar for each arm, its whisker from the least to the most, computed ones dashed."""
    bars = [
        (arm.label, arm.processes, got["images_per_second"], got["least"], got["most"], False)
        for arm in arms
        if (got := arm.results(arms))
    ]
    bars += [(recipe, n, rate, rate, rate, True) for recipe, n, rate in computed]
    if not bars:
        return None
    left, width, height = 250, 400, 24
    scale = width / max(most for *_, most, _ in bars)
    colours = dict(zip(dict.fromkeys(name for name, *_ in bars), PALETTE * len(bars), strict=False))
    parts = [f'<text x="10" y="22" font-weight="bold">images/s: {escape(stem_of(args))}</text>']
    parts.append(f'<text x="10" y="40" fill="#555">{escape(hardware())}, {date.today()}</text>')
    for index, (name, n, rate, least, most, is_computed) in enumerate(bars):
        y = 56 + index * height
        look = f'fill="{colours[name]}"' if not is_computed else f'fill="none" stroke="{colours[name]}"'
        look += ' stroke-dasharray="4 3"' if is_computed else ""
        label = f"{name}, {n}" + (" (computed)" if is_computed else "")
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{rate * scale:.1f}" height="{height - 8}" {look}/>',
            f'<path d="M{left + least * scale:.1f} {y + 10}H{left + most * scale:.1f}" stroke="black"/>',
            f'<text x="{left + most * scale + 6:.1f}" y="{y + 14}">{rate:,.0f}</text>',
        ]
    size = f'width="{left + width + 80}" height="{70 + len(bars) * height}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    return "\n".join([f"<svg {style} {size}>", '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def write(arms, computed, args, rounds):
    """Write the three result files, named after the hardware, and return their common path without the suffix."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{torch.cuda.get_device_name() if GPUS else 'cpu'}-x{GPUS or CORES}".lower())
    path = Path(args.output_dir, slug)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": str(date.today()),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": VERSIONS,
        "settings": vars(args),
        "arms": [
            {
                "recipe": arm.recipe,
                "processes": arm.processes,
                **arm.results(arms),
                "failure": arm.failure,
                "samples": arm.samples,
            }
            for arm in arms
        ],
        "computed": [{"recipe": recipe, "processes": n, "images_per_second": rate} for recipe, n, rate in computed],
    }
    path.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(arms, computed, args, rounds))
    if image := picture(arms, computed, args):
        path.with_suffix(".svg").write_text(image)
    return path


# ----------------------------------------------------------------------------------------------------- arguments
def parse_args():
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, usage="\n" + rest.partition("\n\n")[0])

    def add(group, name, help, **options):
        default = "" if options.get("default") is None else " (default: %(default)s)"
        group.add_argument(name, help=help + default, **options)

    counts = [n for n in (1, 2, 4, 8) if n <= (GPUS or CORES)]
    arms = parser.add_argument_group("arms")
    add(
        arms, "--recipes", "names; in quotes, with own flags or variables", nargs="+", default=RECIPES, metavar="RECIPE"
    )
    add(arms, "--processes", "processes, or GPUs", nargs="+", type=int, choices=(1, 2, 4, 8), default=counts)
    what = parser.add_argument_group("data and model")
    add(what, "--data", "synthetic needs no files, no network", choices=("cifar10", "synthetic"), default="synthetic")
    add(what, "--data-dir", "where CIFAR-10 is, or is downloaded to", default="data")
    add(what, "--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    add(what, "--stem", "of resnet50: 3x3, or stock 7x7", choices=("cifar", "imagenet"), default="imagenet")
    add(what, "--batch-size", "samples per process", type=int, default=128)
    how = parser.add_argument_group("measuring")
    add(how, "--rounds", "how often each arm is run", type=int, default=3)
    add(how, "--minutes", "no further round begins where it would end after this", type=float, default=9.7)
    add(how, "--steps", "optimizer steps of a run", type=int, default=100 if GPUS else 8)
    add(how, "--warmup-steps", "the first of them, which are not measured", type=int, default=20 if GPUS else 2)
    add(how, "--timeout", "seconds after which a run is given up", type=float, default=900)
    add(how, "--output-dir", "for the result files", default="bench_results")
    more = parser.add_argument_group("beyond the arms")
    add(more, "--predict", "what more devices should give on links of this bandwidth", type=float, metavar="GB/S")
    recipes = ("ddp_cifar", "amp_cifar")
    add(more, "--overhead", "under accelerate launch: what data, Accelerate and DDP cost inside", choices=recipes)
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


# ---------------------------------------------------------------------------------------------------------- main
def main():
    args = parse_args()
    if args.overhead:
        return overhead(args)
    args.commit = commit()  # before the measurement, during which somebody may go on working
    arms = [Arm(recipe, n) for recipe in args.recipes for n in args.processes]
    arms = [arm for arm in arms if arm.runs()]
    console = Console(soft_wrap=not sys.stdout.isatty())
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console)
    task = progress.add_task("", total=len(arms) * args.rounds)
    live = console.is_terminal and not console.is_dumb_terminal
    started, rounds = time.perf_counter(), 0

    def screen():
        return Group(table(arms), progress)

    try:
        with Live(get_renderable=screen, console=console, transient=True) if live else nullcontext():
            while rounds < args.rounds:
                for arm in arms:
                    text = f"round {rounds + 1}/{args.rounds}: {arm.recipe} on {arm.processes}"
                    progress.update(task, description=text)
                    if not arm.failure:
                        arm.run(args)
                    progress.advance(task)
                    if not live:
                        end = "failed" if arm.failure else f"{arm.samples[-1]['images_per_second']:,.0f} images/s"
                        console.print(f"{text}: {end}", highlight=False)
                rounds += 1
                elapsed = (time.perf_counter() - started) / 60
                if elapsed * (rounds + 1) / rounds > args.minutes:
                    break
    except KeyboardInterrupt:
        sys.exit("bench: interrupted, nothing written")
    computed = predictions(arms, args) if args.predict else []
    console.print(table(arms, computed))
    console.print("\n".join(notes(args, rounds)), highlight=False)
    if rounds < args.rounds:
        console.print(f"{rounds} of {args.rounds} rounds fitted into {args.minutes:g} minutes (--minutes)")
    path = write(arms, computed, args, rounds)
    console.print(f"written: {path}.json, .md, .svg", highlight=False)
    for arm in arms:
        if arm.failure:
            print(f"bench: {arm.recipe} on {arm.processes} failed: {arm.failure}", file=sys.stderr)
    sys.exit(any(arm.failure for arm in arms))


if __name__ == "__main__":
    main()
