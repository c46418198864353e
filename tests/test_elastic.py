"""A machine that is lost, and one that comes back: two of torch's launchers as two machines."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PROGRAMS, forked, free_port, wait_until
from safetensors.torch import load_file
from test_resume import batches, begin_of

pytestmark = pytest.mark.slow

STEPS = 30
FLAGS = ["--batch-size", 32, "--global-batch-size", 64, "--checkpoint-every", 5, "--epochs", 3]
FLAGS += ["--keep", 9, "--lr", 0.02]
RUN = {"recipe": "ddp_cifar", "plain": True, "flags": FLAGS}
# The defaults are 30 s for others to come, and 3 x 5 s until a machine that is silent is left out.
IMPATIENT = "last_call_timeout=15,keep_alive_interval=1"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max_restarts", "3"]
TORCHRUN += ["--nproc_per_node", "1", "--rdzv_backend", "c10d"]


class Machine:
    """A launcher and its rank, which waits at a gate, a world size and a step counted from its
    start, until it is told to stop or killed."""

    def __init__(self, directory, name, port, gate=None):
        self.log = directory / f"{name}.log"
        run = {**RUN, "directory": directory / "run", "gate": gate}
        # The launcher at the endpoint holds what they agree on: it has to be the one that lives.
        conf = f"{IMPATIENT},is_host={int(name == 'one')}"
        command = [*TORCHRUN, "--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf", conf]
        command += [__file__, json.dumps(run, default=str)]
        environment = {**os.environ, **PROGRAMS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.log, "w") as file:
            self.launcher = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def kill(self):
        """As when it loses its power: the launcher and its rank, which is in another session."""
        found = ["pgrep", "--parent", str(self.launcher.pid)]
        children = subprocess.run(found, capture_output=True, text=True).stdout.split()
        for pid in (self.launcher.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    def leave(self):
        if self.launcher.poll() is None:
            self.kill()


def starts(directory):
    """[{step: digests of its batches}] of each start of the run, over all ranks."""
    found = {}
    for path in sorted((directory / "run").glob("start-*")):
        steps = found.setdefault(path.name.split("-")[1], {})
        for line in path.read_text().splitlines():
            step, digest = line.split()
            steps.setdefault(int(step), []).append(digest)
    return [found[time] for time in sorted(found)]


def test_one_of_two_machines_dies_and_comes_back_and_each_sample_is_seen_once(tmp_path):
    port = free_port()
    one = Machine(tmp_path, "one", port, gate=["1", 12])
    machines = [one]
    try:
        machines.append(Machine(tmp_path, "other", port, gate=["2", 8]))
        wait_until(lambda: list(tmp_path.glob("run/gate-2")), 300)
        machines[1].kill()
        wait_until(lambda: list(tmp_path.glob("run/gate-1")), 300)
        machines.append(Machine(tmp_path, "again", port))
        wait_until(lambda: None not in [one.launcher.poll(), machines[2].launcher.poll()], 300)
    finally:
        for machine in machines:
            machine.leave()
    logs = [machine.log.read_text() for machine in machines]
    assert [machine.launcher.returncode for machine in machines] == [0, -9, 0], logs
    ((codes, output),) = forked(
        [{**RUN, "processes": 2, "directory": tmp_path / "whole"}], tmp_path
    )
    assert codes == [0, 0] and begin_of(output) == 0, output

    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    first, alone, last = starts(tmp_path)
    assert min(first) == 1 and max(first) == 7
    assert min(alone) == 6 and [len(digests) for digests in first.values()] == [2] * len(first)
    assert min(last) > 12 and max(last) == STEPS
    # What counts is what was computed last.
    trained = {step: sorted(digests) for step, digests in {**first, **alone, **last}.items()}
    whole = zip(*(batches(tmp_path / "whole", rank) for rank in (0, 1)), strict=True)
    assert trained == {step: sorted(pair) for step, pair in enumerate(whole, start=1)}
    in_an_epoch = [digest for step in range(1, STEPS // 3 + 1) for digest in trained[step]]
    assert len(set(in_an_epoch)) == 20


def with_gate(recipe, run):
    """Record the batches of each step, and wait in one of them for a signal."""
    directory = Path(run["directory"])
    began = []
    signals = []
    step_of_recipe = recipe.train_step

    class Signal(recipe.StopSignal):
        def receive(self, number):
            signals.append(number)
            super().receive(number)

    recipe.StopSignal = Signal

    def train_step(*arguments):
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        (seed,) = (x for x in arguments if isinstance(x, tuple))
        step = seed[1]
        if not began:
            began.append(step)
        port = os.environ["MASTER_PORT"]  # of this start
        if run["gate"] == [world, step - began[0] + 1]:
            (directory / f"gate-{world}").touch()
            while not signals:
                time.sleep(0.05)
        before = len(batches(directory, rank)) if (directory / f"batches.{rank}").exists() else 0
        result = step_of_recipe(*arguments)
        with open(directory / f"start-{began[0]:04}.{port}-{rank}", "a") as file:
            for digest in batches(directory, rank)[before:]:
                file.write(f"{step} {digest}\n")
        return result

    recipe.train_step = train_step


if __name__ == "__main__":
    from programs.disturbed_training import train

    run = json.loads(sys.argv[1])
    train(run, prepare=lambda recipe: with_gate(recipe, run))
