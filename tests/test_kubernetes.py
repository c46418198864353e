"""kubernetes.yaml: valid by Kubernetes' schemas, and run by a stand-in for a cluster, two pods on
this machine. It differs from the file only in what its reader edits."""

import contextlib
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import yaml
from conftest import (
    IN_FLOAT64,
    ROOT,
    assert_same_training,
    copy,
    outputs,
    project,
    train_forked,
    wait_until,
)
from kubelet import PROBLEM, Job, action

MANIFEST = (ROOT / "clusters/kubernetes.yaml").read_text()
needs_pods = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "")
FLAGS = ["--data=synthetic", "--model=simple_cnn", "--cpu", "--lr=0.02", "--log-every=1"]
FLAGS += ["--global-batch-size=64", "--batch-size=32", "--max-steps=30", "--threads=1"]


def edited(*flags):
    """Return the manifest for CPUs, and for these flags of the recipe."""
    text = MANIFEST
    flags = "".join(f"            - {flag}\n" for flag in (*FLAGS, *flags))
    for old, new in (
        ("--nproc_per_node=gpu", "--nproc_per_node=1"),
        ("            - --global-batch-size=1024\n", flags),
        ('value: "4"', 'value: "1"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def volume(directory, more=""):
    """Return what the pods mount: a directory with the recipe."""
    (directory / "recipes").mkdir(parents=True)
    small = "synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)"
    less = small, "synthetic_images(1280, seed=1), synthetic_images(64, seed=2)"
    copy("ddp_cifar", directory / "recipes/ddp_cifar.py", less, project=IN_FLOAT64 + more)
    return directory


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_manifest_is_valid(version):
    for document in yaml.safe_load_all(MANIFEST):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_number_of_pods_is_the_same_in_three_places():
    _, job = yaml.safe_load_all(MANIFEST)
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in container["args"]


def test_only_what_would_fail_again_ends_the_job_and_an_eviction_does_not_count():
    policy = yaml.safe_load_all(MANIFEST)
    policy = [*policy][1]["spec"]["podFailurePolicy"]
    expected = {(2, False): "FailJob", (143, False): "Ignore", (143, True): "Ignore"}
    expected |= {(137, True): "Ignore", (137, False): "Count", (1, False): "Count"}
    assert {case: action(policy, *case) for case in expected} == expected


@pytest.mark.slow
@pytest.mark.twin  # of a lost machine, in test_elastic.py
@needs_pods
def test_a_pod_is_evicted_in_mid_epoch_and_the_run_ends_like_that_of_one_machine(tmp_path):
    gate = project("interruption", train_step="step_of_a_pod")
    directory = volume(tmp_path / "volume", gate)
    (directory / "wait").touch()
    with Job(edited(), directory) as job:
        job.until((directory / "gate").exists)
        job.running[1].evict()
        (directory / "wait").unlink()
        logs = job.until_over()
    assert job.status == "Complete", logs
    first, later = job.tries[:2], job.tries[2:]
    assert sorted(first) == [(0, 143, "Ignore"), (1, 143, "Ignore")], logs
    assert (0, 0, "Succeed") in later and {code for _, code, _ in later} <= {0, 143}, logs
    (saved,) = [line for line in logs.splitlines() if "stopped after step" in line]
    step = int(saved.split("stopped after step ")[1].split(",")[0])
    assert 12 <= step <= 15 and f'"resumed_from": {step}' in logs

    (whole,) = train_forked(tmp_path, (2, directory / "recipes/ddp_cifar.py", FLAGS))
    ours = outputs(directory / "runs/kubernetes")
    assert (ours.summary["world_size"], ours.summary["resumed_from"]) == (2, step)
    assert_same_training(ours, whole, 0)


@pytest.mark.slow
@needs_pods
def test_a_wrong_flag_ends_the_job_after_one_try_with_a_line_that_names_it(tmp_path):
    directory = volume(tmp_path / "volume")
    (directory / "recipes/torchvision.py").touch()  # nothing of it is used, and it imports for long
    with Job(edited("--epochs=-1"), directory) as job:
        logs = job.until_over()
    assert job.status == "Failed" and (2, "FailJob") in [one[1:] for one in job.tries], logs
    assert [index for index, *_ in sorted(job.tries)] == [0, 1], "one try of each pod"
    # The pod that fails first ends the other one, perhaps before its line.
    said = [x.read_text().count("argument --epochs: -1") for x in job.directory.glob("*.log")]
    assert max(said) == 1, logs


@pytest.mark.slow
@needs_pods
def test_a_pod_that_waits_for_the_other_one_ends_at_once(tmp_path):
    """Its torchrun has no handler for SIGTERM then: as PID 1 it would ignore the signal."""
    with Job(edited(), volume(tmp_path / "volume")) as job:
        job.start(0)
        pod = job.running[0]
        wait_until(lambda: listens(pod))
        pod.terminate()
        assert pod.process.wait(job.pod["terminationGracePeriodSeconds"] / 2) == 143


def listens(pod):
    """Whether torchrun's store listens on its port, 29500: it then waits for the other pod."""
    with contextlib.suppress(psutil.Error, IndexError):
        network = Path(f"/proc/{pod.first_processes()[0].pid}/net")
        return ":733C 0" in (network / "tcp").read_text() + (network / "tcp6").read_text()
