"""The parts of gpu_report.py, which runs one of `PARTS` at a time, as a process:

    gpu_report_parts.py PART --folder FOLDER --seconds SECONDS --data-dir DIR

Each writes its notes and rows to FOLDER/PART.json as soon as it has them, and exits with 1 if a
measurement failed.
"""

import argparse
import inspect
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from conftest import PROGRAMS, ROOT, fork_server, forked, free_port
from make_results import curve

STARTED = time.monotonic()
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


class Report:
    """The notes and rows of a part, written whenever one is added."""

    def __init__(self, path):
        self.path, self.notes, self.rows, self.failed = path, [], [], False

    def note(self, text):
        self.notes.append(text)
        self.write()

    def add(self, **row):
        print(row, flush=True)
        self.rows.append(row)
        self.failed = self.failed or "failure" in row
        self.write()

    def write(self):
        self.path.write_text(json.dumps({"notes": self.notes, "rows": self.rows}, indent=2))


def measure(*configurations, change="nothing", steps=None):
    """Run these (recipe with its own flags, stem, batch size) side by side, as bench.py runs a
    recipe, each in the one rank of a process group, with DDP as in the baseline: of each, what it
    says of its speed, or {"n/a": no memory, no time}, or {"failure": its last words}."""
    runs = []
    least, warmup = steps or ((60, 20) if CUDA else (4, 2))
    seconds = 1.5 if CUDA else 0
    for recipe, stem, batch in configurations:
        name, *own = recipe.split()
        directory = args.folder / "runs" / f"{args.part}-{time.monotonic_ns()}"
        directory.mkdir(parents=True)
        if name == bench.BASELINE:
            script = ROOT / f"recipes/{name}.py"
            more = ["--world_size", 1, "--warmup-steps", warmup, "--measure", least, seconds]
        else:
            script = ROOT / "benchmarks/timed_training.py"
            more = [change, least, seconds, name, "--log-every", warmup, "--epochs", 1]
        run = {"processes": 1, "script": script, "directory": directory}
        run["flags"] = [*more, *data_and_model(stem, batch), "--output-dir", "out", *own]
        run["env"] = {**ONE_RANK, "MASTER_PORT": str(free_port())}
        # Then this process can still say what was measured.
        runs.append({**run, "patience": 0.8 * seconds_left()})
    launched = time.time()
    answers = forked(runs, args.folder, len(runs), **PROGRAMS)
    return [answer(run, launched, *one) for run, one in zip(runs, answers, strict=True)]


def data_and_model(stem, batch):
    flags = ["--data", "synthetic", "--model", MODEL, "--stem", stem, "--batch-size", batch]
    return flags if CUDA else [*flags, "--cpu"]


def answer(run, launched, codes, output):
    """Return the row of a run."""
    directory = run["directory"] / "out"
    if codes != [0] or not (directory / "summary.json").exists():
        print(output, flush=True)
        if out_of_memory := bench.OUT_OF_MEMORY.search(output):
            return {"n/a": out_of_memory[0].strip()[:200]}
        if "\nforked.py: ended after a patience of" in output:
            return {"n/a": "not finished in the time left"}
        last_words = "".join(output.splitlines()[-1:])[:200]
        return {"failure": f"exit code {codes[0]}: {last_words}"}
    found = bench.sample(directory, launched)
    memory = found["peak_memory_bytes"] / 2**30
    return {
        "images/s": found["samples_per_second"],
        "GiB": memory,
        "start s": found["start_seconds"],
    }


def seconds_left():
    return args.seconds - (time.monotonic() - STARTED)


def with_memory(report, configurations):
    """Return the configurations for which the GPU has memory; note which are left out."""
    fitting = []
    left_out = []
    for recipe, stem, batch in configurations:
        needed = gib_needed(stem, batch, recipe)
        if needed <= gpu_gib():
            fitting.append((recipe, stem, batch))
        else:
            left_out.append(f"{recipe}, {stem} stem, batch {batch} ({needed:.0f} GiB)")
    if left_out:
        limit = f"the GPU's {gpu_gib():.0f} GiB"
        report.note(f"left out, by estimate more than {limit}: {'; '.join(left_out)}")
    return fitting


