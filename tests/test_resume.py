"""A run that was stopped and resumed is the run that was not, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch

STEPS_PER_EPOCH = 10  # two epochs of 640 samples at a global batch of 64


def watched(processes, recipe, directory, *flags, disturbances=None, check=True):
    command = [ROOT / "tests/programs/watched.py", recipe, directory / "batches", json.dumps(disturbances or {})]
    command += ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--epochs", 2, "--log-every", 3]
    Path(directory).mkdir(exist_ok=True)
    flags = ["--output-dir", directory, *flags]
    return launch(processes, *command, *flags, check=check, PYTHONPATH=str(ROOT / "tests"))


def content(path):
    return torch.load(path, weights_only=True)


def metrics(directory):
    lines = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


def batches(directory, rank):
    return Path(directory, f"batches.{rank}").read_text().splitlines()


def assert_identical(one, other, where=""):
    """Tensors, and what contains them, to the last bit."""
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


@pytest.mark.parametrize(
    ("recipe", "processes"),
    [
        *(("ddp_cifar", processes) for processes in (1, 2, 4)),
        *(("amp_cifar", processes) for processes in (1, 2, 4)),
        ("data_parallel_cifar", 1),
        *(("pipeline_cifar", processes) for processes in (2, 4)),
    ],
)
def test_stopped_and_resumed_is_uninterrupted(recipe, processes, tmp_path):
    """Resumed from the first step, stopped in mid-epoch, resumed, stopped at the epoch's end, resumed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    share = 64 * (2 if recipe == "pipeline_cifar" else 1) // processes
    flags = ["--batch-size", share]
    watched(processes, recipe, whole, *flags, "--checkpoint-every", 1, "--keep", 20)

    flags += ["--keep", 3]
    latency = 0 if processes == 1 else 1  # the votes of one step are counted after the next
    last = processes - 1
    start = whole / "step-00000001.pt"
    for resume, begin, stop, what in ((start, 1, 4, "SIGTERM"), ("auto", 4, 10, "SIGINT"), ("auto", 10, None, None)):
        disturbances = {str(last): [stop - begin - latency, what]} if stop else {}
        process = watched(
            processes, recipe, broken, *flags, "--resume", resume, disturbances=disturbances, check=not stop
        )
        assert f"resumed_from: {begin}\n" in process.stdout
        if stop:
            assert process.returncode != 0 and f"stopped after step {stop}, which is saved" in process.stderr
            assert not (broken / "summary.json").exists()

    assert [path.name for path in sorted(broken.glob("*.pt"))] == [f"step-{step:08}.pt" for step in (4, 10, 20)]
    for step in (4, 10, 20):
        one, other = (content(directory / f"step-{step:08}.pt") for directory in (whole, broken))
        for checkpoint in (one, other):
            for name in ("output_dir", "checkpoint_every", "keep", "resume"):
                del checkpoint["run"][name]
            del checkpoint["metrics"]  # compared below, without their timing
        assert_identical(one, other)
    assert metrics(whole) == metrics(broken) and len(metrics(whole)) == 2 * 4 + 2
    for rank in range(processes):
        assert len(batches(whole, rank)) == 2 * STEPS_PER_EPOCH
        assert batches(whole, rank)[1:] == batches(broken, rank)
