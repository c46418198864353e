"""Signals and deaths: all ranks stop together with everything saved, and the same command
continues."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import termios
import time
from functools import partial

import psutil
import pytest
import torch
from conftest import (
    ACCELERATE,
    CNN,
    CONFIGS,
    FEW_IMAGES,
    SHORT,
    assert_same_training,
    begin_of,
    copy,
    described_copy,
    load,
    project,
)
from processes import Launched, forked, free_port, launch, outputs, wait_until

recipe = load("recipes/ddp_cifar.py")
pytestmark = pytest.mark.slow

LAUNCH = [ACCELERATE, "launch", "--config_file"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
# Rank 0 says the reason, and looks for its launcher each second: a step takes longer, so that the
# other rank does not stop the run before that.
SLOW = {"train_step": "slow_step"}
WORKERS = {"load_data": "data_of_persistent_workers", "CONTEXT": '"forkserver"'}
# what happens: (the words before the recipe, what the copy has, the launcher's exit codes: Python's
# own is 120 where the last lines have nowhere to go)
CASES = {
    "its terminal is closed": ([*LAUNCH, CONFIGS[2]], {}, {120}),
    "Ctrl-C also ends the tee behind its pipe": ([*LAUNCH, CONFIGS[2]], {}, {1, 120}),
    "its launcher is killed": ([*TORCHRUN, "2"], SLOW, {-signal.SIGKILL}),
    "the launcher of one process is killed": ([*LAUNCH, CONFIGS[1]], SLOW, {-signal.SIGKILL}),
    "SIGTERM comes to each process": ([*LAUNCH, CONFIGS[2]], WORKERS, {1}),
}


def interrupted(case, directory):
    """Start a run that would take minutes and interrupt it when it trains. Return the exit code of
    the launcher, the checkpoints, and everything that was printed while somebody read it."""
    launcher, chosen, _ = CASES[case]
    metrics, log = directory / "run/metrics.jsonl", directory / "log"
    text = project("interruption", **chosen)
    script = copy("ddp_cifar", directory / "mine.py", *SHORT, project=text)
    command = [*launcher, script, *CNN, "--log-every", 1, "--output-dir", directory / "run"]
    command = [*map(str, command), "--batch-size", "16", "--epochs", "1000"]
    master, slave = os.openpty()
    os.set_blocking(master, False)
    started = []
    if "tee" in case:
        tee = subprocess.Popen(["tee", log], stdin=subprocess.PIPE)
        process = Launched(command, output=tee.stdin, session=True)
    elif "terminal" in case:  # interpreters of its own, as which the forks of the others end
        files = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        files["preexec_fn"] = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
        process = subprocess.Popen(command, **files, start_new_session=True)
    else:
        process = Launched(command, output=log, session=True)
    os.close(slave)

    def trains():
        with contextlib.suppress(OSError):
            os.read(master, 65536)  # a terminal's reader
        return metrics.is_file() and metrics.read_text().count('"train"') >= 2

    try:
        wait_until(trains)
        started = psutil.Process(process.pid).children(recursive=True)
        if "terminal" in case:
            os.close(master)
        elif "killed" in case:
            process.kill()
        elif "each process" in case:
            for one in (*started, process):
                one.send_signal(signal.SIGTERM)
        else:
            tee.terminate()  # SIGINT it ignores where these tests run in the background
            tee.communicate()
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait(300)
        wait_until(lambda: not any(one.is_running() for one in started))
    finally:
        for one in [*started, *([process] if process.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    saved = [int(path.stem[5:]) for path in sorted((directory / "run").glob("step-*.pt"))]
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])["step"]
    return code, saved, last, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("case", CASES)
def test_a_run_saves_and_stops_when(case, tmp_path):
    code, saved, last_line, log = interrupted(case, tmp_path)
    assert saved and saved[-1] == last_line, log
    assert code in CASES[case][2], log
    assert "tee" not in case or ("step 2/" in log and "which is saved" not in log), "it ended first"
    if "SIGTERM" in case or "killed" in case:
        assert log.count("SIGTERM: stopping after the next step (") == 1, "by one rank"
        assert f"stopped after step {saved[-1]}, which is saved: rerun the command to resume" in log


OF_LAUNCHER = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def test_a_rank_whose_launcher_died_before_it_connects_ends(tmp_path):
    """Nothing listens at the address of the launcher's store."""
    impatient = "timedelta(minutes=1)", "timedelta(seconds=1)"
    lost = described_copy(tmp_path / "lost", "ddp_cifar", impatient)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **OF_LAUNCHER}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ((codes, output),) = forked([{**lost, "env": environment}], tmp_path)
    assert codes == [1] and output.count("mine: error: ") == 1, output
    assert "Traceback (" not in output


