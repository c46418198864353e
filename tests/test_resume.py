"""A run that was stopped and resumed is the run that was not, bit for bit."""

import pytest
from conftest import (
    CNN,
    SHORT,
    STEPS,
    assert_identical,
    assert_same_training,
    begin_of,
    content,
    copy,
    described_copy,
    project,
    untimed,
)
from processes import forked, outputs


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "microbatches"), [(1, 2), (2, 1)])
def test_stopped_and_resumed_a_run_ends_bit_for_bit_like_an_uninterrupted_one(
    processes, microbatches, tmp_path
):
    """Stopped in mid-epoch, continued by the same command, stopped at the epoch's end, and
    continued."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    common = {"recipe": "ddp_cifar", "processes": processes, "grace": 30}
    flags = ["--batch-size", 64 // processes // microbatches, "--global-batch-size", 64]
    flags += ["--log-every", 1, "--hang-timeout", 30]
    every = ["--checkpoint-every", 1, "--keep", STEPS]
    runs = [{**common, "directory": whole, "flags": [*flags, *every]}]
    for begin, stop, name in ((0, 4, "SIGTERM"), (4, 10, "SIGINT"), (10, None, None)):
        # The ranks stop one step after a signal: they vote while a step is computed.
        disturbances = {str(processes - 1): [stop - begin - 1, name]} if stop else {}
        one = {**common, "directory": broken, "flags": [*flags, "--keep", 3]}
        runs.append({**one, "disturbances": disturbances})
    answers = forked(runs, tmp_path)
    expected = ((0, 0, None), (143, 0, 4), (130, 4, 10), (0, 10, None))
    for (codes, output), (code, begin, stop) in zip(answers, expected, strict=True):
        assert codes == [code] * processes, output
        assert begin_of(output) == begin, output
        assert output.count(f"stopped after step {stop}, which is saved") == bool(stop), output
    steps = [int(path.stem[5:]) for path in sorted(broken.glob("*.pt"))]
    assert steps == [4, 10, 20]
    for step in steps:
        name = f"step-{step:08}.pt"
        assert_identical(content(whole / name), content(broken / name))
    metrics = untimed((broken / "metrics.jsonl").read_text())
    assert metrics == untimed((whole / "metrics.jsonl").read_text())
    # The evaluation after step 10 was not reached before the second stop.
    assert [line["step"] for line in metrics] == [*range(1, 11), 10, *range(11, 21), 20]
    for rank in range(processes):
        batches = (whole / f"batches.{rank}").read_text()
        assert batches.count("\n") == STEPS * microbatches
        assert batches == (broken / f"batches.{rank}").read_text()
    assert not (broken / "unfinished.pt.tmp").exists()


CHUNKS = {"pipeline_cifar": ["--chunks", 2]}  # more would take more time
UNFUSED = (
    "    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)\n",
    "    trained = [p for p in model.parameters() if p.requires_grad]\n"
    "    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(peak / 100))\n",
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp_cifar", "pipeline_cifar", "sharded_cifar"])
def test_what_is_no_tensor_of_a_state_dict_resumes_and_no_state_keeps_the_file(recipe, tmp_path):
    """AdamW that is not fused would keep its number of steps in the mapped checkpoint, and so the
    disk space of a file that a later save deletes. FSDP takes no integer parameters."""
    is_sharded = recipe == "sharded_cifar"
    more = ["--replicas", 2] if is_sharded else CHUNKS.get(recipe, [])
    model = "growing_model" if is_sharded else "quantised_model"
    text = project("resume", build_model=model)
    script = copy(recipe, tmp_path / "mine.py", *SHORT, UNFUSED, project=text)
    flags = [*CNN, "--batch-size", 16, "--checkpoint-every", 2, "--max-steps", 6, "--keep", 1]
    flags += more
    common = {"processes": 2, "script": script, "directory": tmp_path}
    whole, broken = ([*flags, "--log-every", 1, "--output-dir", x] for x in ("whole", "broken"))
    once, ended, resumed = forked(
        [
            {**common, "flags": whole},
            {**common, "flags": broken, "env": {"ENDS": "4"}},
            {**common, "flags": broken},
        ],
        tmp_path,
    )
    assert [set(x[0]) for x in (once, ended, resumed)] == [{0}, {7}, {0}], (once, ended, resumed)
    assert begin_of(resumed[1]) == 2
    if is_sharded:  # the checkpoint has all of a model
        built = [output.count("builds a model on cpu") for _, output in (once, resumed)]
        assert built == [1, 0]
    assert resumed[1].count("mapped files: False") == 8 and "mapped files: True" not in resumed[1]
    assert_same_training(outputs(tmp_path / "broken"), outputs(tmp_path / "whole"), 0)
    files = [path for path in (tmp_path / "broken").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1, "all by the umask"


def test_each_script_that_has_trained_is_kept(tmp_path):
    one = described_copy(tmp_path / "run", "ddp_cifar", flags=["--batch-size", 32])
    forked([one], tmp_path)
    script = one["script"]
    earlier = script.read_text()
    script.write_text(earlier.replace("nn.ReLU()", "nn.GELU()"))
    forked([one, one], tmp_path)
    kept = {path.name: path.read_text() for path in (one["directory"] / "run").glob("*.py")}
    now = script.read_text()
    assert kept == {"mine.from-00000000.py": earlier, "mine.from-00000002.py": now}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "processes"), [("ddp_cifar", 1), ("pipeline_cifar", 2), ("sharded_cifar", 2)]
)
def test_an_evaluation_in_mid_epoch_changes_nothing_and_one_that_was_ended_is_repeated(
    recipe, processes, tmp_path
):
    """Every third of eight steps, four in an epoch. Each follows a checkpoint."""
    text = project("resume", train_step="plain_step", evaluate="evaluate_or_end")
    script = copy(recipe, tmp_path / "mine.py", *SHORT, project=text)
    flags = [*CNN, "--global-batch-size", 64, "--batch-size", 32, "--epochs", 2]
    flags += CHUNKS.get(recipe, [])
    common = {"processes": processes, "script": script, "directory": tmp_path}
    often = [*flags, "--evaluate-every", 3, "--checkpoint-every", 7, "--keep", 9]
    often += ["--log-every", 1, "--output-dir"]
    runs = [
        {**common, "flags": [*flags, "--log-every", 1, "--output-dir", "without"]},
        {**common, "flags": [*often, "with"], "env": {"ENDS": "3"}},
        {**common, "flags": [*often, "with"]},
    ]
    answers = forked(runs, tmp_path)
    assert [set(codes) for codes, _ in answers] == [{0}, {7}, {0}], answers
    assert begin_of(answers[2][1]) == 3, "the step was saved before its evaluation"
    without, often = (outputs(tmp_path / name) for name in ("without", "with"))
    assert [line["step"] for line in often.evaluations] == [3, 6, 8]
    names = sorted(path.name[:13] for path in often.directory.glob("step-*"))
    assert names == [f"step-{step:08}" for step in (3, 6, 7, 8)]
    del often.evaluations[:2], without.evaluations[0]  # without: in steps 4 and 8
    assert_same_training(often, without, 0)
