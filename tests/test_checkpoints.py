"""Whatever happens to a checkpoint, the last good one stays, and the run continues from it."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import (
    CNN,
    FEW_IMAGES,
    SHORT,
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    copy,
    described_copy,
    load,
    project,
)
from processes import forked, outputs

ERROR = re.compile(r"^\w+: error: (.*)", re.MULTILINE)


def checkpoints(directory):
    return sorted(int(path.stem[5:]) for path in directory.glob("step-*.pt"))


def one_process(directory, *flags, stop=None, recipe="ddp_cifar"):
    """A run of 20 steps; with `stop`, SIGTERM comes in its n-th step and it ends one step later."""
    one = {"recipe": recipe, "processes": 1, "directory": directory}
    disturbances = {"0": [stop, "SIGTERM"]} if stop else {}
    return {**one, "flags": ["--batch-size", 64, *flags], "disturbances": disturbances}


def the_error(answer, code=2):
    """The one line by which a run ended, without a traceback."""
    codes, output = answer
    assert codes[0] == code and "Traceback" not in output, output
    (line,) = ERROR.findall(output)
    return line


RECIPES = ["ddp_cifar", pytest.param("sharded_cifar", marks=pytest.mark.slow)]
# A small checkpoint of sharded has as many files as a large one.
DISTURBED = project("disturbed") + "\nFILE_SIZE = 1000\n"
KILLS = {  # rank, step, what it is about to do in the save after that, where the next run begins
    "ddp_cifar": [
        (0, 2, r"open unfinished\.pt\.tmp", 1),
        (0, 3, r"os.rename unfinished\.pt\.tmp", 2),
        (0, 4, "open killed", 4),  # the new one has its name
        (0, 6, r"os.remove step-\d+\.pt", 6),  # an old one is to be deleted
    ],
    "sharded_cifar": [
        (1, 2, "open shard-00002-model-00003-.*", 1),
        (0, 2, "open run.pt", 1),
        (0, 3, r"os.rename step-\d+\.tmp", 2),
        (0, 4, r"os.rename step-\d+", 4),
        (0, 6, r"os.rmdir step-\d+\.deleted\.tmp", 6),
    ],
}
# A new checkpoint and its name are on the disk before an old one goes.
ORDER = {
    "ddp_cifar": r"fsync unfinished\.pt\.tmp rename unfinished\.pt\.tmp fsync killed OLD",
    "sharded_cifar": r"fsync run\.pt fsync (\S+) rename \1 fsync killed OLD",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_any_moment_of_a_save_the_run_continues_to_the_same_end(recipe, tmp_path):
    """One run, killed over and over while it saves, and the same command each time."""
    script = copy(recipe, tmp_path / "mine.py", FEW_IMAGES, project=DISTURBED)
    flags = [*CNN, "--batch-size", 16, "--checkpoint-every", 1, "--max-steps", 8]
    flags += ["--log-every", 1, "--output-dir"]
    one = {"processes": 2, "script": script, "directory": tmp_path, "grace": 0.5}
    kills = [{"DISTURB": json.dumps(kill)} for *kill, _ in KILLS[recipe]]
    runs = [{**one, "flags": [*flags, "killed"], "env": env} for env in (*kills, {})]
    whole, *answers = forked([{**one, "flags": [*flags, "whole"]}, *runs], tmp_path)
    assert whole[0] == answers[-1][0] == [0, 0], answers[-1]
    for (rank, *_, begin), before, after in zip(KILLS[recipe], answers, answers[1:], strict=False):
        assert before[0][rank] == -9, before
        assert begin_of(after[1]) == begin, after
        assert "damaged" not in after[1], "a checkpoint under its final name was not complete"
    whole, killed = (outputs(tmp_path / name) for name in ("whole", "killed"))
    assert_same_training(killed, whole, 0)
    left = [sorted(path.name for path in run.directory.iterdir()) for run in (whole, killed)]
    assert left[0] == left[1] and sum(name.startswith("step-") for name in left[0]) == 2
    disk, old = (killed.directory / "disk.0").read_text(), r"(?:re\w+ step-\d+(?!\d|\.tmp)\S* ?)+"
    order = ORDER[recipe].replace("OLD", old)
    assert len(re.findall(order, disk)) == len(re.findall(old, disk)) >= 2, disk


# Rank, step, bytes: torch fails while it writes, or Python when it closes the file.
FULL_DISKS = {"ddp_cifar": [[0, 4, 12_000], [0, 4, 9000]], "sharded_cifar": [[1, 4, 3000]]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_where_a_checkpoint_cannot_be_written_all_ranks_exit_and_earlier_ones_stay(
    recipe, tmp_path
):
    """The disk is full, as far as one rank can tell, or the directory has become read-only."""
    cases = [("File too large", disturb) for disturb in FULL_DISKS[recipe]]
    cases += [("Permission denied", [0, 4, "read-only"])]
    flags = ["--batch-size", 16, "--checkpoint-every", 2, "--max-steps", 6]
    runs = []
    for index, (_, disturb) in enumerate(cases):
        directory = tmp_path / str(index)
        run = described_copy(directory, recipe, project=DISTURBED, flags=flags)
        runs.append(run | {"processes": 2, "env": {"DISTURB": json.dumps(disturb)}})
    answers = forked(runs, tmp_path, together=2)
    for (reason, _), run, answer in zip(cases, runs, answers, strict=True):
        pattern = r"cannot write run/step-00000004, earlier ones stay \((.*)\)"
        assert reason in re.fullmatch(pattern, the_error(answer))[1] and answer[0][1] != 0, answer
        left = {path.stem for path in (run["directory"] / "run").iterdir()}
        assert left == {"metrics", "run", "mine.from-00000000", "step-00000002"}


def test_a_damaged_newest_checkpoint_is_skipped_and_none_is_trained_over(tmp_path):
    """A byte of the newest is flipped; of two, --keep 1 keeps the intact one. A run that is
    complete is evaluated again. Where all are damaged, nothing is begun over them."""
    directory = tmp_path / "run"
    newest, summary = directory / "step-00000020.pt", directory / "summary.json"
    again = one_process(directory, "--checkpoint-every", 10)
    one = {**again, "flags": [*again["flags"], "--keep", 1]}
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and checkpoints(directory) == [10, 20], output
    weights, expected = (directory / "model.safetensors").read_bytes(), content(newest)
    test_loss = json.loads(summary.read_text())["test_loss"]

    tensor = torch.load(newest, weights_only=True)["states"]["model"]["1.0.weight"]
    damaged = bytearray(newest.read_bytes())
    damaged[damaged.index(tensor.numpy().tobytes()) + 1000] ^= 1  # not in the padding
    newest.write_bytes(damaged)
    ((codes, output),) = forked([{**one, "disturbances": {"0": [2, "SIGTERM"]}}], tmp_path)
    assert codes == [143] and begin_of(output) == 10, output
    assert output.count("skipping damaged") == 1 and "step-00000020.pt (" in output
    stopped, damaged = checkpoints(directory)
    assert 12 < stopped < damaged == 20, "one step after the signal, or later on a busy machine"
    ((codes, output),) = forked([one], tmp_path)
    assert codes == [0] and begin_of(output) == stopped, output
    assert checkpoints(directory) == [20]
    assert_identical(content(newest)["states"], expected["states"])
    assert (directory / "model.safetensors").read_bytes() == weights

    intact = newest.read_bytes()
    kept = {**json.loads(summary.read_text()), "test_loss": 0}
    summary.write_text(json.dumps(kept))
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and json.loads(summary.read_text()) == kept, "as the training left it"
    summary.unlink()
    ((codes, output),) = forked([again], tmp_path)
    assert codes == [0] and begin_of(output) == 20, output
    assert json.loads(summary.read_text())["test_loss"] == test_loss
    assert newest.read_bytes() == intact, "nothing was trained that had to be saved"

    newest.write_bytes(intact[:-100])
    torn = newest.read_bytes()
    (answer,) = forked([again], tmp_path)
    assert "has no intact checkpoint: choose another" in the_error(answer)
    assert newest.read_bytes() == torn


OTHERS = "--log-every 5 --threads 1 --tracker tensorboard --hang-timeout 300 --evaluate-every 7"
OTHERS += " --checkpoint-every 9 --keep 3 --data-dir x --batch-size 32 --global-batch-size 64"


def test_other_hyperparameters_are_an_error_that_names_them(tmp_path):
    directory = tmp_path / "run"
    started, refused, continued, other = forked(
        [
            one_process(directory, stop=2),
            one_process(directory, "--epochs", 3, "--lr", 0.2, "--clip-norm", 1, "--log-every", 5),
            one_process(directory, *OTHERS.split(), stop=1),
            one_process(directory, recipe="amp_cifar"),
        ],
        tmp_path,
    )
    assert started[0] == continued[0] == [143], continued
    line = the_error(refused)
    assert "step-00000003.pt has clip_norm 9.0, not 1.0; epochs 2, not 3; lr 0.1, not 0.2" in line
    assert "log_every" not in line and "choose another --output-dir" in line
    assert begin_of(continued[1]) == 3
    assert "recipe ddp_cifar, not amp_cifar" in the_error(other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_ranks_get_the_checkpoint_or_none_resumes(recipe, tmp_path):
    """The main process reads it once; of a sharded one each process reads its part. An error names
    the rank. A flag that was added to the recipe later does not hinder resuming."""
    second = "1" if recipe == "sharded_cifar" else "0"
    readers = {"OSError": "0", "MemoryError": second}  # by which error they fail
    script = copy(recipe, tmp_path / "mine.py", *SHORT, project=project("checkpoints"))
    flags = [*CNN, "--batch-size", 16, "--max-steps", 2, "--output-dir", "run0"]
    again = {"processes": 2, "script": script, "directory": tmp_path, "flags": flags}
    later = {**again, "env": {"LATER": "1"}}
    ends = {"grace": 0.5, "terminate": True}
    fails = [{**again, **ends, "env": {"FAILS": x, "ERROR": e}} for e, x in readers.items()]
    own_disks = {**again, **ends, "flags": [*flags[:-1], "run"], "env": {"OWN_DISKS": "1"}}
    saved, *failed, resumed, refused = forked([again, *fails, later, own_disks], tmp_path)
    assert saved[0] == resumed[0] == [0, 0], resumed
    read = re.findall(r"rank (.) reads run0/step-00000002", resumed[1])
    assert sorted(read) == sorted({*readers.values()}), resumed[1]
    for rank, (codes, output) in zip(readers.values(), failed, strict=True):
        assert 0 not in codes and "resuming" not in output, output
        # On a slow machine that of the other rank follows, before it is ended.
        line, *later = re.findall("^mine: error: (.*)$", output, re.MULTILINE)
        assert later == [] or (len(later) == 1 and later[0].startswith("rank 1: ")), output
        assert "step-00000002" in line and "Stale file handle" in line, line
        assert second == "0" or f"on rank {rank} on" in line, line
    said = the_error(refused)
    seen = r"--output-dir: \['[0-9a-f]{16}', 'step-00000002(\.pt)?'\] on rank 0"
    assert re.search(seen, said), said
    assert "but [] on rank 1 on" in said, said
    assert said.endswith(" (1 in all): all machines have to share data and directory"), said


def test_a_checkpoint_is_mapped_and_not_copied_into_memory(tmp_path):
    """Eight ranks that read 12 GB each would need a hundred."""

    def in_memory():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])

    path = tmp_path / "step-00000001.pt"
    torch.save({"weights": torch.ones(2**24)}, path)
    read_file = load("recipes/ddp_cifar.py").read_file
    before = in_memory()
    checkpoint = read_file(path)
    assert in_memory() - before < 16 * 1024, "of 65,536 kB"
    assert checkpoint["weights"].sum() == 2**24
