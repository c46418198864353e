# SPDX-License-Identifier: Apache-2.0
"""Measure what grows with the number of ranks, on one machine: processes that share its cores.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --recipe sharded --processes 32 128 -- --replicas 16
    python benchmarks/ranks.py --recipe pipeline --processes 2 8 32 128 -- --chunks 2

The model has 284 parameters, each global batch one sample per rank of the largest run. For each
number of processes it trains four steps, then again until SIGTERM to the last rank. Processes are
forked after the imports, as in the tests. Prints a table in Markdown, and compares the weights with
those of the first run. Flags behind `--` are the recipe's.

Columns: seconds from the start to the first step, of these in the comparisons of ranks (waiting for
all of them), to the end of four steps, and from a signal to the end of the last rank; of a rank,
the most: calls of the store (the recipe's own), sockets, open files, MiB of private memory; lines.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from conftest import LITTLE_DATA, SMALL, copy, forked, outputs, pytest_sessionfinish  # noqa: E402

STEPS = 4
MODEL = """
def build_model(args):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.AdaptiveAvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 10)),
    )
"""
INSTRUMENTS = """
noted = {"start": time.time(), "calls": 0, "compared": 0}
taken = count(1)
plain_step, plain_exit, plain_main, compare = train_step, exit_now, main, exit_if_ranks_differ


def exit_if_ranks_differ(*arguments):
    noted["compared"] -= time.time()
    compare(*arguments)
    noted["compared"] += time.time()


def counted(method):
    def call(*arguments):
        noted["calls"] += 1
        return method(*arguments)

    return call


for name in ("get", "set", "add", "check", "wait"):
    setattr(distributed.Store, name, counted(getattr(distributed.Store, name)))


def train_step(*arguments):
    noted.setdefault("first step", time.time())
    if next(taken) == STEPS and "SIGNAL" in os.environ:
        noted["signal"] = time.time()
        if RANK == WORLD_SIZE - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    return plain_step(*arguments)


def note():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(path))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    noted["memory"] = sum(int(x.split()[1]) for x in lines if x.startswith("Private_")) / 1024
    noted["files"], noted["sockets"] = len(links), sum(x.startswith("socket") for x in links)
    noted["end"] = time.time()
    Path(f"rank-{RANK}.json").write_text(json.dumps(noted))


def exit_now(status):
    note()
    plain_exit(status)


def main():
    plain_main()
    note()
"""


def train(recipe, processes, batch, directory, flags, **env):
    """Train in a directory. Return what each rank noted, and the number of printed lines."""
    directory.mkdir()
    project = MODEL + INSTRUMENTS.replace("STEPS", str(STEPS))
    script = copy(f"{recipe}_cifar", directory / "mine.py", LITTLE_DATA, project=project)
    replicas = processes // 2 if recipe == "pipeline" else processes
    words = [*SMALL, "--log-every", 1, "--lr", 1, "--output-dir", "run", "--epochs", 999]
    words += ["--batch-size", batch // replicas, "--global-batch-size", batch, *flags]
    run = {"processes": processes, "script": script, "flags": words, "directory": directory}
    [(codes, output)] = forked([{**run, "patience": 1200}], directory, **env)
    if {*codes} != {143 if env else 0}:
        sys.exit(f"ranks: exit codes {codes}\n{output}")
    noted = [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]
    return noted, output.count("\n")


def row(recipe, processes, batch, directory, flags):
    """Return the cells of one number of processes, in the order of the module's docstring."""
    more = ["--max-steps", STEPS, *flags]
    noted, lines = train(recipe, processes, batch, directory / str(processes), more)
    start, end = min(x["start"] for x in noted), max(x["end"] for x in noted)
    first = max(x["first step"] for x in noted)
    stopped, _ = train(recipe, processes, batch, directory / f"{processes}-s", flags, SIGNAL="1")
    stop = max(x["end"] for x in stopped) - min(x["signal"] for x in stopped)
    names = ("compared", "calls", "sockets", "files", "memory")
    compared, *most = (max(x[name] for x in noted) for name in names)
    seconds = (first - start, compared, end - start, stop)
    return [processes, *(f"{x:.1f}" for x in seconds), *most, lines]


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--recipe", choices=("ddp", "amp", "pipeline", "sharded"), default="ddp")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("flags", nargs="*", help="the recipe's, behind --")
    args = parser.parse_args()
    batch = max(args.processes)
    names = ["processes", "to step 1, s", "comparing, s", "to the end, s", "a stop, s"]
    names += ["calls of the store", "sockets", "open files", "private MiB", "lines"]
    print(f"| {' | '.join(names)} |\n|{' ---: |' * len(names)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        for processes in args.processes:
            cells = row(args.recipe, processes, batch, directory, args.flags)
            cells = (f"{x:.0f}" if isinstance(x, float) else str(x) for x in cells)
            print(f"| {' | '.join(cells)} |", flush=True)
        first, *others = (outputs(directory / f"{n}/run").weights for n in args.processes)
        differences = [(x[name] - y).abs().max() for x in others for name, y in first.items()]
        print(f"\nThe weights differ by at most {torch.stack(differences).max():.1g}.")
    pytest_sessionfinish()


if __name__ == "__main__":
    main()
