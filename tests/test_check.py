"""check.py: copies that train the same in every way pass, mistakes are found with their step."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import check
import pytest
import running
import torch
from conftest import CNN, SHORT, copy, project
from processes import ROOT, execute, launch, run

STEPS = 5
FLAGS = [*CNN, "--batch-size", "8"]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """A function that checks a copy. It returns the exit status, the output and {name: run}.
    Its functions are those of programs/overrides/checked.py, or `chosen` ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "execute", execute)

    def run(lines=(), flags=(), steps=("--max-steps", str(STEPS)), **chosen):
        text = project("checked", **chosen)
        copy("sharded_cifar", tmp_path / "sharded.py", *SHORT, project=text)
        copy("ddp_cifar", tmp_path / "my copy.py", *SHORT, *lines, project=text)
        monkeypatch.setattr(sys, "argv", ["check.py", "my copy.py", *FLAGS, *steps, *flags])
        drawn = []
        monkeypatch.setattr(check, "draw", lambda *_: drawn.append(True))
        with pytest.raises(SystemExit) as end:
            check.main()
        results = json.loads(Path("runs/check/my copy.json").read_text())
        stay = Path("runs/check/my copy").exists()
        assert stay == (end.value.code > 0), "runs that fail or differ stay"
        named = {x["name"]: x for x in results["runs"]}
        assert len(named) == len(results["runs"])
        assert any(drawn) == any(x["differences"] for x in results["runs"])
        output = capsys.readouterr().out
        assert_the_table_has_a_row_for_each(results["runs"][1:], output)
        return end.value.code, output, named

    return run


def assert_the_table_has_a_row_for_each(runs, output):
    for way in (way for way in runs if way["name"] != "perturbed"):
        bounds = [x["bound"] for x in way["differences"]]
        judged = f"{sum(x < check.NO_BOUND for x in bounds)} of {len(bounds)}"
        row = rf"^ *{way['name']} +{way['against']} +{judged} +(\S+ of .*)?{way['verdict']} *$"
        assert re.search(row, output, re.MULTILINE), output


@pytest.mark.slow
def test_a_good_copy_is_the_same_in_every_way(checked):
    """Its random loss depends on the microbatches, which is reported. The statistics of BatchNorm,
    and evaluations, which use them, are compared for the same number of processes only."""
    flags = "--processes 1 2 4 --also sharded.py --kills 2 --hang-timeout 500".split()
    code, output, runs = checked(flags=flags, build_model="model_with_statistics")
    assert code == 0 and not re.search("Known causes|WORLD_SIZE|lower rate", output), output
    reference, perturbed, *more, half, killed = runs.values()
    assert [x["processes"] for x in runs.values()] == [1, 1, 2, 4, 2, 1, 2]
    assert {x["against"] for x in (perturbed, *more, half)} == {reference["name"]}
    assert half["verdict"] == "reported" and f"{half['name']}: {half['remark']}\n" in output
    assert perturbed["flags"][:2] == ["--hang-timeout", check.LEAST_PATIENCE], "the last one counts"
    assert {x["verdict"] for x in more} <= {"the same", "bit for bit"}
    assert [x["copy"] for x in more] == ["my copy.py", "my copy.py", "sharded.py"]
    assert killed["verdict"] == "bit for bit" and killed["against"] == more[0]["name"]
    assert killed["tasks"] == ["step-00000001", "step-00000002", "train"]
    for way in (perturbed, *more, killed):
        found = {(x["metric"], x["step"]): x["difference"] for x in way["differences"]}
        assert all(isinstance(x, float) for one in way["differences"] for x in one["values"])
        names = ("loss", "accuracy", "noise", "grad_norm", "learning_rate")
        assert found.keys() >= {(name, step) for name in names for step in range(1, STEPS + 1)}
        assert ("1.0.weight", STEPS) in found
        of_rank_0 = {(x, STEPS) for x in ("test_loss", "test_noise", "0.3.running_mean")}
        assert found.keys() & of_rank_0 == (of_rank_0 if way in (perturbed, killed) else set())
        assert way != perturbed or found["1.0.weight", STEPS] > 1e-6
        assert way == perturbed or f"{way['name']}: {way['verdict']}\n" in output
    of_loss = [x for way in (perturbed, *more) for x in way["differences"] if x["metric"] == "loss"]
    assert len({x["values"][0] for x in of_loss}) == STEPS, "those of the reference are the first"


