"""The parts of gpu_report.py, which runs one of `PARTS` at a time, as a process:

    gpu_report_parts.py PART --folder FOLDER --seconds SECONDS --data-dir DIR [--rehearse]

Each writes its notes and rows to FOLDER/PART.json as soon as it has them, and exits with 1 if a
measurement failed.
"""

import argparse
import inspect
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def measure(*configurations, change="nothing", steps=None, ranked=False):
    """Run these (recipe with its own flags, stem, batch size) side by side, as bench.py runs a
    recipe: of each, what it says of its speed, or {"failure": its last words}."""
    runs, answers = [], []
    least, warmup = steps or ((60, 20) if CUDA else (4, 2))
    for recipe, stem, batch in configurations:
        name, *own = recipe.split()
        directory = args.folder / "runs" / f"{args.part}-{time.monotonic_ns()}"
        directory.mkdir(parents=True)
        flags = [
            "--data",
            "synthetic",
            "--model",
            MODEL,
            "--stem",
            stem,
            "--batch-size",
            batch,
            "--output-dir",
            "out",
        ]
        flags += [*([] if CUDA else ["--cpu"]), *own]
        seconds = 1.5 if CUDA else 0
        if name == "plain_ddp_cifar":
            script, more = (
                ROOT / f"recipes/{name}.py",
                ["--world_size", 1, "--warmup-steps", warmup],
            )
            more += ["--measure", least, seconds]
        else:
            script, more = (
                ROOT / "benchmarks/timed_training.py",
                [change, least, seconds, name, "--log-every", warmup],
            )
            more += ["--epochs", 1]
        run = {"processes": 1, "script": script, "directory": directory, "flags": [*more, *flags]}
        run["env"] = {**ONE_RANK, "MASTER_PORT": str(free_port())} if ranked else {}
        runs.append(
            {**run, "patience": 0.8 * args.seconds}
        )  # then this process can still say what was measured
    launched = time.time()
    for run, (codes, output) in zip(
        runs, forked(runs, args.folder, len(runs), **PROGRAMS), strict=True
    ):
        path = run["directory"] / "out/summary.json"
        if codes != [0] or not path.exists():
            print(output, flush=True)
            answers.append(
                {"failure": f"exit code {codes[0]}: {''.join(output.splitlines()[-1:])[:200]}"}
            )
            continue
        summary = json.loads(path.read_text())
        if (warmed_up := summary.get("warmed_up_at")) is None:
            warmed_up = json.loads((run["directory"] / "out/metrics.jsonl").open().readline())[
                "time"
            ]
        answer = {
            "images/s": summary["samples_per_second"],
            "GiB": summary["peak_memory_bytes"] / 2**30,
        }
        answers.append({**answer, "start s": warmed_up - launched})
    return answers


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
        if line.startswith(("FAILED", "ERROR")):
            report.add(failure=line.strip()[:200])
    report.note(line.strip(" =\n"))
    report.failed = process.wait() != 0


def images(report):
    """The recipes in turn with the baseline, whose fp32 is theirs."""
    for stem, batch in SHAPES:
        baseline = None
        for recipe in ("plain_ddp_cifar", *PRECISIONS.values()):
            (answer,) = measure((recipe, stem, batch))
            if "plain" in recipe:
                baseline = answer.get("images/s")
            elif baseline and "images/s" in answer:
                answer["over baseline"] = answer["images/s"] / baseline
            report.add(recipe=recipe, stem=stem, batch=batch, **answer)


def compiled_configurations():
    return [
        (f"{PRECISIONS[name]} --compile", stem, batch)
        for stem, batch in SHAPES
        for name in (HALF, "fp32")
    ]


def compile_cache(report):
    """One step of each compiled configuration: what inductor makes of it stays in its cache on the
    disk."""
    configurations = compiled_configurations()
    for four in (configurations[index : index + 4] for index in range(0, len(configurations), 4)):
        for (recipe, stem, batch), answer in zip(four, measure(*four, steps=(1, 1)), strict=True):
            answer = {
                name: value for name, value in answer.items() if name in ("start s", "failure")
            }
            report.add(recipe=recipe, stem=stem, batch=batch, **answer)


def compiled(report):
    path = args.folder / "images.json"
    eager = json.loads(path.read_text())["rows"] if path.exists() else []
    for recipe, stem, batch in compiled_configurations():
        (answer,) = measure((recipe, stem, batch))
        for row in eager:
            if "images/s" in answer and "images/s" in row:
                if (f"{row['recipe']} --compile", row["stem"], row["batch"]) == (
                    recipe,
                    stem,
                    batch,
                ):
                    answer["over eager"] = answer["images/s"] / row["images/s"]
        report.add(recipe=recipe, stem=stem, batch=batch, **answer)


def timings():
    """Return {name: seconds of every time} that the last run has written, and its folder."""
    last = max((args.folder / "runs").glob(f"{args.part}-*"), key=os.path.getmtime)
    return json.loads((last / "timings.json").read_text()), last