def in_time(report, measurements):
    """Yield these, while there is time for one that takes as long as the longest so far; note
    which are left out."""
    longest = 0.0
    for index, measurement in enumerate(measurements):
        if 1.3 * longest > seconds_left():
            report.note(f"left out, no time was left: {'; '.join(map(str, measurements[index:]))}")
            return
        began = time.monotonic()
        yield measurement
        longest = max(longest, time.monotonic() - began)


def gpu_gib():
    """Return the memory of the GPU; on CPU, where all is small, no limit."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if CUDA else math.inf


def gib_needed(stem, batch, recipe):
    """Return the memory that training ResNet-50 takes, by estimate: what autograd saves of each
    image, counted on the meta device, and about 3 GiB for weights, gradients, momentum, cuDNN's
    workspace and CUDA."""
    mib = {("cifar", 4): 24.3, ("cifar", 2): 12.2, ("imagenet", 4): 1.7, ("imagenet", 2): 0.9}
    return batch * mib[stem, 2 if recipe.startswith("amp") else 4] / 1024 + 3


def machine(report):
    report.note(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    versions = {
        name: __import__(name).__version__ for name in ("torch", "torchvision", "accelerate")
    }
    report.note(", ".join(f"{name} {version}" for name, version in versions.items()))
    commands = [["git", "-C", ROOT, "describe", "--always", "--dirty"], ["nvidia-smi"]]
    for command in [command for command in commands if shutil.which(command[0])]:
        answer = subprocess.run(command, capture_output=True, text=True)
        print(answer.stdout, answer.stderr, flush=True)
        report.note(
            f"{command[0]}: {answer.stdout.strip() if command[0] == 'git' else 'in machine.log'}"
        )
    report.note(
        "no GPU: a rehearsal with small numbers"
        if not CUDA
        else f"{torch.cuda.device_count()} GPU(s)"
    )
    for index in range(torch.cuda.device_count() if CUDA else 0):
        report.note(f"{torch.cuda.get_device_properties(index)}, NCCL {torch.cuda.nccl.version()}")


def tests(report):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rA",
        "--durations=10",
        "-p",
        "no:cacheprovider",
        "tests/test_gpu.py",
    ]
    command += [] if CUDA else ["-m", "not slow"]
    unbuffered = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }  # the log is to have what was done when time is over
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=unbuffered)
    for line in process.stdout:
        print(line, end="", flush=True)
        # A failure is added as soon as pytest tells it, since time may be over before the summary,
        # which tells it again, with its reason.
        if "short test summary info" in line:
            report.rows.clear()
        if re.match(r"(FAILED|ERROR) |tests/.* (FAILED|ERROR) ", line):
            report.add(failure=line.strip()[:200])
    report.note(line.strip(" =\n"))
    report.failed = process.wait() != 0


def images(report):
    """The recipes in turn with the baseline, whose fp32 is theirs; and its DataLoader alone."""
    rates = {}
    plain = bench.BASELINE
    eight = f"{plain} --workers 8"
    recipes = [plain, *PRECISIONS.values()]
    plan = [(recipe, *shape) for shape in SHAPES for recipe in recipes]
    # Two workers may be too few for a fast GPU. What they load does not depend on the stem.
    plan.insert(1, (eight, *SHAPES[0]))
    for recipe, stem, batch in in_time(report, with_memory(report, plan)):
        (row,) = measure((recipe, stem, batch))
        rates[recipe, stem, batch] = rate = row.get("images/s")
        if rate and rates.get((plain, stem, batch)) and recipe != plain:
            row["over baseline"] = rate / rates[plain, stem, batch]
        if (stem, batch) == SHAPES[0] and recipe in (plain, eight):
            row["loader alone"] = loader_alone(recipe, stem, batch)
        report.add(recipe=recipe, stem=stem, batch=batch, **row)


def loader_alone(recipe, stem, batch):
    """Return the images/s of the baseline's DataLoader without a model, or what went wrong."""
    flags = ["--world_size", 1, *data_and_model(stem, batch), *recipe.split()[1:]]
    process = subprocess.run(bench.loader_command(flags), capture_output=True, text=True)
    if process.returncode:
        print(process.stdout, process.stderr, flush=True)
        return f"exit code {process.returncode}"
    return float(process.stdout.split()[-1])


