# SPDX-License-Identifier: Apache-2.0
"""Interrupt a copy of a recipe by random faults; compare with an undisturbed run, bit for bit.

    python benchmarks/faults.py recipes/ddp_cifar.py -- --data synthetic --model simple_cnn --cpu \\
        --max-steps 100 --checkpoint-every 10 --batch-size 8
    python benchmarks/faults.py ../mine.py --faults 20 --seed 3 -- --text a.txt --cpu

torchrun starts a copy, a fault happens, and the same command starts it again, until it is complete.
Weights and evaluations then have to be those of the undisturbed run; after that it begins anew.
Rank 0 waits until the fault has happened: in a save before the write, fsync or rename, after an
update, or when an evaluation begins. Other faults come up to 8 s after the start, or up to 1 s
after the read of a checkpoint begins. SIGSTOP comes in a step or an evaluation: in a save, all
ranks would wait for the stopped one. Errors: a process that does not end, a second traceback, a
failure without a fault, a start that does not resume the newest intact checkpoint, a difference. A
full disk needs root. Writes runs/faults/NAME.json, and the output of each start into
runs/faults/NAME/. Exit status 1: an error; the same --seed draws the same faults, as far as the
same checkpoints exist.
"""

import argparse
import functools
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import torch
from bench import GPUS
from check import MEASURED, TORCHRUN, error_of
from running import describe, run_script

# moment: (the function in which rank 0 waits, the highest number of its call, seconds after it)
MOMENTS = {
    "start": ((runpy, "run_path"), 1, 8),
    "read": ((torch, "load"), 1, 1),
    "step": ((torch.optim.Optimizer, "zero_grad"), 25, 0),
    "evaluation": ((torch.nn.Module, "eval"), 1, 0),
    "write": ((torch, "save"), 3, 0),
    "fsync": ((os, "fsync"), 5, 0),
    "rename": ((os, "replace"), 3, 0),
}
MARK = "LOG_OF_FAULTS"  # a variable of the environment
KINDS = ["SIGKILL of a rank", "SIGTERM of a rank", "SIGUSR1 of a rank", "SIGSTOP of a rank"]
KINDS += ["SIGKILL of the launcher", "SIGTERM of the launcher", "SIGHUP of the launcher"]
KINDS += ["SIGKILL of all", "Ctrl-C", "Ctrl-C twice", "second start", "directory removed"]
KINDS += ["full disk", "memory refused", "no file opens"]
# Between two runs, after SIGKILL of all. Without an earlier checkpoint it is only that.
DAMAGE = ["stale file", "deleted checkpoint", "cut checkpoint", "flipped bit"]
ONLY_AT = {"SIGSTOP of a rank": ["step", "evaluation"], "no file opens": ["read"]}
ONLY_AT["memory refused"] = ["write", "fsync", "rename"]


def train_as_rank(moment, number, reached, copy, *flags):
    """Train as the program of one rank. In the number-th call of the moment's function, rank 0
    makes the file `reached` and waits until it is deleted."""
    calls = count(1)

    def waiting(function):
        @functools.wraps(function)
        def call(*arguments, **named):
            if next(calls) == int(number):
                Path(reached).touch()
                while os.path.exists(reached):
                    time.sleep(0.01)
            return function(*arguments, **named)

        return call

    if os.environ["RANK"] == "0" and moment in MOMENTS:
        owner, name = MOMENTS[moment][0]
        setattr(owner, name, waiting(getattr(owner, name)))
    run_script(copy, *flags)


def processes(path):
    """Return the processes of the start that has this log, or of all starts in a directory."""
    found = psutil.process_iter(["environ", "ppid"])
    mark = str(path.resolve())
    return [x for x in found if (x.info["environ"] or {}).get(MARK, "").startswith(mark)]


