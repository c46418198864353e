"""--tracker has the lines of metrics; --epochs 0 evaluates --weights. Weights that do not fit:
test_errors.py."""

import os

import pytest
from conftest import load
from processes import train_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RECIPES = ["ddp_cifar", "pipeline_cifar"]
FLAGS = ["--batch-size", 64, "--seed", 3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    flags = [*FLAGS, "--max-steps", 6, "--epochs", 2, "--tracker", "tensorboard"]
    runs = [(2, recipe, flags) for recipe in RECIPES]
    return dict(zip(RECIPES, train_forked(tmp_path_factory.mktemp("trained"), *runs), strict=True))


def test_tensorboard_has_the_lines_of_metrics(trained):
    result = trained["ddp_cifar"]
    events = EventAccumulator(str(result.directory / "ddp_cifar")).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == {"train", "checkpoint", "evaluation"}
    for event, lines in (("train", result.train), ("evaluation", result.evaluations)):
        names = lines[-1].keys() - {"event", "step", "epoch", "time"}
        assert {f"{event}/{name}" for name in names} == {x for x in tags if x.startswith(event)}
        for name in names:
            tracked = {scalar.step: scalar.value for scalar in events.Scalars(f"{event}/{name}")}
            assert tracked == pytest.approx({line["step"]: line[name] for line in lines})


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_epochs_evaluate_weights_as_their_training_did_and_change_no_file(
    trained, recipe, tmp_path
):
    result = trained[recipe]
    before = {path: path.read_bytes() for path in result.directory.rglob("*") if path.is_file()}
    flags = [*FLAGS, "--epochs", 0, "--weights", result.directory / "model.safetensors"]
    (evaluated,) = train_forked(tmp_path, (2, recipe, flags))
    (line,) = evaluated.evaluations
    assert evaluated.train == []
    for name in ("test_loss", "test_accuracy"):
        assert line[name] == evaluated.summary[name] == result.summary[name]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert not list(evaluated.directory.glob("*.pt"))


def test_a_resumed_training_continues_its_run_in_weights_and_biases(tmp_path, monkeypatch):
    """The library reads its run's id from the environment, where a user may have set another."""
    recipe = load("recipes/ddp_cifar.py")
    monkeypatch.setenv("WANDB_RESUME", "")
    monkeypatch.delenv("WANDB_RESUME")

    def told(own=""):
        monkeypatch.setenv("WANDB_RUN_ID", own)  # monkeypatch undoes what the recipe sets
        if not own:
            monkeypatch.delenv("WANDB_RUN_ID")
        recipe.lock_output_directory(tmp_path)
        return os.environ["WANDB_RUN_ID"]

    first, second = told(), told()
    assert first != second and len(first) == 16, "without a checkpoint"
    (tmp_path / "step-00000001.pt").touch()
    assert told() == second and os.environ["WANDB_RESUME"] == "allow"
    assert told("mine") == "mine"
