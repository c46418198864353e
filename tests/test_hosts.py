"""Several machines without a scheduler: one `accelerate launch` on each, here two on this machine,
over its loopback interface or, as root, as two network namespaces with an address each."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import (
    ACCELERATE,
    IN_FLOAT64,
    LITTLE_DATA,
    PROGRAMS,
    ROOT,
    ROUNDING,
    SYNTHETIC_DATA,
    Launched,
    assert_same_training,
    copy,
    free_port,
    outputs,
    train_forked,
    wait_until,
)
from kubelet import PROBLEM, two_networks

pytestmark = pytest.mark.slow

FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "4"]
FLAGS += ["--batch-size", "16", "--lr", "0.02", "--log-every", "1"]
RECIPES = ["pipeline_cifar", "ddp_cifar"]
ENDLESS = ["--max-steps", "100000", "--epochs", "10000", "--hang-timeout", "6"]
# Of 512 steps: the packets are lost before the first save, in which a hang is not detected.
LONG_EPOCH = SYNTHETIC_DATA, "synthetic_images(2**14, seed=1), synthetic_images(64, seed=2)"

# A host whose name, as in Debian's /etc/hosts, is no address at which another one could reach it.
BOOT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && shift && exec "$@"'


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Return the address of the first host; {name: a process that is there} of both; and why they
    are not network namespaces, if they are not."""
    if PROBLEM:
        yield "127.0.0.1", {"one": None, "other": None}, PROBLEM
        return
    directory, there = tmp_path_factory.mktemp("etc"), {}
    with two_networks("eth7") as names:
        for host, name in enumerate(names):
            address = f"-n {name} addr add 10.77.0.{host + 1}/24 dev eth7"
            subprocess.run(["ip", *address.split()], check=True)
            known = directory / f"{name}.hosts"
            known.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.1 host0\n10.77.0.2 host1\n"
            )
            boot = ["unshare", "--uts", "--mount", "sh", "-c", BOOT, name, known]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = ["ip", "netns", "exec", name, *boot, "sh", "-c", "echo; read line"]
            there[name] = subprocess.Popen(command, **pipes)
            there[name].stdout.readline()  # until it is set up
        yield "10.77.0.1", there, None
        for process in there.values():
            process.communicate("\n")


@pytest.fixture(scope="module")
def trained(hosts, tmp_path_factory):
    """Two hosts train a pipeline, whose stages are on different hosts, and then ddp until no packet
    arrives any more: both run and hold their connections open, but none hears of the other. Return
    the outputs of their pipeline and of one that one host trains; exit codes; what they printed."""
    (address, there, problem), directory = hosts, tmp_path_factory.mktemp("trained")
    line = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml"]
    line += ["--num_processes", 2, "--main_process_ip", address]
    line += ["--main_process_port", free_port()]
    ports = json.dumps([free_port(), None if problem else free_port()])
    data = dict(zip(RECIPES, (LITTLE_DATA, LONG_EPOCH), strict=True))
    scripts = [copy(x, directory / f"{x}.py", data[x], project=IN_FLOAT64) for x in RECIPES]
    running = []
    for rank, process in enumerate(there.values()):
        command = [*line, "--machine_rank", rank, __file__, ports]
        environment = {**os.environ, **PROGRAMS}
        if not problem:
            environment["GLOO_SOCKET_IFNAME"] = "eth7"
        with open(directory / f"{rank}.log", "w") as log:
            options = {"output": log, "namespaces": process and process.pid}
            running.append(Launched(command, directory, environment, **options))
    (one,) = train_forked(directory, (2, scripts[0], FLAGS))
    metrics = directory / "runs/ddp_cifar/metrics.jsonl"
    try:
        if not problem:
            wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 5)
            nowhere = "lladdr 02:00:00:00:00:99 dev eth7 nud permanent"
            for name, other in zip(there, ("10.77.0.2", "10.77.0.1"), strict=True):
                lose = ["ip", "-n", name, "neigh", "replace", other, *nowhere.split()]
                subprocess.run(lose, check=True)
        codes = [host.wait() for host in running]
    finally:
        for host in running:
            host.kill()
    ours = outputs(directory / "runs/pipeline_cifar")
    return ours, one, codes, [(directory / f"{rank}.log").read_text() for rank in (0, 1)]


def test_two_hosts_train_like_one(hosts, trained):
    ours, one, codes, printed = trained
    assert hosts[2] is None or codes == [0, 0], printed
    assert ours.summary["world_size"] == 2
    assert_same_training(ours, one, ROUNDING)
    assert printed[0].count("step 4/4 epoch 1 loss") == 1 and "step 4/4" not in printed[1]


def test_a_host_whose_packets_are_lost_is_named_by_the_other(hosts, trained):
    """By names that are, as in Debian's /etc/hosts, loopback addresses."""
    _, there, problem = hosts
    if problem:
        pytest.skip(problem)
    *_, codes, printed = trained
    assert 0 not in codes, printed
    first, second = there
    said = f"ddp_cifar: error: no step for 6 s because of rank 1 on {second} (no report)"
    assert printed[0].count(": error: ") == 1 and said in printed[0], printed[0]
    # The store in which ranks report is on the first host, and never answers the other one.
    assert f"no step for 6 s, rank 1 on {second} is at\n  File" in printed[1], printed[1]
    assert f"rank 0 on {first} is at\n  File" in printed[0]


def train_all(ports):
    """Train in the process that the launcher has started, each recipe in a fork of its own and on a
    port of its own: the launcher's serves one training."""
    import accelerate  # noqa: F401
    import torchvision  # noqa: F401

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    more = [], ENDLESS
    for recipe, flags, port in zip(RECIPES, more, ports, strict=True):
        if port and not (child := os.fork()):
            os.environ["MASTER_PORT"] = str(port)
            sys.argv = [f"{recipe}.py", *FLAGS, *flags]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        if port and (status := os.waitpid(child, 0)[1]):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    train_all(json.loads(sys.argv[1]))
