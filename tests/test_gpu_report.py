"""gpu_report.py: whatever happens to a part, what the others and it itself have measured is
written."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import gpu_report
import psutil
import pytest
from conftest import PROGRAMS, ROOT, run, wait_until

PARTS = """
import json, os, subprocess, sys, time
name, folder = sys.argv[1], sys.argv[sys.argv.index("--folder") + 1]
open(f"{folder}/{name}.json", "w").write(json.dumps({"notes": ["begun"], "rows": [{"x": 1234.5}, {"x": 1, "y": "z"}]}))
print("said by", name, flush=True)
if name == "raises":
    raise ValueError("broken")
if name == "hangs":
    # As a launcher's ranks: in a session of its own.
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
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
    code, results, text = report({"raises": 60, "hangs": 1}, {"good": 60})
    assert code == 1
    assert {name: part["status"] for name, part in results.items()} == {
        "raises": "failed: exit code 1",
        "hangs": "failed: not finished after 1 s",
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
    assert code == 1 and (results["good"]["status"], results["last"]["status"]) == (
        "dropped: no time was left",
        "done",
    )
    assert "dropped: no time was left" in text
    assert report({"good": 60})[0] == 0


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
