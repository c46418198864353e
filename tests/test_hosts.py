"""Several machines without a scheduler: one `accelerate launch` on each, here in two network
namespaces with an address each."""

import contextlib
import os
import subprocess

import pytest
from conftest import (
    ACCELERATE,
    CNN,
    FEW_IMAGES,
    IN_FLOAT64,
    ROUNDING,
    SYNTHETIC_DATA,
    assert_same_training,
    copy,
)
from processes import ROOT, Launched, free_port, outputs, train_forked, wait_until

pytestmark = pytest.mark.slow

FLAGS = [*CNN, "--batch-size", 16, "--lr", 0.02, "--log-every", 1]
# Of 512 steps: the packets are lost before the first save, in which a hang is not detected.
LONG_EPOCH = SYNTHETIC_DATA, "synthetic_images(2**14, seed=1), synthetic_images(64, seed=2)"

# A host whose name, as in Debian's /etc/hosts, is no address at which another one could reach it.
BOOT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && shift && exec "$@"'


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """{name: a process that is there} of two hosts, with an interface eth7 each that are joined."""
    directory, there = tmp_path_factory.mktemp("etc"), {}
    first, second = names = [f"recipes-{os.getpid()}-{index}" for index in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add eth7 netns {first} type veth peer name eth7 netns {second}")
    commands += [f"-n {name} link set eth7 up" for name in names]
    commands += [f"-n {x} addr add 10.77.0.{n}/24 dev eth7" for n, x in enumerate(names, 1)]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        for name in names:
            known = directory / f"{name}.hosts"
            addresses = ("127.0.0.1 localhost", f"127.0.1.1 {name}")
            known.write_text("\n".join([*addresses, "10.77.0.1 host0", "10.77.0.2 host1\n"]))
            boot = ["unshare", "--uts", "--mount", "sh", "-c", BOOT, name, known]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = ["ip", "netns", "exec", name, *boot, "sh", "-c", "echo up; read line"]
            there[name] = subprocess.Popen(command, **pipes)
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


@contextlib.contextmanager
def launched(hosts, directory, script, *flags):
    """Start one `accelerate launch` of a copy on each host. Yield a function that waits for their
    ends, and returns their exit codes and what they printed."""
    logs = [directory / f"{rank}.log" for rank in (0, 1)]
    command = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml"]
    command += ["--num_processes", 2, "--main_process_ip", "10.77.0.1"]
    command += ["--main_process_port", free_port()]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth7"}
    with contextlib.ExitStack() as stack:
        running = []
        for rank, process in enumerate(hosts.values()):
            words = [*command, "--machine_rank", rank, script, *FLAGS, *flags]
            options = {"output": logs[rank], "namespaces": process.pid}
            running.append(stack.enter_context(Launched(words, directory, environment, **options)))
        yield lambda: ([host.wait() for host in running], [log.read_text() for log in logs])


def test_two_hosts_train_like_one(hosts, tmp_path):
    """A pipeline, whose stages are on different hosts."""
    script = copy("pipeline_cifar", tmp_path / "mine.py", FEW_IMAGES, project=IN_FLOAT64)
    with launched(hosts, tmp_path, script, "--max-steps", 4) as results:
        (one,) = train_forked(tmp_path, (2, script, [*FLAGS, "--max-steps", 4]))
        codes, printed = results()
    assert codes == [0, 0], printed
    ours = outputs(tmp_path / "runs/mine")
    assert ours.summary["world_size"] == 2
    assert_same_training(ours, one, ROUNDING)
    assert printed[0].count("step 4/4 epoch 1 loss") == 1 and "step 4/4" not in printed[1]


def test_a_host_whose_packets_are_lost_is_named_by_the_other(hosts, tmp_path):
    """Both run and hold their connections open, but none hears of the other. The names are, as in
    Debian's /etc/hosts, loopback addresses."""
    script = copy("ddp_cifar", tmp_path / "mine.py", LONG_EPOCH, project=IN_FLOAT64)
    metrics = tmp_path / "runs/mine/metrics.jsonl"
    nowhere = "lladdr 02:00:00:00:00:99 dev eth7 nud permanent"
    with launched(hosts, tmp_path, script, "--epochs", 10_000, "--hang-timeout", 6) as results:
        wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 5)
        for name, other in zip(hosts, ("10.77.0.2", "10.77.0.1"), strict=True):
            lose = ["ip", "-n", name, "neigh", "replace", other, *nowhere.split()]
            subprocess.run(lose, check=True)
        codes, printed = results()
    assert 0 not in codes, printed
    first, second = hosts
    said = f"mine: error: no step for 6 s because of rank 1 on {second} (no report)"
    assert printed[0].count(": error: ") == 1 and said in printed[0], printed[0]
    # The store in which ranks report is on the first host, and never answers the other one.
    assert f"no step for 6 s, rank 1 on {second} is at\n  File" in printed[1], printed[1]
    assert f"rank 0 on {first} is at\n  File" in printed[0]
