"""A run that was stopped and resumed is the run that was not, bit for bit."""

import json
import re

import pytest
import torch
from conftest import MEASURED, forked

STEPS = 20  # two epochs of 640 samples at a global batch of 64
RECIPES = [("ddp_cifar", 1), ("ddp_cifar", 4), ("amp_cifar", 2)]
CONFIG = ("output_dir", "checkpoint_every", "keep")  # in which two equal runs differ


def content(path):
    """A checkpoint, without the values in which two equal runs differ."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name in CONFIG:
        del checkpoint["config"][name]
    return {**checkpoint, "metrics": untimed(checkpoint["metrics"])}


def untimed(metrics):
    """The lines of metrics.jsonl that two equal runs have in common."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    lines = [line for line in lines if line["event"] != "checkpoint"]
    return [{key: x for key, x in line.items() if key not in MEASURED} for line in lines]


def begin_of(output):
    """The step from which a run resumed: it says so at its start and at its end."""
    (begin,) = set(re.findall('"resumed_from": ([0-9]+)', output))
    return int(begin)


def assert_identical(one, other, where=""):
    """Compare tensors, and containers of them, to the last bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_identical(*pair, f"{where}/{index}")
    elif torch.is_tensor(one):
        assert one.stride() == other.stride() and torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "processes"), RECIPES)
def test_stopped_and_resumed_a_run_ends_bit_for_bit_like_an_uninterrupted_one(
    recipe, processes, tmp_path
):
    """Stopped in mid-epoch, continued by the same command, stopped at the epoch's end, and
    continued."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    common = {"recipe": recipe, "processes": processes, "grace": 30}
    flags = ["--batch-size", 64 // processes, "--log-every", 1]
    every = ["--checkpoint-every", 1, "--keep", STEPS]
    runs = [{**common, "directory": whole, "flags": [*flags, *every]}]
    for begin, stop, name in ((0, 4, "SIGTERM"), (4, 10, "SIGINT"), (10, None, None)):
        # The ranks stop one step after a signal: they vote while a step is computed.
        disturbances = {str(processes - 1): [stop - begin - 1, name]} if stop else {}
        one = {**common, "directory": broken, "flags": [*flags, "--keep", 3]}
        runs.append({**one, "disturbances": disturbances})
    answers = forked(runs, tmp_path)
    expected = ((0, 0, None), (143, 0, 4), (130, 4, 10), (0, 10, None))
    for (codes, output), (code, begin, stop) in zip(answers, expected, strict=True):
        assert codes == [code] * processes, output
        assert begin_of(output) == begin, output
        assert output.count(f"stopped after step {stop}, which is saved") == bool(stop), output
    steps = [int(path.stem[5:]) for path in sorted(broken.glob("*.pt"))]
    assert steps == [4, 10, 20]
    for step in steps:
        name = f"step-{step:08}.pt"
        assert_identical(content(whole / name), content(broken / name))
    metrics = untimed((broken / "metrics.jsonl").read_text())
    assert metrics == untimed((whole / "metrics.jsonl").read_text())
    # The evaluation after step 10 was not reached before the second stop.
    assert [line["step"] for line in metrics] == [*range(1, 11), 10, *range(11, 21), 20]
    for rank in range(processes):
        batches = (whole / f"batches.{rank}").read_text()
        assert batches.count("\n") == STEPS
        assert batches == (broken / f"batches.{rank}").read_text()
    assert not (broken / "unfinished.tmp").exists()
