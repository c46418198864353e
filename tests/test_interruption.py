"""Signals and deaths: all processes leave together with everything saved, and the run goes on from
there."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import ACCELERATE, CONFIGS, PROGRAMS, ROOT, at_once, forked, launch, run, wait_until
from test_resume import STEPS, assert_identical, content

pytestmark = pytest.mark.slow

FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--log-every", "1"]
RECIPE = ROOT / "recipes/ddp_cifar.py"
MAIN = '\nif __name__ == "__main__":'


def ranks_of(directory):
    """{rank: pid} of the training processes that write to a directory."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = process.joinpath("cmdline").read_bytes().split(b"\0")
            variables = process.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(directory).encode() in command and not {b"launch", b"torch.distributed.run"} & set(
            command
        ):
            rank = next((entry for entry in variables if entry.startswith(b"RANK=")), b"RANK=0")
            found[int(rank.removeprefix(b"RANK="))] = int(process.name)
    return found


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
WORKERS = """
def load_data(args, accelerator):
    labels = torch.zeros(512, dtype=torch.int64)
    data = torch.utils.data.TensorDataset(torch.randn(512, 3, 8, 8), labels)
    options = {"num_workers": 2, "multiprocessing_context": "CONTEXT", "persistent_workers": True}
    train_loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(data, 64)


if __name__ == "__main__":"""


def changed_recipe(directory, old, new):
    """The recipe with another text in one place, under its own name, by which a run knows it."""
    source = RECIPE.read_text()
    assert source.count(old) == 1
    directory.mkdir(exist_ok=True)
    path = directory / RECIPE.name
    path.write_text(source.replace(old, new))
    return path


