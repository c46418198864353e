# SPDX-License-Identifier: Apache-2.0
"""Measure the recipes on this machine: `make bench`, about ten minutes.

    python benchmarks/bench.py
    python benchmarks/bench.py --recipes plain_ddp "ddp_cifar --compile" --data cifar10

A configuration is a recipe, with flags, on a number of processes. All of them run once per round,
so that a drift of the machine's speed affects them alike; ratios are taken within a round. A run is
the recipe's own `main` under `accelerate launch` with --max-steps, but its epoch does not end, and
it neither evaluates nor saves (see `run_recipe`). plain_ddp.py runs as it is, and the time is that
at which its lines arrive. A line takes time, too: a run has one in the middle, where its warm-up
ends, and one at its end.

Writes all samples (JSON, after each run) and a table (Markdown) to --output-dir; `make results`
publishes them. A configuration that this hardware cannot run, or has no memory for, is "n/a" with
the reason. Exits with status 1 if a run failed.
"""

import argparse
import functools
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from datetime import date
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, RandomSampler

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from running import CORES, ROOT, VERSIONS, bf16_instructions, commit, execute, hardware

BASELINE = "plain_ddp"
TUNED = f"{BASELINE} --tuned"
RECIPES = ["data_parallel_cifar", "ddp_cifar", "amp_cifar", "pipeline_cifar", "sharded_cifar"]
RECIPES = [BASELINE, *RECIPES]
GPUS = torch.cuda.device_count()
LINE_OF_BASELINE = re.compile(r"step \d+ samples (\d+) ")
PEAK_OF_BASELINE = re.compile(r"peak memory (\S+) GiB")
UNAVAILABLE = re.compile(r"no fp16 on CPU|has no bf16")  # what recipes say of hardware
OUT_OF_MEMORY = re.compile(
    r".*(?:OutOfMemoryError|out of memory|can't allocate memory|STATUS_ALLOC_FAILED).*"
)
COLUMNS = {
    "recipe": "",
    "N": "processes; GPUs of DataParallel",
    "images/s": "median over the rounds",
    "range": "lowest and highest of the rounds",
    "ratio": f"images/s / those of {BASELINE} on the same N in the same round, median, range",
    "to tuned": f"the same to those of {TUNED}",
    "scaling": f"images/s / {'(N times those of one)' if GPUS else 'those of one process'}",
    "GiB": f"peak {'GPU' if GPUS else 'resident'} memory, the maximum over the processes",
}