@pytest.mark.slow
def test_where_rounding_decides_a_lower_rate_tells_more(checked):
    flags = "--lr 8 --global-batch-size 32 --processes 1 --also".split()
    code, output, runs = checked(build_model="chaotic_model", flags=[*flags, "my copy.py"])
    assert code == 0 and runs["my copy on 2"]["verdict"] == "the same", output
    assert re.search(r"^perturbed: judges [1-4] of 5 steps$", output, re.MULTILINE), output
    assert "perturbed: judges 5 of 5 steps" in output
    assert "a lower rate amplifies less: --lr 0.8\n" in output
    assert runs["1 process"]["flags"][-2:] in (["--lr", 0.8], ["--lr", 0.008])


@pytest.mark.slow
def test_what_no_rate_tells_has_a_status_of_its_own(checked):
    """The killed run is compared bit for bit nevertheless."""
    chosen = {"build_model": "chaotic_model", "make_optimizer": "optimizer_with_a_fixed_rate"}
    code, output, runs = checked(flags=["--batch-size", "7"], **chosen)
    assert code == 3 and "microbatches of 3" not in runs, output
    two, killed = runs["2 processes"], runs["2 processes, killed"]
    assert re.fullmatch("the same up to step [1-4]", two["verdict"]), output
    assert f"2 processes: {two['verdict']}; later, rounding decides {two['undecided']}" in output
    assert two["undecided"] in check.DECISIVE and killed["verdict"] == "bit for bit"
    judged = [x["step"] for x in two["differences"] if x["bound"] < check.NO_BOUND]
    assert two["verdict"].endswith(f" {max(judged)}")


