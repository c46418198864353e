"""A server that runs trainings as in disturbed_training.py, or any script, each as its number of
processes, without a launcher: forked from this one, which has imported what recipes import. Fifty
trainings take a minute. conftest.py starts it once and writes to its stdin, in one line of JSON:

    {"runs": [...], "directory": ..., "env": {...},
     "together": how many side by side, each on its share of the cores,
     "imports": modules that they need besides}

A run has `processes`, and what `train` in disturbed_training.py takes, or a `script` with its
`flags` and `directory`; `env` of its own; `terminal`: its output goes to one; `patience`:
seconds until the run is ended; `grace`: seconds that the others have when a process has failed (5);
`terminate`: SIGTERM before SIGKILL, as from a launcher; `until`: [text, n], the run is ended when
its output has the text n times. The answer, a line on stdout, has [exit codes by rank, output] for
each run. If patience has ended a run, the output's last line says so.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from pathlib import Path

import accelerate  # noqa: F401
import huggingface_hub.serialization  # noqa: F401
import numpy
import rich.progress  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torchvision  # noqa: F401
from conftest import free_port
from disturbed_training import train

HERE = [path for path in sys.path if Path(path).name in ("tests", "programs")]
kept = []


def work(run, rank, port, request, cores):
    """Run one rank, in a forked process."""
    processes = run["processes"]
    os.environ.clear()
    os.environ.update(request["env"])
    if processes > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        os.environ.update(
            zip(names, map(str, (rank, rank, processes, processes, port)), strict=True)
        )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.update(run.get("env", {}))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    random.seed()  # all inherit the same generators: nothing may depend on their state
    numpy.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(32))
    try:
        os.chdir(request["directory"])
        if "script" in run:
            os.chdir(run["directory"])
            sys.argv = [run["script"], *map(str, run["flags"])]
            own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path = [str(Path(run["script"]).parent), *filter(None, own), *(set_aside(sys.path))]
            kept.append(runpy.run_path(run["script"], run_name="__main__"))
        else:
            train(run)
        code = 0
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code:
            sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if code else 0)


def set_aside(paths):
    """Return the paths without those of the tests, whose modules are forgotten, too: a script finds
    what it would find if it had been started alone."""
    for name in ("conftest", "disturbed_training"):
        sys.modules.pop(name, None)
    return [path for path in paths if path not in HERE]


class Execution:
    """The processes of one run."""

    def __init__(self, run, request, cores):
        self.run, self.codes, self.ranks, self.text = run, {}, {}, b""
        self.master, port = None, free_port()
        if run.get("terminal"):
            self.master, slave = os.openpty()
            os.set_blocking(self.master, False)
        else:
            self.file = tempfile.TemporaryFile()
            slave = self.file.fileno()
        for rank in range(run["processes"]):
            if pid := os.fork():
                self.ranks[pid] = rank
                continue
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(slave, 1)
            os.dup2(slave, 2)
            work(run, rank, port, request, cores)
        if self.master:
            os.close(slave)
        self.patience = run.get("patience", 300)
        self.deadline = time.monotonic() + self.patience
        self.said = ""

    def read(self):
        with contextlib.suppress(OSError):
            while self.master and (data := os.read(self.master, 65536)):
                self.text += data

    def ended(self, pid, status):
        code = self.codes[self.ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if code:
            self.deadline = min(self.deadline, time.monotonic() + self.run.get("grace", 5))

    def has_said(self, text, times):
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode().count(text) == times

    def check(self):
        self.read()
        if (until := self.run.get("until")) and self.ranks and self.has_said(*until):
            self.deadline = 0
        if time.monotonic() > self.deadline:
            if not any(self.codes.values()):
                self.said = f"\nforked.py: ended after a patience of {self.patience:.0f} s\n"
            number = signal.SIGTERM if self.run.pop("terminate", False) else signal.SIGKILL
            for pid in self.ranks:
                os.kill(pid, number)
            self.deadline += 5

    def answer(self):
        if not self.master:
            self.file.seek(0)
            self.text = self.file.read()
            self.file.close()
        else:
            os.close(self.master)
        return [self.codes[rank] for rank in sorted(self.codes)], self.text.decode() + self.said


def serve(request):
    for name in request["imports"]:
        importlib.import_module(name)
    gc.freeze()  # the recipes collect their garbage before they leave: not this process's, too
    together = request["together"]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = max(1, len(cores) // min(together, len(request["runs"])))
    free = [cores[slot * share :][:share] or cores[:share] for slot in range(together)]
    answers, waiting, running = {}, list(enumerate(request["runs"])), {}
    while waiting or running:
        while waiting and free:
            number, run = waiting.pop(0)
            slot = free.pop()
            running[number] = slot, Execution(run, request, slot)
        pid = True
        while pid and any(execution.ranks for _, execution in running.values()):
            pid, status = os.waitpid(-1, os.WNOHANG)
            for _, execution in running.values():
                if pid in execution.ranks:
                    execution.ended(pid, status)
        for number, (slot, execution) in list(running.items()):
            execution.check()
            if not execution.ranks:
                answers[number] = execution.answer()
                free.append(slot)
                del running[number]
        time.sleep(0.01)
    return [answers[number] for number in sorted(answers)]


resource_tracker.ensure_running()  # one for all, instead of one for each process
while line := sys.stdin.readline():
    answer = json.dumps(serve(json.loads(line)))
    print(answer, flush=True)
os._exit(0)
