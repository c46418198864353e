"""A rank that stalls is named, and the run ends; a slow one is left alone."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
from conftest import ACCELERATE, CONFIGS, PROGRAMS, ROOT, forked, outputs

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests/programs/stalling_training.py"
HOST = socket.gethostname()
TIMEOUT = 6  # seconds
IN_COMPUTE_LOSS = "it is at line {line}, in compute_loss"
IN_TIMED = ", in timed)"
SILENT = "it was stopped or killed, or its machine or network is gone"
SKIPPED = "all wait for others, or for the device: one has left out a collective operation"

CASES = {  # processes, recipe, what stalls where, what is said of it
    "is stopped in training": (2, "sharded_cifar", "training", "SIGSTOP", SILENT),
    "is stopped in training, of four": (4, "pipeline_cifar", "training", "SIGSTOP", SILENT),
    "is stopped in evaluation": (2, "pipeline_cifar", "evaluation", "SIGSTOP", SILENT),
    "is stopped while saving": (2, "sharded_cifar", "saving", "SIGSTOP", SILENT),
    "sleeps in training": (2, "pipeline_cifar", "training", "sleep", IN_COMPUTE_LOSS),
    "sleeps in training, of four": (4, "amp_cifar", "training", "sleep", IN_COMPUTE_LOSS),
    "sleeps in evaluation": (2, "sharded_cifar", "evaluation", "sleep", IN_COMPUTE_LOSS),
    "sleeps in its dataset": (2, "ddp_cifar", "dataset", "sleep", IN_TIMED),
    "sleeps in a worker": (2, "pipeline_cifar", "worker", "sleep", IN_TIMED),
    "skips a collective": (2, "ddp_cifar", "training", "skip", SKIPPED),
    "is alone": (1, "data_parallel_cifar", "training", "sleep", IN_COMPUTE_LOSS),
}
SLOW = ["ddp_cifar", "sharded_cifar"]
LAUNCHED = "under a launcher"
BUSY = """
import os, sys, time

parent = os.getppid()
begin, end = sys.argv[1:]
while os.getppid() == parent and not os.path.exists(end):
    if not os.path.exists(begin):
        time.sleep(0.1)