CALL = "logits = model(images)"
RANK_1_FAILS = f'assert model.training or os.environ["RANK"] == "0", "[own]"\n    {CALL}'
BY_STEP = {"compute_loss": "loss_by_step", "make_optimizer": "optimizer_that_counts"}
PLAIN = {"build_model": "plain_model", "compute_loss": "plain_loss"}
WRONG = {  # verdicts of the runs, what is said, how the copy differs from a good one
    "noise by rank": (
        ",,differs at step 1,reported,bit for bit",
        r": loss \d\S+ and \d\S+, by \S+\n(.*\n)+.*the loss depend on RANK or WORLD_SIZE",
        {"compute_loss": "lambda *x: loss_of_noise(RANK, *x)"},
    ),
    "noise by the clock": (
        ",differs at step 1",
        "perturbed: differs at step 1: loss .*, in two equal runs",
        {"compute_loss": "loss_by_the_clock"},
    ),
    "a state that is not saved": (
        ",,the same,reported,differs at step 3",
        "a state that is in no checkpoint, such as an attribute",
        BY_STEP,
    ),
    "random numbers in a cache": (
        ",,differs at step 1[78],.*",
        r"up to the second epoch: --max-steps 20\n",
        {"load_data": "data_cached_in_memory", "flags": ["--global-batch-size", "16"], "steps": []},
    ),
    "a wrong flag": (
        "fails in step 1",
        "unrecognized arguments: --none",
        {"flags": ["--none"]},
    ),
    "a crash": (
        "fails in step 1",
        "NameError: name 'image'",
        {"lines": [(CALL, "logits = model(image)")]},
    ),
    "a crash of a rank": (
        f",,fails after step {STEPS},reported",
        r"AssertionError: \[own\], ",
        {"lines": [(CALL, RANK_1_FAILS)]},
    ),
    "a checkpoint that is not found": (
        ",,the same,the same,fails",
        "it resumed from step 0, not 2",
        {"lines": [("checkpoint = self.checkpoints.find()", "checkpoint = None")], **PLAIN},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_in_its_first_step_and_said(what, checked):
    """The runs that cannot be compared without one that failed are left out."""
    verdicts, said, chosen = WRONG[what]
    code, output, runs = checked(**chosen)
    assert code == 1 and re.search(said, output), output
    assert re.fullmatch(verdicts, ",".join(x["verdict"] for x in runs.values())), output
    for name, one in runs.items():
        assert not one["reason"] or f"{name}: {one['verdict']}: {one['reason']}\n" in output
    for error, log in re.findall(r"(\w+Error: .*) \((\S.*\.txt)\)$", output, re.MULTILINE):
        assert error in Path(log).read_text()
    assert ("Known causes" in output) == (len(runs) > 1)
    assert ("in no checkpoint" in output) == (what == "a state that is not saved")
    assert ("RANK or WORLD_SIZE" in output) == (what == "noise by rank")


@pytest.mark.slow
def test_a_slow_first_step_is_no_failure_and_what_is_slower_says_how_to_go_on(checked, monkeypatch):
    """The time after which a run hangs follows the longest step of the reference."""
    monkeypatch.setattr(check, "LEAST_PATIENCE", 1)
    monkeypatch.setattr(check, "SLOWER", 0)
    slow = ["--processes", "1"]
    code, output, runs = checked(flags=slow, compute_loss="loss_with_a_slow_first_step")
    assert code == 1 and "no step for 1 s" in output, output
    assert "if it is slow and does not hang, add --hang-timeout SECONDS (" in output
    monkeypatch.setattr(check, "SLOWER", 3)  # its runs are in the place of those that stay
    code, output, runs = checked(flags=slow, compute_loss="loss_with_a_slow_first_step")
    assert [*runs] == ["1 process", "1 process, killed"], "one number of processes, as it was said"
    flags = runs["1 process, killed"]["flags"]
    assert code == 0 and flags[flags.index("--hang-timeout") + 1] >= 6, output


def test_a_learning_rate_may_differ_by_its_rounding_and_nothing_may_be_missing():
    missing = [(0.1, None), (None, 0.1), (torch.ones(2), torch.ones(3))]
    assert {check.difference(*values) for values in missing} == {check.NO_BOUND}
    assert check.difference(None, None) == 0
    rate, loss = ((1, "train", name) for name in ("learning_rate", "loss"))
    for ours, bound, verdict in (
        ({rate: 0.1 * (1 + 1e-15)}, 0.0, "the same"),
        ({rate: 0.1 * (1 + 1.5e-12)}, 0.0, "differs at step 1"),
        ({}, 0.0, "differs at step 1"),
        ({loss: 0.2}, check.NO_BOUND, "not judged"),
    ):
        run = {"differences": [], "reason": ""}
        theirs = dict.fromkeys(ours or [rate], 0.1)
        check.compare(run, ours, theirs, dict.fromkeys(theirs, bound), ())
        assert run["verdict"] == verdict
        assert ours or run["reason"].startswith("learning_rate 0.1 and nan, by ")


def test_a_bound_is_ten_times_the_perturbed_runs_difference_up_to_the_next_step():
    """Two opposite jumps of an accuracy may leave the rounding of a quotient."""
    found = [(1, "loss", 0), (1, "accuracy", 0), (1, "near 0", 0.5)]
    found += [(2, "loss", 1e-5), (2, "accuracy", 8e-11), (2, "near 0", 0.3)]
    found += [(3, "loss", 5e-6), (3, "accuracy", 1e-10), (3, "near 0", 0.1)]
    found += [(4, "loss", 5e-4), (4, "accuracy", 3e-4), (4, "near 0", 0.1)]
    found += [(step, "learning_rate", 0) for step in (1, 2)]
    found += [(5, "loss", 2e-3), (5, "accuracy", 3e-4), (5, "near 0", 0.1)]
    keys = ("event", "step", "metric", "difference")
    differences = [dict(zip(keys, ("train", *x), strict=True)) for x in found]
    differences.append(dict(zip(keys, ("weights", 1, "bias", 0), strict=True)))
    bounds, last = check.bounds_of(differences)
    assert bounds[1, "weights", "bias"] == check.CHANGE, "which has not moved, and makes no jumps"
    expected = [(1, "loss", 1e-4), (2, "loss", 1e-4), (3, "loss", 5e-3)]
    expected += [(1, "accuracy", 0.01), (2, "accuracy", 0.01), (3, "accuracy", 3e-3)]
    expected += [(1, "learning_rate", check.CHANGE)]
    expected += [(step, "near 0", check.NO_BOUND) for step in range(1, 6)]
    expected += [(4, name, check.NO_BOUND) for name in ("loss", "accuracy")]
    for step, name, bound in expected:
        assert bounds[step, "train", name] == pytest.approx(bound), (step, name)
    assert last == 3, "in step 4, ten times the loss's next difference is 2%"
    assert bounds[1, "train", "of the copy only"] == check.LIMIT
    keys = "metric", "difference", "bound", "step"
    near = [("a", 2e-6, 0.0, 1), ("b", 1e-3, 0.01, 1), ("c", 9e-6, 1e-5, 1)]
    near = {"differences": [dict(zip(keys, x, strict=True)) for x in near]}
    assert check.judged_of(near)[1] == "9e-06 of 1e-05, c, step 1"
    assert check.bounds_of(differences, 4e-3)[0][2, "train", "loss"] == 4e-3, "in 16 bits"


REFERENCE = ROOT / "recipes/ddp_cifar.py"
NONSENSE = {
    "there is no file": ["no.py"],
    "it is not a copy of ": [ROOT / "recipes/data_parallel_cifar.py"],
    r"names on both sides of the line '# =====': means .line \d+., start .*, Run ": ["clashing.py"],
    "argument --max-steps: invalid int value": [REFERENCE, "--max-steps", "x"],
    "choose a multiple of 16": [REFERENCE, "--global-batch-size", "24", "--cpu"],
}


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_is_an_error(said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    imports = "import torch.nn as nn, math as means, start\nfrom os import path as Run"
    clashing = "\ndef main", f"\n{imports}\n\n\ndef main"
    copy("ddp_cifar", Path("clashing.py"), clashing)
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, NONSENSE[said])])
    with pytest.raises(SystemExit) as end:
        check.main()
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and re.search(said, line)


