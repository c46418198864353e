"""--tracker has the lines of metrics; --epochs 0 evaluates --weights. Weights that do not fit:
test_errors.py."""

import os

import pytest
from conftest import CNN, SHORT, copy, load
from processes import train_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_tensorboard_has_the_lines_of_metrics_and_no_epochs_evaluate_weights(tmp_path):
    """As their training did. No file changes."""
    scripts = [
        copy(f"{name}_cifar", tmp_path / f"{name}.py", *SHORT) for name in ("ddp", "pipeline")
    ]
    flags = [*CNN, "--batch-size", 64, "--epochs", 2, "--tracker", "tensorboard"]
    trained = train_forked(tmp_path, *((2, script, flags) for script in scripts))
    assert_tensorboard_has_the_lines(trained[0])
    files = [path for run in trained for path in run.directory.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    runs = []
    for script, run in zip(scripts, trained, strict=True):
        weights = ["--epochs", 0, "--weights", run.directory / "model.safetensors"]
        where = {"directory": tmp_path / f"again-{script.stem}"}
        runs.append((2, script, [*CNN, "--batch-size", 64, *weights], where))
    for evaluated, result in zip(train_forked(tmp_path, *runs), trained, strict=True):
        (line,) = evaluated.evaluations
        assert evaluated.train == []
        for name in ("test_loss", "test_accuracy"):
            assert line[name] == evaluated.summary[name] == result.summary[name]
        assert not list(evaluated.directory.glob("*.pt"))
    assert [path.read_bytes() for path in files] == before


def assert_tensorboard_has_the_lines(result):
    events = EventAccumulator(str(result.directory / "ddp")).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == {"train", "checkpoint", "evaluation"}
    for event, lines in (("train", result.train), ("evaluation", result.evaluations)):
        names = lines[-1].keys() - {"event", "step", "epoch", "time"}
        assert {f"{event}/{name}" for name in names} == {x for x in tags if x.startswith(event)}
        for name in names:
            tracked = {scalar.step: scalar.value for scalar in events.Scalars(f"{event}/{name}")}
            assert tracked == pytest.approx({line["step"]: line[name] for line in lines})


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
    for content in (b"a\0b", b"\xff\xfe", b""):  # no id: it gets another one
        (tmp_path / "run.id").write_bytes(content)
        assert len(bytes.fromhex(told())) == 8
