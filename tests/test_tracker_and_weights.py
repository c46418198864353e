"""--tracker has the lines of metrics; --weights are evaluated with --epochs 0, or trained from, as
far as they fit."""

import pytest
import torch
from conftest import ROOT, forked, train_forked
from safetensors.torch import load_file, save_file

FLAGS = ["--max-steps", 6, "--epochs", 2, "--batch-size", 64, "--seed", 3]
BASE = ["--data", "synthetic", "--model", "simple_cnn", "--cpu"]
RECIPES = {"ddp_cifar": 2, "pipeline_cifar": 2, "data_parallel_cifar": 1, "amp_cifar": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs = [
        (processes, recipe, [*FLAGS, "--tracker", "tensorboard"])
        for recipe, processes in RECIPES.items()
    ]
    return dict(zip(RECIPES, train_forked(tmp_path_factory.mktemp("trained"), *runs), strict=True))


@pytest.mark.parametrize("recipe", ["ddp_cifar", "pipeline_cifar"])
def test_tensorboard_has_the_lines_of_metrics(trained, recipe):
    loading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    result = trained[recipe]
    events = loading.EventAccumulator(str(result.directory / recipe)).Reload()
    for event, lines in (("train", result.train), ("evaluation", result.evaluations)):
        names = lines[-1].keys() - {"event", "step", "epoch", "time"}
        assert names == {
            tag.partition("/")[2] for tag in events.Tags()["scalars"] if tag.startswith(f"{event}/")
        }
        for name in names:
            tracked = {scalar.step: scalar.value for scalar in events.Scalars(f"{event}/{name}")}
            assert tracked == pytest.approx(
                {line["step"]: line[name] for line in lines if line[name] is not None}
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_epochs_evaluate_weights_and_a_checkpoint_and_touch_nothing(trained, recipe, tmp_path):
    result = trained[recipe]
    before = {path: path.read_bytes() for path in result.directory.rglob("*") if path.is_file()}
    flags = ["--epochs", 0, "--batch-size", 64, "--seed", 3, "--weights", result.weights]
    evaluated, untrained = train_forked(
        tmp_path, *((RECIPES[recipe], recipe, line) for line in (flags, flags[:-2]))
    )
    (line,) = evaluated.evaluations
    assert evaluated.train == [] and evaluated.summary["train_loss"] is None
    for name in ("test_loss", "test_accuracy", "samples"):
        assert line[name] == evaluated.summary[name] == result.summary[name]
    assert untrained.summary["test_loss"] != evaluated.summary["test_loss"]
    assert {
        path: path.read_bytes() for path in result.directory.rglob("*") if path.is_file()
    } == before


def test_weights_are_what_training_starts_from_as_far_as_they_fit(trained, tmp_path):
    """Where the head is another task's, the first layers are the file's and the head is the
    seed's."""
    weights = load_file(trained["ddp_cifar"].weights)
    head = [name for name, value in weights.items() if value.shape[0] == 10]
    other = {
        name: torch.zeros(7, *value.shape[1:]) if name in head else value
        for name, value in weights.items()
    }
    save_file(other, tmp_path / "other.safetensors")
    torch.save(weights, tmp_path / "weights.pth")
    flags = ["--max-steps", 1, "--lr", 1e-9, "--batch-size", 64, "--weights"]
    runs = [
        (1, "ddp_cifar", [*flags, tmp_path / name]) for name in ("other.safetensors", "weights.pth")
    ]
    runs += [(2, "pipeline_cifar", [*flags, tmp_path / "other.safetensors"])]
    fresh = (1, "ddp_cifar", flags[:-1])
    mine, whole, piped, fresh = train_forked(tmp_path, *runs, fresh)
    assert all(
        f"names that do not fit: {', '.join(sorted(head))}\n" in result.output
        for result in (mine, piped)
    )
    assert "names that do not fit: none\n" in whole.output
    for result, is_head in ((mine, fresh), (piped, fresh), (whole, None)):
        for name, value in load_file(result.weights).items():
            source = load_file(is_head.weights)[name] if is_head and name in head else weights[name]
            torch.testing.assert_close(value, source, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module."])
def test_weights_of_a_wrapped_model_load(trained, prefix, wrapped):
    """As `torch.compile` and DDP name them in their state dicts."""
    evaluated = wrapped[prefix]
    assert "names that do not fit: none\n" in evaluated.output
    assert evaluated.summary["test_loss"] == trained["ddp_cifar"].summary["test_loss"]


@pytest.fixture(scope="module")
def wrapped(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("wrapped")
    weights = load_file(trained["ddp_cifar"].weights)
    runs = {}
    for prefix in ("_orig_mod.", "module.", "_orig_mod.module."):
        path = directory / f"{prefix}pt"
        torch.save({prefix + name: value for name, value in weights.items()}, path)
        flags = ["--epochs", 0, "--batch-size", 64, "--seed", 3, "--weights", path]
        runs[prefix] = (2, "ddp_cifar", flags)
    return dict(zip(runs, train_forked(directory, *runs.values()), strict=True))


WRONG = {
    "absent": (["--epochs", 1], "argument --weights: cannot load absent "),
    "text": (["--epochs", 1], "argument --weights: cannot load text "),
    "other.safetensors": (
        ["--epochs", 0],
        "argument --weights: other.safetensors does not fit this model: 0.0.bias, ",
    ),
    "nothing.safetensors": (
        ["--epochs", 1],
        "argument --weights: nothing.safetensors does not fit this model: ",
    ),
}


def test_weights_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "text").write_text("weights")
    for name, key in (("other", "2.1.weight"), ("nothing", "body.weight")):
        save_file(
            {key: torch.zeros(7, 128)}, tmp_path / f"{name}.safetensors", metadata={"format": "pt"}
        )
    common = {"processes": 1, "script": ROOT / "recipes/ddp_cifar.py", "directory": tmp_path}
    runs = [
        {**common, "flags": [*BASE, *flags, "--weights", name, "--output-dir", f"runs/{name}"]}
        for name, (flags, _) in WRONG.items()
    ]
    for (name, (_, message)), (codes, output) in zip(
        WRONG.items(), forked(runs, tmp_path, together=2), strict=True
    ):
        assert codes == [2], name
        assert (
            output.startswith("ddp_cifar: error: ")
            and output.count("\n") == 1
            and message in output
        ), output


def continued(tracker, directory, **env):
    """A run with a tracker that is killed after step 5 of 10, and continued from step 4."""
    flags = ["--batch-size", 64, "--epochs", 1, "--log-every", 1, "--checkpoint-every", 2]
    common = {"recipe": "ddp_cifar", "processes": 1, "directory": directory / "run", "env": env}
    common["flags"] = [*flags, "--tracker", tracker]
    killed = {**common, "disturbances": {"0": [6, "SIGKILL"]}}
    outcomes = forked([killed, common], directory)
    assert [codes for codes, _ in outcomes] == [[-9], [0]], outcomes
    assert "resumed_from: 4\n" in outcomes[1][1]
    return directory / "run"


def test_a_continued_run_is_one_curve_in_tensorboard(tmp_path):
    """Step 5 was logged twice: before the kill, and again."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = continued("tensorboard", tmp_path)
    events = loading.EventAccumulator(str(directory / "ddp_cifar")).Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == list(range(1, 11))


def test_a_continued_run_is_one_run_for_wandb(tmp_path):
    """Offline: both parts have the same run id, by which wandb joins them."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    continued("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    parts = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(parts) == 2 and len({name.rpartition("-")[2] for name in parts}) == 1, parts
