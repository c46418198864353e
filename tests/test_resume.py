"""A run that was stopped and resumed is the run that was not, bit for bit."""

import json

import pytest
from conftest import (
    CNN,
    FEW_IMAGES,
    SHORT,
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    copy,
    project,
    untimed,
)
from processes import forked, outputs

STEPS = 16  # two epochs of 256 samples at a global batch of 32


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "microbatches"), [(1, 2), (2, 1)])
def test_stopped_and_resumed_a_run_ends_bit_for_bit_like_an_uninterrupted_one(
    processes, microbatches, tmp_path
):
    """Stopped in mid-epoch, continued by the same command, stopped at the epoch's end, and
    continued."""
    script = copy("ddp_cifar", tmp_path / "mine.py", FEW_IMAGES, project=project("disturbed"))
    common = {"processes": processes, "script": script, "directory": tmp_path, "grace": 30}
    flags = [*CNN, "--batch-size", 32 // processes // microbatches, "--global-batch-size", 32]
    flags += ["--epochs", 2, "--log-every", 1, "--hang-timeout", 30, "--clip-norm", 9]
    every = ["--checkpoint-every", 1, "--keep", STEPS]
    runs = [{**common, "flags": [*flags, *every, "--output-dir", "whole"]}]
    flags += ["--keep", 3, "--output-dir", "broken"]
    for stop, name in ((4, "SIGTERM"), (8, "SIGINT"), (0, None)):
        # The ranks stop one step after a signal: they vote while a step is computed.
        env = {"DISTURB": json.dumps({processes - 1: [stop - 1, name]})}
        runs.append({**common, "flags": flags, "env": env})
    answers = forked(runs, tmp_path)
    expected = ((0, 0, None), (143, 0, 4), (130, 4, 8), (0, 8, None))
    for (codes, output), (code, begin, stop) in zip(answers, expected, strict=True):
        assert codes == [code] * processes, output
        assert begin_of(output) == begin, output
        assert output.count(f"stopped after step {stop}, which is saved") == bool(stop), output
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = [int(path.stem[5:]) for path in sorted(broken.glob("*.pt"))]
    assert steps == [4, 8, STEPS]
    for step in steps:
        name = f"step-{step:08}.pt"
        assert_identical(content(whole / name), content(broken / name))
    metrics = untimed((broken / "metrics.jsonl").read_text())
    assert metrics == untimed((whole / "metrics.jsonl").read_text())
    # The evaluation after step 8 was not reached before the second stop.
    assert [line["step"] for line in metrics] == [*range(1, 9), 8, *range(9, 17), 16]
    for rank in range(processes):
        batches = (whole / f"batches.{rank}").read_text()
        assert batches.count("\n") == STEPS * microbatches
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
    script = copy(recipe, tmp_path / "mine.py", *SHORT, UNFUSED, project=text)
    flags = [*CNN, "--global-batch-size", 64, "--batch-size", 32, "--epochs", 2, "--log-every", 1]
    flags += OWN_FLAGS.get(recipe, [])
    common = {"processes": 2, "script": script, "directory": tmp_path}
    often = [*flags, "--evaluate-every", 3, "--checkpoint-every", 7, "--keep", 9]
    often += ["--output-dir", "with"]
    once, ended, resumed = forked(
        [
            {**common, "flags": [*flags, "--output-dir", "without"]},
            {**common, "flags": often, "env": {"ENDS": "3"}},
            {**common, "flags": often},
        ],
        tmp_path,
    )
    assert [set(x[0]) for x in (once, ended, resumed)] == [{0}, {7}, {0}], (once, ended, resumed)
    assert begin_of(resumed[1]) == 3, "the step was saved before its evaluation"
    if is_sharded:  # the checkpoint has all of a model
        built = [output.count("builds a model on cpu") for _, output in (once, resumed)]
        assert built == [1, 0]
    assert resumed[1].count("mapped files: False") == 10 and "mapped files: True" not in resumed[1]
    without, often = (outputs(tmp_path / name) for name in ("without", "with"))
    assert [line["step"] for line in often.evaluations] == [3, 6, 8]
    names = sorted(path.name[:13] for path in often.directory.glob("step-*"))
    assert names == [f"step-{step:08}" for step in (3, 6, 7, 8)]
    del often.evaluations[:2], without.evaluations[0]  # without: in steps 4 and 8
    assert_same_training(often, without, 0)
    files = [path for path in often.directory.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1, "all by the umask"
