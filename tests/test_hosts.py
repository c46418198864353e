"""Several machines without a scheduler: one `accelerate launch` on each, here in two network
namespaces with an address each."""

import contextlib
import os
import shutil
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
from processes import PROGRAMS, ROOT, Launched, free_port, outputs, train_forked, wait_until


@contextlib.contextmanager
def two_networks(interface):
    """The names of two network namespaces. Their interfaces of this name are joined and up."""
    names = [f"recipes-{os.getpid()}-{index}" for index in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append("link add {0} netns {1} type veth peer name {0} netns {2}")
    commands += [f"-n {name} link set {interface} up" for name in names]
    commands.append("netns exec {1} unshare --uts --mount --pid --fork true")
    try:
        for command in commands:
            words = ["ip", *command.format(interface, *names).split()]
            subprocess.run(words, check=True, capture_output=True, text=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def find_problem():
    """Return why there are no such networks here, or ""."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "needs root and the command ip (Debian: iproute2)"
    try:
        with two_networks("eth0"):
            return ""
    except subprocess.CalledProcessError as error:  # such as in a container
        return f"no network namespaces here: {error.stderr.strip()}"


PROBLEM = find_problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)]

FLAGS = [*CNN, "--batch-size", 16, "--lr", 0.02, "--log-every", 1]
# Of 512 steps: the packets are lost before the first save, in which a hang is not detected.
LONG_EPOCH = SYNTHETIC_DATA, "synthetic_images(2**14, seed=1), synthetic_images(64, seed=2)"

# A host whose name, as in Debian's /etc/hosts, is no address at which another one could reach it.
BOOT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && shift && exec "$@"'


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """{name: a process that is there} of two hosts."""
    directory, there = tmp_path_factory.mktemp("etc"), {}
    with two_networks("eth7") as names:
        for host, name in enumerate(names):
            address = f"-n {name} addr add 10.77.0.{host + 1}/24 dev eth7"
            subprocess.run(["ip", *address.split()], check=True)
            known = directory / f"{name}.hosts"
            addresses = ("127.0.0.1 localhost", f"127.0.1.1 {name}")
            known.write_text("\n".join([*addresses, "10.77.0.1 host0", "10.77.0.2 host1\n"]))
            boot = ["unshare", "--uts", "--mount", "sh", "-c", BOOT, name, known]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = ["ip", "netns", "exec", name, *boot, "sh", "-c", "echo; read line"]
            there[name] = subprocess.Popen(command, **pipes)
            there[name].stdout.readline()  # until it is set up
        yield there
        for process in there.values():
            process.communicate("\n")


@contextlib.contextmanager
def launched(hosts, directory, script, *flags):
    """Start one `accelerate launch` of a copy on each host. Yield a function that waits for their
    ends, and returns their exit codes and what they printed."""
    logs, running = [directory / f"{rank}.log" for rank in (0, 1)], []
    command = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml"]
    command += ["--num_processes", 2, "--main_process_ip", "10.77.0.1"]
    command += ["--main_process_port", free_port()]
    environment = {**os.environ, **PROGRAMS, "GLOO_SOCKET_IFNAME": "eth7"}
    for rank, process in enumerate(hosts.values()):
        words = [*command, "--machine_rank", rank, script, *FLAGS, *flags]
        with open(logs[rank], "w") as log:
            options = {"output": log, "namespaces": process.pid}
            running.append(Launched(words, directory, environment, **options))
    try:
        yield lambda: ([host.wait() for host in running], [log.read_text() for log in logs])
    finally:
        for host in running:
            host.kill()


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
