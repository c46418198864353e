# SPDX-License-Identifier: Apache-2.0
"""Train the recipes over NCCL with several ranks on one GPU: `bash benchmarks/gpu.sh nccl`.

    python benchmarks/nccl.py
    python benchmarks/nccl.py --one-machine    # needs NCCL 2.30
    python benchmarks/nccl.py --cpu --cases sharded-2 killed    # over gloo, without a GPU

Each rank has a torchrun of its own, as on as many machines with one GPU, and NCCL connects them by
sockets. With --one-machine, one torchrun starts all ranks, and NCCL uses shared memory. This shows
that collectives are right and in the same order on all ranks, and nothing of links between GPUs.

A case trains 24 steps, in float64 if it has no precision. All its numbers and weights have to be
those of another case, up to rounding. In some cases rank 1 gets a signal in the step after a
checkpoint; the same command then resumes, and has to end with the same numbers, bit for bit. Prints
a line of Markdown per case, and writes nccl.json. Exit status 1: a case failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from bench import GPUS, ROOT, load
from check import BATCHNORM, ENVIRONMENT, NO_BOUND, compare, error_of, judged_of, values_of
from running import describe, free_port
from torch.optim.optimizer import register_optimizer_step_post_hook

FLAGS = "--data synthetic --model simple_cnn --global-batch-size 64 --lr 0.4 --threads 1"
FLAGS += " --max-steps 24 --log-every 1 --checkpoint-every 8 --evaluate-every 12"
CHECKPOINT = "step-00000008"
RESNET = "--model resnet50 --stem imagenet --batch-size 8 --global-batch-size 16 --max-steps 3"
CASES = {  # name: (recipe, ranks, flags, the case with the same numbers)
    "ddp-1": ("ddp", 1, "", ""),
    "ddp-2": ("ddp", 2, "", "ddp-1"),
    "sharded-2": ("sharded", 2, "", "ddp-2"),
    "pipeline-2": ("pipeline", 2, "", "ddp-2"),
    "killed": ("ddp", 2, "", "ddp-2"),
    "terminated": ("ddp", 2, "", "ddp-2"),
    "stopped": ("ddp", 2, "--hang-timeout 20", "ddp-2"),
    "bf16-1": ("amp", 1, "--precision bf16", ""),
    "bf16-2": ("amp", 2, "--precision bf16", "bf16-1"),
    "fp16-1": ("amp", 1, "--precision fp16", ""),
    "fp16-2": ("amp", 2, "--precision fp16", "fp16-1"),
    "replicas-4": ("sharded", 4, "--replicas 2", "ddp-2"),
    "1f1b-4": ("pipeline", 4, "--schedule 1f1b", "ddp-2"),
    "resnet50-1": ("ddp", 1, RESNET, ""),
    "resnet50-2": ("ddp", 2, RESNET, "resnet50-1"),
    "compiled-2": ("ddp", 2, "--compile", "ddp-2"),
}
FAULTS = {  # case: (signal, what a rank has to print)
    "killed": ("SIGKILL", ""),
    "terminated": ("SIGTERM", r"stopped after step \d+, .*"),
    "stopped": ("SIGSTOP", r"error: no step for 20 s because of rank 1 .*"),
}
# A sum in another order differs by its number of terms, at most, times the unit roundoff. 2^14
# pixels are in a batch, and 24 steps, fewer than 2^5, follow each other.
FLOAT64 = 2.0 ** (14 + 5 - 53)
NORM = 4 * 2.0**-24  # the pipeline adds up its stages' norms in float32
# Three layers round input, weights and output, and twice as many numbers in the backward pass.
LOWER = {"bf16": 27 * 2.0**-8, "fp16": 27 * 2.0**-11}
LIMIT = 180  # seconds of a run, ten times as many on a CPU
GRACE = 60  # seconds that ranks have after the first failure
COLUMNS = ["case", "ranks", "s", "NCCL", "compared with", "nearest to its bound", "verdict"]


def train_as_rank(number, path, *flags):
    """Train as one rank, on fewer and smaller images. Rank 1 gets the signal, if there is any."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    sys.argv = [path, *flags]
    recipe = load(path)
    images, build_model = recipe.synthetic_images, recipe.build_model
    items = recipe.ImageTensors.__getitems__
    dtype = torch.float32 if "--precision" in flags else torch.float64

    def smaller_items(dataset, indices):
        pixels, labels = items(dataset, indices)
        return pixels[:, :, ::2, ::2].to(dtype), labels

    recipe.ImageTensors.__getitems__ = smaller_items
    recipe.synthetic_images = lambda samples, seed: images(samples // 16, seed)
    recipe.build_model = lambda args: build_model(args).to(dtype)
    signals = [number] if number != "none" and recipe.RANK == 1 else []

    def send(*_):
        if signals and any(Path(flags[-1]).glob(f"{CHECKPOINT}*")):
            os.kill(os.getpid(), signal.Signals[signals.pop()])

    register_optimizer_step_post_hook(send)
    recipe.start(recipe.main)


def run(commands, environment, log, limit, grace):
    """Run launchers side by side. Return their exit codes, their output, and whether processes were
    killed: after `limit` seconds, or `grace` seconds after the first failure."""
    late, deadline = False, time.monotonic() + limit
    with open(log, "w") as file:
        options = {"stdout": file, "stderr": file, "env": environment, "start_new_session": True}
        launchers = [psutil.Popen(list(map(str, command)), **options) for command in commands]
    try:
        while not late and any(launcher.poll() is None for launcher in launchers):
            time.sleep(0.1)
            if any(launcher.poll() for launcher in launchers):
                deadline = min(deadline, time.monotonic() + grace)
            late = time.monotonic() > deadline
    finally:
        for launcher in launchers:
            with suppress(psutil.NoSuchProcess):
                for process in [*launcher.children(recursive=True), launcher]:
                    process.kill()
    return [launcher.wait() for launcher in launchers], log.read_text(), late


class Case:
    """A case, and what was found out about it."""

    def __init__(self, name, args):
        recipe, self.ranks, flags, self.against = CASES[name]
        self.name, self.args = name, args
        self.signal, self.awaited = FAULTS.get(name, ("none", ""))
        self.path, self.output = args.recipes / f"{recipe}_cifar.py", args.output_dir / name
        self.flags = [*FLAGS.split(), *flags.split(), *["--cpu"] * args.cpu]
        self.lower = LOWER.get(flags.removeprefix("--precision "))
        self.said, self.nccl = "", []
        # Filled by check.py's `compare`.
        self.result = {"differences": [], "reason": "", "verdict": "", "undecided": ""}

    def train(self, number):
        """Train, with a signal or none. Return what `run` does."""
        nodes, local = (1, self.ranks) if self.args.one_machine else (self.ranks, 1)
        launch = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
        launch += ["--master-port", free_port(), "--nnodes", nodes, "--nproc_per_node", local]
        words = [__file__, "rank", number, self.path, *self.flags, "--output-dir", self.output]
        commands = [[*launch, "--node-rank", node, *words] for node in range(nodes)]
        paths = [str(ROOT / "benchmarks/one_gpu"), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, **ENVIRONMENT, "NCCL_DEBUG": "INFO"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = str(int(self.args.one_machine))
        log = self.args.output_dir / f"{self.name}-{number}.txt"
        limit = LIMIT * (10 if self.args.cpu else 1)
        return run(commands, environment, log, limit, 5 if number == "SIGSTOP" else GRACE)

    def interrupt(self):
        """Train until the signal ends the run. Return an error, or ""."""
        codes, text, late = self.train(self.signal)
        found = re.search(self.awaited, text)
        self.said = found[0] if found and self.awaited else error_of(self.path, text)
        if late and self.signal != "SIGSTOP":
            return f"ranks are left {GRACE} s after {self.signal}: {self.said}"
        return "" if any(codes) and found else f"after {self.signal}: {self.said}"

    def complete(self, values):
        """Train to the end, and compare the numbers. Return an error, or ""."""
        codes, text, _ = self.train("none")
        self.nccl = sorted(set(re.findall(r"NCCL (?:version|INFO .* via) (\S+)", text)))
        if any(codes):
            return f"exit codes {codes}: {error_of(self.path, text)}"
        resumed = json.loads((self.output / "summary.json").read_text())["resumed_from"]
        if (resumed > 0) != (self.signal != "none"):
            return f"it resumed from step {resumed}"
        ours = values[self.name] = values_of(self.output)
        if self.against:
            theirs = values[self.against]
            compare(self.result, ours, theirs, self.bounds(theirs), BATCHNORM)
        return self.result["reason"]

    def bounds(self, keys):
        """Return {(step, event, name): bound}."""
        if self.signal != "none":
            return defaultdict(float)
        bounds = defaultdict(lambda: self.lower or FLOAT64)
        bounds |= {key: self.lower or NORM for key in keys if key[2] == "grad_norm"}
        if self.lower:  # an accuracy changes in jumps
            bounds |= {key: NO_BOUND for key in keys if key[2].endswith("accuracy")}
        return bounds

    def examine(self, values):
        began = time.monotonic()
        shutil.rmtree(self.output, ignore_errors=True)
        error = f"{self.against} failed" if self.against and self.against not in values else ""
        if not error and self.signal != "none":
            error = self.interrupt()
        self.result["reason"] = error = error or self.complete(values)
        if not error:
            shutil.rmtree(self.output)
        self.seconds = time.monotonic() - began

    def line(self):
        """Return its line of the table."""
        _, nearest = judged_of(self.result)
        reason = self.result["reason"]
        verdict = f"failed: {reason}" if reason else f"ok: {self.said}" if self.said else "ok"
        cells = [self.name, self.ranks, f"{self.seconds:.0f}", ", ".join(self.nccl)]
        text = " | ".join(map(str, [*cells, self.against, nearest, verdict]))
        return f"| {text} |".replace(f" on {socket.gethostname()}", " on HOST")


def parse_args():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="some")
    add("--one-machine", action="store_true", help="one torchrun, and no NCCL_HOSTID")
    add("--cpu", action="store_true", help="over gloo, to try this program")
    add("--recipes", type=Path, default=ROOT / "recipes", help="folder of the recipes")
    add("--output-dir", type=Path, default=Path("runs/nccl"), help="folder (%(default)s)")
    args = parser.parse_args()
    if not (GPUS or args.cpu):
        parser.error("no GPU: add --cpu")
    for name, (*_, against) in reversed(CASES.items()):
        args.cases += [against] * (name in args.cases)
    # No CPU trains in fp16.
    args.cases = [x for x in CASES if x in args.cases and not (args.cpu and x.startswith("fp16"))]
    return args


def main():
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # and the runs do not ignore them
        signal.signal(number, lambda *_: sys.exit(130))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    content, values = describe(0 if args.cpu else GPUS) | {"cases": []}, {}
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for case in [Case(name, args) for name in args.cases]:
        case.examine(values)
        print(case.line(), flush=True)
        content["cases"].append({k: x for k, x in vars(case).items() if k != "args"})
        text = json.dumps(content, indent=1, default=str)
        (args.output_dir / "nccl.json").write_text(f"{text}\n")
    failed = sum(bool(x["result"]["reason"]) for x in content["cases"])
    print(f"{failed} of {len(args.cases)} cases failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    train_as_rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
