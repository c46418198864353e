"""Looking at a run: --tracker, --profile, and --eval-only, which measures a checkpoint and touches nothing."""

import json
import re

import pytest
from conftest import ROOT, launch, train

FLAGS = ["--max-steps", 10, "--batch-size", 32, "--seed", 3]


@pytest.fixture(scope="module", params=["ddp_cifar", "pipeline_cifar"])
def observed(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    observers = ["--tracker", "tensorboard", "--profile"]
    return request.param, directory, train(2, directory, *FLAGS, *observers, recipe=request.param)


def test_tensorboard_has_the_lines_of_metrics(observed):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    recipe, directory, result = observed
    events = loading.EventAccumulator(str(directory / recipe)).Reload()
    for event, lines in (("train", result.train), ("evaluation", result.evaluations)):
        for name in lines[-1].keys() - {"event", "step"}:
            tracked = {scalar.step: scalar.value for scalar in events.Scalars(f"{event}/{name}")}
            assert tracked == pytest.approx({line["step"]: line[name] for line in lines if line[name] is not None})


def test_a_trace_of_three_steps_of_every_rank(observed):
    _, directory, _ = observed
    assert len(list(directory.glob("trace-rank-*.json"))) == 2
    for rank in (0, 1):
        events = json.loads((directory / f"trace-rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert any("conv" in name for name in names)


def test_evaluating_a_checkpoint_touches_nothing(observed, tmp_path):
    recipe, directory, result = observed
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    flags = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", *FLAGS]
    flags += ["--output-dir", directory, "--eval-only", "--resume", "auto"]
    output = launch(2, ROOT / f"recipes/{recipe}.py", *flags).stdout
    (test,) = result.evaluations
    (shown,) = re.findall(r"epoch 1 step 10 (test loss .*)", output)
    assert shown == f"test loss {test['test_loss']:.3f} test accuracy {test['test_accuracy']:.2%} of 1,024 samples"
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
