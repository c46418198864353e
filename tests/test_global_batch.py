"""--global-batch-size: the same training on any number of processes, and with accumulation."""

from types import SimpleNamespace

import pytest
import torch
from conftest import load, train_forked
from safetensors.torch import load_file

recipe = load("recipes/ddp_cifar.py")

# (processes, --batch-size, microbatches that follow); eight processes take one step only.
LAYOUTS = [(1, 64, 1), (1, 16, 4), (2, 128, 1), (2, 8, 4), (4, 16, 1), (4, 5, 4)]
ONE_STEP = [(1, 64, 1), (8, 128, 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{steps: [result for each layout]}"""
    runs = []
    for steps, layouts in ((3, LAYOUTS), (1, ONE_STEP)):
        for processes, batch, _ in layouts:
            flags = ["--global-batch-size", 64, "--batch-size", batch, "--max-steps", steps]
            runs.append((processes, "ddp_cifar", [*flags, "--lr", 0.4]))
    trained = train_forked(tmp_path_factory.mktemp("layouts"), *runs)
    return {3: trained[: len(LAYOUTS)], 1: trained[len(LAYOUTS) :]}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 1])
def test_any_number_of_processes_trains_the_same(results, steps):
    layouts = LAYOUTS if steps == 3 else ONE_STEP
    torch.manual_seed(0)
    initial = recipe.build_model(SimpleNamespace(model="simple_cnn")).state_dict()
    expected = load_file(results[steps][0].weights)
    moved = max((expected[name] - value).abs().max() for name, value in initial.items())
    assert moved > 0.01, "1e-5 would prove nothing"
    for (processes, _, accumulation), result in zip(layouts, results[steps], strict=True):
        summary = result.summary
        assert (summary["accumulation"], summary["global_batch_size"]) == (accumulation, 64)
        assert summary["batch_size"] * accumulation * processes == 64
        assert (summary["steps"], summary["steps_per_epoch"]) == (steps, 10)
        weights = load_file(result.weights)
        deviation = max((weights[name] - value).abs().max() for name, value in expected.items())
        assert deviation < 1e-5, (processes, accumulation)
        assert summary["test_loss"] == pytest.approx(
            results[steps][0].summary["test_loss"], abs=1e-5
        )


def divided(monkeypatch, global_batch, batch, replicas, multiple=1):
    """Return (batch size, accumulation), or the error."""

    def refuse(message):
        raise ValueError(message)

    monkeypatch.setattr(recipe, "exit_with_error", refuse)
    args = SimpleNamespace(global_batch_size=global_batch, batch_size=batch)
    accelerator = SimpleNamespace()
    try:
        accumulation = recipe.divide_global_batch(args, accelerator, replicas, multiple)
    except ValueError as error:
        return str(error)
    assert accelerator.gradient_accumulation_steps == accumulation
    assert args.global_batch_size == args.batch_size * accumulation * replicas
    return args.batch_size, accumulation


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [4, 7, 16, 100])
def test_every_number_is_divided_or_the_nearest_that_can_be_are_named(
    monkeypatch, batch, replicas, multiple
):
    answers = {n: divided(monkeypatch, n, batch, replicas, multiple) for n in range(1, 260)}
    possible = [n for n, answer in answers.items() if isinstance(answer, tuple)]
    assert possible, "no number could be divided"
    for global_batch, answer in answers.items():
        if isinstance(answer, tuple):
            size, accumulation = answer
            assert size <= batch and size % multiple == 0
            assert accumulation == 1 or size > batch / 4 or multiple > 1, "small ones are slow"
            continue
        below = max((n for n in possible if n < global_batch), default=None)
        above = min((n for n in possible if n > global_batch), default=None)
        if above is None:  # outside of what was tried
            continue
        nearest = " or ".join(str(n) for n in (below, above) if n)
        assert answer.startswith(f"argument --global-batch-size: {global_batch} cannot be divided")
        assert answer.endswith(f"choose {nearest}"), answer


def test_without_it_the_global_batch_is_the_processes_batches(monkeypatch):
    assert divided(monkeypatch, None, 32, 4) == (32, 1)
    assert divided(monkeypatch, 256, 128, 2) == (128, 1)
    assert divided(monkeypatch, 256, 128, 1) == (128, 2)
