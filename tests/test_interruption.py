"""Signals and deaths: all ranks stop together with everything saved, and the same command
continues."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import (
    ACCELERATE,
    CONFIGS,
    LITTLE_DATA,
    PROGRAMS,
    ROOT,
    SMALL,
    STEPS,
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    copy,
    described_copy,
    forked,
    outputs,
    run,
    train_forked,
    wait_until,
)

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes/ddp_cifar.py"
WORKERS = """
def load_data(args, accelerator):
    labels = torch.zeros(512, dtype=torch.int64)
    data = torch.utils.data.TensorDataset(torch.randn(512, 3, 8, 8), labels)
    workers = {"num_workers": 1, "persistent_workers": True}
    options = {"multiprocessing_context": "forkserver", "drop_last": True, **workers}
    train_loader = DataLoader(data, args.batch_size, shuffle=True, **options)
    return train_loader, DataLoader(data, 64)
"""
LAUNCH = [ACCELERATE, "launch", "--config_file"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
# what happens: (the words before the recipe, the launcher's exit code)
CASES = {
    "its terminal is closed": ([*LAUNCH, CONFIGS[2]], 1),
    "Ctrl-C also ends the tee behind its pipe": ([*LAUNCH, CONFIGS[2]], 128 + signal.SIGINT),
    "its launcher is killed": ([*TORCHRUN, "2"], -signal.SIGKILL),
    "SIGTERM comes to each process": ([*LAUNCH, CONFIGS[2]], 1),
}


def interrupted(case, directory):
    """Start a run that would take minutes and interrupt it when it trains. Return the exit code of
    the launcher, the checkpoints, and everything that was printed while somebody read it."""
    launcher, _ = CASES[case]
    script, metrics, log = RECIPE, directory / "run/metrics.jsonl", directory / "log"
    if "each process" in case:
        script = copy("ddp_cifar", directory / "mine.py", project=WORKERS)
    command = [*launcher, script, *SMALL, "--log-every", 1, "--output-dir", directory / "run"]
    command = [*map(str, command), "--batch-size", "16", "--epochs", "1000"]
    master, slave = os.openpty()
    os.set_blocking(master, False)
    output = {"stdout": open(log, "w"), "start_new_session": True}
    if "terminal" in case:
        command = ["setsid", "--ctty", *command]
        output = {"stdin": slave, "stdout": slave}
    elif "tee" in case:
        command = ["bash", "-c", '"$@" 2>&1 | tee "$0"', str(log), *command]
    started = []
    # Ignored where these tests run in the background.
    command = ["env", "--default-signal=INT,HUP", *command]
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, **output)
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


@pytest.fixture(scope="module")
def interruptions(tmp_path_factory):
    with ThreadPoolExecutor(2) as pool:
        directories = [tmp_path_factory.mktemp("interrupted") for _ in CASES]
        return dict(zip(CASES, pool.map(interrupted, CASES, directories), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_run_saves_and_stops_when(interruptions, case):
    code, saved, last_line, log = interruptions[case]
    assert saved and saved[-1] == last_line, log
    assert CASES[case][1] == code, log
    if "SIGTERM" in case or "killed" in case:
        assert log.count("SIGTERM: stopping after the next step (") == 1, "by one rank"
        assert f"stopped after step {saved[-1]}, which is saved: rerun the command to resume" in log


CTRL_C = """
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # ignored where these tests run in the background


def compute_loss(model, batch, args):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGQUIT)
    time.sleep(99)
"""


def test_ctrl_c_is_answered_at_once_and_ctrl_backslash_ends_a_step_that_never_ends(tmp_path):
    stuck = described_copy(tmp_path / "stuck", "ddp_cifar", project=CTRL_C)
    ((codes, output),) = forked([stuck], tmp_path)
    assert codes == [-signal.SIGQUIT], output
    assert output.count("SIGINT: stopping after the next step (Ctrl-\\ aborts)\n") == 1
    assert "which is saved" not in output and not list(tmp_path.glob("stuck/run/*.pt"))


IN_EVALUATION = """
plain_loss = compute_loss
evaluated = 0


