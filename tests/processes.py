"""Ways to start what a test runs. Take the first one that shows what the test is for:

- `train_forked`: whole trainings; their results are `outputs`
- `forked`: ranks that fail, or are ended: exit codes and what they print. `execute`: the trainings
  of check.py. In both the ranks are forks of a process that has imported everything, without a
  launcher
- `launch`, `Launched`: a launcher that forks its ranks, where one matters, or a signal to it
- `run`: a real interpreter, where its start or its end matters
"""

import functools
import itertools
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent


def run(command, cwd=ROOT, check=True, timeout=600, **env):
    """Run a command as a user would; return its exit code, stdout and stderr."""
    words = [str(word) for word in command]
    options = {"capture_output": True, "text": True, "timeout": timeout}
    process = subprocess.run(words, cwd=cwd, env={**os.environ, **env}, **options)
    if check:
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return process


def launch(command, cwd=ROOT, check=True, **env):
    """As `run`, by `Launched`."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = (Path(directory, name) for name in ("stdout", "stderr"))
        with Launched(command, cwd, env, output=output, errors=errors) as process:
            process.wait()
        process.stdout, process.stderr = output.read_text(), errors.read_text()
    if check:
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return process


def write_programs(directory, **texts):
    """Write programs, {name: shell script}. Return a PATH on which they come first."""
    for name, text in texts.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


class Launched:
    """A launcher or a script, as `subprocess.Popen` starts it, but as a fork of a process that has
    imported everything. Its ranks are forks, too: see programs/forked.py. Where the start or the
    end of an interpreter matters, use Popen. `env` is added to the environment; `output` and
    `errors` may be paths."""

    def __init__(self, command, cwd=ROOT, env=(), stdin=None, output=None, errors=None, **how):
        words = [str(word) for word in command]
        environment = {**os.environ, **dict(env)}
        request = {"command": words, "directory": cwd, "env": environment, **how}
        fork_server()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + os.environ["FORK_SERVER"])
        with open(os.devnull) as nothing, ExitStack() as stack:
            output, errors = (
                stack.enter_context(x.open("w")) if isinstance(x, Path) else x
                for x in (output, errors)
            )
            files = [stdin or nothing, output or sys.__stdout__, errors or output or sys.__stderr__]
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            socket.send_fds(connection, [b"\0"], numbers)
        connection.sendall(json.dumps(request, default=str).encode() + b"\n")
        self.answer = connection.makefile("r")
        self.pid = int(self.answer.readline())
        self.returncode = None

    def poll(self):
        if self.returncode is None and select.select([self.answer], [], [], 0)[0]:
            self.returncode = int(self.answer.readline())
        return self.returncode

    def wait(self, timeout=600):
        wait_until(lambda: self.poll() is not None, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Ranks:
    """The processes of a run that `forked` describes."""

    def __init__(self, run, directory, imports, env):
        self.file, self.master = tempfile.TemporaryFile(), None
        output = self.file
        if run.get("terminal"):
            self.master, output = os.openpty()
            os.set_blocking(self.master, False)
        size, port, self.ranks = run["processes"], free_port(), []
        for rank in range(size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            numbers |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
            own = {name: str(x) for name, x in numbers.items() if size > 1} | run.get("env", {})
            command = [sys.executable, run["script"], *run["flags"]]
            how = {"env": {**env, **own}, "output": output, "imports": imports}
            how["ignored"] = run.get("ignored", ())
            self.ranks.append(Launched(command, run.get("directory", directory), **how))
        if self.master:
            os.close(output)
        self.patience = run.get("patience", 300) * max(1, os.getloadavg()[0] / os.cpu_count())
        self.deadline = time.monotonic() + self.patience
        self.grace = run.get("grace", 5)
        self.last_signal = signal.SIGTERM if run.get("terminate") else signal.SIGKILL

    def have_ended(self):
        with suppress(OSError):
            while self.master and (text := os.read(self.master, 65536)):
                self.file.write(text)
        codes = [rank.poll() for rank in self.ranks]
        if any(codes):
            self.deadline = min(self.deadline, time.monotonic() + self.grace)
        if None in codes and time.monotonic() > self.deadline:
            if not any(codes):
                os.write(self.file.fileno(), f"\nended after {self.patience:.0f} s\n".encode())
            for rank in self.ranks:
                rank.send_signal(self.last_signal)
            self.last_signal = signal.SIGKILL
            self.deadline = time.monotonic() + 5
            self.grace = 5
        return None not in codes

    def answer(self):
        self.file.seek(0)
        with self.file:
            return [rank.returncode for rank in self.ranks], self.file.read().decode()


def train_forked(directory, *runs, together=2, **env):
    """Outputs of several trainings (processes, script, flags), and what they printed, without a
    launcher; {...} at the end of one is for `forked`."""
    described = []
    for index, (processes, script, flags, *more) in enumerate(runs):
        one = {"processes": processes, "script": script, "directory": Path(directory, str(index))}
        one["flags"] = ["--log-every", 1, *flags, "--output-dir", "."]
        one |= more[0] if more else {}
        one["directory"].mkdir(exist_ok=True)
        described.append(one)
    results = []
    answers = forked(described, directory, together, **env)
    for one, (codes, output) in zip(described, answers, strict=True):
        assert set(codes) == {0}, output
        results.append(outputs(one["directory"]))
        results[-1].output = output
    return results


def outputs(directory):
    """The results of a training: its lines, its summary, its weights."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        directory=directory,
        summary=json.loads((directory / "summary.json").read_text()),
        train=[line for line in lines if line["event"] == "train"],
        evaluations=[line for line in lines if line["event"] == "evaluation"],
        weights=load_file(directory / "model.safetensors"),
    )


