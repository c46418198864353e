"""submit_job.sh on a real Slurm: several slurmd on this machine, real jobs, a node that dies. The
jobs run side by side, each on nodes of its own."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from conftest import ACCELERATE, CNN
from processes import ROOT, free_port, outputs, run, train_forked, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
MISSING = [program for program in PROGRAMS if not shutil.which(program)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"Slurm is not installed: no {', '.join(MISSING)} (Debian: slurm-wlm, munge)",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of a Slurm on one machine need root"),
]
STEPS = 40
FLAGS = [*CNN, "--log-every", 1, "--lr", 0.02, "--max-steps", STEPS, "--checkpoint-every", 10]
FLAGS += ["--keep", 9, "--global-batch-size", 64, "--batch-size", 32]


NODES = ("n1", "s1", "s2")  # the latter are in two partitions, one of which goes first

CONFIGURATION = """
ClusterName=recipes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=100
# More cores and memory than the machine has: nothing is bound to them.
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A node is down when a test says so, not when this machine is busy.
SlurmdTimeout=600
KillWait=60
ReturnToService=2
# Not those of another cluster's jobs: submit_job.sh makes a port of it.
FirstJobId={first_job}
NodeName=DEFAULT CPUs=4 RealMemory=1000
{nodes}
PartitionName=low Nodes=n1 Default=YES
PartitionName=spare Nodes=s1,s2 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=s1,s2 PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Its files are in the directory, its ports are free ones, and no other Slurm on this machine
    matters to it."""

    def __init__(self, directory):
        self.directory, self.daemons = directory, {}
        (directory / "state").mkdir()
        controller_port, *ports = (free_port() for _ in range(1 + len(NODES)))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            for node, port in zip(NODES, ports, strict=True)
        ]
        values = {"directory": directory, "host": host, "controller_port": controller_port}
        values |= {"nodes": "\n".join(nodes), "first_job": random.randrange(1, 19_000)}
        (directory / "slurm.conf").write_text(CONFIGURATION.format(**values))
        # Without what a Slurm around this process has set.
        outer = ("SLURM", "SBATCH", "SCANCEL", "SINFO", "SQUEUE", "SRUN", "MUNGE")
        kept = {name: x for name, x in os.environ.items() if not name.startswith(outer)}
        self.environment = {**kept, "SLURM_CONF": str(directory / "slurm.conf")}
        self.environment["PATH"] = f"{ACCELERATE.parent}:{kept['PATH']}"

    def start(self):
        directory = self.directory
        subprocess.run(["mungekey", "--create", f"--keyfile={directory}/munge.key"], check=True)
        flags = [f"--{x}-file={directory}/munge.{x}" for x in ("pid", "log", "seed", "key")]
        flags.append(f"--socket={directory}/munge.socket")
        self.spawn("munged", "munged", "--foreground", "--force", *flags)
        wait_until((directory / "munge.socket").exists)
        self.spawn("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.spawn(node, "slurmd", "-D", "-N", node)
        idle = {f"{node} idle" for node in NODES}
        states = ("sinfo", "-h", "-N", "-o", "%N %T")
        wait_until(lambda: {*self.run(*states).splitlines()} == idle)

    def spawn(self, name, *command):
        log = open(self.directory / f"{name}.out", "a")
        self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def kill_node(self, node):
        """As a power failure does: the daemon, the step managers that it has started, and all that
        runs in them. The managers first: one that outlives its tasks reports how they ended. The
        controller would know after SlurmdTimeout, or is told."""
        self.daemons.pop(node).kill()
        log = str(self.directory / f"{node}.log")
        for step in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if step.name() == "slurmstepd" and log in [file.path for file in step.open_files()]:
                    processes = step, *step.children(recursive=True)
                    subprocess.run(["kill", "-KILL", *(str(each.pid) for each in processes)])

    def stop(self):
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command, **options):
        options = {"env": self.environment, "capture_output": True, "text": True, **options}
        process = subprocess.run(list(map(str, command)), **options)
        return process.stdout if process.returncode == 0 else process.stdout + process.stderr


@pytest.fixture
def slurm(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.run("scancel", "--user=root")
        cluster.stop()


class Job:
    """A job of a recipe, submitted in a directory of its own that looks like this repository."""

    def __init__(self, cluster, directory, *options, flags=FLAGS):
        self.cluster, self.directory = cluster, directory
        for name in ("recipes", "clusters", "accelerate_configs"):
            (directory / name).symlink_to(ROOT / name)
        command = ["sbatch", "--parsable", *options, "clusters/submit_job.sh"]
        command += ["recipes/ddp_cifar.py", *flags]
        self.id = cluster.run(*command, cwd=directory).strip()
        assert self.id.isdigit(), self.id
        self.results = directory / f"runs/slurm-{self.id}"

    def show(self, name):
        fields = self.cluster.run("scontrol", "show", "job", self.id).split()
        return next(field.partition("=")[2] for field in fields if field.startswith(f"{name}="))

    def nodes(self):
        return self.cluster.run("scontrol", "show", "hostnames", self.show("NodeList")).split()

    def log(self):
        path = self.directory / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def until(self, *states):
        wait_until(lambda: self.show("JobState") in states)

    def until_step(self, step):
        wait_until(lambda: f"\nstep {step}/" in self.log())

    def until_back_in_the_queue(self, restarts):
        """Slurm lets it wait there for two minutes, until the nodes have forgotten it; these have
        sooner."""
        self.until("PENDING")
        assert self.show("Restarts") == str(restarts)
        wait_until(lambda: self.processes() == [])
        self.cluster.run("scontrol", "update", f"jobid={self.id}", "StartTime=now+3")

    def steps(self):
        """The steps that each start of this job has logged."""
        starts = self.log().split(f"job {self.id}: recipes/")[1:]
        return [[*map(int, re.findall(r"\nstep (\d+)/.* loss ", start))] for start in starts]

    def checkpoints(self):
        return sorted(int(path.stem[5:]) for path in self.results.glob("step-*.pt"))

    def processes(self):
        """The launchers and ranks of this job."""
        command = ["pgrep", "-f", f"^[^ ]*python.* runs/slurm-{self.id} "]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()


def preempted_and_then_bereft_of_a_node_a_job_continues_on_the_other(directory, slurm):
    """From two nodes to one, at the same global batch: it ends like two processes that nothing
    has happened to. One readable log; the other node's is apart."""
    job = Job(slurm, directory, "--nodes=1-2", "--partition=spare")
    job.until_step(5)
    first, second = job.nodes()
    urgent = ["sbatch", "--parsable", "--partition=urgent", f"--nodelist={first}", "--exclusive"]
    urgent = slurm.run(*urgent, "--wrap=true", cwd=directory).strip()
    job.until_back_in_the_queue(restarts=1)
    assert "which is saved" in job.log()
    job.until("RUNNING")
    wait_until(lambda: job.steps()[1:] not in ([], [[]]))  # a step after the restart
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", urgent), "it went first"
    slurm.kill_node(second)  # well before the last step
    wait_until(lambda: job.processes() == [])  # on the other node
    slurm.run("scontrol", "update", f"nodename={second}", "state=down", "reason=dead")
    job.until_back_in_the_queue(restarts=2)
    job.until("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert job.show("JobState") == "COMPLETED" and job.nodes() == [first], job.log()

    before, between, after = job.steps()
    assert between[0] == before[-1] + 1 >= 6
    assert after[0] - 1 in (before[-1], *range(10, between[-1] + 1, 10))
    assert after == [*range(after[0], STEPS + 1)]
    ours = outputs(job.results)
    assert (ours.summary["world_size"], ours.summary["global_batch_size"]) == (1, 64)
    assert job.log().startswith(f"job {job.id}: recipes/ddp_cifar.py ")
    other = (directory / f"slurm-{job.id}-node-1.out").read_text()
    assert "stopping after the next step" in other and "step 1/" not in other

    (whole,) = train_forked(directory, (2, ROOT / "recipes/ddp_cifar.py", FLAGS))
    torch.testing.assert_close(ours.weights, whole.weights, rtol=0, atol=1e-5)


def warned_of_its_time_limit_a_job_is_requeued_and_cancelled_it_saves_and_stays_away(
    directory, slurm
):
    endless = ["--max-steps", 100_000, "--epochs", 10_000, "--checkpoint-every", 100_000]
    job = Job(slurm, directory, "--ntasks-per-node=2", flags=[*FLAGS, *endless])
    job.until_step(2)
    assert "mem=1000M" in job.show("TRES"), "all memory of the node"
    slurm.run("scancel", "--signal=USR1", job.id)  # what Slurm sends before the time limit
    job.until_back_in_the_queue(restarts=1)
    (saved,) = job.checkpoints()
    job.until("RUNNING")
    # The signal comes before the ranks have handlers.
    wait_until(lambda: len(job.processes()) >= 3)  # ranks that have everything to import yet
    slurm.run("scancel", job.id)
    job.until("CANCELLED")
    wait_until(lambda: not job.processes())
    assert job.log().count("back into the queue") == 1 and job.show("Restarts") == "1"
    assert len(job.checkpoints()) == 2 and job.checkpoints()[0] == saved, "saved, too"


def test_jobs_side_by_side(slurm, tmp_path_factory):
    """They wait more than they compute."""
    stories = (
        preempted_and_then_bereft_of_a_node_a_job_continues_on_the_other,
        warned_of_its_time_limit_a_job_is_requeued_and_cancelled_it_saves_and_stays_away,
    )
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(story, tmp_path_factory.mktemp("job"), slurm) for story in stories]
    for job in jobs:
        job.result()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_script_is_clean():
    run(["shellcheck", ROOT / "clusters/submit_job.sh"])
