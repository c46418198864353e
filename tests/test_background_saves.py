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
RECIPES = ["ddp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sharded", "pipeline"))]
WRITER = {"ddp": 0, "sharded": 1, "pipeline": 0}  # a rank that writes
FLAGS = [*CNN, "--batch-size", 16, "--max-steps", 8, "--checkpoint-every", 1, "--log-every", 1]


def train(recipe, directory, *cases):
    """[exit codes, output] of a recipe's training into whole/, and of a copy's with the addition:
    (directory, environment, more flags)."""
    own = project("background").replace("from lib.memory import available_memory\n", "")
    own = DISTURBED + own
    script = make(directory / "mine.py", recipe, "background_saves")
    end = '\n\nif __name__ == "__main__":'
    script.write_text(script.read_text().replace(end, own + end))
    plain = copy(f"{recipe}_cifar", directory / "plain.py", FEW_IMAGES, project=DISTURBED)
    flags = [*FLAGS, *(["--chunks", 2] if recipe == "pipeline" else []), "--output-dir"]
    common = {"processes": 2, "directory": directory, "grace": 1, "terminate": True}
    common["patience"] = 100  # a process whose thread has failed would be awaited for hours
    runs = [{**common, "script": plain, "flags": [*flags, "whole", "--keep", 9]}]
    for name, env, *more in cases:
        runs.append({**common, "script": script, "flags": [*flags, name, *more], "env": env})
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
    timeout: that is no hang, and its rank is named."""
    stopped = {"DISTURB": '{"1": [3, "SIGTERM"]}'}
    slow = {"SLOW": json.dumps([WRITER[recipe], 7, 16])}
    whole, first, second = train(
        recipe,
        tmp_path,
        ("run", stopped, "--keep", 9),
        ("run", slow, "--keep", 9, "--hang-timeout", 6),
    )
    assert (whole[0], second[0]) == ([0, 0], [0, 0]), second
    assert first[0] == [143, 143], first
    end = begin_of(second[1])
    assert f"stopped after step {end}, which is saved" in first[1] and 3 < end < 8
    written = [(int(x), int(y)) for x, y in re.findall(r"writes (\d) in (\d)", first[1])]
    assert {x for x, _ in written} == {*range(1, end + 1)}
    assert all(y == x + (x < end) for x, y in written), written
    named = set(re.findall(r"(rank \d) on \S+ has waited 6 s for the disk", second[1]))
    assert named == {f"rank {WRITER[recipe]}"}, second[1]
    results = [outputs(tmp_path / name) for name in ("run", "whole")]
    assert_same_training(*results, 0)
    written = sorted((tmp_path / "whole").glob("step-*"))
    assert len(written) == 8
    for path in written:
        assert_same_checkpoint(tmp_path / "run" / path.name, path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "sharded"])
def test_a_failed_write_ends_the_run_and_without_memory_a_save_is_in_the_foreground(
    recipe, tmp_path
):
    """One rank's disk is full, as far as the rank can tell, and another one has no memory."""
    rank = WRITER[recipe]
    whole, full, raised, foreground = train(
        recipe,
        tmp_path,
        ("full", {"DISTURB": json.dumps({rank: [4, 3000]})}),
        ("raised", {"RAISES": json.dumps([rank, 4])}),
        ("foreground", {"NO_MEMORY": str(rank)}, "--keep", 1),
    )
    (line,) = re.findall("^mine: error: (.*)", full[1], re.MULTILINE)
    pattern = r"cannot write full/step-0000000[34], earlier ones stay \(.*File too large.*\)"
    assert re.fullmatch(pattern, line) and 0 not in full[0], full
    left = {path.stem for path in (tmp_path / "full").iterdir()}
    step = int(line.partition("step-")[2][:8])
    kept = {f"step-{x:08}" for x in (step - 2, step - 1)}
    assert left == {"metrics", "run", "batches", "mine.from-00000000", *kept}
    assert 0 not in raised[0] and "RuntimeError: no such device" in raised[1], raised
    assert not (tmp_path / "raised" / "summary.json").exists()
    assert whole[0] == foreground[0] == [0, 0], foreground
    assert foreground[1].count("no memory for a copy of the states") == 1
    written = re.findall(r"writes (\d) in (\d)", foreground[1])
    assert all(x == y for x, y in written) and len({*written}) == 8
    assert_same_training(outputs(tmp_path / "foreground"), outputs(tmp_path / "whole"), 0)
    (left,) = (tmp_path / "foreground").glob("step-*")
    assert_same_checkpoint(left, tmp_path / "whole" / left.name)
