"""submit_job.sh on a real Slurm: several slurmd on this machine, real jobs, a node that dies. The
jobs run side by side, each on nodes of its own."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ACCELERATE, CNN
from processes import ROOT, outputs, run, train_forked, wait_until
from slurm_cluster import MISSING, Cluster

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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.environment["PATH"] = f"{ACCELERATE.parent}:{os.environ['PATH']}"
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.run("scancel", "--user=root")
        cluster.stop()


class Job:
    """A job of a recipe, submitted in a directory of its own that looks like this repository."""

    def __init__(self, cluster, directory, *options, recipe="recipes/ddp_cifar.py", flags=FLAGS):
        self.cluster, self.directory = cluster, directory
        for name in ("recipes", "clusters", "accelerate_configs"):
            (directory / name).symlink_to(ROOT / name)
        command = ["sbatch", "--parsable", *options, "clusters/submit_job.sh", recipe, *flags]
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
        return [
            [int(step) for step in re.findall(r"\nstep (\d+)/.* loss ", start)] for start in starts
        ]

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
    slurm.miss_node(second)
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


def a_job_has_whole_nodes_with_a_process_per_gpu_and_fails_where_the_training_fails(
    directory, slurm
):
    broken = str(ROOT / "tests/programs/broken_job.py")
    job = Job(slurm, directory, "--partition=gpu", recipe=broken, flags=[])
    job.until("FAILED", "COMPLETED")
    assert (job.show("JobState"), job.show("ExitCode")) == ("FAILED", "1:0")
    assert "it is broken" in job.log()
    assert "mem=1000M" in job.show("TRES")
    # The launcher ends the second when the first has failed.
    seen = re.findall("sees (.*);", job.log())
    assert seen and set(seen) <= {"0 2 0,1", "1 2 0,1"}


STORIES = (
    preempted_and_then_bereft_of_a_node_a_job_continues_on_the_other,
    warned_of_its_time_limit_a_job_is_requeued_and_cancelled_it_saves_and_stays_away,
    a_job_has_whole_nodes_with_a_process_per_gpu_and_fails_where_the_training_fails,
)


def test_jobs_side_by_side(slurm, tmp_path_factory):
    """They wait more than they compute."""
    with ThreadPoolExecutor(len(STORIES)) as pool:
        jobs = [pool.submit(x, tmp_path_factory.mktemp("job"), slurm) for x in STORIES]
    for job in jobs:
        job.result()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_script_is_clean():
    run(["shellcheck", ROOT / "clusters/submit_job.sh"])
