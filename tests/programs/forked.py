"""A server that runs scripts, each as its number of processes, without a launcher; or a command
with its launcher. All are forks of this process, which has imported what recipes import: fifty
trainings take a minute. processes.py starts it once, with the number of a socket; each connection
brings one request, a line of JSON:

    {"runs": [...], "directory": ..., "env": {...},
     "together": how many side by side,
     "imports": modules that they need besides}

A run has `processes` and a `port`, a `script` with its `flags` and `directory`; `env` of its own;
`terminal`: its output goes to one; `patience`: seconds until the run is ended, more where others
use the cores, too; `grace`: seconds that the others have when a process has failed (5);
`terminate`: SIGTERM before SIGKILL, as from a launcher. The answer is a line that has [exit codes
by rank, output] for each run. If patience has ended a run, the output's last line says so.

    {"command": [...], "directory": ..., "env": {...},
     "session": a session of its own, "terminal": its stdin is the terminal of its session,
     "ignored": numbers of the signals that it ignores at its start, "namespaces": pid of a process
     whose network, host name and mounts it has, "tee": all that it prints goes through tee(1), in
     its process group, to this file}

is `accelerate launch ...`, `python -m torch.distributed.run ...` or `python script.py ...`, whose
stdin, stdout and stderr come through the socket. What these start as `python ...` are forks, too.
The answer has two lines: its pid, and at its end its exit code.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from multiprocessing import resource_tracker
from pathlib import Path

import accelerate.commands.accelerate_cli  # noqa: F401
import huggingface_hub.serialization  # noqa: F401
import numpy.ctypeslib  # noqa: F401
import rich._emoji_codes
import rich.json
import rich.progress  # noqa: F401
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.checkpoint.state_dict
import torch.distributed.launcher.api
import torch.distributed.pipelining
import torch.utils.serialization
import torchvision  # noqa: F401
from forks import (
    SIGNALS,
    become,
    close_files_but,
    draw_seeds,
    fork_instead_of_exec,
    kept,
    without_tests,
)

with contextlib.suppress(ImportError):  # where it is installed, Accelerate imports it in each rank
    import datasets  # noqa: F401


def work(run, rank, port, request):
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
    draw_seeds()
    try:
        os.chdir(run["directory"])
        sys.argv = [run["script"], *map(str, run["flags"])]
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path = [str(Path(run["script"]).parent), *filter(None, own), *without_tests(sys.path)]
        kept.append(runpy.run_path(run["script"], run_name="__main__"))
        code = 0
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code:
            sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if code else 0)


class Execution:
    """The processes of one run."""

    def __init__(self, run, request):
        self.run, self.codes, self.ranks, self.text = run, {}, {}, b""
        self.master = None
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
            work(run, rank, run["port"], request)
        if self.master:
            os.close(slave)
        self.patience = run.get("patience", 300) * max(1, os.getloadavg()[0] / os.cpu_count())
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

    def check(self):
        self.read()
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


def run_all(request):
    answers, waiting, running = {}, list(enumerate(request["runs"])), {}
    while waiting or running:
        while waiting and len(running) < request["together"]:
            number, run = waiting.pop(0)
            running[number] = Execution(run, request)
        pid = True
        while pid and any(execution.ranks for execution in running.values()):
            pid, status = os.waitpid(-1, os.WNOHANG)
            for execution in running.values():
                if pid in execution.ranks:
                    execution.ended(pid, status)
        for number, execution in list(running.items()):
            execution.check()
            if not execution.ranks:
                answers[number] = execution.answer()
                del running[number]
        time.sleep(0.01)
    return [answers[number] for number in sorted(answers)]


# -------------------------------------------------------------------------------------- commands
def start_command(request, descriptors, connection):
    """Start a command, say its pid, wait for its end, and say its exit code."""
    pid = os.fork()
    if pid == 0:
        if request.get("session") or request.get("terminal"):
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        if request.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        close_files_but()
        enter_namespaces(request.get("namespaces"))
        os.chdir(request["directory"])
        for number in SIGNALS:  # also where these tests run in the background
            is_ignored = number in request.get("ignored", ())
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        if request.get("tee"):
            tee = subprocess.Popen(["tee", request["tee"]], stdin=subprocess.PIPE)
            for number in (1, 2):
                os.dup2(tee.stdin.fileno(), number)
            kept.append(tee)
            tee.stdin.close()
        subprocess._fork_exec = fork_instead_of_exec
        forked_spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
        torch.multiprocessing.spawn = forked_spawn
        words = request["command"]
        become(words if words[0] == sys.executable else [sys.executable, *words], request["env"])
    for descriptor in descriptors:
        os.close(descriptor)  # a pipe has to end with the command
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.sendall(f"{code}\n".encode())


def enter_namespaces(pid):
    """As `nsenter --net --uts --mount --target PID`."""
    for name in ("net", "uts", "mnt") if pid else ():
        with open(f"/proc/{pid}/ns/{name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {name}")


def serve(listener):
    """Answer each connection in a fork of this process, until the tests end."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            os._exit(0)
        if listener in ready:
            answer(listener)


def answer(listener):
    connection, _ = listener.accept()
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    for name in request.get("imports", ()):
        importlib.import_module(name)
    if mapping := sys.modules.get("transformers.conversion_mapping"):
        mapping.get_checkpoint_conversion_mapping(None)  # or each rank would build it
    gc.freeze()  # the recipes collect their garbage before they leave: not this process's, too
    if os.fork() == 0:
        listener.close()
        if "command" in request:
            start_command(request, descriptors, connection)
        else:
            connection.sendall(json.dumps(run_all(request)).encode() + b"\n")
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.close()


if __name__ == "__main__":
    resource_tracker.ensure_running()  # one for all, instead of one for each process
    serve(socket.socket(fileno=int(sys.argv[1])))
