"""kubernetes.yaml: valid by Kubernetes' schemas, and run by a stand-in for a cluster, two pods on
this machine. It differs from the file only in what its reader edits."""

import contextlib
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import yaml
from conftest import IN_FLOAT64, SYNTHETIC_DATA, assert_same_training, copy, project
from kubelet import PROBLEM, Pods
from processes import ROOT, outputs, train_forked, wait_until

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
    less = SYNTHETIC_DATA, "synthetic_images(1280, seed=1), synthetic_images(64, seed=2)"
    copy("ddp_cifar", directory / "recipes/ddp_cifar.py", less, project=IN_FLOAT64 + more)
    return directory


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_manifest_is_valid(version):
    for document in yaml.safe_load_all(MANIFEST):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_numbers_of_pods_the_names_and_the_times_to_save_fit_together():
    service, job = yaml.safe_load_all(MANIFEST)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(env["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shared": container["workingDir"], "shm": "/dev/shm"}


def action(policy, code, disrupted):
    """Return what the first rule of a podFailurePolicy that matches says of a pod that failed."""
    for rule in policy["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
        if disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions:
            return rule["action"]
    return "Count"


def test_only_what_would_fail_again_ends_the_job_and_an_eviction_does_not_count():
    policy = yaml.safe_load_all(MANIFEST)
    policy = [*policy][1]["spec"]["podFailurePolicy"]
    expected = {(2, False): "FailJob", (143, False): "Ignore", (143, True): "Ignore"}
    expected |= {(137, True): "Ignore", (137, False): "Count", (1, False): "Count"}
    assert {case: action(policy, *case) for case in expected} == expected


@pytest.mark.slow
@pytest.mark.cluster
@needs_pods
def test_a_pod_is_evicted_in_mid_epoch_and_the_run_ends_like_that_of_one_machine(tmp_path):
    gate = project("interruption", train_step="step_at_a_gate", GATE='"2/12"')  # in mid-epoch
    directory = volume(tmp_path / "volume", gate)
    results = directory / "runs/kubernetes"
    with Pods(edited(), directory) as pods:
        evicted = pods.start(0, 1)
        wait_until((results / "gate-2").exists)
        evicted[1].terminate()
        (results / "open").touch()
        assert pods.exit_codes(evicted) == [143, 143], pods.logs()
        assert pods.exit_codes(pods.start(0, 1)) == [0, 0], pods.logs()
        logs = pods.logs()
    (saved,) = [line for line in logs.splitlines() if "stopped after step" in line]
    step = int(saved.split("stopped after step ")[1].split(",")[0])
    assert 12 <= step <= 15 and f'"resumed_from": {step}' in logs

    (tmp_path / "0").mkdir()
    (tmp_path / "0/open").touch()
    (whole,) = train_forked(tmp_path, (2, directory / "recipes/ddp_cifar.py", FLAGS))
    ours = outputs(results)
    assert (ours.summary["world_size"], ours.summary["resumed_from"]) == (2, step)
    assert_same_training(ours, whole, 0)


@pytest.mark.slow
@pytest.mark.cluster
@needs_pods
def test_a_wrong_flag_is_status_2_of_a_pod_with_a_line_that_names_it(tmp_path):
    directory = volume(tmp_path / "volume")
    (directory / "recipes/torchvision.py").touch()  # nothing of it is used, and it imports for long
    with Pods(edited("--epochs=-1").replace("--nnodes=2", "--nnodes=1"), directory) as pods:
        assert pods.exit_codes(pods.start(0)) == [2], pods.logs()
        assert pods.logs().count("argument --epochs: -1") == 1, pods.logs()


@pytest.mark.slow
@pytest.mark.cluster
@needs_pods
def test_a_pod_that_waits_for_the_other_one_ends_at_once(tmp_path):
    """Its torchrun has no handler for SIGTERM then: as PID 1 it would ignore the signal."""
    with Pods(edited(), volume(tmp_path / "volume")) as pods:
        (pod,) = pods.start(0)
        wait_until(lambda: listens(pod))
        pod.terminate()
        assert pod.process.wait(pods.grace / 2) == 143


def listens(pod):
    """Whether torchrun's store listens on its port, 29500: it then waits for the other pod."""
    with contextlib.suppress(psutil.Error, IndexError):
        network = Path(f"/proc/{pod.first_processes()[0].pid}/net")
        return ":733C 0" in (network / "tcp").read_text() + (network / "tcp6").read_text()
