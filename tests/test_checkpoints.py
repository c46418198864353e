"""Whatever happens while a checkpoint is written, the last good one stays and the run goes on from
it."""

import json
import sys

import pytest
from conftest import PROGRAMS, ROOT, forked, run, the_error_line
from test_resume import STEPS, assert_identical, batch_size, content

# Even numbers are before an operation, odd ones after it. The first open is the lock's; of a save,
# which has hundreds of writes, the file's and then the directory's, and so with fsync; old ones are
# deleted from the third save on.
KILLS = [
    *[("open", moment) for moment in range(2, 6)],
    *[("write", moment) for moment in (0, 1, 2, 51, 250, 601)],
    *[("fsync", moment) for moment in range(6)],
    *[("replace", moment) for moment in range(4)],
    *[("unlink", moment) for moment in range(3)],
]


@pytest.mark.parametrize(
    ("recipe", "processes", "kills"),
    # What writes is the same text in all recipes; what the pipeline collects for it, from two
    # stages, is not.
    [
        ("ddp_cifar", 2, KILLS),
        pytest.param("pipeline_cifar", 2, KILLS[::3], marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_of_a_save_the_run_goes_on_to_the_same_end(
    recipe, processes, kills, tmp_path
):
    """One run, killed over and over while it saves and resumed each time; and an undisturbed
    one."""
    common = {"recipe": recipe, "processes": processes}
    flags = ["--batch-size", batch_size(recipe, processes), "--checkpoint-every", 1, "--keep", 2]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    resumed = {**common, "directory": killed, "flags": [*flags, "--resume", "auto"]}
    runs = [{**resumed, "save": kill} for kill in kills]
    outcomes = forked([{**common, "directory": whole, "flags": flags}, *runs, resumed], tmp_path)
    begins = []
    for (codes, output), expected in zip(outcomes, (0, *[-9] * len(kills), 0), strict=True):
        assert codes[0] == expected, output
        assert "cannot load" not in output, "a checkpoint under its final name was not complete"
        begins.append(int(output.partition("resumed_from: ")[2].split()[0]))
    assert begins == sorted(begins), "a checkpoint was lost"
    assert (3 if kills == KILLS else 0) < begins[-1] < STEPS, (
        "the kills came too early or too late to prove anything"
    )
    for step in (STEPS - 1, STEPS):
        assert_identical(
            *(content(directory / f"step-{step:08}.pt") for directory in (whole, killed))
        )
    assert sorted(path.name for path in killed.glob("*")) == sorted(
        path.name for path in whole.glob("*")
    )


def checkpoints(directory):
    return sorted(int(path.stem[5:]) for path in directory.glob("step-*.pt"))


@pytest.mark.slow
def test_where_a_checkpoint_cannot_be_written_the_earlier_one_stays(tmp_path):
    """No room on the disk (as far as the process can tell), and no permission to create the file (a
    directory is in its place); then the same run with room, to its end."""
    directory = tmp_path / "run"
    first = {
        "recipe": "ddp_cifar",
        "processes": 1,
        "directory": directory,
        "flags": ["--batch-size", 64, "--checkpoint-every", 2],
    }
    ((codes, output),) = forked([{**first, "disturbances": {"0": [3, "SIGTERM"]}}], tmp_path)
    assert codes == [143] and checkpoints(directory) == [2, 3], output
    before = {path: path.read_bytes() for path in directory.glob("step-*.pt")}
    resumed = {**first, "flags": [*first["flags"], "--resume", "auto"]}

    (directory / "metrics.jsonl").unlink()
    (directory / "metrics.jsonl").symlink_to("/dev/full")
    program = [
        sys.executable,
        ROOT / "tests/programs/disturbed_training.py",
        json.dumps(resumed, default=str),
    ]
    full = run(["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *program], check=False, **PROGRAMS)
    line = the_error_line(full)
    assert (
        "cannot write step-00000004.pt" in line and "File too large" in line and "--resume" in line
    )
    assert not (directory / "checkpoint.tmp").exists()
    (directory / "metrics.jsonl").unlink()

    (directory / "checkpoint.tmp").mkdir()
    ((codes, output),) = forked([resumed], tmp_path)
    assert codes == [1] and output.count("error:") == 1 and "Traceback" not in output
    assert "cannot write step-00000004.pt" in output and "Is a directory" in output
    (directory / "checkpoint.tmp").rmdir()

    assert {path: path.read_bytes() for path in directory.glob("step-*.pt")} == before
    ((codes, output),) = forked([resumed], tmp_path)
    assert codes == [0] and output.count("resumed_from: 3\n") == 1
    assert checkpoints(directory) == [18, 20]


def test_what_is_not_finite_stops_all_processes_and_is_not_saved(tmp_path):
    """Two processes, a line of metrics every 3 steps and a checkpoint every 5."""
    cases = {
        "loss": ({"1": [7, "nan"]}, "since a step between 7 and 9 "),
        "gradient": ({"0": [9, "inf"]}, "since a step between 7 and 9 "),
        "early": ({"0": [1, "inf"]}, "since a step between 1 and 3 "),
    }
    common = {
        "recipe": "ddp_cifar",
        "processes": 2,
        "flags": ["--batch-size", 32, "--checkpoint-every", 5],
    }
    runs = [
        {**common, "directory": tmp_path / name, "disturbances": case[0]}
        for name, case in cases.items()
    ]
    for (name, (_, where)), (codes, output) in zip(
        cases.items(), forked(runs, tmp_path), strict=True
    ):
        assert codes == [1, 1], output
        (line,) = [line for line in output.splitlines() if "error:" in line]
        assert f"loss or weights are not finite {where}" in line
        assert checkpoints(tmp_path / name) == ([] if name == "early" else [5])


def test_a_damaged_newest_checkpoint_is_skipped_and_a_finished_run_only_evaluated(tmp_path):
    directory = tmp_path / "run"
    flags = ["--batch-size", 64, "--checkpoint-every", 10]
    common = {"recipe": "ddp_cifar", "processes": 1, "directory": directory, "flags": flags}
    ((codes, output),) = forked([common], tmp_path)
    assert codes == [0] and checkpoints(directory) == [10, 20], output
    newest, summary = (
        directory / "step-00000020.pt",
        json.loads((directory / "summary.json").read_text()),
    )
    weights, intact = (directory / "model.safetensors").read_bytes(), newest.read_bytes()

    again = {**common, "flags": [*flags, "--resume", "auto"]}
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and "resumed_from: 20\n" in output
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert f"test_accuracy: {summary['test_accuracy']}" in output

    newest.write_bytes(intact[:-100])
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and "resumed_from: 10\n" in output
    assert output.count("cannot load") == 1 and "step-00000020.pt (BadZipFile" in output
    (abandoned,) = directory.glob("step-00000020.pt.abandoned-*")
    assert abandoned.read_bytes() == intact[:-100], "a damaged file is kept, too"
    assert (directory / "model.safetensors").read_bytes() == weights


def test_auto_starts_afresh_only_where_there_is_none_and_says_so(tmp_path):
    run_ = {
        "recipe": "ddp_cifar",
        "processes": 1,
        "directory": tmp_path / "run",
        "flags": ["--resume", "auto"],
    }
    ((codes, output),) = forked([run_], tmp_path)
    assert codes == [0] and output.count("starting afresh") == 1 and "resumed_from: 0\n" in output


def test_a_run_that_is_killed_while_it_writes_its_summary_writes_it_when_resumed(tmp_path):
    recipe, script = ROOT / "recipes/ddp_cifar.py", tmp_path / "killed.py"
    script.write_text(
        "import os, pathlib, runpy, signal\n"
        "def torn(path, text):\n    open(path, 'w')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pathlib.Path.write_text = torn\nrunpy.run_path('{recipe}', run_name='__main__')\n"
    )
    flags = [
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--cpu",
        "--max-steps",
        2,
        "--output-dir",
        "run",
    ]
    killed = {"processes": 1, "script": script, "directory": tmp_path, "flags": flags}
    resumed = {**killed, "script": recipe, "flags": [*flags, "--resume", "auto"]}
    (codes, output), (resumed_codes, _) = forked([killed, resumed], tmp_path)
    assert (codes, resumed_codes) == ([-9], [0]), output
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2


def test_an_old_checkpoint_that_somebody_else_deletes_at_that_moment_is_no_error(tmp_path):
    script = tmp_path / "deleted.py"
    script.write_text(
        "import os, pathlib, runpy\n"
        "unlink = pathlib.Path.unlink\n"
        "pathlib.Path.unlink = lambda path, *missing, **ok: (os.unlink(path), unlink(path, *missing, **ok))\n"
        f"runpy.run_path('{ROOT}/recipes/ddp_cifar.py', run_name='__main__')\n"
    )
    flags = [
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--cpu",
        "--max-steps",
        3,
        "--output-dir",
        "run",
    ]
    flags += ["--checkpoint-every", 1, "--batch-size", 16]
    ((codes, output),) = forked(
        [{"processes": 1, "script": script, "directory": tmp_path, "flags": flags}], tmp_path
    )
    assert codes == [0] and checkpoints(tmp_path / "run") == [2, 3], output


@pytest.mark.slow
def test_the_others_wait_while_the_main_process_reads_a_large_checkpoint(tmp_path):
    """By torch's default for half an hour, here for a second."""
    flags = [
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--cpu",
        "--max-steps",
        1,
        "--output-dir",
        "run",
    ]
    first = {
        "processes": 2,
        "script": ROOT / "recipes/ddp_cifar.py",
        "directory": tmp_path,
        "flags": flags,
    }
    source, line = first["script"].read_text(), "        checkpoint = torch.load(path"
    assert source.count(line) == 1
    script = tmp_path / "slow.py"
    impatient = "distributed.distributed_c10d._get_default_timeout = lambda _: timedelta(seconds=1)\n\n\ndef main("
    script.write_text(
        source.replace(line, f"        time.sleep(2)\n{line}").replace("def main(", impatient)
    )
    resumed = {**first, "script": script, "flags": [*flags, "--resume", "auto"]}
    outcomes = forked([first, resumed], tmp_path)
    assert [codes for codes, _ in outcomes] == [[0, 0], [0, 0]], outcomes
