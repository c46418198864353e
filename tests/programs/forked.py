"""A server that starts commands as forks of this process, which has imported what recipes import:
fifty trainings take a minute. processes.py starts it once, with the number of a socket; each
connection brings one request, a line of JSON:

    {"command": [...], "directory": ..., "env": {...}, "imports": modules that it needs besides,
     "session": a session of its own, "ignored": numbers of the signals that it ignores,
     "namespaces": pid of a process whose network, host name and mounts it has}

It is `accelerate launch ...`, `python -m torch.distributed.run ...` or `python script.py ...`,
whose stdin, stdout and stderr come through the socket. What these start as `python ...` are forks,
too. The answer has two lines: its pid, and at its end its exit code.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import accelerate.commands.accelerate_cli  # noqa: F401
import huggingface_hub.serialization  # noqa: F401
import numpy.ctypeslib
import rich._emoji_codes
import rich.json
import rich.progress  # noqa: F401
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.checkpoint.state_dict
import torch.distributed.launcher.api
import torch.distributed.pipelining
import torch.utils.serialization
import torchvision  # noqa: F401

with contextlib.suppress(ImportError):  # where it is installed, Accelerate imports it in each rank
    import datasets  # noqa: F401

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1
kept = []
plain_fork_exec = subprocess._fork_exec


def fork_instead_of_exec(words, programs, close, passed, directory, environment, *more):
    """In the place of the function that `subprocess` calls: a program of Python is a fork of this
    process."""
    words = list(map(os.fsdecode, words))
    if words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-u", "-m")):
        return plain_fork_exec(words, programs, close, passed, directory, environment, *more)
    stdin, _, _, stdout, _, stderr, _, failure, _, session, *_ = more
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ends = {n: os.dup(x) for n, x in enumerate((stdin, stdout, stderr)) if x != -1}
        for number, end in ends.items():
            os.dup2(end, number)
        if session:
            os.setsid()
        close_files_but({*passed} - {failure})
        os.chdir(directory or ".")
        pairs = (os.fsdecode(pair).split("=", 1) for pair in environment or ())
        become(words, dict(pairs) or dict(os.environ))
    return pid


def close_files_but(kept):
    """Close what a program that is executed would not have. It starts a resource tracker of its
    own, unless the file of this one's is kept."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the one by which they are listed
                os.close(number)
    tracker = resource_tracker._resource_tracker
    if tracker._fd not in kept:
        tracker._fd = tracker._pid = None


def become(words, environment):
    """Be `python [-u] script.py ...`, or `python [-u] -m module ...`, to its end."""
    os.environ.clear()
    os.environ.update(environment)
    show(environment)
    for number in SIGNALS:  # as exec does, what is ignored stays ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    draw_seeds()
    unbuffered = words[1] == "-u"
    open_streams(unbuffered)
    sys.argv = words[1 + unbuffered :]
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    code = 1
    try:
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            sys.path = [os.getcwd(), *own, *sys.path]
            kept.append(runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
        else:
            sys.path = [str(Path(sys.argv[0]).parent), *own, *sys.path]
            kept.append(runpy.run_path(sys.argv[0], run_name="__main__"))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.excepthook(*sys.exc_info())
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits, as the end of an interpreter does
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads, or the disk is full
        code = 120
    os._exit(code & 255)


def show(environment):
    """Let /proc show this environment. It is read from the memory in which the kernel has put the
    first one, between these addresses: proc(5)."""
    stat = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = map(int, stat[47:49])
    content = b"".join(os.fsencode(f"{name}={x}\0") for name, x in environment.items())
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content[: end - start - 1], min(len(content), end - start - 1))


def open_streams(unbuffered):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        binary = "wb" if number else "rb"
        file = open(number, binary, 0 if unbuffered and number else -1, closefd=False)
        lines = number == 2 or os.isatty(number)
        text = io.TextIOWrapper(file, line_buffering=lines, write_through=unbuffered)
        kept.append(getattr(sys, name))
        setattr(sys, name, text)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def draw_seeds():
    """All inherit the same generators: nothing may depend on their state."""
    random.seed()
    numpy.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(32))


def start_command(request, descriptors, connection):
    """Start a command, say its pid, and return it."""
    pid = os.fork()
    if pid == 0:
        if request.get("session"):
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        close_files_but({resource_tracker._resource_tracker._fd})
        enter_namespaces(request.get("namespaces"))
        os.chdir(request["directory"])
        for number in SIGNALS:  # also where these tests run in the background
            is_ignored = number in request.get("ignored", ())
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        subprocess._fork_exec = fork_instead_of_exec
        forked_spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
        torch.multiprocessing.spawn = forked_spawn
        words = request["command"]
        become(words if words[0] == sys.executable else [sys.executable, *words], request["env"])
    for descriptor in descriptors:
        os.close(descriptor)  # a pipe has to end with the command
    connection.sendall(f"{pid}\n".encode())
    return pid


def enter_namespaces(pid):
    """As `nsenter --net --uts --mount --target PID`."""
    for name in ("net", "uts", "mnt") if pid else ():
        with open(f"/proc/{pid}/ns/{name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {name}")


def serve(listener):
    """Start the command of each connection, and say its exit code, until the tests end."""
    connections = {}  # by pid
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.02)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = connections.pop(ended[0])
                with contextlib.suppress(OSError):  # nobody waits any more
                    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                connection.close()
        if sys.stdin in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            connections[answer(connection)] = connection


def answer(connection):
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    for name in request.get("imports", ()):
        importlib.import_module(name)
    if mapping := sys.modules.get("transformers.conversion_mapping"):
        mapping.get_checkpoint_conversion_mapping(None)  # or each rank would build it
    gc.freeze()  # the recipes collect their garbage before they leave: not this process's, too
    return start_command(request, descriptors, connection)


if __name__ == "__main__":
    del sys.path[0]  # this folder, which other programs do not see
    resource_tracker.ensure_running()  # one for all, instead of one for each process
    serve(socket.socket(fileno=int(sys.argv[1])))
