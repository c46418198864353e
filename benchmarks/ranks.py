# SPDX-License-Identifier: Apache-2.0
"""Measure what grows with the number of ranks, on one machine: processes that share its cores.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --recipe sharded --processes 32 128 -- --replicas 16
    python benchmarks/ranks.py --recipe pipeline --processes 2 8 32 128 -- --chunks 2

The model has 284 parameters, each global batch one sample per rank of the largest run. For each
number of processes it trains four steps, then again until SIGTERM to the last rank. Processes are
forked after the imports. Prints a table in Markdown, and compares the weights with
those of the first run. Flags behind `--` are the recipe's. The runs stay in --output-dir.

Columns: seconds from the start to the first step, of these in the comparisons of ranks (waiting for
all of them), to the end of four steps, and from a signal to the end of the last rank; of a rank,
the most: calls of the store and bytes of their values, also gloo's own; sockets, open files, MiB
of private memory; lines.
"""

import argparse
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import torch
from bench import ROOT, load
from running import fork, free_port, rank_environment
from safetensors.torch import load_file
from torch import distributed, nn

STEPS = 4
FLAGS = "--data synthetic --cpu --lr 1 --log-every 1 --epochs 999 --output-dir run"
# Of the recipes: imported before the fork.
MODULES = ["accelerate", "torchvision", "rich.progress", "huggingface_hub.serialization"]
MODULES += ["torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining"]
MODULES += ["datasets"] * bool(importlib.util.find_spec("datasets"))  # Accelerate imports it then


def build_model(args):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.AdaptiveAvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 10)),
    )


class CountingStore(distributed.Store):
    """A store that counts calls and bytes, also those of gloo, which are C++."""

    def __init__(self, store, values):
        super().__init__()
        self.store, self.values = store, values

    def set_timeout(self, timeout):
        self.store.set_timeout(timeout)


def counted(name):
    """Return a method that notes a call, and the bytes of its value and of what it returns."""

    def call(self, key, *arguments):
        result = getattr(self.store, name)(key, *arguments)
        values = [*arguments, *(result if isinstance(result, list) else [result])]
        self.values["calls"] += 1
        self.values["bytes"] += sum(len(x) for x in values if isinstance(x, bytes | str))
        return result

    return call


for name in ("set", "get", "multi_get", "add", "check", "wait"):
    setattr(CountingStore, name, counted(name))


class Notes:
    """Measures one rank. With `stop`, the last rank gets SIGTERM in its fourth step."""

    def __init__(self, recipe, stop):
        self.rank, self.is_last = recipe.RANK, recipe.RANK == recipe.WORLD_SIZE - 1
        self.stop = stop
        self.steps = count(1)
        self.values = {"start": time.time(), "calls": 0, "bytes": 0, "compared": 0}
        distributed.rendezvous = self.counted(distributed.rendezvous)
        recipe.train_step = self.at_step(recipe.train_step)
        recipe.exit_if_ranks_differ = self.timed(recipe.exit_if_ranks_differ)
        recipe.exit_now = self.at_exit(recipe.exit_now)

    def counted(self, rendezvous):
        def call(*arguments, **options):
            for store, rank, world_size in rendezvous(*arguments, **options):
                yield CountingStore(store, self.values), rank, world_size

        return call

    def timed(self, function):
        def call(*arguments):
            began = time.time()
            function(*arguments)
            self.values["compared"] += time.time() - began

        return call

    def at_step(self, function):
        def call(*arguments):
            self.values.setdefault("first step", time.time())
            if next(self.steps) == STEPS and self.stop:
                self.values["signal"] = time.time()
                if self.is_last:
                    os.kill(os.getpid(), signal.SIGTERM)
            return function(*arguments)

        return call

    def at_exit(self, function):
        def call(status):
            self.write()
            function(status)

        return call

    def write(self):
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(path))
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(x.split()[1]) for x in lines if x.startswith("Private_")) / 1024
        sockets = sum(x.startswith("socket") for x in links)
        self.values |= {"memory": private, "files": len(links), "sockets": sockets}
        self.values["end"] = time.time()
        Path(f"rank-{self.rank}.json").write_text(json.dumps(self.values))


def work(recipe, words, stop):
    """Train as one rank."""
    sys.argv = [str(ROOT / f"recipes/{recipe}_cifar.py"), *words]
    module = load(Path(sys.argv[0]))
    images = module.synthetic_images
    module.synthetic_images = lambda samples, seed: images(samples // 16, seed)
    module.build_model = build_model
    notes = Notes(module, stop)
    module.main()
    notes.write()


def train(recipe, processes, batch, directory, flags, stop=False):
    """Train in a directory. Return what each rank noted, and the number of printed lines."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    replicas = processes // 2 if recipe == "pipeline" else processes
    words = [*FLAGS.split(), "--batch-size", batch // replicas, "--global-batch-size", batch]
    words = [str(x) for x in (*words, *flags)]
    port, output = free_port(), directory / "output.txt"
    ranks = []
    for rank in range(processes):
        environment = {"OMP_NUM_THREADS": "1", **rank_environment(rank, processes, port)}
        ranks.append(fork(partial(work, recipe, words, stop), directory, environment, output))
    codes = {os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks}
    if codes != {143 if stop else 0}:
        sys.exit(f"ranks: exit codes {codes}: see {output}")
    noted = [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]
    return noted, output.read_text().count("\n")


def row(recipe, processes, batch, directory, flags):
    """Return the cells of one number of processes, in the order of the module's docstring."""
    more = ["--max-steps", STEPS, *flags]
    noted, lines = train(recipe, processes, batch, directory / str(processes), more)
    start, end = min(x["start"] for x in noted), max(x["end"] for x in noted)
    first = max(x["first step"] for x in noted)
    stopped, _ = train(recipe, processes, batch, directory / f"{processes}-stopped", flags, True)
    stop = max(x["end"] for x in stopped) - min(x["signal"] for x in stopped)
    names = ("compared", "calls", "bytes", "sockets", "files", "memory")
    compared, *most = (max(x[name] for x in noted) for name in names)
    seconds = (first - start, compared, end - start, stop)
    return [processes, *(f"{x:.1f}" for x in seconds), *most, lines]


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--recipe", choices=("ddp", "amp", "pipeline", "sharded"), default="ddp")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--output-dir", default="runs/ranks", help="folder of the runs")
    parser.add_argument("flags", nargs="*", help="the recipe's, behind --")
    args = parser.parse_args()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # no garbage for the ranks
    batch = max(args.processes)
    names = ["processes", "to step 1, s", "comparing, s", "to the end, s", "a stop, s"]
    names += ["calls of the store", "bytes", "sockets", "open files", "private MiB", "lines"]
    print(f"| {' | '.join(names)} |\n|{' ---: |' * len(names)}", flush=True)
    directory = Path(args.output_dir).resolve()
    weights = []
    for processes in args.processes:
        cells = row(args.recipe, processes, batch, directory, args.flags)
        cells = (f"{x:.0f}" if isinstance(x, float) else str(x) for x in cells)
        print(f"| {' | '.join(cells)} |", flush=True)
        weights.append(load_file(directory / f"{processes}/run/model.safetensors"))
    first, *others = weights
    differences = [(x[name] - y).abs().max() for x in others for name, y in first.items()]
    if others:
        print(f"\nThe weights differ by at most {torch.stack(differences).max():.1g}.")
    gc.unfreeze()  # or libraries warn that it was not freed


if __name__ == "__main__":
    main()
