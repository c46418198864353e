"""Whatever happens while a checkpoint is written, the last good one stays and the run goes on from
it."""

import json
import re
import sys
from collections import Counter

import numpy
import pytest
import torch
from conftest import PROGRAMS, ROOT, forked, load, run, the_error_line
from test_resume import STEPS, assert_identical, batch_size, begin_of, content

SMALL = ["--data", "synthetic", "--model", "simple_cnn", "--cpu"]


def kills_of(moments):
    """[(operation, n)]: each moment of a save, before and after each operation on the disk; of its
    hundreds of writes the first three, the one in the middle and the last."""
    found = []
    for operation, number in Counter(moments).items():
        chosen = range(number)
        if operation == "write":
            assert number > 100
            chosen = [0, 1, 2, number // 2, number - 1]
        found += [(operation, n) for n in chosen]
    assert [kind for kind, n in found if n == 0] == ["open", "write", "fsync", "replace", "unlink"]
    return [(kind, n) for kind, n in found if kind != "open" or n > 1]  # the first is the lock's


@pytest.mark.parametrize(
    ("recipe", "share"),
    # What writes is the same text in all recipes; what the pipeline collects for it, from two
    # stages, is not.
    [("ddp_cifar", 1), pytest.param("pipeline_cifar", 3, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_of_a_save_the_run_goes_on_to_the_same_end(recipe, share, tmp_path):
    """One run, killed over and over while it saves, and the same command each time; and an
    undisturbed one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = ["--batch-size", batch_size(recipe, 2), "--checkpoint-every", 1, "--keep", 2]
    one = {"recipe": recipe, "processes": 2, "flags": flags}
    again = {**one, "directory": killed}
    stopped = {**again, "disturbances": {"0": [1, "SIGTERM"]}}
    recorded = {**stopped, "save": ["record", tmp_path / "moments"]}
    for codes, output in forked([{**one, "directory": whole}, stopped, recorded], tmp_path):
        assert codes in ([0, 0], [143, 143]), output
    begin = checkpoints(killed)[-1]
    kills = kills_of((tmp_path / "moments").read_text().split())[::share]
    assert len(kills) > 15 / share

    begins = [begin]
    outcomes = forked([*({**again, "save": kill} for kill in kills), again], tmp_path)
    for (codes, output), expected in zip(outcomes, [*[-9] * len(kills), 0], strict=True):
        assert codes[0] == expected, output
        assert "cannot load" not in output, "a checkpoint under its final name was not complete"
        begins.append(begin_of(output))
    assert begins == sorted(begins), "a checkpoint was lost"
    assert begin < begins[-1] < STEPS, "the kills came too early or too late to prove anything"
    for step in (STEPS - 1, STEPS):
        name = f"step-{step:08}.pt"
        assert_identical(content(whole / name), content(killed / name))
    left = sorted(path.name for path in killed.glob("*"))
    assert left == sorted(path.name for path in whole.glob("*"))


def run_ids(directory, *steps):
    paths = [directory / f"step-{step:08}.pt" for step in steps]
    return {torch.load(path, weights_only=True)["run_id"] for path in paths}


def checkpoints(directory):
    return sorted(int(path.stem[5:]) for path in directory.glob("step-*.pt"))


@pytest.mark.slow
def test_where_a_checkpoint_cannot_be_written_the_earlier_one_stays(tmp_path):
    """No room on the disk (as far as the process can tell), and no permission to create the file (a
    directory is in its place); then the same command with room, to its end."""
    directory = tmp_path / "run"
    flags = ["--batch-size", 64, "--checkpoint-every", 2]
    again = {"recipe": "ddp_cifar", "processes": 1, "directory": directory, "flags": flags}
    ((codes, output),) = forked([{**again, "disturbances": {"0": [3, "SIGTERM"]}}], tmp_path)
    assert codes == [143] and checkpoints(directory) == [2, 3], output
    before = {path: path.read_bytes() for path in directory.glob("step-*.pt")}

    (directory / "metrics.jsonl").unlink()
    (directory / "metrics.jsonl").symlink_to("/dev/full")
    program = [sys.executable, ROOT / "tests/programs/disturbed_training.py"]
    program.append(json.dumps(again, default=str))
    full = run(["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *program], check=False, **PROGRAMS)
    line = the_error_line(full)
    assert "cannot write step-00000004.pt" in line and "File too large" in line
    assert "earlier ones stay: the same command continues" in line
    assert not (directory / "checkpoint.tmp").exists()
    (directory / "metrics.jsonl").unlink()

    (directory / "checkpoint.tmp").mkdir()
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [1] and output.count("error:") == 1 and "Traceback" not in output
    assert "cannot write step-00000004.pt" in output and "Is a directory" in output
    (directory / "checkpoint.tmp").rmdir()

    assert {path: path.read_bytes() for path in directory.glob("step-*.pt")} == before
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and begin_of(output) == 3
    assert checkpoints(directory) == [18, 20]


def test_what_is_not_finite_stops_all_processes_and_is_not_saved(tmp_path):
    """Two processes, a line of metrics every 3 steps and a checkpoint every 5."""
    cases = {
        "loss": ({"1": [7, "nan"]}, "since a step between 7 and 9, not saved"),
        "gradient": ({"0": [9, "inf"]}, "since a step between 7 and 9, not saved"),
        "early": ({"0": [1, "inf"]}, "since a step between 1 and 3, not saved"),
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
        assert f"loss or weights are not finite on ranks [0, 1], {where}" in line
        assert checkpoints(tmp_path / name) == ([] if name == "early" else [5])


def one_process(directory, *flags, stop=None, recipe="ddp_cifar"):
    """A run of 20 steps, which may be stopped in its n-th."""
    one = {"recipe": recipe, "processes": 1, "directory": directory}
    disturbances = {"0": [stop, "SIGTERM"]} if stop else {}
    return {**one, "flags": ["--batch-size", 64, *flags], "disturbances": disturbances}


def test_a_damaged_newest_checkpoint_is_skipped_and_a_complete_run_only_evaluated(tmp_path):
    directory = tmp_path / "run"
    again = one_process(directory, "--checkpoint-every", 10)
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and checkpoints(directory) == [10, 20], output
    assert "this run is complete" not in output
    newest, summary_path = directory / "step-00000020.pt", directory / "summary.json"
    summary = json.loads(summary_path.read_text())
    weights, intact = (directory / "model.safetensors").read_bytes(), newest.read_bytes()

    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and "resumed_from: 20\n" in output
    assert output.count("this run is complete: it is only evaluated again\n") == 1
    assert json.loads(summary_path.read_text()) == summary
    assert f"test_accuracy: {summary['test_accuracy']}" in output
    assert newest.read_bytes() == intact, "nothing was trained that had to be saved"

    assert "it was written by" not in output
    newest.write_bytes(intact[:-100])
    older = torch.load(directory / "step-00000010.pt", weights_only=True)
    ours = older["config"]["versions"]
    older["config"]["versions"] = {**ours, "torch": "2.0.1"}
    torch.save(older, directory / "step-00000010.pt")
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and "resumed_from: 10\n" in output
    told = f"warning: it was written by {older['config']['versions']}, and this is {ours}\n"
    assert output.count(told) == 1, output
    assert output.count("cannot load") == 1 and "step-00000020.pt (BadZipFile" in output
    assert (directory / "model.safetensors").read_bytes() == weights
    assert newest.read_bytes() != intact[:-100]
    assert checkpoints(directory) == [10, 20]


def test_a_damaged_later_checkpoint_is_not_kept_instead_of_an_intact_one(tmp_path):
    """Only one is kept: those of this run, up to this step."""
    directory = tmp_path / "run"
    ((codes, output),) = forked([one_process(directory, "--checkpoint-every", 10)], tmp_path)
    assert codes == [0] and checkpoints(directory) == [10, 20], output
    (directory / "step-00000020.pt").write_bytes(b"damaged")
    again = one_process(directory, "--keep", 1, stop=3)
    (codes, output), (second_codes, second) = forked(
        [again, {**again, "disturbances": {}}], tmp_path
    )
    assert codes == [143] and "resumed_from: 10\n" in output, output
    assert second_codes == [0] and "resumed_from: 13\n" in second, second
    assert checkpoints(directory) == [20]


def test_which_checkpoint_counts(tmp_path):
    """A PATH is where a run begins that has none of its own; one inside the output directory has to
    be its newest; and where only damaged ones are left, nothing is begun over them."""
    first, second = tmp_path / "first", tmp_path / "second"
    older, newest = first / "step-00000002.pt", first / "step-00000004.pt"
    damaged = tmp_path / "damaged/step-00000003.pt"
    damaged.parent.mkdir()
    damaged.write_bytes(b"PK")
    begun = ["--resume", older]
    outcomes = forked(
        [
            one_process(first, "--checkpoint-every", 2, "--keep", 9, stop=4),
            one_process(first, "--resume", older),
            one_process(first, "--resume", first / "step-00000003.pt"),
            one_process(first, "--resume", newest, "--keep", 9, stop=1),
            one_process(second, *begun, stop=1),
            one_process(second, *begun, stop=1),
            one_process(second, "--resume", "auto", stop=1),
            one_process(damaged.parent),
        ],
        tmp_path,
    )
    codes = [codes[0] for codes, _ in outcomes]
    begins = [begin_of(output) for (code, *_), output in outcomes if code != 2]
    assert begins == [0, 4, 2, 3, 4], outcomes
    assert codes == [143, 2, 2, 143, 143, 143, 143, 2], outcomes
    assert checkpoints(first) == [2, 4, 5] and checkpoints(second)[-1] == 5
    errors = [re.findall("error: (.*)", output) for _, output in outcomes]
    assert f"{newest} is later than {older}: choose another --output-dir" in errors[1][0]
    assert "cannot load" in errors[2][0] and "No such file" in errors[2][0]
    own = f"{second} has checkpoints of its own, which count before {older}\n"
    assert [output.count(own) for _, output in outcomes] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert "another --output-dir to start afresh" in errors[7][0]
    assert damaged.read_bytes() == b"PK"
    begun, continued = run_ids(first, 2, 4, 5), run_ids(second, 4, 5)
    assert len(begun) == len(continued) == 1 and begun != continued, "for a tracker"


def test_other_hyperparameters_are_an_error_that_names_the_flags(tmp_path):
    directory = tmp_path / "run"
    outcomes = forked(
        [
            one_process(directory, stop=2),
            one_process(directory, "--epochs", 3, "--lr", 0.2, "--clip-norm", 1, "--log-every", 5),
            one_process(directory, "--log-every", 5, "--threads", 1, stop=1),
            one_process(directory, recipe="amp_cifar"),
        ],
        tmp_path,
    )
    assert [codes[0] for codes, _ in outcomes] == [143, 2, 143, 2], outcomes
    (line,) = re.findall("error: (.*)", outcomes[1][1])
    differences = "clip_norm is None there, 1.0 here; epochs is 2 there, 3 here; lr is 0.1 there"
    assert f"is of another run: {differences}, 0.2 here: " in line
    assert "continue it with --epochs 2 --lr 0.1 and without --clip-norm, or choose" in line
    (line,) = re.findall("error: (.*)", outcomes[3][1])
    assert "recipe is ddp_cifar there, amp_cifar here" in line and "--recipe" not in line


def scripted(directory, script, *flags):
    """A run of a script in `directory`/run."""
    flags = [*SMALL, "--output-dir", "run", *flags]
    return {"processes": 1, "script": script, "directory": directory, "flags": flags}


def test_a_run_that_is_killed_while_it_writes_its_summary_writes_it_when_continued(tmp_path):
    recipe, script = ROOT / "recipes/ddp_cifar.py", tmp_path / "killed.py"
    script.write_text(
        "import os, pathlib, runpy, signal\n"
        "def torn(path, text):\n    open(path, 'w')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pathlib.Path.write_text = torn\nrunpy.run_path('{recipe}', run_name='__main__')\n"
    )
    flags = ["--max-steps", 2]
    (codes, output), (second_codes, second) = forked(
        [scripted(tmp_path, script, *flags), scripted(tmp_path, recipe, *flags)], tmp_path
    )
    assert (codes, second_codes) == ([-9], [0]), output + second
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2


def test_an_old_checkpoint_that_somebody_else_deletes_at_that_moment_is_no_error(tmp_path):
    script = tmp_path / "deleted.py"
    script.write_text(
        "import os, pathlib, runpy\n"
        "unlink = pathlib.Path.unlink\n"
        "def late(path, *arguments, **options):\n"
        "    os.unlink(path)\n    unlink(path, *arguments, **options)\n"
        "pathlib.Path.unlink = late\n"
        f"runpy.run_path('{ROOT}/recipes/ddp_cifar.py', run_name='__main__')\n"
    )
    flags = ["--max-steps", 3, "--checkpoint-every", 1, "--batch-size", 16]
    ((codes, output),) = forked([scripted(tmp_path, script, *flags)], tmp_path)
    assert codes == [0] and checkpoints(tmp_path / "run") == [2, 3], output


@pytest.mark.slow
def test_the_others_wait_while_the_main_process_reads_a_large_checkpoint(tmp_path):
    """By torch's default for half an hour, here for a second."""
    recipe = ROOT / "recipes/ddp_cifar.py"
    source, line = recipe.read_text(), "        return torch.load(path"
    assert source.count(line) == 1
    script = tmp_path / "ddp_cifar.py"
    default = "distributed.distributed_c10d._get_default_timeout"
    impatient = f"{default} = lambda _: timedelta(seconds=1)\n\n\ndef main("
    source = source.replace(line, f"        time.sleep(2)\n{line}")
    script.write_text(source.replace("def main(", impatient))
    first, second = (
        {**scripted(tmp_path, path, "--max-steps", 1), "processes": 2} for path in (recipe, script)
    )
    outcomes = forked([first, second], tmp_path)
    assert [codes for codes, _ in outcomes] == [[0, 0], [0, 0]], outcomes
    assert "resumed_from: 1\n" in outcomes[1][1]


def test_a_models_state_keeps_the_versions_of_its_modules_and_numbers_of_numpy_become_pythons(
    tmp_path,
):
    """By its version a module tells whether to convert what it loads."""
    recipe = load("recipes/ddp_cifar.py")
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2))
    content = {"states": {"model": model.state_dict(), "lr": [numpy.float64(0.5)]}}
    recipe.save_to_disk(recipe.without_numpy(content), tmp_path / "x.pt")
    states = torch.load(tmp_path / "x.pt", weights_only=True)["states"]
    assert states["model"]._metadata["0"] == {"version": 2}
    assert states["lr"] == [0.5] and type(states["lr"][0]) is float
