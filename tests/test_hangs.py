"""A rank that stalls is named, and the run ends; a slow one is not."""

import re
import socket

import pytest
from conftest import CNN, NARROW, SYNTHETIC_DATA, copy, project
from processes import forked, outputs

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
IMAGES = SYNTHETIC_DATA, "synthetic_images(320, seed=1), synthetic_images(160, seed=2)"
TIMEOUT = 10  # seconds: sixteen processes share the cores, and take a step in less
# Names of programs/overrides/hangs.py: how it stalls, and the functions of the recipe that do.
SLEEP, STOP = "sleep", "stop"
IN_COMPUTE_LOSS = {"compute_loss": "loss_that_stalls"}
IN_EVALUATION = {"compute_loss": "evaluation_that_stalls"}
IN_WORKER = {"load_data": "data_of_a_worker_that_stalls"}
ONE_SIDED = {"compute_loss": "loss_with_a_collective_of_one_rank"}
RUNS_AHEAD = {"train_step": "step_of_a_device"}
SETTING_UP = {"choose_device": "choice_that_stalls"}
WITH_STORE = {**IN_COMPUTE_LOSS, "STALLING": 0}
SLOW = {"load_data": "slow_data", "compute_loss": "slow_evaluation"}
SLOW |= {"test_metrics": "slow_metrics"}
# As a compilation, on one rank.
COMPILES = {"compute_loss": "loss_that_compiles", "nn.Module.compile": "no_compilation"}
CASES = {  # (processes, recipe, where it stalls, how, the function that is named)
    "stalls while the others wait for its shard": (2, "sharded_cifar", IN_EVALUATION, SLEEP, "log"),
    "stalls in a worker": (2, "pipeline_cifar", IN_WORKER, SLEEP, "timed_next"),
    "is stopped, of four": (4, "pipeline_cifar", IN_COMPUTE_LOSS, STOP, None),
    "calls a collective alone": (2, "ddp_cifar", ONE_SIDED, SLEEP, None),
    "stalls while another one runs ahead": (2, "ddp_cifar", RUNS_AHEAD, SLEEP, "step_of_a_device"),
    "stalls in training, of nine": (9, "ddp_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
    "is alone": (1, "ddp_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
}
OTHERS = {
    "is slow": (2, "ddp_cifar", SLOW, SLEEP, None),
    "compiles": (2, "ddp_cifar", COMPILES, SLEEP, None),
    "stalls while it is set up": (2, "ddp_cifar", SETTING_UP, SLEEP, None),
    "is stopped and has the store": (2, "ddp_cifar", WITH_STORE, STOP, None),
}


def described(directory, name, processes, recipe, where, how, _):
    directory = directory / name.replace(" ", "-")
    directory.mkdir()
    chosen = {"STALLING": processes - 1, "LONGER": 1.25 * TIMEOUT, "stall": how, **where}
    text = project("hangs", **chosen)
    script = copy(recipe, directory / "mine.py", IMAGES, *NARROW, project=text)
    flags = [*CNN, "--output-dir", "run", "--hang-timeout", TIMEOUT, "--batch-size", 16]
    flags += ["--epochs", 2 if where in (SLOW, COMPILES) else 1000]
    flags += ["--compile"] if where == COMPILES else []
    run = {"processes": processes, "script": script, "directory": directory, "flags": flags}
    return run | {"grace": 10}


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """{name: [exit codes, output], the copy}, of runs that mostly wait: eight at a time."""
    directory = tmp_path_factory.mktemp("hangs")
    cases = {**OTHERS, **CASES}  # the longest first
    runs = [described(directory, name, *case) for name, case in cases.items()]
    answers = forked(runs, directory, together=8)
    return {x: (a, run["script"]) for x, a, run in zip(cases, answers, runs, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_is_named_and_the_run_ends_where_one(stalled, name):
    processes, _, where, how, function = CASES[name]
    (codes, output), script = stalled[name]
    assert 0 not in codes and "Timeout (" not in output, output
    error = rf"^mine: error: no step for {TIMEOUT} s because of (.*)$"
    (named,) = re.findall(error, output, re.MULTILINE)
    if processes > 8:  # they write their stacks into files, which the line names
        assert "rank 1 on" not in output, output
        named, files = named.split(", stacks in ")
        output = "".join(x.read_text() for x in script.parent.glob(files))
    if where == ONE_SIDED:
        assert re.findall(r"rank (\d)", named) == ["0", "1"], "each waits for the other"
    elif how == STOP:
        assert named == f"rank {processes - 1} on {HOST} (no report)"
    else:
        pattern = r"line (\d+) of [a-z_]+\.py, in (\w+)"
        place = re.fullmatch(rf"rank {processes - 1} on {HOST} \({pattern}\)", named)
        assert place and place[2] == function, named
        line = "stall()" if where != IN_WORKER else "batch = next("
        assert line in script.read_text().splitlines()[int(place[1]) - 1]
    stacks = re.findall(
        rf"^mine: no step for {TIMEOUT} s, rank (\d) on {HOST} is at\n  File", output, re.M
    )
    assert set(stacks) == set(map(str, range(processes - (how == STOP)))), "each rank prints one"
    assert how == STOP or where in (ONE_SIDED, IN_WORKER) or output.count("    stall()\n") == 1


def test_the_others_end_if_the_store_never_answers(stalled):
    (codes, output), _ = stalled["is stopped and has the store"]
    assert codes == [-9, 1] and f"Timeout (0:00:{TIMEOUT:02})!\n" in output, output
    assert f"mine: no step for {TIMEOUT} s, rank 1 on {HOST} is at\n  File" in output, output


def test_what_is_slow_but_moves_is_no_stall_and_no_training_time(stalled):
    """Loading data takes longer than the timeout, an evaluation, and on one rank a save, metrics of
    the whole test set, and the last file."""
    (codes, output), script = stalled["is slow"]
    assert codes == [0, 0] and ": error: " not in output, output
    first, second = outputs(script.parent / "run").train
    assert second["time"] - first["time"] > second["seconds"] + 3.75 * TIMEOUT


def test_a_first_step_that_compiles_may_take_longer_than_the_timeout(stalled):
    (codes, output), _ = stalled["compiles"]
    assert codes == [0, 0] and ": error: " not in output, output
    assert "in loss_that_compiles\n" not in output, "the set-up's timer prints no stack of a step"


def test_a_rank_that_stalls_before_the_first_step_prints_its_stack(stalled):
    """The others wait for it for long, since it may be downloading."""
    (codes, output), _ = stalled["stalls while it is set up"]
    assert codes == [-9, 7] and ": error: " not in output, output
    # Both processes write at the same moment: their lines may be mixed.
    assert output.count(f"Timeout (0:00:{TIMEOUT:02})!\n") == 2
    assert output.count(" in __init__\n") >= 2
    assert output.index(" in choice_that_stalls\n") < output.rindex(" in __init__\n")