class Start:
    """One start of the command, and what it has said."""

    def __init__(self, args, output, moment="none", number=1):
        self.args, self.output = args, output
        self.second = None  # a start in the same directory
        # Not on the disk that may be full.
        self.log = output.parents[1] / f"{time.time_ns()}.log"
        self.reached = self.log.with_suffix(".reached")
        command = [sys.executable, *TORCHRUN, args.processes, __file__, "rank", moment, number]
        command += [self.reached, args.copy, *args.flags, "--output-dir", output]
        with open(self.log, "w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            # Its processes inherit the mark.
            options["env"] = {**os.environ, MARK: str(self.log.resolve())}
            self.launcher = subprocess.Popen(list(map(str, command)), **options)

    def ranks(self):
        """Return the processes of the ranks, in order."""
        found = [x for x in processes(self.log) if x.info["ppid"] == self.launcher.pid]
        found = {x.info["environ"].get("RANK"): x for x in found}
        return [found[rank] for rank in map(str, range(self.args.processes)) if rank in found]

    def reaches(self, delay):
        """Wait for the moment, and then for the delay. Return whether the run is still there."""
        deadline = time.monotonic() + 10 * self.args.limit
        while not self.reached.exists():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        if delay:
            self.reached.unlink()
            time.sleep(delay)
        return bool(self.ranks())

    def end(self):
        """Let it go on until all processes have ended. Return an error, or ""."""
        self.reached.unlink(missing_ok=True)
        with suppress(subprocess.TimeoutExpired):
            self.launcher.wait(10 * self.args.limit)
        deadline = time.monotonic() + self.args.limit
        while (left := processes(self.log)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            process.kill()
        self.code, text, name = self.launcher.wait(), self.log.read_text(), self.args.copy.stem
        own = re.findall(rf"^{re.escape(name)}: (.*)", text, re.MULTILINE)
        message = own[-1] if own else error_of(self.args.copy, text)
        message = message if self.code else "complete"
        self.message = message.replace(f" on {socket.gethostname()}", " on HOST")
        begins = re.findall('"resumed_from": ([0-9]+)', text)
        self.begin = int(begins[0]) if begins else None
        first_lines = rf'^Traceback .*\n  File "[^"]*\b(?:{re.escape(name)}|faults)\.py"'
        # Until a run holds signals, Ctrl-C ends each rank with Python's own traceback.
        early = text.count("\nKeyboardInterrupt\n")
        tracebacks = len(re.findall(first_lines, text, re.MULTILINE)) - early
        told = f"{len(left)} processes are left after {self.args.limit:g} s" if left else ""
        return told or (f"{tracebacks} tracebacks" if tracebacks > 1 else "")


def strike(kind, start, rng):
    """Do what a fault does to a run. Return an error, or ""."""
    ranks, launcher, disk = start.ranks(), start.launcher, start.output.parent
    name, _, target = kind.partition(" of ")
    if target or kind in DAMAGE:
        targets = {"a rank": [rng.choice(ranks)], "the launcher": [launcher]}
        for process in targets.get(target, [launcher, *ranks]):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.Signals[name] if target else signal.SIGKILL)
    elif name.startswith("Ctrl-C"):
        for delay in (0, rng.random())[: 1 + name.endswith("twice")]:
            time.sleep(delay)
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGINT)
    elif kind == "second start":
        start.second = Start(start.args, start.output)
        error = start.second.end()
        said = start.second.log.read_text() + start.log.read_text()
        alone = launcher.poll() is not None or "is in use by another run" in said
        return error if alone else "two runs in one directory"
    elif kind == "directory removed":
        shutil.rmtree(start.output, ignore_errors=True)
    elif kind == "memory refused":
        resource.prlimit(ranks[0].pid, resource.RLIMIT_AS, (ranks[0].memory_info().vms,) * 2)
    elif kind == "no file opens":
        resource.prlimit(ranks[0].pid, resource.RLIMIT_NOFILE, (0, 0))
    elif kind == "full disk":
        used = os.statvfs(disk)
        mount("-o", f"remount,size={(used.f_blocks - used.f_bfree) * used.f_frsize}", disk)
    return ""


def mount(*words):
    return subprocess.run(["mount", *words], stderr=subprocess.DEVNULL).returncode == 0


def files(checkpoint):
    return sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]


class Checkpoints:
    """The checkpoints of a directory, and what faults have done to their files."""

    def __init__(self, output):
        self.output = output
        self.damaged = {}  # (file, time of its change): kind

    def kinds(self):
        """Return {checkpoint: kinds of its damage}, the newest first."""
        paths = sorted(x for x in self.output.glob("step-*") if x.suffix in ("", ".pt"))[::-1]
        changes = {path: [(x, x.stat().st_mtime_ns) for x in files(path)] for path in paths}
        return {path: {*map(self.damaged.get, x)} - {None} for path, x in changes.items()}

    def resumable(self):
        """Return the steps from which a run may resume."""
        steps = []
        for path, kinds in self.kinds().items():
            if "cut checkpoint" not in kinds:  # a flipped bit may be in unused bytes
                steps.append(int(path.stem.removeprefix("step-")))
            if not kinds:
                return steps
        return [0]

    def damage(self, kind, rng):
        """Damage the newest of several intact ones, or leave what a killed save may leave."""
        newest, *others = [path for path, kinds in self.kinds().items() if not kinds] or [None]
        if kind == "stale file" and newest:
            (self.output / "unfinished.pt.tmp").write_bytes(b"x" * 1000)
        elif kind == "deleted checkpoint" and others:
            newest.rename(self.output.with_name(f"{time.time_ns()}"))
        elif kind in ("cut checkpoint", "flipped bit") and others:
            file = rng.choice(files(newest))
            content = bytearray(file.read_bytes())
            place = rng.randrange(len(content))
            content[place] ^= 1 << rng.randrange(8)
            file.write_bytes(content if kind == "flipped bit" else content[:place])
            self.damaged[file, file.stat().st_mtime_ns] = kind


def results(output):
    """Return what the faults must not change in a complete training."""
    metrics, weights = output / "metrics.jsonl", output / "model.safetensors"
    lines = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else [])
    lines = [x for x in lines if x["event"] == "evaluation"]
    evaluations = [{k: x[k] for k in x.keys() - MEASURED | {"step"}} for x in lines]
    return {"evaluations": evaluations, "weights": weights.exists() and weights.read_bytes()}


