"""A run that was stopped and resumed is the run that was not, bit for bit."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import PROGRAMS, ROOT, forked, launch

STEPS = 20  # two epochs of 640 samples at a global batch of 64
RECIPES = [
    *(("ddp_cifar", processes) for processes in (1, 2, 4)),
    ("amp_cifar", 2),
    ("data_parallel_cifar", 1),
    *(("pipeline_cifar", processes) for processes in (2, 4)),
]


# What differs between two equal runs: where and when, and what the machine did meanwhile.
CONFIG = ("output_dir", "checkpoint_every", "keep", "resume", "date")
MEASURED = ("samples_per_second", "time", "peak_memory_gib", "data_wait")
MEASURED += ("slowest_data_wait", "slowest_data_rank")


def content(path):
    """A checkpoint, without what differs between two equal runs."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name in CONFIG:
        del checkpoint["config"][name]
    assert len(checkpoint.pop("run_id")) == 32
    return {**checkpoint, "metrics": untimed(checkpoint["metrics"])}


def untimed(metrics):
    lines = [json.loads(line) for line in metrics.splitlines()]
    return [{key: x for key, x in line.items() if key not in MEASURED} for line in lines]


def begin_of(output):
    """At which step a run began, as it says at its start and, where it came to it, at its end."""
    (begin,) = set(re.findall("resumed_from: ([0-9]+)", output))
    return int(begin)


def batch_size(recipe, processes):
    """The share of a process, or of a pipeline of two, in a global batch of 64."""
    return 64 * (2 if recipe == "pipeline_cifar" else 1) // processes


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


def stopped_and_resumed(recipe, processes, directory):
    """The uninterrupted run, and one that begins from its first step, stops in mid-epoch, continues
    by the same command, stops at the epoch's end, and continues without --resume."""
    whole = directory / f"{recipe}-{processes}-whole"
    broken = directory / f"{recipe}-{processes}-broken"
    common = {"recipe": recipe, "processes": processes}
    flags = ["--batch-size", batch_size(recipe, processes), "--log-every", 1]
    every = ["--checkpoint-every", 1, "--keep", STEPS]
    runs = [{**common, "directory": whole, "flags": [*flags, *every]}]
    latency = 0 if processes == 1 else 1  # the votes of one step are counted after the next
    first = ["--resume", whole / "step-00000001.pt"]
    for resume, begin, stop, what in (
        (first, 1, 4, "SIGTERM"),
        (first, 4, 10, "SIGINT"),
        ([], 10, None, None),
    ):
        disturbances = {str(processes - 1): [stop - begin - latency, what]} if stop else {}
        one = {**common, "directory": broken, "flags": [*flags, "--keep", 3, *resume]}
        runs.append({**one, "disturbances": disturbances})
    return runs


def check_stopped_and_resumed(recipe, processes, directory, outcomes):
    whole, broken = (
        directory / f"{recipe}-{processes}-whole",
        directory / f"{recipe}-{processes}-broken",
    )
    expected = ((0, 0, None), (143, 1, 4), (130, 4, 10), (0, 10, None))
    for (codes, output), (code, begin, stop) in zip(outcomes, expected, strict=True):
        assert codes == [code] * processes, output
        assert begin_of(output) == begin, output
        assert output.count(f"stopped after step {stop}, which is saved") == bool(stop), output
        assert output.count("checkpoints of its own, which count before") == (begin == 4), output
    assert [path.name for path in sorted(broken.glob("*.pt"))] == [
        f"step-{step:08}.pt" for step in (4, 10, 20)
    ]
    for step in (4, 10, 20):
        assert_identical(
            content(whole / f"step-{step:08}.pt"), content(broken / f"step-{step:08}.pt")
        )
    metrics = untimed((broken / "metrics.jsonl").read_text())
    assert metrics == untimed((whole / "metrics.jsonl").read_text())
    assert [line["step"] for line in metrics] == [*range(1, 11), 10, *range(11, 21), 20]
    for rank in range(processes):
        assert len(batches(whole, rank)) == STEPS
        assert batches(whole, rank)[1:] == batches(broken, rank)
    assert not (broken / "checkpoint.tmp").exists()


@pytest.fixture(scope="module")
def all_stopped_and_resumed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resumed")
    runs = {case: stopped_and_resumed(*case, directory) for case in RECIPES}
    outcomes = iter(
        forked([one for runs_of_case in runs.values() for one in runs_of_case], directory)
    )
    return directory, {case: [next(outcomes) for _ in runs[case]] for case in RECIPES}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "processes"), RECIPES)