def compute_loss(model, batch, args):
    global evaluated
    if not model.training:
        evaluated += 1
        say(f"evaluates batch {evaluated}")
        if evaluated == 2 and os.environ["RANK"] == os.environ.get("SIGNALLED"):
            os.kill(os.getpid(), signal.SIGTERM)
    return plain_loss(model, batch, args)
"""


def test_a_signal_in_an_evaluation_stops_after_the_next_batch_and_loses_nothing(tmp_path):
    run = {"project": IN_EVALUATION, "processes": 2, "grace": 30}
    run["flags"] = ["--batch-size", 4, "--max-steps", 4]
    whole, stopped = (
        described_copy(tmp_path / x, "ddp_cifar", **run) for x in ("whole", "stopped")
    )
    signalled = {**stopped, "env": {"SIGNALLED": "1"}}
    answers = forked([whole, signalled, stopped], tmp_path)
    assert [codes for codes, _ in answers] == [[0, 0], [143, 143], [0, 0]], answers
    batches = [output.count("evaluates batch") for _, output in answers]
    assert batches[0] == batches[2] == 16 and 4 <= batches[1] < 16, "of two ranks"
    assert "stopped after step 4, which is saved: rerun the command to resume" in answers[1][1]
    assert begin_of(answers[2][1]) == 4
    whole, stopped = (outputs(tmp_path / name / "run") for name in ("whole", "stopped"))
    assert stopped.evaluations
    assert_same_training(stopped, whole, 0)


UNDER_NOHUP = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
plain_step = train_step


def train_step(run, *arguments):
    if run.step in (2, 5):
        os.kill(os.getpid(), signal.SIGHUP if run.step == 2 else signal.SIGTERM)
    return plain_step(run, *arguments)
"""
LINE = "        resource_tracker.ensure_running()"
EARLY = LINE, f"        os.kill(os.getpid(), signal.SIGUSR1)\n{LINE}"


def test_under_nohup_a_hangup_is_ignored_and_no_signal_is_lost_at_the_start(tmp_path):
    """One that comes while the handlers are installed."""
    flags = ["--batch-size", 8, "--max-steps", 99]
    nohup = described_copy(tmp_path / "nohup", "ddp_cifar", project=UNDER_NOHUP, flags=flags)
    early = described_copy(tmp_path / "early", "ddp_cifar", EARLY, flags=flags)
    (codes, output), (early_codes, early_output) = forked([nohup, early], tmp_path)
    assert codes == [143] and "stopped after step 6, which is saved" in output, output
    assert early_codes == [138] and "stopped after step 2" in early_output, early_output


STUCK_WORKER = """
class Stuck(Dataset):
    calls = count(1)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        if worker and worker.id == 1 and next(self.calls) > 8:  # in its second batch
            Path("worker").write_text(str(os.getpid()))
            time.sleep(1000)
        return torch.full((3, 8, 8), math.nan), 0


def load_data(args, accelerator):
    options = {"num_workers": 2, "batch_size": args.batch_size}
    loader = DataLoader(Stuck(), shuffle=True, drop_last=True, **options)
    return loader, DataLoader(Stuck(), 64)


plain_step = train_step


def train_step(run, model, optimizer, scheduler, microbatches):
    microbatches = list(microbatches)
    while not os.path.exists("worker"):
        time.sleep(0.01)
    return plain_step(run, model, optimizer, scheduler, microbatches)
"""


def test_a_worker_of_a_dataloader_does_not_outlive_its_rank(tmp_path):
    """Its SIGTERM is blocked, so that it lives until a checkpoint is written."""
    run = {"project": STUCK_WORKER, "flags": ["--batch-size", 8]}
    stuck = described_copy(tmp_path / "stuck", "ddp_cifar", **run)
    ((codes, output),) = forked([stuck], tmp_path)
    assert codes == [2] and "not finite at step 1" in output, output
    with contextlib.suppress(psutil.NoSuchProcess):
        worker = psutil.Process(int((tmp_path / "stuck/worker").read_text()))
        try:
            wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
        finally:
            worker.kill()


