"""A server that starts commands as forks of this process, which has imported what recipes import:
fifty trainings take a minute. processes.py starts it once, with the number of a socket; each
connection brings one request, a line of JSON:

    {"command": [...], "directory": ..., "env": {...}, "imports": modules that it needs besides,
     "session": a session of its own, "terminal": its stdin is the terminal of its session,
     "ignored": numbers of the signals that it ignores at its start, "namespaces": pid of a process
     whose network, host name and mounts it has}

It is `accelerate launch ...`, `python -m torch.distributed.run ...` or `python script.py ...`,
whose stdin, stdout and stderr come through the socket. What these start as `python ...` are forks,
too. The answer has two lines: its pid, and at its end its exit code.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
from multiprocessing import resource_tracker

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
from forks import SIGNALS, become, close_files_but, fork_instead_of_exec

with contextlib.suppress(ImportError):  # where it is installed, Accelerate imports it in each rank
    import datasets  # noqa: F401


def start_command(request, descriptors, connection):
    """Start a command, say its pid, and return it."""
    pid = os.fork()
    if pid == 0:
        if request.get("session") or request.get("terminal"):
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        if request.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
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
