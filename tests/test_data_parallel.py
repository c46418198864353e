"""The DataParallel baseline against ddp_cifar.py on one process."""

import pytest
import torch
from conftest import ROOT, forked, train_forked
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/data_parallel_cifar.py"
FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", 1]


@pytest.mark.slow
def test_losses_and_weights_are_those_of_ddp_on_one_process_bit_for_bit(tmp_path):
    resnet50 = ["--model", "resnet50", "--stem", "imagenet"]
    kinds = [
        ["--batch-size", 128, "--global-batch-size", 256],
        ["--batch-size", 16, "--global-batch-size", 32, *resnet50],
    ]
    runs = [
        (1, recipe, ["--max-steps", 4, "--epochs", 3, *kind])
        for kind in kinds
        for recipe in ("data_parallel_cifar", "ddp_cifar")
    ]
    results = train_forked(tmp_path, *runs)
    assert "  replicas: 0\n" in results[0].output
    for result, reference in zip(results[::2], results[1::2], strict=True):
        assert len(result.train) == 4
        assert [line["loss"] for line in result.train] == [line["loss"] for line in reference.train]
        weights, expected = load_file(result.weights), load_file(reference.weights)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert result.summary["accumulation"] == reference.summary["accumulation"] == 2
        assert result.summary["global_batch_size"] == reference.summary["global_batch_size"]
        assert result.summary["test_loss"] == reference.summary["test_loss"]


def test_several_processes_are_an_error(tmp_path):
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    run = {"processes": 1, "script": RECIPE, "directory": tmp_path, "flags": FLAGS, "env": launched}
    ((codes, said),) = forked([run], tmp_path)
    assert codes == [2]
    assert said.startswith("data_parallel_cifar: error: ") and said.count("\n") == 1
    assert "--num_processes 1" in said and "DDP" in said
