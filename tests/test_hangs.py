"""A rank that stalls is named, and the run ends; a slow one is left alone."""

import json
import re
import socket

import pytest
from conftest import PROGRAMS, ROOT, forked

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests/programs/stalling_training.py"
TIMEOUT = 6  # seconds
SILENT = "it was stopped or killed, or its machine or network is gone"

CASES = {  # processes, recipe, what stalls where, what is said of it
    "sleeps in training": (2, "ddp_cifar", "training", "sleep", r"it is at line \d+, in"),
    "sleeps in training, of four": (4, "amp_cifar", "training", "sleep", r"it is at line \d+, in"),
    "sleeps in evaluation": (
        2,
        "ddp_cifar",
        "evaluation",
        "sleep",
        r"it is at line \d+, in evaluate",
    ),
    "sleeps in its dataset": (
        2,
        "sharded_cifar",
        "dataset",
        "sleep",
        r"it is at line \d+, in timed",
    ),
    "sleeps in a worker": (2, "ddp_cifar", "worker", "sleep", r"it is at line \d+, in timed"),
    "is stopped in training": (2, "sharded_cifar", "training", "SIGSTOP", SILENT),
    "is stopped in training, of four": (4, "pipeline_cifar", "training", "SIGSTOP", SILENT),
    "is stopped in evaluation": (2, "pipeline_cifar", "evaluation", "SIGSTOP", SILENT),
    "is stopped while saving": (2, "ddp_cifar", "saving", "SIGSTOP", SILENT),
    "waits elsewhere": (
        2,
        "ddp_cifar",
        "training",
        "wait",
        "all wait for others, or for the device",
    ),
    "is alone": (1, "data_parallel_cifar", "training", "sleep", r"it is at line \d+, in"),
}


def described(directory, name, processes, recipe, where, how, seconds=0):
    folder = directory / name.replace(" ", "-")
    flags = ["--hang-timeout", TIMEOUT, "--checkpoint-every", 4, "--output-dir", folder]
    run = {"recipe": recipe, "rank": processes - 1, "where": where, "how": how, "seconds": seconds}
    run["flags"] = [*map(str, flags), "--epochs", "2" if where == "slowly" else "1000"]
    common = {"script": PROGRAM, "directory": directory, "processes": processes, "grace": 15}
    return {**common, "flags": [json.dumps(run)]}


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """All cases, eight at a time, since they mostly wait."""
    directory = tmp_path_factory.mktemp("hangs")
    runs = [described(directory, name, *case[:4]) for name, case in CASES.items()]
    runs.insert(0, described(directory, "slow", 2, "ddp_cifar", "slowly", "sleep", 2 * TIMEOUT))
    answers = forked(runs, directory, together=8, **PROGRAMS)
    return dict(zip(["slow", *CASES], answers, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_stalls_is_named_and_the_run_ends(stalled, name):
    processes, _, where, how, said = CASES[name]
    codes, output = stalled[name]
    assert 0 not in codes, output
    errors = [line for line in output.splitlines() if re.match(r"\w+: error: ", line)]
    assert len(errors) == 1, output
    line = errors[0]
    assert f"for {TIMEOUT} s" in line and re.search(said, line), line
    named = re.findall(r"rank (\d) on (\S+) \(", line)
    host = socket.gethostname()
    ranks = range(processes) if how == "wait" else [processes - 1]
    assert named == [(str(rank), host) for rank in ranks], line
    live = processes - 1 if how == "SIGSTOP" else processes
    stacks = re.findall(rf"rank (\d) on {host}: no progress for {TIMEOUT} s, at\n  File", output)
    assert len(set(stacks)) == live, "each rank that can speak prints where it is\n" + output
    if where == "saving":
        assert "not reached the end of step" in line


def test_what_is_slow_but_moves_is_no_hang(stalled):
    """Loading data, the first step, saving and an evaluation take longer than the timeout."""
    codes, output = stalled["slow"]
    assert codes == [0, 0], output
    assert "error" not in output.replace("(no error before", "")
    said = f"no progress for {TIMEOUT} s (no error before the first step or while saving), at"
    assert output.count(said) >= 2