def compiled_configurations():
    return [
        (f"{PRECISIONS[name]} --compile", stem, batch)
        for stem, batch in SHAPES
        for name in (HALF, "fp32")
    ]


def compile_cache(report):
    """One step of each compiled configuration: what inductor makes of it stays in its cache on the
    disk. Four side by side, but on GPUs with less than 60 GiB one by one."""
    together = 4 if gpu_gib() >= 60 else 1
    fitting = with_memory(report, compiled_configurations())
    groups = [fitting[index : index + together] for index in range(0, len(fitting), together)]
    for group in in_time(report, groups):
        for (recipe, stem, batch), row in zip(group, measure(*group, steps=(1, 1)), strict=True):
            row = {name: row[name] for name in ("start s", "n/a", "failure") if name in row}
            report.add(recipe=recipe, stem=stem, batch=batch, **row)


def compiled(report):
    path = args.folder / "images.json"
    eager = json.loads(path.read_text())["rows"] if path.exists() else []
    rates = {(row["recipe"], row["stem"], row["batch"]): row.get("images/s") for row in eager}
    fitting = with_memory(report, compiled_configurations())
    for recipe, stem, batch in in_time(report, fitting):
        (row,) = measure((recipe, stem, batch))
        before = rates.get((recipe.removesuffix(" --compile"), stem, batch))
        if "images/s" in row and before:
            row["over eager"] = row["images/s"] / before
        report.add(recipe=recipe, stem=stem, batch=batch, **row)


def timings():
    """Return {name: seconds of every time} that the last run has written, and its folder."""
    last = max((args.folder / "runs").glob(f"{args.part}-*"), key=os.path.getmtime)
    return json.loads((last / "timings.json").read_text()), last


def profile(report):
    """The host's share of a step, as far as it is launching kernels, is the same for every
    batch."""
    stem, batch = SHAPES[0]
    for precision, recipe in PRECISIONS.items():
        (row,) = measure((recipe, stem, batch), change="parts")
        if "images/s" not in row:
            report.add(precision=precision, **row)
            continue
        found, _ = timings()
        medians = {name: 1e6 * statistics.median(values) for name, values in found.items()}
        rest = medians["step"] - sum(value for name, value in medians.items() if name != "step")
        report.add(precision=precision, stem=stem, batch=batch, **medians, rest=rest)
    steps = (60, 20) if CUDA else (8, 2)
    (row,) = measure((PRECISIONS[HALF], stem, batch), change="profile", steps=steps)
    if "images/s" not in row:
        report.add(precision="torch.profiler", **row)
        return
    for path in timings()[1].glob("*"):
        if path.is_file() and path.name != "timings.json":
            kept = args.folder / f"profile-{path.name}"
            shutil.move(path, kept)
            report.note(f"torch.profiler: {kept.name}")


def variants(report):
    """In two rounds, in one rank of a process group."""
    stem, batch = SHAPES[0]
    changes = ["nothing", "broadcast buffers", "batched gradient copy", "foreach SGD"]
    options = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    if "batched_grad_copy" not in options:
        changes.remove("batched gradient copy")
        report.note(f"torch {torch.__version__} has no batched_grad_copy")
    plan = [(number, change) for number in (1, 2) for change in changes]
    for number, change in in_time(report, plan):
        (row,) = measure((PRECISIONS[HALF], stem, batch), change=change)
        report.add(round=number, change=change, stem=stem, batch=batch, **row)


