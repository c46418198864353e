"""Several machines without a scheduler: one `accelerate launch` on each, here two on this machine's loopback."""

import subprocess

import pytest
from conftest import ACCELERATE, ROOT, free_port, outputs, train
from safetensors.torch import load_file

RECIPES = ["ddp_cifar", "amp_cifar", "pipeline_cifar"]
FLAGS = ["--max-steps", 4, "--batch-size", 16]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_hosts_train_like_one(recipe, tmp_path):
    """In the pipeline the two stages are on different hosts. Each host has a disk of its own."""
    line = [ACCELERATE, "launch", "--config_file", ROOT / "accelerate_configs/nodes.yaml", "--num_processes", 2]
    line += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    script = [ROOT / f"recipes/{recipe}.py", "--data", "synthetic", "--model", "simple_cnn", "--cpu", *FLAGS]
    hosts = []
    for rank in (0, 1):
        directory = tmp_path / f"host{rank}"
        directory.mkdir()
        command = [*line, "--machine_rank", rank, *script, "--log-every", 1]
        hosts.append(
            subprocess.Popen(
                list(map(str, command)), cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    printed = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], printed
    result = outputs(tmp_path / f"host0/runs/{recipe}")
    assert result["summary"]["world_size"] == 2 and "step 4/4" in printed[0] and "step" not in printed[1]
    ours, theirs = load_file(result["weights"]), load_file(train(2, tmp_path, *FLAGS, recipe=recipe).weights)
    assert max((ours[name] - value).abs().max() for name, value in theirs.items()) < 1e-6
