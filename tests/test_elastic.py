"""A machine that is lost, and one that comes back: two of torch's launchers as two machines."""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    PROGRAMS,
    ROUNDING,
    Launched,
    assert_same_training,
    free_port,
    outputs,
    train_forked,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 30
FLAGS = ["--batch-size", 32, "--global-batch-size", 64, "--checkpoint-every", 5, "--epochs", 3]
FLAGS += ["--keep", 9, "--lr", 0.02, "--log-every", 1]
RUN = {"recipe": "ddp_cifar", "plain": True, "in_float64": True, "flags": FLAGS}
# The defaults are 30 s for others to come, and 3 x 5 s until a machine that is silent is left out.
# One that lives is silent for two intervals, and for longer where others use the cores, too.
IMPATIENT = "last_call_timeout=15,keep_alive_interval=3"
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
            self.launcher = Launched(command, env=environment, output=file, session=True)

    def kill(self):
        """As when it loses its power: the launcher and its rank, which is in another session."""
        if self.launcher.poll() is None:
            for process in psutil.Process(self.launcher.pid).children():
                process.kill()
            self.launcher.kill()
            self.launcher.wait()


def test_one_of_two_machines_dies_and_comes_back_and_the_run_ends_like_one_that_was_left_alone(
    tmp_path,
):
    port = free_port()
    one = Machine(tmp_path, "one", port, gate=["1", 12])
    machines = [one]
    try:
        machines.append(Machine(tmp_path, "other", port, gate=["2", 8]))
        wait_until(lambda: list(tmp_path.glob("run/gate-2")))
        machines[1].kill()
        wait_until(lambda: list(tmp_path.glob("run/gate-1")))
        machines.append(Machine(tmp_path, "again", port))
        wait_until(lambda: None not in [one.launcher.poll(), machines[2].launcher.poll()])
    finally:
        for machine in machines:
            machine.kill()
    logs = [machine.log.read_text() for machine in machines]
    assert [machine.launcher.returncode for machine in machines] == [0, -9, 0], logs
    (whole,) = train_forked(tmp_path, (2, "ddp_cifar", FLAGS, {"in_float64": True}))
    assert_same_training(outputs(tmp_path / "run"), whole, ROUNDING)
    # The ranks of each start, and the steps from which they continued.
    begins = sorted(path.name for path in tmp_path.glob("run/start-*"))
    assert begins[:2] == ["start-0001-0-of-2", "start-0001-1-of-2"], begins
    alone, *back = begins[2:]
    assert alone == "start-0006-0-of-1" and [name[-6:] for name in back] == ["0-of-2", "1-of-2"]
    assert 13 < int(back[0][6:10]) < STEPS


def with_gate(recipe, run):
    """Note where each rank begins, and wait in one of its steps for a signal."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    steps = []
    signals = []
    step_of_recipe = recipe.train_step

    class Watcher(recipe.Watcher):
        def note(self, number, *frame):
            signals.append(number)
            super().note(number)

    def train_step(training, *arguments):
        steps.append(training.step)
        Path(run["directory"], f"start-{steps[0]:04}-{rank}-of-{world}").touch()
        if run["gate"] == [world, len(steps)]:
            Path(run["directory"], f"gate-{world}").touch()
            while not signals:
                time.sleep(0.05)
        return step_of_recipe(training, *arguments)

    recipe.Watcher = Watcher
    recipe.train_step = train_step


if __name__ == "__main__":
    from programs.disturbed_training import train

    run = json.loads(sys.argv[1])
    train(run, prepare=lambda recipe: with_gate(recipe, run))