WAITS = """
plain_step = train_step


def train_step(run, *arguments):
    while run.step == 3 and "GATE" in os.environ and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
    return plain_step(run, *arguments)
"""
STARTS = {
    "alone": ("ddp_cifar", 1, [sys.executable]),
    "under a launcher": ("sharded_cifar", 2, [*LAUNCH, CONFIGS[2]]),
}


@pytest.mark.parametrize(
    "start", [pytest.param("alone", marks=pytest.mark.twin), "under a launcher"]
)
def test_a_second_start_in_mid_training_is_an_error_that_the_first_run_does_not_notice(
    start, tmp_path
):
    recipe, processes, launcher = STARTS[start]
    script = copy(recipe, tmp_path / "mine.py", LITTLE_DATA, project=WAITS)
    flags = [*SMALL, "--batch-size", 16, "--max-steps", 5, "--checkpoint-every", 2, "--keep", 9]
    flags += ["--threads", 1]
    command = [*launcher, script, *flags, "--log-every", 1, "--output-dir", tmp_path / "run"]
    metrics = tmp_path / "run/metrics.jsonl"
    with open(tmp_path / "log", "w") as log:
        environment = {**os.environ, "GATE": str(tmp_path / "gate")}
        words = [str(word) for word in command]
        first = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    try:
        wait_until(lambda: metrics.exists() and '"step": 2' in metrics.read_text())
        second = run(command, check=False)
        (line,) = re.findall("^mine: error: (.*)$", second.stderr, re.MULTILINE)
        assert second.returncode and line == f"--output-dir {tmp_path}/run is in use by another run"
        (tmp_path / "gate").touch()
        assert first.wait(300) == 0, (tmp_path / "log").read_text()
    finally:
        first.kill()
    (alone,) = train_forked(tmp_path, (processes, script, flags))
    assert_same_training(outputs(tmp_path / "run"), alone, 0)


NO_LOCKS = """
import errno


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


os.lockf = no_locks
"""


def test_on_a_file_system_without_locks_a_run_says_so_and_trains(tmp_path):
    ((codes, output),) = forked(
        [described_copy(tmp_path / "run", "ddp_cifar", project=NO_LOCKS)], tmp_path
    )
    said = "mine: run cannot be locked (No locks available): start no second run in it"
    assert codes == [0] and output.count(said) == 1, output


def test_the_launcher_restarts_a_run_whose_rank_is_killed_or_stalls_to_the_same_end(tmp_path):
    """First a rank is killed in step 13, then one stalls there; a checkpoint every 5 steps."""
    flags = ["--batch-size", 32, "--checkpoint-every", 5, "--hang-timeout", 10]
    common = {"recipe": "ddp_cifar", "processes": 2, "flags": flags}
    disturbances = {"1": [13, "SIGKILL"], "1.1": [3, "stall"]}
    disturbed = {**common, "directory": tmp_path / "disturbed", "disturbances": disturbances}
    ((codes, output),) = forked([{**common, "directory": tmp_path / "whole"}], tmp_path)
    assert codes == [0, 0], output
    program = ROOT / "tests/programs/disturbed_training.py"
    restarted = run(
        [*LAUNCH, CONFIGS[2], "--max_restarts", 2, program, json.dumps(disturbed, default=str)],
        **PROGRAMS,
    )
    begins = re.findall('"resumed_from": ([0-9]+)', restarted.stdout)
    assert begins == ["0", "10", "10", "10"], "at the start of each attempt, and in the results"
    assert restarted.stderr.count("no step for 10 s because of rank 1 on") == 1, restarted.stderr
    name = f"step-{STEPS:08}.pt"
    whole, disturbed = (content(tmp_path / run / name) for run in ("whole", "disturbed"))
    assert_identical(whole, disturbed)
    assert Path(tmp_path, "disturbed/summary.json").exists()
