"""submit_job.sh on a real Slurm: twelve slurmd on this machine, real jobs, real signals, a node
that dies.

The tests marked `at_once` run side by side, each on nodes of its own."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from unittest import mock

import pytest
import torch
from conftest import ACCELERATE, ROOT, at_once
from safetensors.torch import load_file
from slurm_cluster import MISSING, Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"Slurm is not installed: no {', '.join(MISSING)} (Debian: slurm-wlm, munge)",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of a Slurm on one machine need root"),
]
STEPS = 40
TWO_ON_ONE, TWO_NODES = ("--ntasks-per-node=2",), ("--nodes=2",)
PART_OF_A_NODE = ("--oversubscribe", "--mem=100")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.environment["PATH"] = f"{ACCELERATE.parent}:{os.environ['PATH']}"
    cluster.environment["OMP_WAIT_POLICY"] = "passive"  # more threads than cores
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.run("scancel", "--user=root")
        cluster.stop()


class Job:
    """A job submitted in a directory of its own, which looks like this repository. The recipe is a
    path or code."""

    def __init__(self, cluster, directory, *options, recipe, flags=()):
        self.cluster, self.directory = cluster, directory
        if not recipe.endswith(".py"):
            (directory / "recipe.py").write_text(recipe)
            recipe = "recipe.py"
        for name in ("recipes", "accelerate_configs"):
            (directory / name).symlink_to(ROOT / name)
        command = ["sbatch", "--parsable", *options, "recipes/submit_job.sh", recipe, *flags]
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

    def wait(self, condition, what, seconds=180):
        try:
            self.cluster.wait(condition, what, seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}\n{self.show('JobState')} {self.show('Reason')}\n{self.log()[-4000:]}"
            ) from None

    def until(self, *states):
        self.wait(lambda: self.show("JobState") in states, " or ".join(states))

    def until_complete(self):
        self.until("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        assert self.show("JobState") == "COMPLETED", self.log()


class Training(Job):
    def __init__(self, cluster, directory, *options, flags=()):
        defaults = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--log-every", 1]
        defaults += ["--batch-size", 32]
        defaults += ["--lr", 0.02]
        defaults += ["--max-steps", STEPS, "--checkpoint-every", 10, "--keep", 4]
        super().__init__(
            cluster, directory, *options, recipe="recipes/ddp_cifar.py", flags=[*defaults, *flags]
        )

    def until_step(self, step):
        self.wait(lambda: f"\nstep {step}/" in self.log(), f"step {step}")

    def until_launched(self):
        """Until the ranks are there: they have everything to import yet."""
        self.wait(lambda: len(self.processes()) >= 3, "ranks")

    def until_back_in_the_queue(self, restarts):
        """Slurm lets it wait there for two minutes, until the nodes have forgotten it; these have
        sooner."""
        self.until("PENDING")
        assert self.show("Restarts") == str(restarts)
        assert self.processes() == []
        self.cluster.run("scontrol", "update", f"jobid={self.id}", "StartTime=now+3")

    def steps(self):
        """The steps that each start of this job has logged."""
        starts = self.log().split(f"job {self.id}: recipes/")[1:]
        return [
            [int(step) for step in re.findall(r"^step (\d+)/", start, re.MULTILINE)]
            for start in starts
        ]

    def checkpoints(self):
        return sorted(int(path.stem[5:]) for path in self.results.glob("step-*.pt"))

    def summary(self):
        return json.loads((self.results / "summary.json").read_text())

    def weights(self):
        return load_file(self.results / "model.safetensors")

    def ended_like(self, other):
        self.until_complete()
        other.until_complete()
        theirs = other.weights()
        return all(torch.equal(value, theirs[name]) for name, value in self.weights().items())

    def processes(self):
        """The launchers and ranks of this job."""
        pattern = f"^[^ ]*python.* runs/slurm-{self.id} "
        return subprocess.run(
            ["pgrep", "-f", pattern], capture_output=True, text=True
        ).stdout.split()


@pytest.fixture(scope="module")
def two_nodes(slurm, tmp_path_factory):
    """Nothing happens to this one, but for the other on its first node."""
    return Training(
        slurm, tmp_path_factory.mktemp("two"), *PART_OF_A_NODE, *TWO_NODES, "--nodelist=n[1-2]"
    )


@pytest.fixture(scope="module")
def one_node(slurm, tmp_path_factory):
    return Training(
        slurm, tmp_path_factory.mktemp("one"), *PART_OF_A_NODE, *TWO_ON_ONE, "--nodelist=n1"
    )


@at_once
def test_preempted_and_then_bereft_of_a_node_it_ends_like_the_undisturbed(
    directory, slurm, two_nodes
):
    job = Training(slurm, directory, *TWO_NODES)
    job.until_step(5)
    first = f"--nodelist={job.nodes()[0]}"
    urgent = slurm.run(
        "sbatch",
        "--parsable",
        "--partition=high",
        first,
        "--exclusive",
        "--wrap=true",
        cwd=directory,
    )
    job.until_back_in_the_queue(restarts=1)
    assert "which is saved" in job.log()
    job.until("RUNNING")
    second = job.nodes()[1]
    job.wait(lambda: job.steps()[1:] not in ([], [[]]), "step after the restart")
    slurm.kill_node(second)  # well before the last step
    job.wait(lambda: job.processes() == [], "end of the processes on the other node")
    assert job.show("JobState") == "RUNNING", (
        f"Slurm has not missed the node yet\n{job.log()[-3000:]}"
    )
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", urgent.strip()), (
        "it had to go first"
    )
    slurm.miss_node(second)
    job.until_back_in_the_queue(restarts=2)
    assert job.ended_like(two_nodes)
    first, second, third = job.steps()
    assert second[0] == first[-1] + 1 >= 6
    assert third[0] - 1 in (first[-1], *range(10, second[-1] + 1, 10))


@at_once
def test_it_goes_on_from_its_own_newest_checkpoint_or_else_from_the_one_named(
    directory, slurm, one_node
):
    """Killed before it has saved anything; then warned in mid-run."""
    path = one_node.results / "step-00000010.pt"
    one_node.wait(path.exists, path)
    job = Training(slurm, directory, *TWO_ON_ONE, flags=["--resume", path])
    job.until_launched()
    slurm.run("scontrol", "requeue", job.id)
    for process in job.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    job.until_back_in_the_queue(restarts=1)
    assert job.checkpoints() == []
    job.until_step(12)
    slurm.run("scancel", "--signal=USR1", job.id)  # what Slurm sends before the time limit
    job.until_back_in_the_queue(restarts=2)
    saved = job.checkpoints()[-1]
    assert job.log().count("which is saved") == 1
    assert job.ended_like(one_node)
    assert [steps[0] for steps in job.steps()[1:]] == [11, saved + 1]
    assert job.summary()["resumed_from"] == saved


@at_once
def test_on_one_or_two_nodes_it_goes_on_where_one_has_died_on_the_other(
    directory, slurm, two_nodes
):
    flags = ["--global-batch-size", 64, "--keep", STEPS]
    job = Training(slurm, directory, "--partition=spare", "--nodes=1-2", flags=flags)
    job.until_step(11)
    first, second = job.nodes()
    slurm.kill_node(second)
    job.wait(lambda: job.processes() == [], "end of the processes on the other node")
    slurm.miss_node(second)
    job.until_back_in_the_queue(restarts=1)
    job.until_complete()
    assert job.nodes() == [first]
    summary = job.summary()
    assert (summary["world_size"], summary["global_batch_size"]) == (1, 64)
    assert summary["resumed_from"] >= 10
    before, after = job.steps()
    assert before[-1] < STEPS
    # The last one twice: with its evaluation.
    assert after == [*range(summary["resumed_from"] + 1, STEPS + 1), STEPS]
    two_nodes.until_complete()
    theirs = two_nodes.weights()
    for name, value in job.weights().items():
        assert (value - theirs[name]).abs().max() < 1e-5


@at_once
def test_cancelled_while_it_starts_it_saves_and_stays_away(directory, slurm):
    job = Training(slurm, directory, *TWO_NODES, flags=["--max-steps", 10_000])
    job.until_launched()
    slurm.run("scancel", job.id)
    job.until("CANCELLED")
    job.wait(lambda: not job.processes(), "end of its processes")
    assert job.checkpoints() and "back into the queue" not in job.log()
    assert job.show("Restarts") == "0"


@at_once
def test_a_job_that_fails_has_failed(directory, slurm):
    job = Job(slurm, directory, *TWO_ON_ONE, recipe="import sys; sys.exit('it is broken')")
    job.until("FAILED", "COMPLETED")
    assert (job.show("JobState"), job.show("ExitCode")) == ("FAILED", "1:0")
    assert "it is broken" in job.log()


def on_gpu_node(slurm, directory, *options):
    """What the ranks of such a job see, and the memory that it has."""
    variables = (
        'get("RANK", "0"), "of", get("WORLD_SIZE", "1"), get("CUDA_VISIBLE_DEVICES", "none")'
    )
    # One write, or the lines of two ranks may come interleaved.
    line = f"' '.join(['rank', {variables}, '\\n']).encode()"
    recipe = f"import os; get = os.environ.get; os.write(1, {line})"
    job = Job(slurm, directory, "--partition=gpu", *options, recipe=recipe)
    job.until_complete()
    memory = re.search(r"mem=(\w+)", job.show("TRES"))
    return sorted(re.findall("^(rank .*) $", job.log(), re.MULTILINE)), memory[1]


@at_once
def test_a_job_has_whole_nodes_with_a_process_per_gpu(directory, slurm):
    seen = on_gpu_node(slurm, directory)
    assert seen == (["rank 0 of 2 0,1", "rank 1 of 2 0,1"], "1000M")


@at_once
def test_the_processes_of_a_node_can_be_chosen(directory, slurm):
    seen = on_gpu_node(slurm, directory, "--export=ALL,PROCESSES_PER_NODE=1")
    assert seen == (["rank 0 of 1 0,1"], "1000M")


@at_once
def test_a_job_can_take_a_part_of_a_node(directory, slurm):
    seen = on_gpu_node(slurm, directory, *PART_OF_A_NODE, "--gpus-per-node=1", "--nodes=2")
    assert seen == (["rank 0 of 2 0"], "200M")


@at_once
def test_another_slurm_on_this_machine_is_no_matter(directory, slurm):
    with mock.patch.dict(
        os.environ, SLURM_CONF="/nowhere", SLURM_JOB_ID="1", SLURM_PARTITION="none"
    ):
        cluster = Cluster(directory / "slurm")
    try:
        cluster.start()
        assert cluster.run("srun", "--nodes=1", "echo", "works") == "works\n"
    finally:
        cluster.stop()


def test_two_jobs_side_by_side_on_two_nodes_and_on_one_train_the_same(slurm, two_nodes, one_node):
    for job in (two_nodes, one_node):
        job.until_complete()
        assert (job.summary()["world_size"], job.summary()["steps"]) == (2, STEPS)
        assert job.show("BatchHost") == "n1"
    started, ended = zip(
        *[(job.show("StartTime"), job.show("EndTime")) for job in (two_nodes, one_node)],
        strict=True,
    )
    assert max(started) < min(ended)
    theirs = one_node.weights()
    for name, value in two_nodes.weights().items():
        assert (value - theirs[name]).abs().max() < 1e-6


def test_one_readable_log_and_the_other_nodes_apart(two_nodes):
    two_nodes.until_complete()
    log = two_nodes.log()
    assert log.startswith(f"job {two_nodes.id}: recipes/ddp_cifar.py ")
    assert log.count(f"\nstep {STEPS}/{STEPS} epoch 1 loss") == 1
    other = (two_nodes.directory / f"slurm-{two_nodes.id}-node-1.out").read_text()
    assert "step " not in other


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_script_is_clean():
    checked = subprocess.run(
        ["shellcheck", ROOT / "recipes/submit_job.sh"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
