"""The baseline: the training of ddp_cifar.py on one process, with other means."""

import io
import math
import sys

import pytest
import torch
from conftest import LITTLE_DATA, SMALL, Exit, copy, forked, load, outputs
from safetensors.torch import load_file

RESNET = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 16]
KINDS = {"simple": ["--batch-size", 64], "resnet": RESNET}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{(recipe, kind): what a copy on little data left}, of more than one epoch."""
    directory = tmp_path_factory.mktemp("baseline")
    runs = {}
    for recipe in ("data_parallel_cifar", "ddp_cifar"):
        script = copy(recipe, directory / f"{recipe}.py", LITTLE_DATA)
        for kind, flags in KINDS.items():
            flags = [*SMALL, *flags, "--max-steps", 6 if kind == "simple" else 3, "--log-every", 1]
            run = {"processes": 1, "script": script, "directory": directory}
            name = f"{recipe}-{kind}"
            runs[recipe, kind] = {**run, "flags": [*flags, "--output-dir", name]}
    answers = forked(list(runs.values()), directory, together=2)
    assert [codes for codes, _ in answers] == [[0]] * 4, answers
    return {key: outputs(directory / "-".join(key)) for key in runs}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_ddp_on_one_process_bit_for_bit(trained, kind):
    result, reference = (trained[x, kind] for x in ("data_parallel_cifar", "ddp_cifar"))
    losses, expected = ([line["loss"] for line in run["train"]] for run in (result, reference))
    assert len(losses) == (6 if kind == "simple" else 3) and losses == expected
    rates, expected = (
        [line["learning_rate"] for line in run["train"]] for run in (result, reference)
    )
    assert rates == expected
    for name in ("test_loss", "test_accuracy", "steps", "global_batch_size", "precision"):
        assert result["summary"][name] == reference["summary"][name], name
    weights, expected = load_file(result["weights"]), load_file(reference["weights"])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_several_processes_are_an_error_that_says_how_to_launch_one(monkeypatch):
    recipe = load("recipes/data_parallel_cifar.py", exits=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exit, match=r"one process, --num_processes 1: or use ddp_cifar.py"):
        recipe.make_accelerator(None)


def test_a_launchers_precision_is_an_error_and_not_training_in_fp32(monkeypatch):
    recipe = load("recipes/data_parallel_cifar.py", exits=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(Exit, match="the baseline trains in fp32"):
        recipe.make_accelerator(None)


def test_a_loss_that_is_not_finite_is_an_error():
    recipe = load("recipes/data_parallel_cifar.py", exits=True)
    with pytest.raises(Exit, match="the loss is not finite at step 4: lower --lr"):
        recipe.write(io.StringIO(), "train", 0, 4, {"loss": math.nan, "accuracy": 0.1})


def test_an_error_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["data_parallel_cifar.py", "--batch-size", "-1"])
    with pytest.raises(SystemExit) as end:
        load("recipes/data_parallel_cifar.py").parse_args()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("data_parallel_cifar: error: argument --batch-size: ")
    assert said.count("\n") == 1