def profile(report):
    """The host's share of a step, as far as it is launching kernels, is the same for every
    batch."""
    stem, batch = SHAPES[0]
    for precision, recipe in PRECISIONS.items():
        (answer,) = measure((recipe, stem, batch), change="parts", ranked=True)
        if "failure" in answer:
            report.add(precision=precision, **answer)
            continue
        found, _ = timings()
        medians = {name: 1e6 * statistics.median(values) for name, values in found.items()}
        rest = medians["step"] - sum(value for name, value in medians.items() if name != "step")
        report.add(precision=precision, stem=stem, batch=batch, **medians, rest=rest)
    steps = (60, 20) if CUDA else (8, 2)
    (answer,) = measure((PRECISIONS[HALF], stem, batch), change="profile", steps=steps)
    if "failure" in answer:
        report.add(precision="torch.profiler", **answer)
        return
    for path in timings()[1].glob("*"):
        if path.is_file() and path.name != "timings.json":
            report.note(
                f"torch.profiler: {shutil.move(path, args.folder / f'profile-{path.name}').name}"
            )


def variants(report):
    """In two rounds, in one rank of a process group: without one there is no DDP."""
    stem, batch = SHAPES[0]
    changes = ["nothing", "broadcast buffers", "batched gradient copy", "foreach SGD"]
    if (
        "batched_grad_copy"
        not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    ):
        changes.remove("batched gradient copy")
        report.note(f"torch {torch.__version__} has no batched_grad_copy")
    for number in (1, 2):
        for change in changes:
            (answer,) = measure((PRECISIONS[HALF], stem, batch), change=change, ranked=True)
            report.add(round=number, change=change, stem=stem, batch=batch, **answer)


def epoch(report):
    """What surrounds the steps of an epoch, in seconds; on a GPU of 51,200 training and 10,240 test
    samples."""
    stem, batch = SHAPES[1 % len(SHAPES)]
    length = "--epochs 3 --checkpoint-every 100" if CUDA else "--max-steps 4 --checkpoint-every 2"
    (answer,) = measure((f"{PRECISIONS[HALF]} {length}", stem, batch), change="epoch")
    if "failure" in answer:
        report.add(**answer)
    for name, values in timings()[0].items():
        report.add(what=name, times=len(values), first=values[0], median=statistics.median(values))


def training(report):
    """As many epochs as fit at the speed that was measured, in 16 bits with the CIFAR stem."""
    real = (Path(args.data_dir) / "cifar-10-batches-py").is_dir()
    samples, batch, stem = (50000 if real else 5120), (512 if CUDA else 64), "cifar"
    path, rate = args.folder / "images.json", 0
    for row in json.loads(path.read_text())["rows"] if path.exists() else []:
        if (row["recipe"], row["stem"], row["batch"]) == (PRECISIONS[HALF], stem, 512):
            rate = row.get("images/s", 0)
    if not CUDA:
        epochs = 2
    elif rate:  # what an epoch costs besides its steps, and what is before and after all of them
        epochs = int((args.seconds - 25) * rate * 0.85 / samples)
    else:
        epochs = 3
    epochs = max(1, min(epochs, 200 if real else 20))
    output = args.folder / "training"
    data = ["--data", "cifar10" if real else "synthetic", "--data-dir", args.data_dir]
    flags = [
        *data,
        "--model",
        MODEL,
        "--stem",
        stem,
        "--batch-size",
        batch,
        "--epochs",
        epochs,
        "--output-dir",
        output,
    ]
    flags += [] if CUDA else ["--cpu", "--max-steps", 4]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
    ]
    command += [ROOT / "accelerate_configs/1gpu.yaml", ROOT / "recipes/amp_cifar.py", *flags]
    report.note(
        f"{'CIFAR-10' if real else 'synthetic data'}: accelerate launch {' '.join(map(str, command[4:]))}"
    )
    process = subprocess.Popen(list(map(str, command)))
    seen, metrics = 0, output / "metrics.jsonl"
    while True:
        code = process.poll()
        lines = (
            [json.loads(line) for line in metrics.read_text().splitlines()]
            if metrics.exists()
            else []
        )
        evaluations = [line for line in lines if line["event"] == "evaluation"]
        for line in evaluations[seen:]:
            begun = line["time"] - lines[0]["time"]
            report.add(
                epoch=line["epoch"],
                test_accuracy=line["test_accuracy"],
                test_loss=line["test_loss"],
                s=begun,
            )
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
parser = argparse.ArgumentParser()
parser.add_argument("part", choices=PARTS)
parser.add_argument("--folder", type=Path)
parser.add_argument("--seconds", type=float)
parser.add_argument("--data-dir")
parser.add_argument("--rehearse", action="store_true")
args = parser.parse_args()
args.folder = args.folder.resolve()
args.data_dir = str(Path(args.data_dir).resolve())
if args.rehearse:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
CUDA = torch.cuda.device_count() > 0
MODEL = "resnet50" if CUDA else "simple_cnn"
HALF = "fp16" if CUDA and not torch.cuda.is_bf16_supported(including_emulation=False) else "bf16"
PRECISIONS = {"fp32": "ddp_cifar", HALF: f"amp_cifar --precision {HALF}"}
# By what is asked first: small batches, where launching kernels is what takes time, and the default
# of bench.py.
SHAPES = [
    ("imagenet", 128),
    ("cifar", 512),
    ("imagenet", 512),
    ("cifar", 128),
    ("imagenet", 1024),
    ("cifar", 1024),
]
if not CUDA:
    SHAPES = [("imagenet", 8)]
report = Report(args.folder / f"{args.part}.json")
report.write()
PARTS[args.part](report)
if fork_server.cache_info().currsize:
    fork_server().communicate()
sys.exit(report.failed)