def forked(runs, directory, together=1, imports=(), **env):
    """[exit codes by rank, output] of each of these runs, without a launcher, so many side by side.
    A run has `processes`, a `script`, `flags`, a `directory` if it is not this one, and `env` of
    its own. `terminal`: its output goes to one; `patience`: seconds until it is ended (300), more
    where others use the cores, too; `grace`: seconds that the others have when a process has failed
    (5); `terminate`: SIGTERM before SIGKILL, as from a launcher; `ignored`: signals."""
    env = {"OMP_NUM_THREADS": "1", **env}
    waiting, running, answers = list(enumerate(runs)), {}, {}
    while waiting or running:
        while waiting and len(running) < together:
            number, run = waiting.pop(0)
            running[number] = Ranks(run, directory, imports, env)
        for number in [x for x, ranks in running.items() if ranks.have_ended()]:
            answers[number] = running.pop(number).answer()
        time.sleep(0.02)
    return [answers[number] for number in sorted(answers)]


def execute(command, environment, timeout, imports=()):
    """As running.py's `execute` of check.py's command, but without a launcher."""
    processes, script, *flags = command[command.index("--nproc_per_node") + 1 :]
    env = {name: x for name, x in environment.items() if os.environ.get(name) != x}
    if processes == "1":  # as torchrun sets them, by which Accelerate makes DDP
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = {"processes": int(processes), "script": script, "flags": flags, "directory": Path.cwd()}
    run |= {"env": env, "grace": 0.5, "terminate": True}
    [(codes, output)] = forked([run], Path.cwd(), imports=imports)
    return int(any(codes)), [(0.0, output)]


@functools.cache
def fork_server():
    """Start programs/forked.py, once for all of pytest's workers: FORK_SERVER is its address."""
    if "FORK_SERVER" in os.environ:
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0forked-{os.getpid()}")
    listener.listen(100)
    program = [sys.executable, ROOT / "tests/programs/forked.py", str(listener.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["ROOM"] = "-" * 2**14  # for the environments that its forks show
    options = {"stdin": subprocess.PIPE, "pass_fds": [listener.fileno()], "env": environment}
    os.environ["FORK_SERVER"] = listener.getsockname().decode()[1:]
    return subprocess.Popen(program, **options)


# Until a port is used, nobody else may choose it: each of pytest's workers has a range of its own,
# below the ports that the kernel hands out.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
WIDTH = 8000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
numbers = itertools.count(secrets.randbelow(WIDTH))


def free_port():
    while True:
        port = 4000 + WIDTH * WORKER + next(numbers) % WIDTH
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def wait_until(condition, seconds=300):
    """Wait so many seconds at most, or longer where others use the cores, too."""
    while not condition():
        assert seconds > 0, "waited in vain"
        time.sleep(0.05)
        seconds -= 0.05 / max(1, os.getloadavg()[0] / os.cpu_count())