# ----------------------------------------------------------------------------------- configurations
class Configuration:
    """A recipe with flags on a number of processes, and its measurements."""

    def __init__(self, recipe, processes):
        self.recipe = recipe
        self.processes = processes
        self.name, *self.flags = shlex.split(recipe)
        self.samples = []
        self.failure = None
        self.unavailable = None
        in_bf16 = "bf16" in recipe or recipe == TUNED
        in_bf16 |= self.name == "amp_cifar" and "--precision" not in recipe
        if in_bf16 and not (GPUS or bf16_instructions()):  # a recipe says what a GPU cannot do
            self.unavailable = "this CPU has no bf16 instructions: emulated, it is much slower"

    def outcome(self):
        """Return the word that stands in the table if there are no figures."""
        return "failed" if self.failure else "n/a" if self.unavailable else ""

    def fits(self):
        """Return whether the recipe can have this many devices at all."""
        if self.name == "data_parallel_cifar":  # one process, whose devices are GPUs
            return self.processes == 1 or GPUS > 0
        return self.name not in ("pipeline_cifar", "sharded_cifar") or self.processes % 2 == 0

    def command(self, args, output_dir):
        processes, batch = self.processes, args.batch_size
        flags = ["--max-steps", 2 * args.steps, "--log-every", args.steps]
        flags += ["--data", args.data, "--data-dir", args.data_dir]
        flags += ["--model", args.model, "--stem", args.stem, *([] if GPUS else ["--cpu"])]
        if self.name == BASELINE:
            line = [sys.executable, ROOT / f"benchmarks/{BASELINE}.py", "--processes", processes]
            line += ["--samples", 2 * args.steps * batch * processes]
        else:
            if self.name == "data_parallel_cifar":  # its batch is that of all GPUs
                processes, batch = 1, batch * processes
            if self.name == "pipeline_cifar":  # its batch is that of two processes
                batch *= 2
            line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
            line += ["--config_file", ROOT / f"accelerate_configs/{processes}gpu.yaml"]
            # At a rate that cannot diverge in the few steps.
            line += [__file__, "run", self.name, "--lr", 1e-6, "--output-dir", output_dir]
        return list(map(str, [*line, *flags, "--batch-size", batch, *self.flags]))

    def environment(self):
        if self.name != "data_parallel_cifar" or not GPUS:
            return os.environ
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
        own = ",".join(visible.split(",")[: self.processes])  # it takes all GPUs that it sees
        return os.environ | {"CUDA_VISIBLE_DEVICES": own}

    def run(self, args):
        """Run it once, unless it could not run before. Keep the sample, or the error."""
        if self.outcome():
            return
        with tempfile.TemporaryDirectory(dir=args.output_dir) as directory:
            command = self.command(args, directory)
            code, lines = execute(command, self.environment(), args.timeout)
            if code != 0:
                self.note_error(code, "".join(line for _, line in lines))
            elif self.name == BASELINE:
                self.samples.append(sample_of_baseline(lines))
            else:
                self.samples.append(sample_of_recipe(directory, lines[0][0]))

    def note_error(self, code, text):
        # The recipe's own words, which the launcher's traceback would hide.
        said = [line for line in text.splitlines() if line.startswith(f"{self.name}: ")]
        reason = f"exit code {code}\n" + "\n".join(said or text.splitlines()[-15:])
        if out_of_memory := OUT_OF_MEMORY.search(text):
            self.unavailable = out_of_memory[0].strip()
        elif UNAVAILABLE.search(reason):
            self.unavailable = reason
        else:
            self.failure = reason

    def results(self, configurations):
        """Return the figures: medians over the rounds, and ratios to other configurations within
        each round."""
        if self.failure or not self.samples:
            return {}

        def ratios(recipe, processes):
            for other in configurations:
                same = (other.recipe, other.processes) == (recipe, processes)
                if same and other.samples and not other.failure:
                    pairs = zip(self.samples, other.samples, strict=False)
                    return [a["samples_per_second"] / b["samples_per_second"] for a, b in pairs]
            return []

        rates = [sample["samples_per_second"] for sample in self.samples]
        to_baseline, to_tuned = (ratios(name, self.processes) for name in (BASELINE, TUNED))
        to_one = ratios(self.recipe, 1)
        one = statistics.median(to_one) if to_one else None
        names = ("samples_per_second", "peak_memory_gib", "start_seconds")
        columns = {name: [sample[name] for sample in self.samples] for name in names}
        return {
            **{name: statistics.median(x) for name, x in columns.items() if None not in x},
            "least": min(rates),
            "most": max(rates),
            "ratio": statistics.median(to_baseline) if to_baseline else None,
            "ratio_range": [f(to_baseline, default=None) for f in (min, max)],
            "to_tuned": statistics.median(to_tuned) if to_tuned else None,
            "to_tuned_range": [f(to_tuned, default=None) for f in (min, max)],
            # N processes on CPU share the cores; N GPUs are N times the hardware of one.
            "scaling": one and one / (self.processes if GPUS else 1),
        }


def sample_of_baseline(lines):
    """Return the figures of a run from its lines: between the last two with a loss."""
    found = [(when, LINE_OF_BASELINE.match(line)) for when, line in lines]
    losses = [(when, int(match[1])) for when, match in found if match]
    (warm, before), (end, after) = losses[-2:]
    # On a GPU a warning of torch comes after it.
    [peak] = [match[1] for _, line in lines if (match := PEAK_OF_BASELINE.match(line))]
    return as_sample(after - before, end - warm, float(peak), warm - lines[0][0])