def epoch(report):
    """What surrounds the steps of an epoch, in seconds; on a GPU of 51,200 training and 10,240 test
    samples."""
    candidates = [(PRECISIONS[HALF], *shape) for shape in SHAPES]
    fitting = with_memory(report, candidates)
    _, stem, batch = fitting[1 % len(fitting)]
    length = "--epochs 3 --checkpoint-every 100" if CUDA else "--max-steps 4 --checkpoint-every 2"
    (row,) = measure((f"{PRECISIONS[HALF]} {length}", stem, batch), change="epoch")
    if "start s" not in row:
        report.add(**row)
        return
    for name, values in timings()[0].items():
        report.add(what=name, times=len(values), first=values[0], median=statistics.median(values))


def training(report):
    """As many epochs as fit at the speed that was measured, in 16 bits with the CIFAR stem."""
    real = (Path(args.data_dir) / "cifar-10-batches-py").is_dir()
    samples = 50000 if real else 5120
    stem = "cifar"
    path = args.folder / "images.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rates = {(row["recipe"], row["stem"], row["batch"]): row.get("images/s") for row in rows}
    batch = 64
    if CUDA:
        batch = max(n for n in (512, 256, 128) if gib_needed(stem, n, "amp") <= gpu_gib())
    rate = rates.get((PRECISIONS[HALF], stem, batch))
    if not CUDA:
        epochs = 2
    elif rate:  # what an epoch costs besides its steps, and what is before and after all of them
        epochs = int((args.seconds - 25) * rate * 0.85 / samples)
    else:
        epochs = 3
    epochs = max(1, min(epochs, 200 if real else 20))
    output = args.folder / "training"
    data = ["--data", "cifar10" if real else "synthetic", "--data-dir", args.data_dir]
    flags = [*data, "--model", MODEL, "--stem", stem, "--batch-size", batch]
    flags += ["--epochs", epochs, "--output-dir", output]
    flags += [] if CUDA else ["--cpu", "--max-steps", 4]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", ROOT / "accelerate_configs/1gpu.yaml"]
    command += [ROOT / "recipes/amp_cifar.py", *flags]
    data = "CIFAR-10" if real else "synthetic data"
    report.note(f"{data}: accelerate launch {' '.join(map(str, command[4:]))}")
    process = subprocess.Popen(list(map(str, command)))
    seen = 0
    metrics = output / "metrics.jsonl"
    while True:
        code = process.poll()
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        evaluations = [line for line in lines if line["event"] == "evaluation"]
        for line in evaluations[seen:]:
            row = {name: line[name] for name in ("epoch", "test_accuracy", "test_loss")}
            report.add(**row, s=line["time"] - lines[0]["time"])
        seen = len(evaluations)
        if code is not None:
            break
        time.sleep(1)
    report.failed = code != 0
    if code == 0:
        (args.folder / "training.svg").write_text(curve(output / "summary.json", metrics))
        report.note("the curve is training.svg")


PARTS = {
    part.__name__: part
    for part in (machine, tests, compile_cache, images, profile, variants, epoch, compiled)
}
PARTS["training"] = training
CUDA = torch.cuda.device_count() > 0
MODEL = "resnet50" if CUDA else "simple_cnn"
HALF = "fp16" if CUDA and not torch.cuda.is_bf16_supported(including_emulation=False) else "bf16"
PRECISIONS = {"fp32": "ddp_cifar", HALF: f"amp_cifar --precision {HALF}"}
# By what is asked first: small batches, where launching kernels is what takes time, and the default
# of bench.py.
BATCHES = (("imagenet", 128), ("cifar", 512), ("imagenet", 512), ("cifar", 128))
SHAPES = [*BATCHES, ("imagenet", 1024), ("cifar", 1024)] if CUDA else [("imagenet", 8)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.data_dir = str(Path(args.data_dir).resolve())
    report = Report(args.folder / f"{args.part}.json")
    report.write()
    PARTS[args.part](report)
    if fork_server.cache_info().currsize:
        fork_server().communicate()
    sys.exit(report.failed)
