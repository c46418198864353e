"""Sequences that count by their tokens: the step is on the weighted mean over the global batch,
however it is divided among processes and microbatches."""

import shutil

import pytest
import torch
from conftest import ROUNDING_FLOAT32, assert_same_training, copy, load, project
from processes import train_forked
from torch import nn
from torch.nn import functional as F

FLAGS = ["--cpu", "--epochs", 5, "--global-batch-size", 8]
SCALED = [*FLAGS, "--batch-size", 2, "--clip-norm", 0.2, "--precision", "fp32"]
SCALER = {"Run.describe": "describe_as_fp16", "make_accelerator": "accelerator_with_scaler"}
BOUND = 10 * ROUNDING_FLOAT32  # the steps follow each other


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two trainings on two processes: of ddp, where process 1 has no targets, and of amp, with a
    loss scale and an overflow in the third step."""
    directory = tmp_path_factory.mktemp("tokens")
    ddp = copy("ddp_cifar", directory / "ddp.py", project=project("tokens"))
    text = project("tokens", compute_loss="overflow", **SCALER)
    amp = copy("amp_cifar", directory / "amp.py", project=text)
    flags = [*FLAGS, "--batch-size", 1, "--clip-norm", 0.1]
    return train_forked(directory, (2, ddp, flags), (2, amp, SCALED))


def flat(weights):
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def assert_is_exact(run, clip_norm, lines):
    """The steps of these lines are those of a training in float64, in one batch: each on the mean
    over all tokens."""
    ours = load("tests/programs/overrides/tokens.py")
    model = ours.build_model(None).double()
    initial = flat(model.state_dict())
    optimizer, _ = ours.make_optimizer(model, None, None)
    for line in lines:
        optimizer.zero_grad()
        tokens = [sequence for sequence in ours.Sequences() if len(sequence) > 1]
        logits = torch.cat([model(sequence[:-1]) for sequence in tokens])
        loss = F.cross_entropy(logits, torch.cat([sequence[1:] for sequence in tokens]))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        assert line["loss"] == pytest.approx(loss.item(), rel=BOUND)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=BOUND)
    update = flat(model.state_dict()) - initial
    assert update.norm() > 3, "a defect would be less than a rounding error"
    assert (flat(run.weights) - initial - update).norm() < BOUND * update.norm()


def test_each_step_is_on_the_mean_over_all_tokens(trained):
    assert_is_exact(trained[0], 0.1, trained[0].train)


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits(trained):
    lines = [*trained[1].train]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["loss_scale"] for line in lines] == [1024, 1024, 512, 512, 512]
    skipped = lines.pop(2)
    assert skipped["grad_norm"] is None and skipped["loss"] == lines[2]["loss"]
    assert_is_exact(trained[1], 0.2, lines)


def test_a_run_resumes_with_the_loss_scale_that_an_overflow_has_left(trained, tmp_path):
    """Two steps after it, in a process that would begin with another scale."""
    whole = trained[1]
    directory = shutil.copytree(whole.directory, tmp_path / "again")
    (directory / "step-00000005.pt").unlink()
    script = whole.directory.parent / "amp.py"
    (again,) = train_forked(tmp_path, (2, script, SCALED, {"directory": directory}))
    assert again.summary["resumed_from"] == 4
    scaling = [(line["loss_scale"], line["skipped_steps"]) for line in again.train]
    assert scaling[-2:] == [(512, 1), (512, 1)]
    assert_same_training(again, whole, 0)