def interrupt(recipe, processes, name, target, directory, *flags):
    """Start a run that would take minutes, send a signal when it trains, and tell how it left."""
    log, script = directory.with_suffix(".log"), ROOT / f"recipes/{recipe.partition(',')[0]}.py"
    if recipe.endswith("workers"):
        context = recipe.split()[1]
        folder = directory.with_suffix(".recipe")
        script = changed_recipe(folder, MAIN, WORKERS.replace("CONTEXT", context))
        flags = "--batch-size", 4, *flags
    launcher = [ACCELERATE, "launch", "--config_file", CONFIGS[processes]]
    if recipe.endswith("torchrun"):
        launcher = [*TORCHRUN, processes]
    command = [*launcher, script, *FLAGS]
    with open(log, "w") as file:
        launcher = subprocess.Popen(
            [*map(str, command), "--output-dir", str(directory), *map(str, flags)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    metrics, started = directory / "metrics.jsonl", []
    try:
        wait_until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 2)
        ranks = ranks_of(directory)
        assert sorted(ranks) == list(range(processes))
        started = psutil.Process(launcher.pid).children(recursive=True)
        if target == "group":
            os.killpg(launcher.pid, signal.Signals[name])
        else:
            os.kill(launcher.pid if target == "launcher" else ranks[target], signal.Signals[name])
        code = launcher.wait(30)
        wait_until(lambda: not any(process.is_running() for process in started), 15)
    finally:
        for process in [*started, *([launcher] if launcher.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return code, log.read_text(), sorted(path.name for path in directory.glob("*"))


# What the launcher answers, and what it shows as the processes' exit code, where it is still there
# to show it.
CASES = {
    ("ddp_cifar", 2, "SIGTERM", "launcher"): (1, None),
    ("ddp_cifar", 2, "SIGUSR1", "launcher"): (-signal.SIGUSR1, None),
    ("amp_cifar", 2, "SIGHUP", "group"): (1, None),
    ("pipeline_cifar", 2, "SIGUSR1", 1): (1, 138),
    ("data_parallel_cifar", 1, "SIGTERM", "launcher"): (-signal.SIGTERM, None),
    ("ddp_cifar, forkserver workers", 1, "SIGTERM", "group"): (-signal.SIGTERM, None),
    ("ddp_cifar, spawn workers", 2, "SIGINT", "group"): (1, None),
    ("ddp_cifar, torchrun", 2, "SIGKILL", "launcher"): (-signal.SIGKILL, None),
}


@pytest.fixture(scope="module")
def interruptions(tmp_path_factory):
    """All cases, three at a time."""
    directory = tmp_path_factory.mktemp("interrupted")

    def one(case):
        return interrupt(
            *case, directory / "-".join(map(str, case)), "--batch-size", 64, "--epochs", 1000
        )

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(CASES, pool.map(one, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_signal_makes_all_processes_save_and_leave(interruptions, case):
    code, log, left = interruptions[case]
    expected, shown = CASES[case]
    assert code == expected, log
    assert log.count(f"{case[0].partition(',')[0]}: stopped after step") == 1, log
    if shown:
        assert f"exitcode  : {shown} " in log or f"exit status {shown}" in log, log
    checkpoints = [name for name in left if name.startswith("step-")]
    assert left == ["metrics.jsonl", "run.lock", *checkpoints] and checkpoints, log
    assert f"stopped after step {int(checkpoints[-1][5:13])}, which is saved" in log


def test_a_run_that_dies_in_its_evaluation_evaluates_when_resumed(tmp_path):
    """The last step's checkpoint is from before its evaluation."""
    directory = tmp_path / "run"
    line = "        for index, batch in enumerate(loader):\n"
    death = "            os.kill(os.getpid(), signal.SIGKILL)\n"
    script = changed_recipe(tmp_path / "changed", line, line + death)
    flags = [*FLAGS, "--batch-size", "16", "--max-steps", "2", "--output-dir", str(directory)]
    died = {"processes": 1, "script": script, "flags": flags, "directory": tmp_path}
    resumed = {**died, "script": RECIPE}
    (codes, _), (resumed_codes, output) = forked([died, resumed], tmp_path)
    assert (codes, resumed_codes) == ([-9], [0]), output
    assert "resumed_from: 2\n" in output
    lines = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("train", 1),
        ("train", 2),
        ("evaluation", 2),
    ]
    assert json.loads(Path(directory, "summary.json").read_text())["train_loss"] == lines[1]["loss"]


@at_once
def test_a_killed_rank_is_named_and_the_launcher_restarts_the_run_to_the_same_end(directory):
    common = {
        "recipe": "ddp_cifar",
        "processes": 2,
        "flags": ["--batch-size", 32, "--checkpoint-every", 5],
    }
    whole = {**common, "directory": directory / "whole"}
    ((codes, output),) = forked([whole], directory)
    assert codes == [0, 0], output
    killed = {**common, "directory": directory / "killed", "disturbances": {"1": [13, "SIGKILL"]}}
    program = ROOT / "tests/programs/disturbed_training.py"
    alone = json.dumps({**killed, "directory": directory / "alone"}, default=str)
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[2], "--max_restarts", "2", program]
    command.append(json.dumps(killed, default=str))
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(launch, 2, program, alone, check=False, **PROGRAMS)
        restarted = pool.submit(run, command, **PROGRAMS).result()
        alone = alone.result()
    assert alone.returncode == 1
    cause = alone.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in cause and "Signal 9 (SIGKILL)" in cause, alone.stderr
    assert content(directory / "alone/step-00000010.pt")["step"] == 10

    begins = re.findall("resumed_from: ([0-9]+)", restarted.stdout)
    assert begins == ["0", "10", "10"], "at the start of each attempt, and in the results"
    one, other = (content(directory / name / f"step-{STEPS:08}.pt") for name in ("whole", "killed"))
    assert_identical(one, other)


@at_once
def test_without_a_launcher_the_exit_code_is_the_signals(directory):
    command = [
        sys.executable,
        RECIPE,
        *FLAGS,
        "--output-dir",
        directory,
        "--epochs",
        "1000",
    ]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGUSR1)
            break
    process.stdout.read()
    assert process.wait(20) == 128 + signal.SIGUSR1


def test_a_signal_while_the_handlers_are_installed_is_not_lost(tmp_path):
    """Between the first handler and the process group of the votes, which takes a while to
    connect."""
    line = "        resource_tracker.ensure_running()"
    script = changed_recipe(tmp_path, line, "        os.kill(os.getpid(), signal.SIGUSR1)")
    one = {"processes": 1, "script": script, "directory": tmp_path}
    ((codes, output),) = forked([{**one, "flags": [*FLAGS, "--epochs", 9]}], tmp_path)
    assert codes == [128 + signal.SIGUSR1], output
    assert "stopped after step 1, which is saved: the same command continues" in output, output


@at_once
def test_under_nohup_a_hangup_does_not_stop_it(directory):
    command = [
        "nohup",
        sys.executable,
        RECIPE,
        *FLAGS,
        "--output-dir",
        directory / "run",
    ]
    command += ["--epochs", 1000, "--batch-size", 8]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGHUP)
        if line.startswith("step 20/"):
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.read()
    assert process.wait(20) == 128 + signal.SIGTERM


@at_once
def test_what_nobody_reads_does_not_keep_it_from_saving(directory):
    """As Ctrl-C does under `| tee`, which dies of it, too."""
    command = [
        sys.executable,
        RECIPE,
        *FLAGS,
        "--output-dir",
        directory,
        "--epochs",
        "1000",
    ]
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    assert list(directory.glob("step-*.pt"))


@at_once
def test_a_launcher_that_dies_during_the_start_is_missed(directory):
    line = "LAUNCHER = os.getppid()"
    death = (
        "os.kill(LAUNCHER, signal.SIGKILL)\nwhile os.getppid() == LAUNCHER:\n    time.sleep(0.01)\n"
    )
    script = changed_recipe(directory / "changed", line, f"{line}\n{death}#")
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[1], script, *FLAGS]
    command += ["--output-dir", directory, "--max-steps", 300]
    process = run(command, check=False)  # until the recipe has closed its output, too
    assert process.returncode == -signal.SIGKILL
    left = [path.name for path in directory.glob("step-*.pt")]
    assert left == ["step-00000001.pt"], process.stderr


