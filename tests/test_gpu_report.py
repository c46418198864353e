"""gpu_report.py: whatever happens to a part, what the others and it itself have measured is
written."""

import inspect
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_report
import gpu_report_parts
import psutil
import pytest
import torch
from conftest import PROGRAMS, ROOT, forked, free_port, run, wait_until

PARTS = """
import json, os, subprocess, sys, time
name, folder = sys.argv[1], sys.argv[sys.argv.index("--folder") + 1]
rows = [{"x": 1234.5}, {"x": 1, "y": "z"}]
open(f"{folder}/{name}.json", "w").write(json.dumps({"notes": ["begun"], "rows": rows}))
print("said by", name, flush=True)
if name == "raises":
    raise ValueError("broken")
if name == "hangs":
    # As a launcher's ranks: in a session of its own.
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
if name == "broken":
    rows.append({"failure": "FAILED tests/test_gpu.py::test_it"})
    open(f"{folder}/{name}.json", "w").write(json.dumps({"notes": ["begun"], "rows": rows}))
    time.sleep(600)
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Run these groups of parts; return the exit status, {part: what results.json has}, and the
    report."""
    (tmp_path / "parts.py").write_text(PARTS)

    def call(*groups, minutes=9):
        titles = {name: name for group in groups for name in group}
        flags = ["--folder", str(tmp_path / "out"), "--minutes", str(minutes)]
        monkeypatch.setattr(sys, "argv", ["gpu_report.py", *flags])
        for name, value in {
            "PROGRAM": tmp_path / "parts.py",
            "GROUPS": groups,
            "TITLES": titles,
        }.items():
            monkeypatch.setattr(gpu_report, name, value)
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        with pytest.raises(SystemExit) as stopped:
            gpu_report.main()
        for number, handler in before.items():
            signal.signal(number, handler)
        results = json.loads((tmp_path / "out/results.json").read_text())["parts"]
        return stopped.value.code, results, (tmp_path / "out/report.md").read_text()

    return call


def hung(results):
    """Whether the process that the part which hangs has started is still there."""
    return psutil.pid_exists(int(results["hangs"]["log"].split()[-1]))


def test_parts_that_raise_or_hang_keep_what_they_have_and_the_others_run(report):
    code, results, text = report({"raises": 60, "hangs": 4}, {"good": 60})
    assert code == 1
    assert {name: part["status"] for name, part in results.items()} == {
        "raises": "failed: exit code 1",
        "hangs": "not finished after 4 s",
        "good": "done",
    }
    assert all(part["rows"] == [{"x": 1234.5}, {"x": 1, "y": "z"}] for part in results.values())
    assert (
        text.count("- begun\n") == 3
        and text.count("| x | y |\n| --- | --- |\n| 1,234 |  |\n| 1 | z |\n") == 3
    )
    assert "ValueError: broken" in text and "said by hangs" in text and "said by good" not in text
    wait_until(lambda: not hung(results), 5)


def test_what_no_time_is_left_for_is_dropped_and_said(report):
    code, results, text = report({"good": 60}, {"last": 60}, minutes=(gpu_report.RESERVED + 5) / 60)
    assert code == 0 and (results["good"]["status"], results["last"]["status"]) == (
        "dropped: no time was left",
        "done",
    )
    assert "dropped: no time was left" in text


def test_a_part_whose_time_is_over_fails_only_if_something_in_it_has_failed(report):
    code, results, text = report({"hangs": 4}, {"good": 60})
    assert code == 0 and results["good"]["status"] == "done"
    assert "\nnot finished after 4 s, 4 s\n" in text and "said by hangs" in text
    code, results, _ = report({"broken": 4})
    assert code == 1 and results["broken"]["status"] == "failed: not finished after 4 s"