@pytest.mark.parametrize("word", ["copy=mine.py", "recipes/ddp_cifar.py"])
def test_words_that_make_would_ignore_are_errors(word):
    """Also where a file has that name: then it is a target that is up to date."""
    process = run(["make", "--silent", "check", word], check=False)
    assert process.returncode == 2 and "COPY" in process.stderr and process.stdout == ""


def test_why_a_run_failed_is_one_line_that_of_the_launcher_if_there_is_no_other():
    launchers = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    launchers += "  traceback : Signal 9 (SIGKILL) received by PID 7\n"
    for said, line in (
        ("OSError: no\nmy own: error: no data: get some\n", "my own: error: no data: get some"),
        ("Traceback (most recent call last):\n  in f\nOSError: no\n", "OSError: no"),
        ("step 1/2\n", "Signal 9 (SIGKILL) received by PID 7"),
    ):
        text = f"W1125 a warning: error: none\n{said}{launchers}"
        assert check.error_of("dir/my own.py", text) == line


@pytest.mark.parametrize(
    ("recipe", "gpus", "flags", "processes", "batch", "total"),
    [
        ("ddp", 3, [], [1, 2, 3], 8, 96),
        ("ddp", 8, ["--cpu"], [1, 2], 8, 32),
        ("pipeline", 5, [], [2, 4], 16, 64),
        ("pipeline", 1, [], [2], 16, 32),  # its own error names the remedy
        ("ddp", 0, ["--processes", "1", "4", "--batch-size", "2"], [1, 4], 2, 16),
        ("ddp", 0, ["--global-batch-size", "48"], [1, 2], 8, 48),
    ],
)
def test_processes_and_batches(recipe, gpus, flags, processes, batch, total, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("HOME", str(ROOT))
    flags = [f"~/recipes/{recipe}_cifar.py", "--kill", "1", *flags]
    monkeypatch.setattr(sys, "argv", ["check.py", *flags])
    args = check.parse_args()
    assert args.processes == processes and "--kill" in args.flags, "which is the copy's own"
    assert args.flags[-4:] == ["--batch-size", batch, "--global-batch-size", total]


def test_a_signal_ends_the_check_by_an_exception_so_that_its_runs_end(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "execute", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["check.py", str(REFERENCE)])
    with pytest.raises(SystemExit, match="130"):
        check.main()


@pytest.mark.slow
def test_the_command_with_its_launcher(tmp_path):
    """A copy may import what is beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/beside.py").touch()
    text = f"import beside\n{project('checked')}"
    copy("ddp_cifar", tmp_path / "mine/train.py", *SHORT, project=text)
    command = [sys.executable, ROOT / "tools/check.py", "mine/train.py", *FLAGS, "--max-steps", 5]
    process = launch([*command, "--processes", 1], cwd=tmp_path)
    row = r"1 process, killed +1 process +(\d+) of \1 +0 of 0, loss, step 1 +bit for bit"
    assert re.search(row, process.stdout), process.stdout
    results = json.loads((tmp_path / "runs/check/train.json").read_text())
    assert results["runs"][-1]["tasks"] == ["step-00000002", "train"]
    assert results["command"][0] == "mine/train.py"
    picture = (tmp_path / "runs/check/train.svg").exists()
    assert picture != ("no picture without matplotlib" in process.stderr)


@pytest.mark.parametrize(("steps", "kills", "killed"), [(13, 1, [7]), (16, 2, [5, 10])])
def test_a_kill_is_in_mid_epoch(steps, kills, killed, tmp_path):
    """In epochs of 4, the middle of 13 steps would be 8, the second kill in 16 steps 12."""
    args = SimpleNamespace(kills=kills, flags=[], gpus=0)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/summary.json").write_text(f'{{"steps": {steps}, "steps_per_epoch": 4}}')
    one, found = check.Check(args, tmp_path, None), {}
    one.add = lambda *_, **given: found.update(given)
    one.add_killed({"name": "whole", "processes": 2})
    assert found["tasks"] == [*(f"step-{step:08}" for step in killed), "train"]


def test_the_perturbed_run_changes_the_weights_once_and_more_than_they_are_rounded(monkeypatch):
    hooks = []
    monkeypatch.setattr(check, "register_optimizer_step_pre_hook", hooks.append)
    monkeypatch.setattr(running, "run_script", lambda *_: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    check.run_copy("change", "mine.py")
    for dtype, size in ((torch.float32, 1e-5), (torch.bfloat16, torch.finfo(torch.bfloat16).eps)):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
        optimizer = torch.optim.SGD([weight])
        hooks[0](optimizer)
        changed = weight.clone()
        assert (changed - 1).double().std().item() == pytest.approx(size, rel=0.2)
        hooks[0](optimizer)
        assert weight.equal(changed)


def test_a_kill_waits_for_a_save_in_the_background_or_the_run_might_end_first(
    monkeypatch, tmp_path
):
    hooks, killed = [], []
    monkeypatch.setattr(check, "register_optimizer_step_post_hook", hooks.append)
    monkeypatch.setattr(running, "run_script", lambda *_: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    monkeypatch.setattr(os, "kill", lambda _, number: killed.append(number))
    check.run_copy("step-00000002", "mine.py", str(tmp_path))
    hooks[0]()
    assert killed == []
    (unfinished := tmp_path / "unfinished.pt.tmp").touch()
    threading.Timer(0.2, unfinished.rename, [tmp_path / "step-00000002.pt"]).start()
    hooks[0]()
    assert killed == [signal.SIGKILL]
