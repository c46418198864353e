"""Several machines without a scheduler: a launcher on each of two hosts with an address of its own,
which lose each other's packets; and two of torch's elastic launchers, one of which dies."""

import contextlib
import os
import re
import subprocess
import sys

import psutil
import pytest
from conftest import (
    ACCELERATE,
    CNN,
    IN_FLOAT64,
    NARROW,
    ROUNDING,
    SYNTHETIC_DATA,
    assert_same_training,
    copy,
    project,
)
from processes import ROOT, Launched, free_port, outputs, train_forked, wait_until

pytestmark = pytest.mark.slow

ENDLESS = [*CNN, "--batch-size", 16, "--log-every", 1, "--epochs", 10_000, "--hang-timeout", 6]
# Of 512 steps: the packets are lost before the first save, in which a hang is not detected.
LONG_EPOCH = SYNTHETIC_DATA, "synthetic_images(2**14, seed=1), synthetic_images(64, seed=2)"

BOOT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && echo up && read line'


@pytest.fixture
def hosts(tmp_path):
    """{name: a process that is there} of two hosts, with an interface eth7 each that are joined.
    For each the name of its own is, as in Debian's /etc/hosts, a loopback address."""
    there = {}
    first, second = names = [f"recipes-{os.getpid()}-{index}" for index in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add eth7 netns {first} type veth peer name eth7 netns {second}")
    commands += [f"-n {name} link set eth7 up" for name in names]
    commands += [f"-n {x} addr add 10.77.0.{n}/24 dev eth7" for n, x in enumerate(names, 1)]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        for name in names:
            (tmp_path / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", BOOT]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            there[name] = subprocess.Popen([*command, name, tmp_path / name], **pipes)
            if not there[name].stdout.readline():
                pytest.skip("a container may have no namespaces of its own")
        yield there
        for process in there.values():
            process.communicate("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and the command ip (Debian: iproute2): {error}")
    finally:
        for name in names:
            subprocess.run(f"ip netns delete {name}", shell=True, capture_output=True)


def test_a_host_whose_packets_are_lost_is_named_by_the_other(hosts, tmp_path):
    """Both run and hold their connections open, but none hears of the other."""
    script = copy("ddp_cifar", tmp_path / "mine.py", LONG_EPOCH)
    metrics = tmp_path / "runs/mine/metrics.jsonl"
    logs = [tmp_path / f"{name}.log" for name in hosts]
    command = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml"]
    command += ["--num_processes", 2, "--main_process_ip", "10.77.0.1"]
    command += ["--main_process_port", free_port()]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth7"}
    with contextlib.ExitStack() as stack:
        running = []
        for rank, process in enumerate(hosts.values()):
            words = [*command, "--machine_rank", rank, script, *ENDLESS]
            options = {"output": logs[rank], "namespaces": process.pid}
            running.append(stack.enter_context(Launched(words, tmp_path, environment, **options)))
        wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 5)
        nowhere = "lladdr 02:00:00:00:00:99 dev eth7 nud permanent"
        for name, other in zip(hosts, ("10.77.0.2", "10.77.0.1"), strict=True):
            lose = ["ip", "-n", name, "neigh", "replace", other, *nowhere.split()]
            subprocess.run(lose, check=True)
        assert 0 not in [host.wait() for host in running]
    printed = [log.read_text() for log in logs]
    first, second = hosts
    assert "\nstep 4/" in printed[0] and "step 4/" not in printed[1], printed
    said = f"mine: error: no step for 6 s because of rank 1 on {second} (no report)"
    assert printed[0].count(": error: ") == 1 and said in printed[0], printed[0]
    # The store in which ranks report is on the first host, and never answers the other one.
    assert f"no step for 6 s, rank 1 on {second} is at\n  File" in printed[1], printed[1]
    assert f"rank 0 on {first} is at\n  File" in printed[0]


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
