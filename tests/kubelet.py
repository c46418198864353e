"""A stand-in for the kubelet and the DNS, for test_kubernetes.py: it starts the pods of
clusters/kubernetes.yaml as Kubernetes would. Each is a tree of processes with PID 1 in a namespace
of its own, and has its own network, host name and mounts."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml

# Host name, hosts, directory: what a pod finds before its first process starts.
BOOT = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind "$2" "$3" &&
mount -t tmpfs -o "size=$4" tmpfs /dev/shm && ip link set lo up && cd "$3" && shift 4 && exec "$@"
"""
LAUNCHER = Path(__file__).parent / "programs/launcher"  # whose ranks are forks of it
ENVIRONMENT = ["OMP_WAIT_POLICY", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"]
# With other instructions than the run that they are compared with, pods round otherwise.
ENVIRONMENT += ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"]


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
    """Return why there are no such networks here, or None."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "needs root and the command ip (Debian: iproute2)"
    try:
        with two_networks("eth0"):
            return None
    except subprocess.CalledProcessError as error:  # such as in a container
        return f"no network namespaces here: {error.stderr.strip()}"


PROBLEM = find_problem()


class Pod:
    """One try of the pod of this index."""

    def __init__(self, pods, index):
        name = f"{pods.name}-{index}"
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {entry["name"]: entry["value"] for entry in pods.container["env"]}
        environment |= {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name}
        environment["PYTHONPATH"] = str(LAUNCHER)
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [*pods.container["command"], *pods.container["args"]]
        expanded = [re.sub(r"\$\((\w+)\)", lambda x: environment[x[1]], word) for word in words]
        command = ["ip", "netns", "exec", pods.networks[index], "unshare", "--uts", "--mount"]
        command += ["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", BOOT, name]
        command += [pods.hosts, pods.directory, pods.container["workingDir"], pods.shm_size]
        with open(pods.directory / f"{name}.log", "a") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            self.process = subprocess.Popen([*map(str, command), *expanded], **options)

    def terminate(self):
        """As an eviction does: SIGTERM to PID 1."""
        for process in self.first_processes():
            process.send_signal(signal.SIGTERM)

    def first_processes(self):
        return psutil.Process(self.process.pid).children()


class Pods:
    """The two pods of a manifest, by their indexes."""

    def __init__(self, manifest, directory):
        _, job = yaml.safe_load_all(manifest)
        pod = job["spec"]["template"]["spec"]
        self.directory = directory
        self.name = job["metadata"]["name"]
        self.hosts = directory / "hosts"
        (self.container,) = pod["containers"]
        self.grace = pod["terminationGracePeriodSeconds"]
        (memory,) = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
        self.shm_size = memory["sizeLimit"].removesuffix("i")
        names = [f"{self.name}-{index}" for index in (0, 1)]
        lines = [f"10.78.0.{n} {name}.{pod['subdomain']} {name}" for n, name in enumerate(names, 1)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.running = []
        self.link = two_networks("eth0")

    def __enter__(self):
        self.networks = self.link.__enter__()
        for number, network in enumerate(self.networks, 1):
            add = f"ip -n {network} addr add 10.78.0.{number}/16 dev eth0"
            subprocess.run(add.split(), check=True)
        return self

    def __exit__(self, *error):
        for pod in self.running:
            pod.process.kill()
            pod.process.wait()
        self.link.__exit__(*error)

    def start(self, *indexes):
        started = [Pod(self, index) for index in indexes]
        self.running += started
        return started

    def exit_codes(self, pods):
        """Wait until they end by themselves, or the grace period of a pod that was evicted."""
        return [pod.process.wait(200) for pod in pods]

    def logs(self):
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))