class Trial:
    """The training with faults, and what the next start has to do."""

    def __init__(self, args, directory):
        self.args, self.output = args, directory / "disk/output"
        self.starts = count()
        self.checkpoints = Checkpoints(self.output)
        whole = Start(args, directory / "whole/output")
        if (error := whole.end()) or whole.code:
            error = error or whole.message
            sys.exit(f"faults: error: {args.copy} fails without faults: {error} ({whole.log})")
        self.expected = results(whole.output)

    def start(self, kinds):
        """Start the copy with one fault, if there are any kinds. Return what happened."""
        rng = random.Random(f"{self.args.seed}/{self.args.copy.stem}/{next(self.starts)}")
        moments = {kind: ONLY_AT.get(kind, [*MOMENTS]) for kind in kinds}
        resumable = self.checkpoints.resumable()
        if resumable == [0]:
            moments = {kind: [x for x in found if x != "read"] for kind, found in moments.items()}
        kind = rng.choice([kind for kind, found in moments.items() if found] or ["none"])
        moment = rng.choice(moments.get(kind, ["none"]))
        _, highest, longest = MOMENTS.get(moment, (None, 1, 0))
        call = rng.randint(1, highest)
        delay = rng.uniform(0, 0 if kind in ONLY_AT else longest)
        start = Start(self.args, self.output, moment, call)
        struck = start.reaches(delay)
        error = strike(kind, start, rng) if struck else ""
        began = time.monotonic()
        error = start.end() or error
        seconds = time.monotonic() - began
        if kind == "full disk":
            mount("-o", "remount,size=50%", self.output.parent)
        if start.code and not struck:
            error = error or "it fails without a fault"
        if kind == "directory removed":  # perhaps before it was read
            resumable.append(0)
        if start.begin not in (None, *resumable):
            error = error or f"it resumed from {start.begin}, not from {resumable}"
        if struck:
            self.checkpoints.damage(kind, rng)
        if start.code == 0 and not error:
            found = results(self.output)
            error = " ".join(f"other {k}" for k, x in self.expected.items() if x != found[k])
        if start.code == 0 or error:
            shutil.rmtree(self.output, ignore_errors=True)
        row = {"kind": kind, "moment": moment, "call": call, "delay": delay, "exit": start.code}
        row |= {"seconds": seconds, "resumed_from": start.begin}
        row |= {"newest": self.checkpoints.resumable()[0]}
        row |= {"message": (start.second or start).message, "error": error}
        return row | {"log": start.log.name}, struck


def disturb(args, directory, rows):
    """Train the copy with faults. Print a line for each, and add it to the rows."""
    disk = directory / "disk"
    disk.mkdir(parents=True)
    mounted = mount("-t", "tmpfs", "-o", "size=50%", "tmpfs", disk)
    if not mounted:
        print("full disk is left out: no tmpfs can be mounted")
    kinds = [x for x in args.kinds if mounted or x != "full disk"]
    try:
        trial = Trial(args, directory)
        while len(rows) < args.faults or trial.output.exists():
            row, struck = trial.start(kinds if len(rows) < args.faults else [])
            if struck or row["error"]:
                rows.append(row)
                told = "{kind:23} at {moment:10} {call:2}, exit {exit:3} after {seconds:4.1f} s, "
                told += "from {resumed_from} to {newest}: {message} {error}"
                print(f"{len(rows):3} {told.format(**row)}", flush=True)
    finally:
        for process in processes(directory):
            process.kill()
        if mounted:
            subprocess.run(["umount", "--lazy", disk])


def parse_args():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("copy", type=Path, help="a copy of ddp, amp, sharded or pipeline")
    add("--faults", type=int, default=10, help="how many (%(default)s)")
    add("--seed", type=int, default=0, help="of the faults (%(default)s)")
    add("--processes", type=int, default=2, help="ranks (%(default)s)")
    add("--limit", type=float, default=180, help="seconds for ranks to end, a tenth of a run's")
    add("--kinds", nargs="+", choices=[*KINDS, *DAMAGE], default=[*KINDS, *DAMAGE], metavar="KIND")
    add("--output-dir", type=Path, default=Path("runs/faults"), help="folder of the runs")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.flags = ["--hang-timeout", "60", *sys.argv[at + 1 :]]
    return args


def main():
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # and the runs do not ignore them
        signal.signal(number, lambda *_: sys.exit(130))
    directory = args.output_dir / args.copy.stem
    shutil.rmtree(directory, ignore_errors=True)
    content = describe(0 if "--cpu" in args.flags else GPUS)
    rows = content["faults"] = []
    try:
        disturb(args, directory, rows)
    finally:
        directory.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    errors = sum(bool(row["error"]) for row in rows)
    print(f"{args.copy}: {len(rows)} faults, {errors} errors (seed {args.seed})")
    sys.exit(bool(errors))


if __name__ == "__main__":
    train_as_rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
