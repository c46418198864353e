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
    # Status 2 would come again; 143 is a stop; a pod may be evicted before it has saved.
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert [rule["onExitCodes"]["values"] for rule in rules[:2]] == [[2], [143]]
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


# What a rank does: a wrong flag, a stop because another pod is evicted, and because this one is.
STOPS = "import signal, time\nsignal.signal(15, lambda *_: exit(143))"
RANKS = {"wrong": ("exit(2)", 2), "saved": ("exit(143)", 143), "stopped": (STOPS, 143)}
RANKS["waits"] = "", 143  # nothing: torchrun waits for another pod


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKS)
def test_the_command_ends_with_the_status_of_the_rank_and_passes_sigterm_on(case, tmp_path):
    """Also before torchrun has a handler for SIGTERM, which PID 1 would ignore."""
    text, status = RANKS[case]
    script, started = tmp_path / "rank.py", tmp_path / "started"
    waits = "time.sleep(99)" * (case == "stopped")
    script.write_text(f"{text}\nopen({str(started)!r}, 'w')\n{waits}")
    _, job, _ = yaml.safe_load_all(MANIFEST)
    _, *command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    port, pods = free_port(), 1 + (case == "waits")
    flags = [f"--nnodes={pods}", "--node_rank=0", "--master_addr=127.0.0.1"]
    pod = subprocess.Popen([sys.executable, *command, *flags, f"--master_port={port}", script])
    try:
        if case in ("waits", "stopped"):
            wait_until(lambda: listens(port) if case == "waits" else started.exists())
            pod.send_signal(signal.SIGTERM)
        assert pod.wait(100) == status
    finally:
        pod.kill()


def listens(port):
    with contextlib.suppress(OSError):
        return not socket.create_connection(("127.0.0.1", port)).close()