"""
LOSS_LINE = "    logits = model(images)\n"


def loss_line(recipe):
    """Return the number of the line in which `compute_loss` calls the model."""
    before, _ = (ROOT / f"recipes/{recipe}.py").read_text().split(LOSS_LINE)
    return before.count("\n") + 1


def described(directory, name, processes, recipe, where, how, *more_flags, **more):
    flags = ["--hang-timeout", TIMEOUT, "--epochs", 1000, *more_flags]
    flags += ["--checkpoint-every", 4] if where in ("saving", "slowly") else []
    if how != "skip":  # what the first line does for the first time is part of the first step, then
        flags += ["--log-every", 1]
    flags += ["--output-dir", directory / name.replace(" ", "-")]
    run = {"recipe": recipe, "rank": processes - 1, "where": where, "how": how}
    run |= {"flags": [*map(str, flags)], "seconds": 1.25 * TIMEOUT}
    common = {"script": PROGRAM, "directory": directory, "processes": processes}
    return {**common, "grace": 10, "patience": 240, "flags": [json.dumps(run)], **more}


@contextmanager
def started(commands, **options):
    """Start processes, and kill them in the end. Yield the first."""
    with ExitStack() as stack:
        processes = [subprocess.Popen(command, **options) for command in commands]
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield processes[0]


def launch_command(directory):
    flags = ["--checkpoint-every", 4, "--epochs", 1]
    run = described(directory, LAUNCHED, 2, "ddp_cifar", "training", "sleep", *flags)
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[2], "--max_restarts", "1", PROGRAM]
    return [*command, *run["flags"]]


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """[exit codes, output] of all cases, eight at a time, since they mostly wait; meanwhile, of the
    one under a launcher. Each core is busy during a slow run."""
    directory = tmp_path_factory.mktemp("hangs")
    slowly = ["--epochs", 1, "--batch-size", 8]
    runs = {
        **{f"slow {x}": described(directory, x, 2, x, "slowly", "sleep", *slowly) for x in SLOW},
        "setting up": described(
            directory, "setting up", 2, "ddp_cifar", "setting-up", "sleep", patience=25
        ),
        **{name: described(directory, name, *case[:4]) for name, case in CASES.items()},
    }
    loaded = [directory / SLOW[-1] / name for name in ("run.lock", "summary.json")]
    busy = [sys.executable, "-c", BUSY, *loaded]
    printed = directory / "launched.txt"
    options = {"cwd": directory, "env": {**os.environ, **PROGRAMS}, "stderr": subprocess.STDOUT}
    with (
        open(printed, "w") as file,
        started([launch_command(directory)], stdout=file, **options) as launched,
        started([busy] * os.cpu_count()),
    ):
        answers = forked(list(runs.values()), directory, together=8, **PROGRAMS)
        code = launched.wait(120)
    answers.append([[code], printed.read_text()])
    return dict(zip([*runs, LAUNCHED], answers, strict=True))


def the_error(output):
    (line,) = [line for line in output.splitlines() if re.match(r"\w+: error: ", line)]
    return line


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_stalls_is_named_and_the_run_ends(stalled, name):
    processes, recipe, _, how, said = CASES[name]
    codes, output = stalled[name]
    assert 0 not in codes, output
    line = the_error(output)
    assert f"for {TIMEOUT} s" in line, line
    assert said.format(line=loss_line(recipe)) in line, line
    named = re.findall(r"rank (\d) on (\S+) \(", line)
    ranks = range(processes) if how == "skip" else [processes - 1]
    assert named == [(str(rank), HOST) for rank in ranks], line
    live = processes - 1 if how == "SIGSTOP" else processes
    stacks = re.findall(rf"rank (\d) on {HOST}: no progress for {TIMEOUT} s, at\n  File", output)
    assert len(set(stacks)) == live, "each rank that can speak prints where it is\n" + output
    assert "not reached the end of step" in line


@pytest.mark.parametrize("recipe", SLOW)
def test_what_is_slow_but_moves_is_no_hang(stalled, recipe):
    """Loading data, the first step, saving and an evaluation take longer than the timeout, on a
    busy machine."""
    codes, output = stalled[f"slow {recipe}"]
    assert codes == [0, 0], output
    assert "error" not in output.replace("(no error before", "")
    said = f"no progress for {TIMEOUT} s (no error before the first step or while saving), at"
    assert output.count(said) >= 2


def test_a_rank_that_stalls_in_setting_up_is_seen_in_the_others_stack(stalled):
    """The others wait for it for long, since it may be downloading: they say where, not that it is
    an error."""
    codes, output = stalled["setting up"]
    assert codes == [-9, -9] and "error" not in output, output
    waiting, sleeping = re.findall(r"^Timeout .*?(?=^Timeout|\Z)", output, re.DOTALL | re.MULTILINE)
    for stack in (waiting, sleeping):
        assert stack.startswith(f"Timeout (0:00:{TIMEOUT:02})!\nThread 0x"), output
        assert "(most recent call first):\n  File " in stack and " in make_accelerator\n" in stack
    assert " in stall\n" in sleeping and " in choose_device" not in waiting, output
    assert " in init_process_group\n" in waiting, output


def test_under_a_launcher_a_run_with_a_rank_that_stalls_is_restarted_and_completes(stalled):
    (code,), output = stalled[LAUNCHED]
    assert code == 0, output
    line = the_error(output)
    where = IN_COMPUTE_LOSS.format(line=loss_line("ddp_cifar"))
    assert f"rank 1 on {HOST} ({where}) has not reached the end of step 5 for" in line, line
    assert output.count("resuming from ") == 1 and "resumed_from: 4\n" in output
    left = outputs(re.search("output_dir: (.*)", output)[1])
    assert left["summary"]["resumed_from"] == 4 and left["weights"].exists()
    assert [line["step"] for line in left["train"]] == list(range(1, 11))
