"""The baseline: the training of ddp_cifar.py on one process, with other means."""

import io
import math
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import CNN, SHORT, Exit, assert_same_training, copy, load
from processes import train_forked

# As on an AMD machine with HIP_VISIBLE_DEVICES, which has precedence over CUDA_VISIBLE_DEVICES.
GPUS_THAT_STAY = """
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
"""
# As Accelerate makes it under torchrun and on a GPU.
GROUP = """
import atexit
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("open at the end:", distributed.is_initialized()))
"""


def test_losses_and_weights_are_those_of_ddp_on_one_process_bit_for_bit(tmp_path):
    """In two epochs of little data, with dropout. --cpu means no GPU whatever torch sees, and no
    process group is open at the end."""
    dropout = "nn.Flatten(), nn.Linear(16", "nn.Flatten(), nn.Dropout(), nn.Linear(16"
    runs = []
    for recipe, text in (
        ("data_parallel_cifar", GPUS_THAT_STAY + GROUP),
        ("ddp_cifar", ""),
    ):
        script = copy(recipe, tmp_path / f"{recipe}.py", *SHORT, dropout, project=text)
        runs.append((1, script, [*CNN, "--batch-size", 64, "--max-steps", 6, "--threads", 1]))
    result, reference = train_forked(tmp_path, *runs)
    assert len(result.train) == 6
    assert_same_training(reference, result, 0, {"grad_norm"})
    for name in ("steps", "global_batch_size", "precision", "device"):
        assert result.summary[name] == reference.summary[name], name
    assert result.summary["replicas"] == 1 and "open at the end: False" in result.output


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "2", "one process, --num_processes 1: or use ddp_cifar.py"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "the baseline trains in fp32"),
    ],
)
def test_a_launchers_setting_that_it_would_ignore_is_an_error(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(Exit, match=said):
        load("recipes/data_parallel_cifar.py", exits=True).make_accelerator(None)


def test_a_loss_that_is_not_finite_is_an_error():
    recipe = load("recipes/data_parallel_cifar.py", exits=True)
    with pytest.raises(Exit, match="the loss is not finite at step 4: lower --lr"):
        recipe.write(io.StringIO(), "train", 0, 4, {"loss": math.nan, "accuracy": 0.1})


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/kfd"])
def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch, device):
    """NVIDIA's with an old driver, or AMD's with a torch that was built for CUDA."""
    monkeypatch.setattr(os.path, "exists", lambda path: path == device)
    recipe = load("recipes/data_parallel_cifar.py", exits=True)
    with pytest.raises(Exit, match=r"torch cannot use the GPUs: .* or add --cpu"):
        recipe.make_accelerator(SimpleNamespace(cpu=False))


def test_kernels_are_timed_and_fp32_is_tf32_on_gpus(monkeypatch):
    recipe = load("recipes/data_parallel_cifar.py")
    recipe.Accelerator = lambda **_: None
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    recipe.make_accelerator(SimpleNamespace(cpu=False, threads=1, seed=0))
    assert torch.backends.cudnn.benchmark and precisions == ["high"]