def test_stopped_and_resumed_is_uninterrupted(all_stopped_and_resumed, recipe, processes):
    directory, outcomes = all_stopped_and_resumed
    check_stopped_and_resumed(recipe, processes, directory, outcomes[recipe, processes])


@pytest.mark.slow
def test_stopped_and_resumed_through_the_launcher(tmp_path):
    """The launcher answers 1 for every code but 0; everything else is the same."""

    def launched(one, code):
        program = ROOT / "tests/programs/disturbed_training.py"
        process = launch(2, program, json.dumps(one, default=str), check=False, **PROGRAMS)
        assert process.returncode == (1 if code else 0)
        assert process.stderr.count(f"exitcode  : {code}") == (2 if code else 0)
        return [[code] * 2, process.stdout + process.stderr]

    whole, first, second, third = stopped_and_resumed("ddp_cifar", 2, tmp_path)
    outcomes = [
        *forked([whole], tmp_path),
        launched(first, 143),
        *forked([second], tmp_path),
        launched(third, 0),
    ]
    check_stopped_and_resumed("ddp_cifar", 2, tmp_path, outcomes)


CHANGES = [(4, 2, 1), (2, 1, 1), (1, 4, 1), (4, 1, 4)]


@pytest.fixture(scope="module")
def changed_world_sizes(tmp_path_factory):
    """Six steps by one number of processes, the rest by another, at the same global batch; and all
    by the first."""
    directory, runs = tmp_path_factory.mktemp("world"), []
    for before, after, accumulation in CHANGES:
        common = {"recipe": "ddp_cifar", "plain": True}
        start = {
            **common,
            "processes": before,
            "flags": ["--batch-size", 64 // before, "--checkpoint-every", 6, "--keep", 9],
        }
        runs.append({**start, "directory": directory / f"from{before}"})
        flags = ["--batch-size", 64 // after // accumulation, "--global-batch-size", 64]
        flags += ["--resume", directory / f"from{before}/step-00000006.pt"]
        where = directory / f"{before}to{after}by{accumulation}"
        runs.append({**common, "processes": after, "flags": flags, "directory": where})
    runs = list({str(run["directory"]): run for run in runs}.values())
    return directory, dict(
        zip([Path(run["directory"]).name for run in runs], forked(runs, directory), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "accumulation"), CHANGES)
def test_another_number_of_processes_goes_on_with_the_same_steps(
    changed_world_sizes, before, after, accumulation
):
    directory, outcomes = changed_world_sizes
    name = f"{before}to{after}by{accumulation}"
    assert outcomes[name][0] == [0] * after, outcomes[name][1]
    one, other = (
        untimed((directory / run / "metrics.jsonl").read_text()) for run in (f"from{before}", name)
    )
    assert len(one) == len(other) == 10
    assert f"accumulation: {accumulation}\n" in outcomes[name][1]
    for line, expected in zip(other, one, strict=True):
        assert line.pop("event") == expected.pop("event")
        assert line == pytest.approx(expected, abs=1e-5, rel=0)
    assert one[3]["loss"] != one[2]["loss"]


@pytest.mark.slow
def test_another_global_batch_is_an_error_that_names_the_flag_that_mends_it(tmp_path):
    """The same command on fewer processes; then with the flag, also where more does not fit."""
    common = {"recipe": "ddp_cifar", "plain": True, "directory": tmp_path / "run"}
    flags = ["--batch-size", 16, "--max-steps", 4]
    fewer = {**common, "processes": 1}
    started, refused, mended = forked(
        [
            {**common, "processes": 4, "flags": flags, "disturbances": {"2": [1, "SIGTERM"]}},
            {**fewer, "flags": flags},
            {**fewer, "flags": [*flags, "--global-batch-size", 64]},
        ],
        tmp_path,
    )
    assert started[0] == [143] * 4, started[1]
    assert refused[0] == [2], refused[1]
    (line,) = [line for line in refused[1].splitlines() if ": error: " in line]
    # What follows from the flag, such as the learning rate, is not named beside it.
    difference = "is of another run: global_batch_size is 64 there, 16 here: "
    assert f"{difference}continue it with --global-batch-size 64, or choose another" in line
    assert mended[0] == [0], mended[1]
    assert "resumed_from: 2\n" in mended[1] and "accumulation: 4\n" in mended[1]