def test_ctrl_c_ends_what_runs_and_writes_what_is_there(report, tmp_path):
    log: Path = tmp_path / "out/hangs.log"

    def interrupt():
        wait_until(lambda: log.exists() and log.read_text().count("\n") == 2, 20)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    code, results, text = report({"good": 60}, {"hangs": 60}, {"later": 60})
    assert code == 130
    status = {name: part["status"] for name, part in results.items()}
    assert status == {"good": "done", "hangs": "failed: interrupted", "later": "not run"}
    assert results["hangs"]["notes"] == ["begun"] and "not run, 0 s" in text
    wait_until(lambda: not hung(results), 5)


@pytest.mark.slow
def test_the_training_at_the_end_writes_its_curve(tmp_path):
    program = [
        sys.executable,
        ROOT / "benchmarks/gpu_report_parts.py",
        "training",
        "--folder",
        tmp_path,
    ]
    process = run([*program, "--seconds", 30, "--data-dir", tmp_path], **PROGRAMS)
    (evaluation,) = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert 0 <= evaluation["test_accuracy"] <= 1, process.stdout
    assert (tmp_path / "training.svg").read_text().endswith("</svg>\n")


MEASURED = ["4", "0", "ddp_cifar", "--log-every", "1", "--epochs", "1"]
SMALL = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--batch-size", "4"]
MEND = "\nddp_on_one_rank()\n"


def as_one_gpu(directory, *runs):
    """[exit codes, output] of timed_training.py with these (change, line to put in, flags) in the
    one rank of a process group that takes itself for one of GPUs; in directories 0, 1, ..."""
    text = (ROOT / "benchmarks/timed_training.py").read_text()
    assert text.count(MEND) == 1
    described = []
    for index, (change, lines, *flags) in enumerate(runs):
        run = {"processes": 1, "script": ROOT / "tests/programs/as_multi_gpu.py"}
        run["directory"] = directory / str(index)
        run["directory"].mkdir()
        script = run["directory"] / "timed.py"
        script.write_text(text.replace(MEND, lines))
        run["flags"] = [script, change, *MEASURED, *SMALL, *flags]
        run["env"] = {**gpu_report_parts.ONE_RANK, "MASTER_PORT": str(free_port())}
        described.append(run)
    return forked(described, directory, 2, **PROGRAMS)


def test_one_rank_on_a_gpu_is_in_ddp_and_what_does_not_happen_fails(tmp_path):
    """Accelerate wraps one rank on CPU, not on a GPU. The last runs are without what mends it, or
    ask for what is not there."""
    changes = ["nothing", "broadcast buffers", "foreach SGD", "parts"]
    good = [(change, MEND) for change in changes]
    options = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    if "batched_grad_copy" in options:
        good.append(("batched gradient copy", MEND))
    bad = [("nothing", "\n"), ("broadcast buffers", "\n"), ("broadcast bufers", MEND)]
    answers = as_one_gpu(tmp_path, *good, *bad)
    for codes, output in answers[: len(good)]:
        assert codes == [0], output
    said = [
        "what was measured has [], and not ['DDP']",
        "what was measured has [], and not ['broadcast buffers']",
        "timed_training: no change 'broadcast bufers', choose from nothing, broadcast buffers, ",
    ]
    for (codes, output), words in zip(answers[len(good) :], said, strict=True):
        assert codes == [1] and words in output
    seconds = json.loads((tmp_path / "3/timings.json").read_text())
    parts = {"data", "step", "compute_loss", "backward", "metrics", "hang", "signals", "optimizer"}
    assert parts <= seconds.keys() and len(seconds["step"]) >= 3
    assert min(seconds["step"]) > 0


