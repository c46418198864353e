"""A checkpoint that a thread writes is the one that a save in the foreground writes."""

import json
import re

import pytest
from composed import make
from conftest import (
    CNN,
    FEW_IMAGES,
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    copy,
    project,
)
from processes import forked, outputs
from safetensors.torch import load_file

DISTURBED = project("disturbed")
END = '\n\nif __name__ == "__main__":'
RECIPES = ["ddp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sharded", "pipeline"))]
WRITER = {"ddp": 0, "sharded": 1, "pipeline": 0}  # a rank that writes
FLAGS = [*CNN, "--batch-size", 16, "--max-steps", 8, "--checkpoint-every", 1, "--log-every", 1]


def train(recipe, directory, *cases):
    """[exit codes, output] of trainings, (directory, environment, more flags): whole/ is that of a
    recipe, the others are those of a copy with the addition."""
    own = project("background").replace("from lib.memory import available_memory\n", "")
    replaced = [(END, DISTURBED + own + END)]
    script = make(directory / "mine.py", recipe, "background_saves", replaced=replaced)
    plain = copy(f"{recipe}_cifar", directory / "plain.py", FEW_IMAGES, project=DISTURBED)
    flags = [*FLAGS, *(["--chunks", 2] if recipe == "pipeline" else []), "--output-dir"]
    common = {"processes": 2, "directory": directory, "grace": 1, "terminate": True}
    common["patience"] = 100  # a process whose thread has failed would be awaited for hours
    runs = []
    for name, env, *more in cases:
        run = {"script": plain if name == "whole" else script, "env": env}
        runs.append({**common, **run, "flags": [*flags, name, *more]})
    return forked(runs, directory)


def assert_same_checkpoint(ours, theirs):
    """Of a folder all files are compared: run.pt has what is no shard."""
    shards = [{x.name: load_file(x) for x in y.glob("*.safetensors")} for y in (ours, theirs)]
    assert_identical(*shards)
    file = "run.pt" if shards[1] else ""
    ours, theirs = content(ours / file), content(theirs / file)
    for key in ("states", "step", "metrics"):
        assert_identical(ours[key], theirs[key])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thread_writes_the_same_checkpoints_while_the_training_goes_on(recipe, tmp_path):
    """SIGTERM comes in a write. The same command goes on, on a disk that is slower than the hang
    timeout: that is no hang, and its rank is named. A rank without memory saves in the
    foreground."""
    writer = WRITER[recipe]
    whole, first, second, foreground = train(
        recipe,
        tmp_path,
        ("whole", {}, "--keep", 9),
        ("run", {"DISTURB": '{"1": [3, "SIGTERM"]}'}, "--keep", 9),
        ("run", {"SLOW": json.dumps([writer, 7, 16])}, "--keep", 9, "--hang-timeout", 6),
        ("foreground", {"NO_MEMORY": str(writer)}, "--keep", 1),
    )
    assert whole[0] == foreground[0] == second[0] == [0, 0], (foreground, second)
    assert first[0] == [143, 143], first
    end = begin_of(second[1])
    assert f"stopped after step {end}, which is saved" in first[1] and 3 < end < 8
    written = [(int(x), int(y)) for x, y in re.findall(r"writes (\d) in (\d)", first[1])]
    assert {x for x, _ in written} == {*range(1, end + 1)}
    assert all(y == x + (x < end) for x, y in written), written
    named = set(re.findall(r"(rank \d) on \S+ has waited 6 s for the disk", second[1]))
    assert named == {f"rank {writer}"}, second[1]
    assert foreground[1].count("no memory for a copy of the states") == 1
    written = re.findall(r"writes (\d) in (\d)", foreground[1])
    assert all(x == y for x, y in written) and len({*written}) == 8
    for name, left in (("run", 8), ("foreground", 1)):
        ours, theirs = (tmp_path / x for x in (name, "whole"))
        assert_same_training(outputs(ours), outputs(theirs), 0)
        paths = sorted(ours.glob("step-*"))
        assert len(paths) == left
        for path in paths:
            assert_same_checkpoint(path, theirs / path.name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "sharded"])
def test_a_failed_write_ends_the_run(recipe, tmp_path):
    """One rank's disk is full, as far as the rank can tell."""
    rank = WRITER[recipe]
    on_full_disk = "full", {"DISTURB": json.dumps({rank: [4, 3000]})}
    that_raises = "raised", {"RAISES": json.dumps([rank, 4])}
    full, raised = train(recipe, tmp_path, on_full_disk, that_raises)
    (line,) = re.findall("^mine: error: (.*)", full[1], re.MULTILINE)
    pattern = r"cannot write full/step-0000000([34]), earlier ones stay \(.*File too large.*\)"
    step = int(re.fullmatch(pattern, line)[1])
    assert 0 not in full[0], full
    left = {path.stem for path in (tmp_path / "full").iterdir()}
    kept = {f"step-{x:08}" for x in (step - 2, step - 1)}
    assert left == {"metrics", "run", "batches", "mine.from-00000000", *kept}
    assert 0 not in raised[0] and "RuntimeError: no such device" in raised[1], raised
    assert not (tmp_path / "raised" / "summary.json").exists()
