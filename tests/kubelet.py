"""A stand-in for the kubelet, the Job's controller and the DNS, for test_kubernetes.py: it treats
clusters/kubernetes.yaml as Kubernetes would. Each pod is a tree of processes with PID 1 in a
namespace of its own, and has its own network, host name and mounts."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

# Host name, hosts, directory: what a pod finds before its first process starts.
BOOT = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind "$2" "$3" &&
mount -t tmpfs -o "size=$4" tmpfs /dev/shm && ip link set lo up && cd "$3" && shift 4 && exec "$@"
"""
LAUNCHER = Path(__file__).parent / "programs/launcher"  # whose ranks are forks of it
ENVIRONMENT = ("OMP_WAIT_POLICY", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


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


def action(policy, code, disrupted):
    """Return what the first rule of a podFailurePolicy that matches says of a pod that failed."""
    for rule in policy["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
        if disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions:
            return rule["action"]
    return "Count"


class Pod:
    """One try of one index."""

    def __init__(self, job, index, number):
        self.log = job.directory / f"{job.name}-{index}.{number}.log"
        self.grace = job.pod["terminationGracePeriodSeconds"]
        self.disrupted, self.deadline = False, None
        container, name = job.container, f"{job.name}-{index}"
        environment = {name: os.environ[name] for name in ENVIRONMENT}
        environment |= {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name}
        environment["PYTHONPATH"] = str(LAUNCHER)
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [*container["command"], *container["args"]]
        expanded = [re.sub(r"\$\((\w+)\)", lambda x: environment[x[1]], word) for word in words]
        command = ["ip", "netns", "exec", job.networks[index], "unshare", "--uts", "--mount"]
        command += ["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", BOOT, name]
        command += [job.hosts, job.directory, container["workingDir"], job.shm_size, *expanded]
        with open(self.log, "w") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            self.process = subprocess.Popen([str(word) for word in command], **options)

    def evict(self):
        """As by `kubectl drain`, or for a pod of higher priority."""
        self.disrupted = True
        self.terminate()

    def terminate(self):
        if self.deadline is None and self.process.poll() is None:
            self.deadline = time.monotonic() + self.grace
            for process in self.first_processes():  # none, if it has just ended
                process.send_signal(signal.SIGTERM)

    def first_processes(self):
        return psutil.Process(self.process.pid).children()

    def exit_code(self):
        """Return it, or None while the pod runs. The grace period ends by SIGKILL."""
        code = self.process.poll()
        if code is None and self.deadline and time.monotonic() > self.deadline:
            self.process.kill()  # with --kill-child
            code = self.process.wait()
        return code if code is None or code >= 0 else 128 - code


class Job:
    """The Job of a manifest, its pods by their indexes, and what became of each try."""

    def __init__(self, manifest, directory):
        service, job = yaml.safe_load_all(manifest)
        self.directory, self.name = directory, job["metadata"]["name"]
        self.spec, self.pod = job["spec"], job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        assert self.spec["completionMode"] == "Indexed" and self.pod["restartPolicy"] == "Never"
        assert self.spec["parallelism"] == self.spec["completions"] == 2
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": self.name}
        assert service["metadata"]["name"] == self.pod["subdomain"]
        mounts = {mount["name"]: mount["mountPath"] for mount in self.container["volumeMounts"]}
        assert mounts == {"shared": self.container["workingDir"], "shm": "/dev/shm"}
        (memory,) = [volume["emptyDir"] for volume in self.pod["volumes"] if "emptyDir" in volume]
        assert memory["medium"] == "Memory"
        self.shm_size = memory["sizeLimit"].removesuffix("i")
        self.link = two_networks("eth0")
        self.hosts = directory / "hosts"
        self.running, self.addresses, self.tries = {}, {}, []
        self.failures, self.succeeded, self.status = [0, 0], set(), None

    def __enter__(self):
        self.networks = self.link.__enter__()
        return self

    def __exit__(self, *error):
        for pod in self.running.values():
            pod.process.kill()
            pod.process.wait()
        self.link.__exit__(*error)

    def start(self, index):
        """Start a pod, which has another address than the one before it."""
        number = sum(tried == index for tried, *_ in self.tries)
        self.addresses[index] = address = f"10.78.{number}.{index + 1}"
        lines = ["127.0.0.1 localhost"]
        for other, known in self.addresses.items():
            lines.append(f"{known} {self.name}-{other}.{self.pod['subdomain']} {self.name}-{other}")
        self.hosts.write_text("\n".join(lines) + "\n")  # in place: it is mounted
        network = ["ip", "-n", self.networks[index], "addr"]
        subprocess.run([*network, "flush", "dev", "eth0"], check=True)
        subprocess.run([*network, "add", f"{address}/16", "dev", "eth0"], check=True)
        self.running[index] = Pod(self, index, number)

    def step(self):
        """Look at each pod once: start it, or judge how it ended. Kubernetes waits 10 s or more
        before it starts a pod again."""
        for index in range(self.spec["completions"]):
            if index not in self.running and index not in self.succeeded and not self.status:
                self.start(index)
            if index not in self.running or (code := self.running[index].exit_code()) is None:
                continue
            pod = self.running.pop(index)
            judged = "Succeed"
            if code:
                judged = action(self.spec["podFailurePolicy"], code, pod.disrupted)
            self.tries.append((index, code, judged))
            self.succeeded |= {index} if judged == "Succeed" else set()
            self.failures[index] += judged == "Count"
            if judged == "FailJob" or self.failures[index] > self.spec["backoffLimitPerIndex"]:
                self.end("Failed")
        (rule,) = self.spec["successPolicy"]["rules"]
        if {int(rule["succeededIndexes"])} <= self.succeeded:
            self.end("Complete")

    def end(self, status):
        self.status = self.status or status
        for pod in self.running.values():
            pod.terminate()

    def until(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            self.step()
            time.sleep(0.1)

    def until_over(self):
        self.until(lambda: self.status and not self.running)
        return self.logs()

    def logs(self):
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))
