# SPDX-License-Identifier: Apache-2.0
"""Shared by the tools and the benchmarks: this machine, the versions and the commit, which stand
beside results, and how a command is run to its end."""

import os
import platform
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VERSIONS = {name: version(name) for name in ("torch", "torchvision", "accelerate")}


def hardware(gpus):
    """Describe this machine with so many GPUs, or its CPU. Exit if its GPUs cannot be used; that is
    tried in another process, so that this one takes no GPU memory from the runs."""
    if not gpus:
        cpuinfo = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
        name = found[1] if found else platform.processor()
        sets = [torch.backends.cpu.get_cpu_capability(), *bf16_instructions()]
        return f"{CORES} cores of {name} ({', '.join(sets)})"
    tried = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    answer = subprocess.run(tried, capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"{gpus} GPU(s), but {answer.stderr.strip().splitlines()[-1]}")
    asked = "--query-gpu=driver_version,memory.total,power.limit"
    command = ["nvidia-smi", asked, "--format=csv,noheader", "--id=0"]
    try:
        details = subprocess.check_output(command, text=True)
    except (OSError, subprocess.CalledProcessError):  # not of NVIDIA, or in a container
        return f"{gpus} x {answer.stdout.strip()}"
    driver, memory, power = details.strip().split(", ")
    return f"{gpus} x {answer.stdout.strip()} (driver {driver}, {memory}, {power})"


def bf16_instructions():
    """Return the names of this CPU's instruction sets for bf16: of AMX, of AVX-512, of Arm."""
    return sorted(x for x, has in torch.cpu.get_capabilities().items() if has and "bf16" in x)


def commit():
    options = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True}  # no git: no error
    found = subprocess.run("git describe --always --dirty --exclude='*'", **options)
    return found.stdout.strip() or "unknown"


def describe(gpus):
    """Return what stands in a file of results beside these."""
    found = {"date": str(date.today()), "command": sys.argv[1:], "commit": commit()}
    found |= {"hardware": hardware(gpus), "python": platform.python_version()}
    return found | {"versions": VERSIONS}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def fork(function, directory, environment, log):
    """Call a function in a forked process, in a directory, with its output at the end of a file,
    and end that process. Return its process ID."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(directory)
        os.environ.update(environment)
        with open(log, "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # nothing may return into the code of the first process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_script(script, *words):
    """Run a script as the program of this process."""
    sys.argv = [str(script), *words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(str(script), run_name="__main__")


def rank_environment(rank, processes, port):
    """Return the variables that torchrun sets for a rank of several."""
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return found if processes > 1 else {}


def execute(command, environment, timeout):
    """Run a command; return its exit code, and its output as [(time of arrival, line)]."""
    launched = time.time()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    timer = threading.Timer(timeout, os.killpg, [process.pid, signal.SIGTERM])
    timer.start()
    try:
        lines = [(time.time(), line) for line in process.stdout]
        code = process.wait()
    finally:  # also after Ctrl-C
        timer.cancel()
        stop(process)
    if code and time.time() - launched > timeout:
        code = f"none after {timeout:g} s"
    return code, [(launched, ""), *lines]


def stop(process):
    """End a run with all of its processes. Ranks have sessions of their own: the launcher has to be
    asked to end them, for which it takes up to 30 seconds."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