def sample_of_recipe(directory, launched):
    """Return the figures of a run from its files: between the last two lines of metrics."""
    batch = json.loads(Path(directory, "summary.json").read_text())["global_batch_size"]
    text = Path(directory, "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["event"] == "train"]
    warm, end = lines[-2:]
    samples = batch * (end["step"] - warm["step"])
    seconds = samples / end["samples_per_second"]
    peak = end.get("peak_memory_gib")  # data_parallel_cifar.py does not measure it
    return as_sample(samples, seconds, peak, warm["time"] - launched)


def as_sample(samples, seconds, peak_memory_gib, start_seconds):
    return {
        "samples_per_second": samples / seconds,
        "measured_samples": samples,
        "measured_seconds": seconds,
        "peak_memory_gib": peak_memory_gib,
        "start_seconds": start_seconds,
    }


def load(path):
    """Import a recipe, or a copy of one, from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    recipe = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def run_recipe(name, *flags):
    """Run a recipe in each process of the launcher, without evaluations and checkpoints, and with
    an epoch that does not end."""
    recipe = load(ROOT / f"recipes/{name}.py")
    recipe.load_data = functools.partial(load_endless_data, recipe.load_data)
    recipe.evaluate = lambda *_: {"test_loss": 0.0}
    if hasattr(recipe, "Checkpoints"):
        recipe.Checkpoints.save = lambda *_: 0.0
    sys.argv[1:] = flags
    recipe.main()


def load_endless_data(load_data, args, accelerator):
    loader, test_loader = load_data(args, accelerator)
    sampler = RandomSampler(loader.dataset, num_samples=10**9)
    options = {"sampler": sampler, "drop_last": True, "collate_fn": loader.collate_fn}
    return DataLoader(loader.dataset, args.batch_size, **options), test_loader


# -------------------------------------------------------------------------------------- the results
def columns(configurations):
    """Return the names of the columns: N and scaling only for several numbers of processes."""
    left_out = set() if any(one.recipe == TUNED for one in configurations) else {"to tuned"}
    if len({one.processes for one in configurations}) == 1:
        left_out |= {"N", "scaling"}
    return [name for name in COLUMNS if name not in left_out]


def shown_ratio(median, ends):
    return f"{median:.2f} ({ends[0]:.2f}-{ends[1]:.2f})" if median else "-"


def rows(configurations):
    """Return the cells of each configuration, in the order of `columns`."""
    lines = []
    for one in configurations:
        got = one.results(configurations)
        cells = [one.outcome(), *[""] * 5]
        if got:
            cells = [
                f"{got['samples_per_second']:,.0f}",
                f"{got['least']:,.0f}-{got['most']:,.0f}",
                shown_ratio(got["ratio"], got["ratio_range"]),
                shown_ratio(got["to_tuned"], got["to_tuned_range"]),
                f"{got['scaling']:.2f}" if got["scaling"] else "-",
                f"{got['peak_memory_gib']:.1f}" if "peak_memory_gib" in got else "-",
            ]
        cells = [one.recipe.replace("_cifar", ""), str(one.processes), *cells]
        cells = dict(zip(COLUMNS, cells, strict=True))
        lines.append([cells[name] for name in columns(configurations)])
    return lines


def table(configurations):
    shown = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for name in columns(configurations):
        is_text = name == "recipe"
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for cells in rows(configurations):
        shown.add_row(*cells, style="red" if "failed" in cells else None)
    return shown


def notes(args, configurations):
    """Return the lines that say how the figures came about."""
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    stem = {"imagenet": "ImageNet", "cifar": "CIFAR"}[args.stem]
    counts = " or ".join(map(str, sorted({one.processes for one in configurations})))
    model = args.model if args.model != "resnet50" else f"ResNet-50 with the {stem} stem"
    lines = [
        f"{args.hardware}; {versions}; Python {platform.python_version()}; {date.today()}; "
        f"commit {args.commit}.",
        f"{model}; {counts} process(es), each with batch {args.batch_size}; data {args.data}. "
        f"{args.measured}, configurations in turn; each run has {args.steps} steps after as many "
        "of warm-up.",
    ]
    for one in configurations:
        if one.unavailable:
            reason = " ".join(one.unavailable.split())
            lines.append(f"n/a: {one.recipe} on {one.processes}: {reason:.300}")
    return lines


def write(configurations, args):
    """Write all samples, and the table with its command and notes. Return the path of the former,
    named after the hardware."""
    name = f"cpu-x{CORES}"
    if GPUS:
        name = f"{args.hardware.partition(' x ')[2].partition(' (')[0]}-x{GPUS}"
    path = Path(args.output_dir, re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".json")
    names = "recipe", "processes", "failure", "unavailable", "samples"
    content = {
        "date": str(date.today()),
        "hardware": args.hardware,
        "python": platform.python_version(),
        "versions": VERSIONS,
        "settings": vars(args),
        "configurations": [
            {name: getattr(one, name) for name in names} | one.results(configurations)
            for one in configurations
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    names = columns(configurations)
    ruler = ["---", *["---:"] * (len(names) - 1)]
    lines = [" | ".join(cells) for cells in [names, ruler, *rows(configurations)]]
    text = "\n".join(f"| {line} |" for line in lines)
    # A line may break between words, not in a quoted one.
    words = [shlex.quote(word).replace(" ", "\0") for word in sys.argv[1:]]
    lines = textwrap.wrap(" ".join(["python benchmarks/bench.py", *words]), 96)
    command = " \\\n  ".join(lines).replace("\0", " ")
    wrap = textwrap.TextWrapper(100, initial_indent="- ", subsequent_indent="  ")
    said = "\n".join(map(wrap.fill, notes(args, configurations)))
    path.with_suffix(".md").write_text(f"{text}\n\n```\n{command}\n```\n\n{said}\n")
    return path


# --------------------------------------------------------------------------------------------- main
def parse_args():
    summary, _, rest = __doc__.partition("\n\n")
    layout, usage = argparse.ArgumentDefaultsHelpFormatter, "\n" + rest.partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary, usage=usage, formatter_class=layout)
    add = parser.add_argument
    compiled = ["ddp_cifar", "ddp_cifar --compile", "amp_cifar", "amp_cifar --compile"]
    # Two workers may be too few for a fast GPU: the baseline runs with eight, too.
    tuned = [TUNED, f"{TUNED} fp32"]
    gpu_recipes = [BASELINE, f"{BASELINE} --workers 8", *tuned]
    gpu_recipes += [RECIPES[1], *compiled, *RECIPES[-2:]]
    counts = [n for n in (1, 2, 4, 8) if n <= (GPUS or CORES)]
    names = {"nargs": "+", "metavar": "RECIPE", "default": gpu_recipes if GPUS else RECIPES}
    numbers = {"nargs": "+", "type": int, "choices": (1, 2, 4, 8)}
    # On a GPU the model has to be large enough that launching kernels does not limit it.
    stem, batch_size, steps = ("cifar", 512, 50) if GPUS else ("imagenet", 128, 5)
    add("--recipes", help="names; with own flags in quotes", **names)
    add("--processes", help="or GPUs", default=sorted({1, counts[-1]}), **numbers)
    add("--data", help="kind of data", choices=("cifar10", "synthetic"), default="synthetic")
    add("--data-dir", help="folder of CIFAR-10, which is downloaded if missing", default="data")
    add("--model", help="model", choices=("resnet50", "simple_cnn"), default="resnet50")
    add("--stem", help="stem of ResNet-50", choices=("cifar", "imagenet"), default=stem)
    add("--batch-size", help="samples per process", type=int, default=batch_size)
    add("--rounds", help="runs of each configuration", type=int, default=3)
    add("--minutes", help="time after which no round may end", type=float, default=9.7)
    add("--steps", help="steps of a run, after as many of warm-up", type=int, default=steps)
    add("--timeout", help="seconds after which a run is ended", type=float, default=900)
    add("--output-dir", help="folder of the results", default="runs/bench")
    args = parser.parse_args()
    if (args.model, args.stem, GPUS) == ("resnet50", "imagenet", 0):
        # By `memory.py --cuts` among the fastest cuts on CPUs with AVX-512 and with AMX.
        cut = "pipeline_cifar --split layer4.0 --chunks 4"
        args.recipes = [cut if recipe == "pipeline_cifar" else recipe for recipe in args.recipes]
    for recipe in args.recipes:
        if recipe.split()[:1] not in [[name] for name in RECIPES]:
            parser.error(f"argument --recipes: {recipe!r} is none of {', '.join(RECIPES)}")
    if min(args.batch_size, args.rounds, args.steps) < 1:
        parser.error("--batch-size, --rounds and --steps begin at 1")
    if GPUS and max(args.processes) > GPUS:
        parser.error(f"argument --processes: {max(args.processes)}, but {GPUS} GPU(s)")
    return args


def measure(configurations, args, console):
    """Run all configurations round by round, as long as there is time. `args.measured` says how far
    it came."""
    started = time.perf_counter()
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
            console.print(f"a round takes {minutes:.1f} of {args.minutes:g} minutes")
        if minutes * (done + 1) > args.minutes:
            break


def main():
    args = parse_args()
    args.hardware = hardware(GPUS)
    args.commit = commit()  # before the measurement, during which files may change
    args.measured = "No whole round"
    os.makedirs(args.output_dir, exist_ok=True)
    possible = [Configuration(name, n) for name in args.recipes for n in args.processes]
    configurations = [one for one in possible if one.fits()]
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    # Set for SIGINT, too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    interrupted = False
    try:
        measure(configurations, args, console)
    except KeyboardInterrupt:
        interrupted = True
        args.measured += ", then interrupted"
    console.print(table(configurations))
    console.print("\n".join(notes(args, configurations)))
    console.print("\n".join(f"{name}: {meaning}" for name, meaning in COLUMNS.items() if meaning))
    if any(one.samples for one in configurations):
        console.print(f"written: {write(configurations, args)}, .md")
    for one in configurations:
        if one.outcome():
            what = f"{one.recipe} on {one.processes} {one.outcome()}"
            print(f"bench: {what}: {one.failure or one.unavailable}", file=sys.stderr)
    sys.exit(130 if interrupted else any(one.failure for one in configurations))


if __name__ == "__main__":
    run_recipe(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main()
