"""A machine that is lost, and one that comes back: two of torch's launchers as two machines."""

import re
import sys

import psutil
import pytest
from conftest import (
    CNN,
    IN_FLOAT64,
    NARROW,
    ROUNDING,
    SYNTHETIC_DATA,
    assert_same_training,
    copy,
    project,
)
from processes import Launched, free_port, outputs, train_forked, wait_until

pytestmark = pytest.mark.slow

STEPS = 30  # of three epochs
DATA = SYNTHETIC_DATA, "synthetic_images(640, seed=1), synthetic_images(64, seed=2)"
FLAGS = [*CNN, "--batch-size", 32, "--global-batch-size", 64, "--checkpoint-every", 5]
FLAGS += ["--epochs", 3, "--keep", 9, "--lr", 0.02, "--log-every", 1]
# The defaults are 30 s for others to come, and 3 x 5 s until a machine that is silent is left out.
# One that lives is silent for two intervals, and for longer where others use the cores, too.
IMPATIENT = "last_call_timeout=15,keep_alive_interval=3"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max_restarts", "3"]
TORCHRUN += ["--nproc_per_node", "1", "--rdzv_backend", "c10d"]


class Machine:
    """A launcher and its rank, which waits at a gate until it is told to stop or killed."""

    def __init__(self, directory, name, port, gate="0/0"):
        self.log = directory / f"{name}.log"
        # The launcher at the endpoint holds what they agree on: it has to be the one that lives.
        conf = f"{IMPATIENT},is_host={int(name == 'one')}"
        command = [*TORCHRUN, "--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf", conf]
        command += [directory / "mine.py", *FLAGS, "--output-dir", directory / "run"]
        more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GATE": gate}
        self.launcher = Launched(command, env=more, output=self.log, session=True)

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
    text = project("interruption", train_step="step_at_a_gate") + IN_FLOAT64
    script = copy("ddp_cifar", tmp_path / "mine.py", DATA, *NARROW, project=text)
    port = free_port()
    machines = [Machine(tmp_path, "one", port, gate="1/12")]
    try:
        machines.append(Machine(tmp_path, "other", port, gate="2/8"))
        wait_until((tmp_path / "run/gate-2").exists)
        machines[1].kill()
        wait_until((tmp_path / "run/gate-1").exists)
        machines.append(Machine(tmp_path, "again", port))
        wait_until(lambda: None not in [machines[i].launcher.poll() for i in (0, 2)])
    finally:
        for machine in machines:
            machine.kill()
    logs = [machine.log.read_text() for machine in machines]
    assert [machine.launcher.returncode for machine in machines] == [0, -9, 0], logs
    (whole,) = train_forked(tmp_path, (2, script, FLAGS))
    assert_same_training(outputs(tmp_path / "run"), whole, ROUNDING)
    # The number of ranks in each start, and the step from which they continued.
    pattern = r'"world_size": (\d+),.*?"resumed_from": (\d+)'
    starts = re.findall(pattern, "".join(logs), re.DOTALL)
    first, alone, (ranks, step) = sorted(starts, key=lambda start: int(start[1]))
    assert [first, alone, ranks] == [("2", "0"), ("1", "5"), "2"] and 12 < int(step) < STEPS - 1