def test_a_rank_that_starts_late_is_waited_for_longer_than_the_launchers_store(tmp_path):
    """The launcher's store is there first, here in this process. The second run has no launcher."""
    impatient = "timedelta(minutes=1)", "timedelta(seconds=2)"
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    run = {"project": "\n\ntime.sleep(6 * RANK)", "processes": 2}
    late, other = (described_copy(tmp_path / x, "ddp_cifar", impatient, **run) for x in "ab")
    environment = {"MASTER_PORT": str(port), **OF_LAUNCHER}
    answers = forked([{**late, "env": environment}, other], tmp_path, together=2)
    assert [codes for codes, _ in answers] == [[0, 0]] * 2 and store.num_keys() > 1, answers


def test_ctrl_c_is_answered_at_once_and_ctrl_backslash_ends_a_step_that_never_ends(tmp_path):
    text = project("interruption", compute_loss="loss_that_never_ends")
    stuck = described_copy(tmp_path / "stuck", "ddp_cifar", project=text)
    ((codes, output),) = forked([stuck], tmp_path)
    assert codes == [-signal.SIGQUIT], output
    assert output.count("SIGINT: stopping after the next step (Ctrl-\\ aborts)\n") == 1
    assert "which is saved" not in output and not list(tmp_path.glob("stuck/run/*.pt"))


def test_a_signal_in_an_evaluation_stops_after_the_next_batch_and_loses_nothing(tmp_path):
    """Not even what a tracker uploads for long when the other rank is ready to end."""
    replaced = {"compute_loss": "evaluation_that_is_signalled"}
    replaced["accelerate.tracking.TensorBoardTracker.finish"] = "slow_upload"
    text = project("interruption", **replaced)
    run = {"project": text, "processes": 2, "grace": 30}
    run["flags"] = ["--batch-size", 4, "--max-steps", 4]
    whole, stopped = (
        described_copy(tmp_path / x, "ddp_cifar", **run) for x in ("whole", "stopped")
    )
    signalled = {**stopped, "env": {"SIGNALLED": "1"}, "grace": 2, "terminate": False}
    signalled["flags"] = [*stopped["flags"], "--tracker", "tensorboard", "--hang-timeout", 10]
    answers = forked([whole, signalled, stopped], tmp_path)
    assert [codes for codes, _ in answers] == [[0, 0], [143, 143], [0, 0]], answers
    batches = [output.count("evaluates batch") for _, output in answers]
    assert batches[0] == batches[2] == 16 and 4 <= batches[1] < 16, "of two ranks"
    assert "stopped after step 4, which is saved: rerun the command to resume" in answers[1][1]
    assert begin_of(answers[2][1]) == 4
    whole, stopped = (outputs(tmp_path / name / "run") for name in ("whole", "stopped"))
    assert stopped.evaluations
    assert_same_training(stopped, whole, 0)


LINE = "        resource_tracker.ensure_running()"
EARLY = LINE, f"        os.kill(os.getpid(), signal.SIGUSR1)\n{LINE}"


def test_under_nohup_a_hangup_is_ignored_and_no_signal_is_lost_at_the_start(tmp_path):
    """One that comes while the handlers are installed. Without a launcher, the end of the parent
    process is no end of the run."""
    flags = ["--batch-size", 8, "--max-steps", 99]
    text = project("interruption", train_step="step_under_nohup", LAUNCHER="0")
    nohup = described_copy(tmp_path / "nohup", "ddp_cifar", project=text, flags=flags)
    nohup["ignored"] = [signal.SIGHUP]
    early = described_copy(tmp_path / "early", "ddp_cifar", EARLY, flags=flags)
    (codes, output), (early_codes, early_output) = forked([nohup, early], tmp_path)
    assert codes == [143] and "stopped after step 6, which is saved" in output, output
    assert early_codes == [138] and "stopped after step 2" in early_output, early_output