def test_a_compiled_model_that_ddp_leaves_in_one_piece_fails(tmp_path):
    """With buckets of which the simple_cnn needs several, and without a compiler, which takes
    long. The third model is smaller than a bucket."""
    no_compiler = """
compile_with = torch.nn.Module.compile
torch.nn.Module.compile = lambda model, **_: compile_with(model, backend="eager")
"""
    buckets = "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1000\n"
    whole = "torch._dynamo.config.optimize_ddp = False\n"
    runs = [no_compiler + buckets, no_compiler + buckets + whole, no_compiler]
    split, one_piece, small = as_one_gpu(
        tmp_path, *(("nothing", MEND + lines, "--compile") for lines in runs)
    )
    assert split[0] == [0], split[1]
    assert small[0] == [0], small[1]
    assert one_piece[0] == [1] and "DDP split the compiled model into [] parts" in one_piece[1]


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The functions that decide what is measured, of a GPU with so much memory and time, and the
    notes that they make."""

    def call(gib, seconds=1000):
        monkeypatch.setattr(gpu_report_parts, "gpu_gib", lambda: gib)
        monkeypatch.setattr(gpu_report_parts, "seconds_left", lambda: seconds)
        return gpu_report_parts.Report(tmp_path / "plan.json")

    return call


def test_what_has_no_room_on_the_gpu_is_left_out_and_said(plan):
    shapes = [("imagenet", 128), ("cifar", 512), ("imagenet", 1024), ("cifar", 1024)]
    recipes = ["ddp_cifar", "amp_cifar --precision bf16", "plain_ddp_cifar --workers 8"]
    configurations = [(recipe, *shape) for shape in shapes for recipe in recipes]
    for gib, left_out in ((15, 5), (22, 2), (40, 0), (80, 0)):
        report = plan(gib)
        fitting = gpu_report_parts.with_memory(report, configurations)
        assert len(fitting) == len(configurations) - left_out
        assert len(report.notes) == (left_out > 0) and not report.failed
    report = plan(22)
    gpu_report_parts.with_memory(report, configurations)
    assert report.notes == [
        "left out, by estimate more than the GPU's 22 GiB: "
        "ddp_cifar, cifar stem, batch 1024 (27 GiB); "
        "plain_ddp_cifar --workers 8, cifar stem, batch 1024 (27 GiB)"
    ]


def test_what_has_no_time_is_left_out_and_no_failure(plan, monkeypatch):
    now = 0.0
    report = plan(80)
    monkeypatch.setattr(gpu_report_parts.time, "monotonic", lambda: now)
    monkeypatch.setattr(gpu_report_parts, "seconds_left", lambda: 100 - now)
    done = []
    for one in gpu_report_parts.in_time(report, ["a", "b", "c", "d", "e"]):
        done.append(one)
        now += 30  # of 100: a fourth one might not end in time
    assert done == ["a", "b", "c"]
    assert report.notes == ["left out, no time was left: d; e"] and not report.failed


SLOW = """
import json, sys, time
from pathlib import Path
time.sleep(int(sys.argv[sys.argv.index("--batch-size") + 1]) / 10)
names = "samples_per_second", "measured_samples", "measured_seconds", "peak_memory_bytes"
Path("out").mkdir()
summary = {**dict.fromkeys((*names, "warmed_up_at"), 1.0), "device": "cpu"}
Path("out/summary.json").write_text(json.dumps(summary))
"""


def test_what_is_begun_and_not_finished_in_the_time_left_is_no_failure(plan, tmp_path, monkeypatch):
    """Runs of growing duration, of which the third takes longer than what is left."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/timed_training.py").write_text(SLOW)
    report = plan(80)
    arguments = SimpleNamespace(part="images", folder=tmp_path)
    monkeypatch.setattr(gpu_report_parts, "args", arguments, raising=False)
    monkeypatch.setattr(gpu_report_parts, "ROOT", tmp_path)
    gpu_report_parts.measure(("ddp_cifar", "cifar", 1))  # the first one starts the server
    end = time.monotonic() + 5
    monkeypatch.setattr(gpu_report_parts, "seconds_left", lambda: end - time.monotonic())
    for batch in gpu_report_parts.in_time(report, [1, 3, 600, 601]):
        (row,) = gpu_report_parts.measure(("ddp_cifar", "cifar", batch))
        report.add(batch=batch, **row)
    assert [row.get("images/s") for row in report.rows] == [1.0, 1.0, None]
    assert report.rows[2] == {"batch": 600, "n/a": "not finished in the time left"}
    assert report.notes == ["left out, no time was left: 601"] and not report.failed


