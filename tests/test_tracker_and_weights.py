"""--tracker has the lines of metrics; --epochs 0 evaluates --weights. Weights that do not fit:
test_errors.py."""

import json
import sys

import pytest
from conftest import ROOT, SMALL, run, train_forked
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
    assert {tag.partition("/")[0] for tag in tags} == {"train", "evaluation"}
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
    flags = [*FLAGS, "--epochs", 0, "--weights", result.weights]
    evaluated, untrained = train_forked(tmp_path, (2, recipe, flags), (2, recipe, flags[:-2]))
    (line,) = evaluated.evaluations
    assert evaluated.train == []
    for name in ("test_loss", "test_accuracy"):
        assert line[name] == evaluated.summary[name] == result.summary[name]
    assert untrained.summary["test_loss"] != evaluated.summary["test_loss"]
    assert all(path.read_bytes() == content for path, content in before.items())


WANDB = """
import json
import os

config = {}


class Run:
    config = {}

    def log(self, *arguments, **options):
        pass

    def finish(self):
        pass


def init(**options):
    with open(os.environ["SAID"], "a") as file:
        told = {name: os.environ.get(name) for name in ("WANDB_RUN_ID", "WANDB_RESUME")}
        print(json.dumps(told), file=file)
    return Run()
"""


def test_a_resumed_training_continues_its_run_in_weights_and_biases(tmp_path):
    """Of a stand-in for the library, called by Accelerate's tracker."""
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "wandb-1.0.dist-info").mkdir()
    (tmp_path / "wandb-1.0.dist-info/METADATA").write_text("Name: wandb\nVersion: 1.0\n")
    env = {"PYTHONPATH": str(tmp_path), "SAID": str(tmp_path / "said")}
    env["WANDB_DISABLED"] = "false"
    flags = ["--tracker", "wandb", "--epochs", 0, *SMALL]

    def start(directory, **more):
        recipe = ROOT / "recipes/ddp_cifar.py"
        run([sys.executable, recipe, *flags, "--output-dir", tmp_path / directory], **env, **more)

    start("run")
    start("run")
    start("other")
    start("run", WANDB_RUN_ID="mine", WANDB_RESUME="must")
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    first, second, other, own = [x["WANDB_RUN_ID"] for x in said]
    assert first == second != other and len(first) == 16 and own == "mine"
    assert [x["WANDB_RESUME"] for x in said] == ["allow", "allow", "allow", "must"]