def test_a_worker_of_a_dataloader_does_not_outlive_its_rank():
    """In a sample that never ends. It blocks SIGTERM, by which multiprocessing would end it. The
    last lines of the rank cannot be written."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        with contextlib.suppress(OSError):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000])
            worker.start()
            os.write(write, str(worker.pid).encode())
            sys.stdout = open("/dev/full", "w")
            print("a last line")
            recipe.exit_now(0)
        os._exit(1)
    worker = int(os.read(read, 20))
    assert os.waitpid(process, 0)[1] == 0
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie")


def test_a_second_start_in_mid_training_is_an_error_that_the_first_run_does_not_notice(tmp_path):
    text = project("interruption", train_step="step_at_a_gate")
    script = copy("ddp_cifar", tmp_path / "mine.py", *SHORT, project=text)
    command = [*LAUNCH, CONFIGS[2], script, *CNN, "--batch-size", 16, "--max-steps", 5]
    command += ["--log-every", 1, "--output-dir", tmp_path / "run"]
    with Launched(command, env={"GATE": "2/3"}, output=tmp_path / "log") as first:
        wait_until((tmp_path / "run/gate-2").exists)
        second = launch(command, check=False)
        (line,) = re.findall("^mine: error: (.*)$", second.stderr, re.MULTILINE)
        in_use = f"--output-dir {tmp_path}/run is in use by another run: "
        assert second.returncode and line.startswith(in_use)
        (tmp_path / "run/open").touch()
        assert first.wait(300) == 0, (tmp_path / "log").read_text()
    assert [line["step"] for line in outputs(tmp_path / "run").train] == [1, 2, 3, 4, 5]


def test_on_a_file_system_without_locks_one_line_says_so(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setattr(os, "lockf", no_locks)
    recipe.lock_output_directory(tmp_path)
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_the_launcher_restarts_a_run_whose_rank_is_killed_or_stalls_to_the_same_end(tmp_path):
    """First a rank is killed in step 13, then one stalls there; a checkpoint every 5 steps."""
    script = copy("ddp_cifar", tmp_path / "mine.py", FEW_IMAGES, project=project("disturbed"))
    flags = [*CNN, "--batch-size", 16, "--max-steps", 16, "--log-every", 1]
    flags += ["--checkpoint-every", 5, "--hang-timeout", 10, "--output-dir"]
    one = {"processes": 2, "script": script, "directory": tmp_path}
    ((codes, output),) = forked([{**one, "flags": [*flags, "whole"]}], tmp_path)
    assert codes == [0, 0], output
    command = [*LAUNCH, CONFIGS[2], "--max_restarts", 2, script, *flags, "disturbed"]
    disturb = json.dumps({"1": [13, "SIGKILL"], "1.1": [13, "stall"]})
    restarted = launch(command, tmp_path, DISTURB=disturb, OMP_NUM_THREADS="1")
    begins = re.findall('"resumed_from": ([0-9]+)', restarted.stdout)
    assert begins == ["0", "10", "10", "10"], "at the start of each attempt, and in the results"
    assert restarted.stderr.count("no step for 10 s because of rank 1 on") == 1, restarted.stderr
    whole, disturbed = (outputs(tmp_path / name) for name in ("whole", "disturbed"))
    assert_same_training(disturbed, whole, 0)


ENDS = [(SystemExit(3), 3), (SystemExit(), 0), (KeyboardInterrupt(), 130), (ValueError(), 1)]


@pytest.mark.parametrize("raised, status", ENDS)
def test_the_exit_status_is_that_of_main(raised, status, monkeypatch):
    def main():
        raise raised

    statuses = []
    monkeypatch.setattr(recipe, "exit_now", statuses.append)
    recipe.start(main)
    assert statuses[0] == status
