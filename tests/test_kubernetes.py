"""kubernetes.yaml is valid by Kubernetes' schemas; its command passes on statuses and signals."""

import contextlib
import signal
import socket
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from processes import ROOT, free_port, wait_until

MANIFEST = (ROOT / "clusters/kubernetes.yaml").read_text()


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_manifest_is_valid(version):
    for document in yaml.safe_load_all(MANIFEST):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_numbers_of_pods_the_names_and_the_times_to_save_fit_together():
    service, job, policy = yaml.safe_load_all(MANIFEST)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    selected = {"job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == selected
    (rule,) = policy["spec"]["ingress"]
    allowed = [policy["spec"]["podSelector"], *(x["podSelector"] for x in rule["from"])]
    assert allowed == [{"matchLabels": selected}] * 2
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


STOPS = "import signal, time\nsignal.signal(15, lambda *_: exit(143))"
# What a rank does: a wrong flag, a stop because another pod is evicted, and one because this is.
RANKS = {
    "wrong": ("exit(2)", None, 2),
    "waits": ("", signal.SIGTERM, 143),  # torchrun, for the other pod
    "saved": ("exit(143)", None, 143),
    "stopped": (STOPS, signal.SIGTERM, 143),
}
REDUNDANT = [pytest.param(case, marks=pytest.mark.redundant) for case in ("saved", "stopped")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["wrong", "waits", *REDUNDANT])
def test_the_command_ends_with_the_status_of_the_rank_and_passes_sigterm_on(case, tmp_path):
    """Also before torchrun has a handler for SIGTERM, which PID 1 would ignore."""
    text, number, status = RANKS[case]
    script, started = tmp_path / "rank.py", tmp_path / "started"
    script.write_text(f"{text}\nopen({str(started)!r}, 'w')\n" + "time.sleep(99)" * bool(number))
    _, job, _ = yaml.safe_load_all(MANIFEST)
    _, *command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    port, pods = free_port(), 1 + (case == "waits")
    flags = [f"--nnodes={pods}", "--node_rank=0", "--master_addr=127.0.0.1"]
    command = [sys.executable, *command, *flags, f"--master_port={port}", script]
    with open(tmp_path / "log", "w") as log:
        pod = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        if number:
            wait_until(lambda: listens(port) if case == "waits" else started.exists())
            pod.send_signal(number)
        assert pod.wait(100) == status, (tmp_path / "log").read_text()
    finally:
        pod.kill()


def listens(port):
    with contextlib.suppress(OSError):
        return not socket.create_connection(("127.0.0.1", port)).close()