@at_once
def test_a_worker_that_hangs_does_not_keep_a_failed_run_alive(directory):
    """Its SIGTERM is blocked, and multiprocessing waits for it at the exit."""
    stuck = WORKERS.replace("CONTEXT", "fork")
    stuck = stuck.replace('"num_workers": 2', '"num_workers": 1, "timeout": 1')
    stuck = stuck.replace("torch.utils.data.TensorDataset(", "Stuck(")
    dataset = (
        "class Stuck(torch.utils.data.TensorDataset):\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(1000 if torch.utils.data.get_worker_info() else 0)\n"
        "        return super().__getitem__(index)\n\n\n"
    )
    stuck = stuck.replace("def load_data", f"{dataset}def load_data")
    script = changed_recipe(directory / "changed", MAIN, stuck)
    command = [sys.executable, script, *FLAGS, "--output-dir", directory / "run"]
    process = run(command, check=False, timeout=60)
    assert process.returncode == 1 and "DataLoader timed out" in process.stderr


@at_once
def test_two_runs_in_one_directory(directory):
    """The second is told of the first, as long as that lives; SIGKILL frees the directory."""
    command = [
        sys.executable,
        RECIPE,
        *FLAGS,
        "--output-dir",
        directory,
        "--epochs",
        "1000",
    ]
    command += ["--checkpoint-every", "1"]
    first = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith("step 3/"):
            break
    second = {"processes": 1, "script": str(command[1]), "directory": directory}
    flags = [*FLAGS, "--output-dir", str(directory), "--epochs", "1000"]
    ((codes, output),) = forked([{**second, "flags": flags}], directory)
    assert codes == [2] and f"is in use by process {first.pid} on {socket.gethostname()}" in output
    first.kill()
    first.wait()
    ((codes, output),) = forked(
        [{**second, "flags": [*flags, "--checkpoint-every", "0"]}], directory
    )
    assert "is in use" not in output and "--checkpoint-every" in output
    assert list(directory.glob("step-*.pt"))
