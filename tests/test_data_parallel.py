"""The baseline: the training of ddp_cifar.py on one process, with other means."""

import io
import math

import pytest
from conftest import LITTLE_DATA, SMALL, Exit, assert_same_training, copy, load, train_forked


def test_losses_and_weights_are_those_of_ddp_on_one_process_bit_for_bit(tmp_path):
    """In two epochs of little data."""
    runs = []
    for recipe in ("data_parallel_cifar", "ddp_cifar"):
        script = copy(recipe, tmp_path / f"{recipe}.py", LITTLE_DATA)
        runs.append((1, script, [*SMALL, "--batch-size", 64, "--max-steps", 6]))
    result, reference = train_forked(tmp_path, *runs)
    assert len(result.train) == 6
    assert_same_training(reference, result, 0)
    for name in ("steps", "global_batch_size", "precision"):
        assert result.summary[name] == reference.summary[name], name


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
