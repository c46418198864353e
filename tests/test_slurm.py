"""submit_job.sh on a real Slurm: two slurmd on this machine, real jobs, real signals, a node that dies."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from conftest import ACCELERATE, ROOT
from safetensors.torch import load_file
from slurm_cluster import MISSING, Cluster

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)} (Debian: slurm-wlm, munge)"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of a Slurm on one machine need root"),
]
STEPS = 40
TWO_ON_ONE, TWO_NODES = ("--ntasks-per-node=2", "--nodes=1"), ("--nodes=2",)


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
    """A training submitted in a directory of its own, which looks like this repository."""

    def __init__(self, cluster, directory, *options, recipe="ddp_cifar", flags=()):
        self.cluster, self.directory = cluster, directory
        directory.mkdir()
        for name in ("recipes", "accelerate_configs"):
            (directory / name).symlink_to(ROOT / name)
        defaults = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--batch-size", 32, "--log-every", 1]
        defaults += ["--max-steps", STEPS, "--checkpoint-every", 10, *flags]
        command = ["sbatch", "--parsable", *options, "recipes/submit_job.sh", f"recipes/{recipe}.py", *defaults]
        self.id = cluster.run(*command, cwd=directory).strip()
        assert self.id.isdigit(), self.id
        self.results = directory / f"runs/slurm-{self.id}"

    def show(self, name):
        fields = self.cluster.run("scontrol", "show", "job", self.id).split()
        return next(field.partition("=")[2] for field in fields if field.startswith(f"{name}="))

    def log(self):
        path = self.directory / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, condition, what, seconds=90):
        try:
            self.cluster.wait(condition, what, seconds)
        except TimeoutError:
            raise TimeoutError(
                f"no {what}; {self.show('JobState')} {self.show('Reason')}\n{self.log()[-4000:]}"
            ) from None

    def until(self, *states):
        self.wait(lambda: self.show("JobState") in states, " or ".join(states))

    def until_step(self, step):
        self.wait(lambda: f"\nstep {step}/" in self.log(), f"step {step}")

    def until_back_in_the_queue(self, restarts=1, delay=3):
        """Slurm lets it wait there for two minutes, until the nodes have forgotten it; these have sooner."""
        self.until("PENDING")
        assert self.show("Restarts") == str(restarts)
        self.cluster.run("scontrol", "update", f"jobid={self.id}", f"StartTime=now+{delay}")

    def until_complete(self):
        self.until("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        assert self.show("JobState") == "COMPLETED", self.log()
        return json.loads((self.results / "summary.json").read_text())

    def weights(self):
        return load_file(self.results / "model.safetensors")

    def processes(self):
        """The launchers and ranks of this job."""
        found = subprocess.run(["pgrep", "-f", f"output-dir runs/slurm-{self.id} "], capture_output=True, text=True)
        return found.stdout.split()


def equal(job, other):
    theirs = other.weights()
    return all(torch.equal(value, theirs[name]) for name, value in job.weights().items())


@pytest.fixture(scope="module")
def two_nodes(slurm, tmp_path_factory):
    job = Job(slurm, tmp_path_factory.mktemp("jobs") / "two", *TWO_NODES)
    job.until_complete()
    return job


@pytest.fixture(scope="module")
def one_node(slurm, tmp_path_factory):
    """Two jobs of two processes side by side on one node."""
    options = "--oversubscribe", *TWO_ON_ONE, "--nodelist=n1"
    jobs = [Job(slurm, tmp_path_factory.mktemp("jobs") / "one", *options) for _ in range(2)]
    jobs[0].until_step(1)
    assert [job.show("JobState") for job in jobs] == ["RUNNING", "RUNNING"]
    for job in jobs:
        assert job.until_complete()["world_size"] == 2
    return jobs


def test_two_nodes_train_like_one(two_nodes, one_node):
    summary = two_nodes.until_complete()
    assert (summary["world_size"], summary["steps"]) == (2, STEPS)
    theirs = one_node[0].weights()
    for name, value in two_nodes.weights().items():
        assert (value - theirs[name]).abs().max() < 1e-6


def test_two_jobs_side_by_side_train_the_same(one_node):
    assert equal(*one_node)


def test_one_readable_log_and_the_other_nodes_apart(two_nodes):
    log = two_nodes.log()
    assert log.startswith(f"job {two_nodes.id}: recipes/ddp_cifar.py ")
    assert log.count(f"\nstep {STEPS}/{STEPS} ") == 1
    other = (two_nodes.directory / f"slurm-{two_nodes.id}-node-1.out").read_text()
    assert "step " not in other


def test_warned_twice_in_mid_run_it_goes_back_and_ends_like_the_undisturbed(slurm, two_nodes, tmp_path):
    job = Job(slurm, tmp_path / "job", *TWO_NODES)
    for restarts, step in ((1, 5), (2, 20)):
        job.until_step(step)
        slurm.run("scancel", "--signal=USR1", job.id)  # what Slurm sends before the time limit
        job.until_back_in_the_queue(restarts)
        assert job.log().count("which is saved") == restarts and job.processes() == []
    assert job.until_complete()["resumed_from"] >= 20
    assert equal(job, two_nodes)


def test_preempted_it_goes_back_and_ends_like_the_undisturbed(slurm, one_node, tmp_path):
    job = Job(slurm, tmp_path / "job", *TWO_ON_ONE, "--nodelist=n1")
    job.until_step(5)
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=high", "--nodelist=n1", "--exclusive", "--wrap=true", cwd=tmp_path
    )
    job.until_back_in_the_queue()
    assert "which is saved" in job.log()
    job.until_step(STEPS)
    state = slurm.run("scontrol", "show", "job", urgent.strip())
    assert "JobState=COMPLETED" in state, "it had to go first"
    assert job.until_complete()["resumed_from"] >= 5
    assert equal(job, one_node[0])


def test_a_node_that_dies_sends_the_job_back(slurm, two_nodes, tmp_path):
    job = Job(slurm, tmp_path / "job", *TWO_NODES)
    job.until_step(15)
    slurm.kill_node("n2")
    job.until("PENDING")
    slurm.start_node("n2")
    slurm.wait_for_idle_nodes()
    job.until_back_in_the_queue(delay=10)
    assert job.until_complete()["resumed_from"] >= 10
    assert equal(job, two_nodes)


def test_cancelled_it_saves_and_stays_away(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job", *TWO_NODES, flags=["--max-steps", 10_000])
    job.until_step(3)
    slurm.run("scancel", job.id)
    job.until("CANCELLED")
    job.wait(lambda: not job.processes(), "end of its processes")
    assert list(job.results.glob("step-*.pt")) and "back into the queue" not in job.log()
    assert job.show("Restarts") == "0"


def test_the_processes_of_a_node_can_be_chosen(slurm, tmp_path):
    options = "--ntasks-per-node=2", "--export=ALL,PROCESSES_PER_NODE=1"
    job = Job(slurm, tmp_path / "job", *options, recipe="data_parallel_cifar", flags=["--max-steps", 1])
    assert job.until_complete()["world_size"] == 1


def test_a_job_that_fails_has_failed(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job", "--ntasks-per-node=2", flags=["--batch-size", 0])
    job.until("FAILED", "COMPLETED")
    assert (job.show("JobState"), job.show("ExitCode")) == ("FAILED", "1:0")
    assert "ddp_cifar: error: argument --batch-size" in job.log()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_script_is_clean():
    checked = subprocess.run(["shellcheck", ROOT / "recipes/submit_job.sh"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
