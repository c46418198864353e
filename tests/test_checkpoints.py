"""Whatever happens to a checkpoint, the last good one stays, and the run continues from it: to the
same end, bit for bit, as a run that was not stopped."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    described_copy,
    load,
    project,
    untimed,
)
from processes import forked, outputs

ERROR = re.compile(r"^\w+: error: (.*)", re.MULTILINE)


def disturb(rank, step, what):
    return {"DISTURB": json.dumps({rank: [step, what]})}


def the_error(answer):
    """The one line by which a run ended, without a traceback."""
    codes, output = answer
    assert codes[0] == 2 and "Traceback" not in output, output
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
    "sharded_cifar": r"fsync shard-\S+ fsync run\.pt fsync (\S+) rename \1 fsync killed OLD",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_any_moment_of_a_save_the_run_continues_to_the_same_end(recipe, tmp_path):
    """One run, killed over and over while it saves, and the same command each time."""
    run = {"flags": ["--batch-size", 16, "--checkpoint-every", 1, "--max-steps", 8]}
    run |= {"project": DISTURBED, "processes": 2, "terminate": False}
    one = described_copy(tmp_path / "mine", recipe, **run)
    again = {**one, "flags": ["killed" if x == "run" else x for x in one["flags"]]}
    kills = [disturb(*kill) for *kill, _ in KILLS[recipe]]
    whole, *answers = forked([one, *({**again, "env": env} for env in (*kills, {}))], tmp_path)
    assert whole[0] == answers[-1][0] == [0, 0], answers[-1]
    for (rank, *_, begin), before, after in zip(KILLS[recipe], answers, answers[1:], strict=False):
        assert before[0][rank] == -9, before
        assert begin_of(after[1]) == begin, after
        assert "damaged" not in after[1], "a checkpoint under its final name was not complete"
    whole, killed = (outputs(tmp_path / "mine" / name) for name in ("run", "killed"))
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
    cases = [("File too large", fault) for fault in FULL_DISKS[recipe]]
    cases += [("Permission denied", [0, 4, "read-only"])]
    flags = ["--batch-size", 16, "--checkpoint-every", 2, "--max-steps", 6]
    runs = []
    for index, (_, fault) in enumerate(cases):
        more = {"flags": flags, "processes": 2, "env": disturb(*fault)}
        runs.append(described_copy(tmp_path / str(index), recipe, project=DISTURBED, **more))
    answers = forked(runs, tmp_path, together=2)
    for (reason, _), run, answer in zip(cases, runs, answers, strict=True):
        pattern = r"cannot write run/step-00000004, earlier ones stay \((.*)\)"
        assert reason in re.fullmatch(pattern, the_error(answer))[1] and answer[0][1] != 0, answer
        left = {path.stem for path in (run["directory"] / "run").iterdir()}
        assert left == {"metrics", "run", "batches", "mine.from-00000000", "step-00000002"}


def test_a_damaged_newest_checkpoint_is_skipped_and_each_script_is_kept(tmp_path):
    """A byte of it is flipped; of two, --keep 1 keeps the intact one. Then the script is edited."""
    flags = ["--batch-size", 32, "--max-steps", 16, "--checkpoint-every", 8]
    one = described_copy(tmp_path / "mine", "ddp_cifar", project=DISTURBED, flags=flags)
    keeping_one = {**one, "flags": [*one["flags"], "--keep", 1]}
    directory, script = tmp_path / "mine/run", one["script"]
    newest, first = directory / "step-00000016.pt", script.read_text()
    ((codes, output),) = forked([one], tmp_path)
    assert codes == [0], output
    weights, expected = (directory / "model.safetensors").read_bytes(), content(newest)
    tensor = torch.load(newest, weights_only=True)["states"]["model"]["1.0.weight"]
    damaged = bytearray(newest.read_bytes())
    damaged[damaged.index(tensor.numpy().tobytes()) + 1000] ^= 1  # not in the padding
    newest.write_bytes(damaged)
    script.write_text(first + "# edited\n")

    ((codes, output),) = forked([{**keeping_one, "env": disturb(0, 10, "SIGTERM")}], tmp_path)
    assert codes == [143] and begin_of(output) == 8, output
    assert output.count("skipping damaged") == 1 and "step-00000016.pt (" in output
    stopped, damaged = sorted(int(path.stem[5:]) for path in directory.glob("step-*.pt"))
    assert 10 < stopped < damaged == 16, "one step after the signal, or later on a busy machine"
    ((codes, output),) = forked([keeping_one], tmp_path)
    assert codes == [0] and begin_of(output) == stopped, output
    assert [*directory.glob("step-*.pt")] == [newest]
    assert_identical(content(newest)["states"], expected["states"])
    assert (directory / "model.safetensors").read_bytes() == weights
    kept = {path.name: path.read_text() for path in directory.glob("*.py")}
    now = script.read_text()
    assert kept == {"mine.from-00000000.py": first, "mine.from-00000008.py": now}


OTHERS = "--log-every 5 --threads 1 --tracker tensorboard --hang-timeout 300 --evaluate-every 7"
OTHERS += " --checkpoint-every 9 --keep 3 --data-dir x --batch-size 16 --global-batch-size 32"


def test_a_finished_run_is_evaluated_again_and_takes_no_other_hyperparameters(tmp_path):
    """An error names them. Where all checkpoints are damaged, nothing is begun over them."""
    one = described_copy(tmp_path / "mine", "ddp_cifar", flags=["--batch-size", 32])
    directory = tmp_path / "mine/run"
    newest, summary = directory / "step-00000002.pt", directory / "summary.json"
    other = shutil.copy(one["script"], one["directory"] / "other.py")
    changed = ["--max-steps", 3, "--lr", 0.2, "--clip-norm", 1, "--log-every", 5]

    def run(*more, **different):
        (answer,) = forked([{**one, "flags": [*one["flags"], *more], **different}], tmp_path)
        return answer

    assert run()[0] == [0]
    intact, test_loss = newest.read_bytes(), json.loads(summary.read_text())["test_loss"]
    kept = {**json.loads(summary.read_text()), "test_loss": 0}
    summary.write_text(json.dumps(kept))
    codes, output = run(*OTHERS.split())
    assert codes == [0] and begin_of(output) == 2, output
    assert json.loads(summary.read_text()) == kept, "as the training left it"
    summary.unlink()
    assert run()[0] == [0] and json.loads(summary.read_text())["test_loss"] == test_loss
    line = the_error(run(*changed))
    assert "step-00000002.pt has clip_norm None, not 1.0; lr 0.1, not 0.2; max_steps 2" in line
    assert "log_every" not in line and "choose another --output-dir" in line
    assert "recipe mine, not other" in the_error(run(script=other))
    assert newest.read_bytes() == intact, "nothing was trained that had to be saved"
    newest.write_bytes(intact[:-100])
    assert "has no intact checkpoint: choose another" in the_error(run())
    assert newest.read_bytes() == intact[:-100]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_ranks_get_the_checkpoint_or_none_resumes(recipe, tmp_path):
    """The main process reads it once; of a sharded one each process reads its part. An error names
    the rank. A flag that was added to the recipe later does not hinder resuming."""
    second = "1" if recipe == "sharded_cifar" else "0"
    readers = {"OSError": "0", "MemoryError": second}  # by which error they fail
    run = {"flags": ["--batch-size", 16, "--output-dir", "run0"], "processes": 2}
    again = described_copy(tmp_path / "mine", recipe, project=project("checkpoints"), **run)
    later = {**again, "env": {"LATER": "1"}}
    fails = [{**again, "env": {"FAILS": x, "ERROR": e}} for e, x in readers.items()]
    own_disks = {**again, "flags": [*again["flags"][:-1], "run"], "env": {"OWN_DISKS": "1"}}
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
    path = tmp_path / "step-00000001.pt"
    torch.save({"weights": torch.ones(2)}, path)
    checkpoint = load("recipes/ddp_cifar.py").read_file(path)
    assert checkpoint["weights"].sum() == 2 and str(path) in Path("/proc/self/maps").read_text()


STEPS = 16  # two epochs of 256 samples at a global batch of 30


@pytest.mark.slow
def test_stopped_and_resumed_a_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path):
    """Stopped in mid-epoch, continued by the same command, stopped at the epoch's end, and
    continued. On three processes, whose sum depends on its order, in two microbatches."""
    flags = ["--batch-size", 5, "--global-batch-size", 30, "--max-steps", STEPS]
    flags += ["--hang-timeout", 30, "--clip-norm", 9]
    run = {"flags": flags, "project": DISTURBED, "processes": 3, "grace": 30}
    one = described_copy(tmp_path / "mine", "ddp_cifar", **run)
    every = ["--checkpoint-every", 1, "--keep", STEPS]
    runs = [{**one, "flags": [*one["flags"], *every]}]
    flags = [*one["flags"], "--keep", 3, "--output-dir", "broken"]
    for stop, name in ((4, "SIGTERM"), (8, "SIGINT"), (0, None)):
        # The ranks stop one step after a signal: they vote while a step is computed.
        runs.append({**one, "flags": flags, "env": disturb(1, stop - 1, name)})
    answers = forked(runs, tmp_path)
    expected = ((0, 0, None), (143, 0, 4), (130, 4, 8), (0, 8, None))
    for (codes, output), (code, begin, stop) in zip(answers, expected, strict=True):
        assert codes == [code] * 3, output
        assert begin_of(output) == begin, output
        assert output.count(f"stopped after step {stop}, which is saved") == bool(stop), output
    whole, broken = (tmp_path / "mine" / name for name in ("run", "broken"))
    steps = [int(path.stem[5:]) for path in sorted(broken.glob("*.pt"))]
    assert steps == [4, 8, STEPS]
    for step in steps:
        name = f"step-{step:08}.pt"
        assert_identical(content(whole / name), content(broken / name))
    metrics = untimed((broken / "metrics.jsonl").read_text())
    assert metrics == untimed((whole / "metrics.jsonl").read_text())
    # The evaluation after step 8 was not reached before the second stop.
    assert [line["step"] for line in metrics] == [*range(1, 9), 8, *range(9, 17), 16]
    for rank in range(3):
        batches = (whole / f"batches.{rank}").read_text()
        assert batches.count("\n") == STEPS * 2
        assert batches == (broken / f"batches.{rank}").read_text()


UNFUSED = (
    "    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)\n",
    "    trained = [p for p in model.parameters() if p.requires_grad]\n"
    "    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(peak / 100))\n",
)
OWN_FLAGS = {"pipeline_cifar": ["--chunks", 2], "sharded_cifar": ["--replicas", 2]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp_cifar", "pipeline_cifar", "sharded_cifar"])
def test_what_no_state_dict_has_resumes_and_evaluations_in_mid_epoch_change_nothing(
    recipe, tmp_path
):
    """In the first one all ranks end: its step is saved, and it is repeated. AdamW that is not
    fused would keep its number of steps in the mapped checkpoint, and so the disk space of a file
    that a later save deletes. FSDP takes no integer parameters."""
    is_sharded = recipe == "sharded_cifar"
    text = project("resume", build_model="growing_model" if is_sharded else "quantised_model")
    flags = ["--global-batch-size", 64, "--batch-size", 32, "--max-steps", 8]
    run = {"flags": [*flags, *OWN_FLAGS.get(recipe, [])], "project": text, "processes": 2}
    one = described_copy(tmp_path / "mine", recipe, UNFUSED, **run)
    often = ["--evaluate-every", 3, "--checkpoint-every", 7, "--keep", 9, "--output-dir", "with"]
    again = {**one, "flags": [*one["flags"], *often]}
    once, ended, resumed = forked([one, {**again, "env": {"ENDS": "3"}}, again], tmp_path)
    assert [set(x[0]) for x in (once, ended, resumed)] == [{0}, {7}, {0}], (once, ended, resumed)
    assert begin_of(resumed[1]) == 3, "the step was saved before its evaluation"
    if is_sharded:  # the checkpoint has all of a model
        built = [output.count("builds a model on cpu") for _, output in (once, resumed)]
        assert built == [1, 0]
    assert resumed[1].count("mapped files: False") == 10 and "mapped files: True" not in resumed[1]
    without, often = (outputs(tmp_path / "mine" / name) for name in ("run", "with"))
    assert [line["step"] for line in often.evaluations] == [3, 6, 8]
    names = sorted(path.name[:13] for path in often.directory.glob("step-*"))
    assert names == [f"step-{step:08}" for step in (3, 6, 7, 8)]
    del often.evaluations[:2], without.evaluations[0]  # without: in steps 4 and 8
    assert_same_training(often, without, 0)
    files = [path for path in often.directory.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1, "all by the umask"