TESTS = """
import time
import pytest


def test_fails():
    assert "this" == "that"


def test_waits():
    time.sleep(0 if {ends} else 600)


@pytest.fixture
def broken():
    raise ValueError("that")


def test_error(broken):
    pass
"""


def test_a_test_that_fails_is_a_failure_before_the_summary(plan, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    script = tmp_path / "tests/test_gpu.py"
    monkeypatch.setattr(gpu_report_parts, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report_parts, "CUDA", True)  # all tests
    report = plan(80)
    script.write_text(TESTS.replace("{ends}", "True"))
    gpu_report_parts.tests(report)
    assert report.failed
    assert [row["failure"].split(" - ") for row in report.rows] == [
        ["ERROR tests/test_gpu.py::test_error", "ValueError: that"],
        ["FAILED tests/test_gpu.py::test_fails", "AssertionError: assert 'this' == 'that'"],
    ]
    script.write_text(TESTS.replace("{ends}", "False"))
    report = plan(80)
    threading.Thread(target=gpu_report_parts.tests, args=(report,)).start()
    try:
        wait_until(lambda: report.rows, 30)
    finally:
        for child in psutil.Process().children():
            if "tests/test_gpu.py" in child.cmdline():
                child.kill()
    (row,) = report.rows
    assert report.failed and row["failure"].startswith("tests/test_gpu.py::test_fails FAILED")


def test_one_by_one_where_four_together_need_more_memory(plan, monkeypatch):
    together = []

    def measure(*group, **_):
        together.append(len(group))
        return [{"start s": 1.0} for _ in group]

    monkeypatch.setattr(gpu_report_parts, "measure", measure)
    for gib, expected in ((40, 1), (60, 2)):  # there are two configurations on CPU
        together.clear()
        report = plan(gib)
        gpu_report_parts.compile_cache(report)
        assert together == [expected] * (2 // expected) and len(report.rows) == 2


def test_a_run_without_memory_is_no_failure(tmp_path):
    run = {"directory": tmp_path}
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\nTraceback\nend"
    assert gpu_report_parts.answer(run, 0, [1], said) == {"n/a": said.splitlines()[0]}
    assert gpu_report_parts.answer(run, 0, [1], "end") == {"failure": "exit code 1: end"}
    assert gpu_report_parts.answer(run, 0, [-9], "") == {"failure": "exit code -9: "}


def test_the_baseline_is_measured_with_eight_workers_too_and_its_loader_alone(plan, monkeypatch):
    rates = {"plain_ddp_cifar": 50.0, "plain_ddp_cifar --workers 8": 100.0, "ddp_cifar": 200.0}
    report = plan(80)
    shapes = [("imagenet", 8), ("cifar", 8)]
    monkeypatch.setattr(gpu_report_parts, "SHAPES", shapes)
    monkeypatch.setattr(gpu_report_parts, "PRECISIONS", {"fp32": "ddp_cifar"})
    monkeypatch.setattr(gpu_report_parts, "loader_alone", lambda recipe, *_: recipe)
    monkeypatch.setattr(gpu_report_parts, "measure", lambda one: [{"images/s": rates[one[0]]}])
    gpu_report_parts.images(report)
    found = [
        (row["recipe"], row["stem"], row.get("over baseline"), row.get("loader alone"))
        for row in report.rows
    ]
    plain, eight, ddp = rates
    assert found == [
        (plain, "imagenet", None, plain),
        (eight, "imagenet", 2.0, eight),
        (ddp, "imagenet", 4.0, None),
        (plain, "cifar", None, None),
        (ddp, "cifar", 4.0, None),
    ]
