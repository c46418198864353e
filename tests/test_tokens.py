"""Sequences that count by their tokens: the step is on the weighted mean over the global batch,
however it is divided among processes and microbatches."""

import shutil

import pytest
import torch
from conftest import ROUNDING_FLOAT32, assert_same_training, copy, load, project
from processes import train_forked
from torch import nn
from torch.nn import functional as F

SCALER = {"Run.describe": "describe_as_fp16", "make_accelerator": "accelerator_with_scaler"}
# {case: (recipe, --batch-size, --clip-norm, what is chosen)}, on two processes
CASES = {
    "a process without targets": ("ddp_cifar", 4, 1e6, {}),
    "most microbatches without targets": ("ddp_cifar", 1, 0.1, {}),
    "an overflow": ("amp_cifar", 2, 0.2, SCALER | {"disturb": "overflow"}),
}


def flags_of(case):
    recipe, batch, clip_norm, _ = CASES[case]
    flags = ["--cpu", "--epochs", 5, "--global-batch-size", 8, "--batch-size", batch]
    flags += ["--clip-norm", clip_norm]
    return [*flags, "--precision", "fp32"] if recipe == "amp_cifar" else flags


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokens")
    runs = []
    for number, (case, (recipe, *_, chosen)) in enumerate(CASES.items()):
        script = copy(recipe, directory / f"{number}.py", project=project("tokens", **chosen))
        runs.append((2, script, flags_of(case)))
    return dict(zip(CASES, train_forked(directory, *runs), strict=True))


def exact_training(clip_norm, steps):
    """In float64, in one batch: the mean over all tokens. Return weights before and after, the
    losses and the norms of the gradient."""
    ours = load("tests/programs/overrides/tokens.py")
    model = ours.build_model(None).double()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, _ = ours.make_optimizer(model, None, None)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = [sequence for sequence in ours.Sequences() if len(sequence) > 1]
        logits = torch.cat([model(sequence[:-1]) for sequence in tokens])
        loss = F.cross_entropy(logits, torch.cat([sequence[1:] for sequence in tokens]))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return initial, model.state_dict(), losses, norms


def flat(weights, initial):
    return torch.cat([(weights[name].double() - initial[name]).flatten() for name in initial])


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_on_the_mean_over_all_tokens(trained, case):
    overflow = case == "an overflow"  # in the third step, which is skipped
    initial, expected, losses, norms = exact_training(CASES[case][2], 4 if overflow else 5)
    lines = trained[case].train
    update = flat(trained[case].weights, initial)
    exact_update = flat(expected, initial)
    assert exact_update.norm() > 3, "a defect would be less than a rounding error"
    bound = 10 * ROUNDING_FLOAT32  # the steps follow each other
    assert (update - exact_update).norm() / exact_update.norm() < bound
    found = [line["grad_norm"] for line in lines]
    if overflow:  # the schedule waits
        assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1]
        assert [line["loss_scale"] for line in lines] == [1024, 1024, 512, 512, 512]
        losses.insert(2, losses[2])
        assert found.pop(2) is None
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=bound)
    assert found == pytest.approx(norms, rel=bound)


def test_a_run_resumes_with_the_loss_scale_that_an_overflow_has_left(trained, tmp_path):
    """Two steps after it, in a process that would begin with another scale."""
    case = "an overflow"
    whole = trained[case]
    directory = shutil.copytree(whole.directory, tmp_path / "again")
    (directory / "step-00000005.pt").unlink()
    script = whole.directory.parent / f"{list(CASES).index(case)}.py"
    (again,) = train_forked(tmp_path, (2, script, flags_of(case), {"directory": directory}))
    assert again.summary["resumed_from"] == 4
    scaling = [(line["loss_scale"], line["skipped_steps"]) for line in again.train]
    assert scaling[-2:] == [(512, 1), (512, 1)]
    assert_same_training(again, whole, 0)
