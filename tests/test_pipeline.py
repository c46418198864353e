"""The pipeline against the whole model, and both stages against each other."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CNN,
    IN_FLOAT64,
    ROUNDING,
    ROUNDING_FLOAT32,
    SHORT,
    Exit,
    assert_same_training,
    copy,
    load,
    project,
)
from processes import train_forked
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from weights import read_weights

recipe = load("recipes/pipeline_cifar.py", exits=True)
TWO = ["--chunks", 2]  # more would take more time

# {case: what the copies have, flags, numbers of processes}
IN_PLACE = {"build_model": "model_that_works_in_place", "compute_loss": "weighted_loss"}
CASES = {
    "weighted": (IN_PLACE, [], (2, 4)),
    # Clipped also in a step without a line.
    "frozen": (
        {"build_model": "model_with_a_frozen_stage"},
        ["--clip-norm", 0.05, "--log-every", 5],
        (4,),
    ),
    # Of all chunks.
    "batchnorm": ({"build_model": "model_with_batchnorm"}, ["--clip-norm", 0.05], (2,)),
}
SHAPES = {
    1: ["--batch-size", 6],
    2: ["--batch-size", 48, "--chunks", 8],
    4: ["--batch-size", 12, "--chunks", 2, "--schedule", "1f1b"],
}
MORE = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "weighted"]


@pytest.mark.parametrize("case", ["weighted", *MORE])
def test_ten_steps_and_the_evaluation_are_those_of_ddp_that_accumulates(case, tmp_path):
    """Over the same chunks of six samples. Weights of samples are mostly 0. The second stage begins
    with an operation in place, or the first one is frozen. A buffer differs between pipelines. 64
    test samples leave a batch incomplete."""
    chosen, flags, counts = CASES[case]
    text = project("pipeline", **chosen) + IN_FLOAT64
    flags = [*CNN, "--max-steps", 10, "--lr", 0.2, "--global-batch-size", 48, *flags]
    runs = []
    for processes in (1, *counts):
        name = "pipeline" if processes > 1 else "ddp"
        script = tmp_path / f"{processes}.py"
        copy(f"{name}_cifar", script, *SHORT, project=text)
        runs.append((processes, script, [*flags, *SHAPES[processes]]))
    whole, *pipelines = train_forked(tmp_path, *runs)
    accumulation = {1: 8, 2: 1, 4: 2}
    for processes, run in zip((1, *counts), (whole, *pipelines), strict=True):
        assert run.summary["accumulation"] == accumulation[processes]
    losses = [line["loss"] for line in whole.train]
    assert losses[0] - min(losses) > 1e-2, "or it would prove nothing"
    clipped = "--clip-norm" in flags
    assert not clipped or min(line["grad_norm"] for line in whole.train) > 0.1
    for run in pipelines:  # the norm that clips is in float32
        assert_same_training(run, whole, 1e-6 if clipped else ROUNDING, {"grad_norm"})
        norms = [[line["grad_norm"] for line in one.train] for one in (run, whole)]
        assert norms[0] == pytest.approx(norms[1], rel=ROUNDING_FLOAT32)
        # A stage that waits has as much time as the other collectives.
        assert set(re.findall("timeout: (.*)", run.output)) == {str(recipe.TIMEOUT)}


def test_a_loss_in_bf16_is_computed_in_fp32():
    model = SimpleNamespace(args=SimpleNamespace(chunks=1), accumulation=1, chunk_values=[])
    loss = recipe.Pipeline.loss(model, torch.zeros(4, 10).bfloat16(), torch.arange(4))
    assert loss.dtype == torch.float32, "the outputs come from the first stage in bf16"


# A stem, the height of its outputs for images of 32, --split, and where the second stage begins.
CUTS = [("cifar", 32, "layer1.2", "layer1.2"), ("imagenet", 8, None, "layer3.2")]


@pytest.mark.parametrize(("stem", "height", "split", "begin"), CUTS)
def test_the_stages_in_a_row_are_resnet50_wherever_it_is_cut(
    stem, height, split, begin, monkeypatch
):
    models = recipe.torchvision.models
    monkeypatch.setattr(models, "resnet50", partial(models.resnet50, width_per_group=8))
    flags = SimpleNamespace(model="resnet50", stem=stem, split=split)
    model = recipe.build_model(flags).eval().double()
    blocks = recipe.model_blocks(model)
    recipe.set_split(flags, list(blocks))
    first, second = recipe.cut(blocks, flags.split)
    assert next(iter(second)) == begin
    chain = nn.Sequential(*first.values(), *second.values())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(chain(images), model(images))
        assert chain(images).shape == (2, 10)
        assert nn.Sequential(*list(model.children())[:4])(images).shape == (2, 64, height, height)
    assert model.conv1.bias is None and not model.layer1[0].bn3.weight.any()


class OwnForward(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def cut(*blocks, split="1"):
    flags = SimpleNamespace(split=split)
    blocks = recipe.model_blocks(nn.Sequential(*blocks))
    recipe.set_split(flags, list(blocks))
    recipe.cut(blocks, flags.split)


def check_division(world_size, **more):
    flags = {"batch_size": 64, "chunks": 8, "schedule": "gpipe"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "WORLD_SIZE", world_size)
        recipe.check_division(SimpleNamespace(**flags | more))


def last_stage(batch, keys=("loss",)):
    """Evaluate a batch on the last stage of a pipeline whose first batch was four samples."""

    def evaluate(target, return_outputs):
        model.chunk_values.append(dict.fromkeys(keys, torch.zeros(4)))

    model = SimpleNamespace(batch_shapes=[(4, 2), (4,)], training=False)
    model.args = SimpleNamespace(batch_size=4, chunks=1)
    model.chunk_values = []
    model.keys = ["loss"]
    model.group = SimpleNamespace(rank=lambda: 1)
    model.schedule = SimpleNamespace(eval=evaluate)
    return recipe.run_pipeline(model, batch)


linear, images, labels = nn.Linear(2, 2), torch.zeros(4, 2), torch.zeros(4)
MISTAKES = {
    "uneven": (lambda: check_division(2, batch_size=100), "--chunks: choose a divisor of 100"),
    "1f1b": (lambda: check_division(2, schedule="1f1b", chunks=1), "1f1b needs at least 2"),
    "own forward": (lambda: recipe.model_blocks(OwnForward(linear)), "cannot cut OwnForward"),
    "no such block": (lambda: cut(linear, linear, split="9"), "--split: 9 is not one of 1"),
    "empty stage": (lambda: cut(linear, nn.ReLU()), "--split: 1 gives a stage without parameters"),
    "empty first stage": (lambda: cut(nn.ReLU(), linear), "gives a stage without parameters"),
    "tied over the cut": (lambda: cut(linear, linear), "share a parameter (tied weights): choose"),
    "dictionary": (lambda: last_stage({"x": images, "y": labels}), "must be two tensors"),
    "other shapes": (lambda: last_stage((images[:, :1], labels)), "not [(4, 1), (4,)]"),
    "other keys": (lambda: last_stage((images, labels), ("loss", "certain")), "the same keys"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(mistake):
    call, said = MISTAKES[mistake]
    assert len(last_stage((images[:3], labels[:3]))[0]["loss"]) == 3, "an incomplete batch is none"
    check_division(2, chunks=1)  # which is too few for 1f1b alone
    with pytest.raises(Exit, match=re.escape(said)):
        call()


@pytest.mark.copied("pipeline_cifar")
def test_one_process_is_one_error_line(outcome):
    assert outcome.codes == [2] and "takes two processes, not 1: launch" in outcome.output


TIED = project(
    "pipeline", build_model="tied_model", compute_loss="loss_with_outputs", test_metrics="places"
)
TEST_LOADER = "DataLoader(test_set, **options)"
SMALLER = TEST_LOADER, 'DataLoader(test_set, **{**options, "batch_size": 12})'
FLAGS = [*TWO, "--split", 5, "--batch-size", 16]


@pytest.mark.slow
@pytest.mark.copied("pipeline_cifar", SMALLER, project=TIED, processes=4, flags=FLAGS)
def test_outputs_come_in_order_and_weights_tied_within_a_stage_are_written_once(outcome):
    """Of the last batches of the test set one is incomplete, and for the other pipeline none is
    left. Also a block that comes twice; it runs twice. BatchNorm's statistics are those of the
    first pipeline, with which both evaluate."""
    assert set(outcome.codes) == {0}, outcome.output
    model = load("tests/programs/overrides/pipeline.py").tied_model(None)
    weights = load_file(outcome.directory / "run/model.safetensors")
    tied = ["4.weight", "4.bias", "6.weight"]
    assert model.load_state_dict(weights, strict=False) == (tied, [])
    saved = read_weights(outcome.directory / "run/step-00000002.pt")
    assert all(torch.equal(saved[name], x) for name, x in weights.items())
    summary = json.loads((outcome.directory / "run/summary.json").read_text())
    data = recipe.ImageTensors(*recipe.synthetic_images(64, seed=2), torch.device("cpu"))
    images, labels = data.__getitems__(range(64))
    loss = F.cross_entropy(model.eval()(images), labels).item()
    assert loss == pytest.approx(summary["test_loss"], rel=ROUNDING_FLOAT32)
    assert summary["test_places"] == sum(i * label.item() for i, label in enumerate(labels))
