"""The DataParallel baseline against ddp_cifar.py on one process."""

import copy
import sys

import pytest
import torch
from conftest import ROOT, launch, load, run, the_error_line, train_forked
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/data_parallel_cifar.py"
FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "1"]


@pytest.mark.parametrize("model", [["simple_cnn"], ["resnet50", "--stem", "imagenet", "--batch-size", 16]])
def test_losses_and_weights_are_those_of_ddp_on_one_process_bit_for_bit(model, tmp_path):
    flags = ["--model", *model, "--epochs", 3, "--max-steps", 5, "--accumulation-steps", 2]
    result, reference = train_forked(tmp_path, (1, "data_parallel_cifar", flags), (1, "ddp_cifar", flags))
    assert len(result.train) == 5
    assert [line["loss"] for line in result.train] == [line["loss"] for line in reference.train]
    weights, expected = load_file(result.weights), load_file(reference.weights)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert result.summary["global_batch_size"] == reference.summary["global_batch_size"]


def test_the_panel_says_that_it_passes_through_on_cpu(tmp_path):
    process = run([sys.executable, RECIPE, *FLAGS], cwd=tmp_path)
    assert "replicas: none, without GPUs DataParallel only passes the batch through to the model\n" in process.stdout


def test_the_panel_says_how_the_batch_is_divided():
    recipe = load("recipes/data_parallel_cifar.py")
    model = torch.nn.DataParallel(torch.nn.Linear(1, 1))
    model.device_ids = [0, 1, 2, 3]
    assert recipe.describe_replicas(model, 128) == "4 GPUs with 32 + 32 + 32 + 32 samples of each batch"
    assert recipe.describe_replicas(model, 6) == "3 GPUs with 2 + 2 + 2 samples of each batch"


def test_several_processes_are_refused(tmp_path):
    line = the_error_line(launch(2, RECIPE, *FLAGS, cwd=tmp_path, check=False))
    assert "1gpu.yaml" in line and "ddp_cifar.py" in line


def test_gpus_that_are_not_there_are_refused(tmp_path):
    process = run([sys.executable, RECIPE, *FLAGS, "--gpus", "0,77"], cwd=tmp_path, check=False)
    assert "--gpus" in the_error_line(process)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_of_the_replicas_are_those_of_one_device():
    recipe = load("recipes/data_parallel_cifar.py")
    torch.manual_seed(0)
    args = type("Args", (), {"model": "simple_cnn", "stem": "cifar"})
    single = recipe.build_model(args).cuda()
    parallel = torch.nn.DataParallel(copy.deepcopy(single))
    images, labels = torch.randn(64, 3, 32, 32).cuda(), torch.randint(10, (64,)).cuda()
    for model in (single, parallel):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    for value, expected in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(value.grad, expected.grad, rtol=1e-4, atol=1e-6)
