"""Several machines without a scheduler: one `accelerate launch` on each, here two on this machine,
over its loopback interface or, as root, as two network namespaces with an address each."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ACCELERATE, PROGRAMS, ROOT, forked, free_port, outputs, wait_until
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "4"]
FLAGS += ["--batch-size", "16", "--lr", "0.02", "--log-every", "1"]
RECIPES = "amp_cifar", "pipeline_cifar"

# A host whose name, as in Debian's /etc/hosts, is no address at which another one could reach it.
BOOT = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && shift && exec "$@"'


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Return the address of the first host; for each, the words before a command that run it there;
    and why they are not network namespaces, if they are not."""
    directory = tmp_path_factory.mktemp("etc")
    one = "127.0.0.1", ([], [])
    if os.geteuid() != 0 or not shutil.which("ip"):
        yield (
            *one,
            "needs root and the command ip (Debian: iproute2), for addresses of their own",
        )
        return
    names = [f"recipes-{os.getpid()}-{host}" for host in (0, 1)]
    commands = [f"netns add {name}" for name in names]
    commands.append("link add eth7 netns {} type veth peer name eth7 netns {}".format(*names))
    for host, name in enumerate(names):
        commands += [
            f"-n {name} addr add 10.77.0.{host + 1}/24 dev eth7",
            f"-n {name} link set eth7 up",
        ]
        commands.append(f"netns exec {name} unshare --uts --mount true")
        (directory / f"{name}.hosts").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.1 host0\n10.77.0.2 host1\n"
        )
    try:
        for command in commands:
            process = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if process.returncode != 0:
                yield *one, f"no network namespaces here: ip {command}: {process.stderr.strip()}"
                return
        boot = ["unshare", "--uts", "--mount", "sh", "-c", BOOT]
        yield (
            "10.77.0.1",
            [["ip", "netns", "exec", n, *boot, n, directory / f"{n}.hosts"] for n in names],
            None,
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture(scope="module")
def trained(hosts, tmp_path_factory):
    """Directories of two hosts that have trained RECIPES, and of one. In the pipeline the two
    stages are on different hosts. Each host has a disk of its own."""
    (address, prefixes, _), tmp_path = hosts, tmp_path_factory.mktemp("trained")
    line = [
        ACCELERATE,
        "launch",
        "--config_file",
        ROOT / "accelerate_configs/nodes.yaml",
        "--num_processes",
        2,
    ]
    line += ["--main_process_ip", address, "--main_process_port", free_port()]
    ports = json.dumps({recipe: free_port() for recipe in RECIPES})
    running = []
    for rank, prefix in enumerate(prefixes):
        directory = tmp_path / f"host{rank}"
        directory.mkdir()
        command = list(map(str, [*prefix, *line, "--machine_rank", rank, __file__, ports]))
        environment = {**os.environ, **PROGRAMS, "OMP_WAIT_POLICY": "passive"}
        if prefix:
            environment["GLOO_SOCKET_IFNAME"] = "eth7"
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen(command, cwd=directory, env=environment, **pipes))
    reference = {"processes": 2, "directory": tmp_path, "flags": FLAGS}
    codes = forked(
        [{**reference, "script": ROOT / f"recipes/{recipe}.py"} for recipe in RECIPES],
        tmp_path,
        OMP_WAIT_POLICY="passive",
    )
    try:
        printed = [host.communicate(timeout=200)[0] for host in running]
    finally:
        for host in running:
            host.kill()
    assert [host.returncode for host in running] == [0, 0], printed
    assert [code for code, _ in codes] == [[0, 0]] * len(RECIPES), codes
    assert printed[0].count("step 4/4 epoch 1 loss") == len(RECIPES) and "step" not in printed[1]
    return tmp_path / "host0", tmp_path


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_hosts_train_like_one(trained, recipe):
    ours, theirs = (outputs(host / f"runs/{recipe}") for host in trained)
    assert ours["summary"]["world_size"] == theirs["summary"]["world_size"] == 2
    ours, theirs = load_file(ours["weights"]), load_file(theirs["weights"])
    assert max((ours[name] - value).abs().max() for name, value in theirs.items()) < 1e-6


def test_two_hosts_whose_names_are_loopback_addresses_have_found_each_other(hosts, trained):
    if problem := hosts[2]:
        pytest.skip(problem)
    assert (trained[0] / "runs").is_dir()


def test_a_host_whose_packets_are_lost_is_named(hosts, tmp_path):
    """Both hosts go on running and hold their connections open, but none hears of the other."""
    address, prefixes, problem = hosts
    if problem:
        pytest.skip(problem)
    line = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml"]
    line += ["--num_processes", 2, "--main_process_ip", address]
    line += ["--main_process_port", free_port()]
    flags = [*FLAGS, "--max-steps", 100_000, "--epochs", 10_000, "--hang-timeout", 5]
    running = []
    for rank, prefix in enumerate(prefixes):
        directory = tmp_path / f"host{rank}"
        directory.mkdir()
        recipe = ROOT / "recipes/ddp_cifar.py"
        command = [*prefix, *line, "--machine_rank", rank, recipe, *flags]
        running.append(
            subprocess.Popen(
                list(map(str, command)),
                cwd=directory,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth7"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    metrics = tmp_path / "host0/runs/ddp_cifar/metrics.jsonl"
    try:
        wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 5, 120)
        nowhere = "lladdr 02:00:00:00:00:99 dev eth7 nud permanent"
        for prefix, other in zip(prefixes, ("10.77.0.2", "10.77.0.1"), strict=True):
            lose = [*prefix, "ip", "neigh", "replace", other, *nowhere.split()]
            subprocess.run(list(map(str, lose)), check=True)
        printed = [host.communicate(timeout=120)[0] for host in running]
    finally:
        for host in running:
            host.kill()
    for rank, host in enumerate(running):
        assert host.returncode != 0
        other = prefixes[1 - rank][3]
        told = f"ddp_cifar: error: rank {1 - rank} on {other} (it was stopped or killed, or its "
        assert told + "machine or network is gone) has not reached the end of step" in printed[rank]


def train_all(ports):
    """The process that the launcher has started: it trains each recipe in a fork of its own, for
    torch to be imported once, and on a port of its own, because the launcher's serves one
    training."""
    import accelerate  # noqa: F401
    import torchvision  # noqa: F401

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for recipe, port in ports.items():
        if not (child := os.fork()):
            os.environ["MASTER_PORT"] = str(port)
            sys.argv = [str(Path(ROOT, f"recipes/{recipe}.py")), *FLAGS]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    train_all(json.loads(sys.argv[1]))
