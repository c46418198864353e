"""Several machines without a scheduler: one `accelerate launch` on each, here two on this machine's loopback."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from conftest import ACCELERATE, ROOT, forked, free_port, outputs
from safetensors.torch import load_file

RECIPES = ["ddp_cifar", "amp_cifar", "pipeline_cifar"]
FLAGS = "--data synthetic --model simple_cnn --cpu --max-steps 4 --batch-size 16 --log-every 1".split()


def test_two_hosts_train_like_one(tmp_path):
    """In the pipeline the two stages are on different hosts. Each host has a disk of its own."""
    line = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml", "--num_processes", 2]
    line += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    ports = json.dumps({recipe: free_port() for recipe in RECIPES})
    hosts = []
    for rank in (0, 1):
        directory = tmp_path / f"host{rank}"
        directory.mkdir()
        command = list(map(str, [*line, "--machine_rank", rank, __file__, ports]))
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_WAIT_POLICY": "passive"}
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        hosts.append(subprocess.Popen(command, cwd=directory, env=environment, **pipes))
    reference = {"processes": 2, "directory": tmp_path, "flags": FLAGS}
    codes = forked(
        [{**reference, "script": ROOT / f"recipes/{recipe}.py"} for recipe in RECIPES],
        tmp_path,
        OMP_WAIT_POLICY="passive",
    )
    printed = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], printed
    assert [code for code, _ in codes] == [[0, 0]] * len(RECIPES), codes
    assert printed[0].count("step 4/4 epoch 1 loss") == len(RECIPES) and "step" not in printed[1]
    for recipe in RECIPES:
        ours, theirs = (outputs(host / f"runs/{recipe}") for host in (tmp_path / "host0", tmp_path))
        assert ours["summary"]["world_size"] == theirs["summary"]["world_size"] == 2
        ours, theirs = load_file(ours["weights"]), load_file(theirs["weights"])
        assert max((ours[name] - value).abs().max() for name, value in theirs.items()) < 1e-6


def train_all(ports):
    """The process that the launcher has started: it trains each recipe in a fork of its own, for torch to be imported
    once, and on a port of its own, because the launcher's serves one training."""
    import accelerate  # noqa: F401
    import torchvision  # noqa: F401

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for recipe, port in ports.items():
        if not (child := os.fork()):
            os.environ["MASTER_PORT"] = str(port)
            sys.argv = [str(Path(ROOT, f"recipes/{recipe}.py")), *FLAGS]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    train_all(json.loads(sys.argv[1]))
