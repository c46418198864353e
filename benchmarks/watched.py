# SPDX-License-Identifier: Apache-2.0
"""A training script on several ranks, which are watched, disturbed and ended: for others.py.

Ranks are forked after the imports. Each notes a line of JSON per optimizer step: which samples it
had, the loss, the rate. Nothing that a script computes changes, unless a plan says so:

    nan_at               a step in which the last rank multiplies its loss by NaN
    stop_at              a step after which the last rank stops (SIGSTOP)
    pause_at             the step after which all ranks wait, to be killed
    half_save_at         the step from which rank 0 writes half of its next file, and then waits
    pause                seconds to sleep after each step
"""

import json
import os
import re
import signal
import sys
import time
import zlib
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch
from running import fork, free_port, rank_environment, run_script
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves


class Ranks:
    """A training: the ranks' processes, with the environment that torchrun sets, and their notes.
    `codes` and `ends` have the exit code and the time of the end of each rank, or None."""

    def __init__(self, script, words, processes, directory, cwd, out, **plan):
        self.directory, self.out = directory, out  # of the notes, of the script's files
        directory.mkdir(parents=True)
        port = free_port()
        self.pids = []
        for rank in range(processes):
            plan["is_last"] = rank == processes - 1
            function = partial(work, script, words, cwd, directory, rank, plan)
            variables = rank_environment(rank, processes, port)
            self.pids.append(fork(function, cwd, variables, directory / f"output-{rank}.txt"))
        self.codes, self.ends = [None] * processes, [None] * processes

    def poll(self):
        """Return whether all ranks have ended."""
        for rank, pid in enumerate(self.pids):
            if self.ends[rank] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    self.ends[rank] = time.time()
        return None not in self.ends

    def wait(self, until=lambda: False, limit=900, grace=60):
        """Wait for the end, or until a condition holds. Return whether it does. Ranks that outlive
        another one by `grace` seconds are killed, as a launcher would."""
        began = time.time()
        while not self.poll() and not until() and time.time() - began < limit:
            ended = [x for x in self.ends if x]
            if ended and time.time() - min(ended) > grace:
                break
            time.sleep(0.2)
        held = until()
        if not held:
            self.send(signal.SIGKILL)
        return held

    def wait_for(self, until):
        """Wait until a condition holds; exit with the output if it never does."""
        if not self.wait(until):
            sys.exit(f"{self.output()}\nothers: {self.directory} did not come that far")

    def send(self, number):
        """Send a signal to all ranks; SIGKILL also to their DataLoaders' workers."""
        for pid, ended in zip(self.pids, self.ends, strict=True):
            if not ended:
                with suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
        while number == signal.SIGKILL and not self.poll():
            time.sleep(0.05)

    def steps(self, rank=0):
        path = self.directory / f"rank-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def samples(self):
        """Return, for each step, the samples of all ranks."""
        ranks = zip(*(self.steps(rank) for rank in range(len(self.pids))), strict=False)
        return [[x for step in steps for x in step["samples"]] for steps in ranks]

    def waits(self, rank):
        return (self.directory / f"waits-{rank}").exists()

    def output(self):
        paths = sorted(self.directory.glob("output-*.txt"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def seconds_after_stop(self, limit):
        """Return the seconds from the stop of a rank to the end of rank 0, or None after `limit`,
        and its last words."""
        stopped = (self.directory / "stopped").stat().st_mtime
        self.wait(lambda: self.ends[0], limit=stopped + limit - time.time())
        self.send(signal.SIGKILL)
        output = self.directory / "output-0.txt"
        seconds = output.stat().st_mtime - stopped
        return seconds if seconds > 60 else None, output.read_text()[-3000:]

    def first_loss(self):
        """Return the mean over the ranks of what step 1 called `backward` on."""
        losses = [sum(self.steps(rank)[0]["loss"]) for rank in range(len(self.pids))]
        return sum(losses) / len(losses)

    def error(self):
        """Return the name of the last exception, or the error line of a recipe."""
        output = re.sub(r"/\S+/|[\w.]+\.(?=\w+Error)", "", self.output())
        lines = re.findall(r"^\w+(?:Error|Exception)\b|error: [^:]{,90}", output, re.M)
        return lines[-1] if lines else "no error"

    def weights(self, name="last"):
        path = self.directory / f"{name}.pt"
        return torch.load(path, weights_only=True) if path.exists() else None


def work(script, words, cwd, directory, rank, plan):
    """Run a script as one rank."""
    os.setsid()
    sys.path[:0] = ["", str(cwd)]  # the first one for the script's folder
    Watcher(directory, rank, plan)
    run_script(script, *words)


class Watcher:
    """What happens around a script's calls of torch, in one rank."""

    def __init__(self, directory, rank, plan):
        self.directory, self.rank, self.plan = directory, rank, plan
        self.file = open(directory / f"rank-{rank}.jsonl", "w", buffering=1)
        self.step = self.depth = 0
        self.samples, self.losses = [], []
        self.write_tensors, self.serialize_file = torch.save, safetensors.torch.serialize_file
        call, backward, zero_grad = nn_call, torch.Tensor.backward, torch.nn.Module.zero_grad
        torch.nn.Module.__call__ = lambda *a, **k: self.call(call, *a, **k)
        torch.Tensor.backward = lambda *a, **k: self.backward(backward, *a, **k)
        torch.nn.Module.zero_grad = lambda *a, **k: self.samples.clear() or zero_grad(*a, **k)
        torch.save = self.torch_save
        safetensors.torch.serialize_file = self.safetensors_save  # save_file calls it
        register_optimizer_step_post_hook(self.after_step)

    def call(self, function, module, *args, **kwargs):
        if self.depth == 0 and module.training and torch.is_grad_enabled():
            tensors = [x for x in (*kwargs.values(), *args) if torch.is_tensor(x) and x.dim() > 1]
            self.samples += [identity(row) for row in tensors[0]] if tensors else []
        self.depth += 1
        try:
            return function(module, *args, **kwargs)
        finally:
            self.depth -= 1

    def backward(self, function, loss, *args, **kwargs):
        if self.step + 1 == self.plan.get("nan_at") and self.plan["is_last"]:
            loss = loss * float("nan")
        self.losses.append(loss.item())
        return function(loss, *args, **kwargs)

    def after_step(self, optimizer, args, kwargs):
        self.step += 1
        self.optimizer = optimizer
        line = {"step": self.step, "samples": self.samples, "loss": self.losses}
        self.file.write(json.dumps(line | {"rate": optimizer.param_groups[0]["lr"]}) + "\n")
        self.samples, self.losses = [], []
        if self.step == 1:
            self.keep_weights("first")
        self.keep_weights("last")  # of the training: a script may end by os._exit
        time.sleep(self.plan.get("pause", 0))
        if self.step == self.plan.get("pause_at"):
            self.wait_to_be_killed()
        if self.step == self.plan.get("stop_at") and self.plan["is_last"]:
            Path(self.directory, "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def keep_weights(self, name):
        if self.rank == 0:
            groups = self.optimizer.param_groups
            weights = [p.detach() for group in groups for p in group["params"]]
            self.write_tensors(weights, self.directory / f"{name}.pt")

    def torch_save(self, content, file, *args, **kwargs):
        self.write_tensors(content, file, *args, **kwargs)
        self.cut(getattr(file, "name", file))

    def safetensors_save(self, tensors, filename, *args, **kwargs):
        self.serialize_file(tensors, filename, *args, **kwargs)
        self.cut(filename)

    def cut(self, path):
        """Leave half of a file, as a process that is killed while it writes, and wait."""
        if self.rank == 0 and self.step >= self.plan.get("half_save_at", 10**9):
            os.truncate(path, os.path.getsize(path) // 2)
            self.wait_to_be_killed()

    def wait_to_be_killed(self):
        Path(self.directory, f"waits-{self.rank}").touch()
        while True:
            time.sleep(60)


nn_call = torch.nn.Module.__call__


def identity(row):
    """Return a number for a sample, a row of tokens or an image of one colour, that padding by 0 or
    cropping does not change."""
    values = row[..., 0, 0].mul(100).round().long() if row.dim() == 3 else row[row != 0]
    return zlib.crc32(values.numpy().tobytes())


def compared(one, other):
    """Return how far two lists of weights agree."""
    if one is None or other is None:
        return "no weights"
    difference = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
    return f"weights differ by {difference:.0e}" if difference else "the same weights"


def seen_as(whole, seen):
    """Return how the samples of steps differ from those of the uninterrupted training."""
    expected, seen = (Counter(chain(*steps)) for steps in (whole, seen))
    never, again = (expected - seen).total(), (seen - expected).total()
    if not never and not again:
        return "each sample seen once"
    return f"{never} of {expected.total()} samples not seen, {again} once more than they should"


def files(directory):
    """Return {file: time of its last change}."""
    return {x: x.stat().st_mtime for x in Path(directory).rglob("*") if x.is_file()}


def has_nan(path):
    """Return whether a file of tensors has one that is not finite."""
    if path.suffix == ".safetensors":
        tensors = safetensors.torch.load_file(path)
    elif path.suffix in (".pt", ".bin"):
        tensors = torch.load(path, "cpu", weights_only=False)
    else:
        return False
    found = tree_leaves(tensors)
    return any(torch.is_tensor(x) and not x.isfinite().all() for x in found)
