"""Tests and measurements on this machine's GPU in one go: `make gpu-report`.

    python benchmarks/gpu_report.py
    python benchmarks/gpu_report.py --minutes 20 --data-dir data --folder runs/h200
    python benchmarks/gpu_report.py --rehearse

The parts (see gpu_report_parts.py) are processes of their own, in order of importance, with what
time they may take at most. After each of them report.md and results.json in the folder are written
anew; NAME.log has what a part printed. A part that fails or takes too long keeps what it has
measured, and the others go on; what no time is left for is dropped. How fast the GPU is decides
what fits into the time: the report says what did not, and that is no failure. The exit status is 1
if a part failed, or a test in it before its time was over, and 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PROGRAM = Path(__file__).parent / "gpu_report_parts.py"
RESERVED = 60  # seconds that no part but the last one may take
# At most so many seconds of each part. Those of the first group run together: nothing in it is
# timed.
GROUPS = [
    {"machine": 30, "tests": 200, "compile_cache": 200},
    {"images": 190},
    {"profile": 40},
    {"variants": 70},
    {"epoch": 60},
    {"compiled": 200},
    {"training": 3600},
]
TITLES = {
    "machine": "Machine",
    "tests": "Tests of test_gpu.py",
    "compile_cache": "Compiling, while the tests run, what is measured later",
    "images": "Images per second, eager",
    "profile": "A step on the host, in microseconds",
    "variants": "Variants, images per second",
    "epoch": "Seconds per epoch",
    "compiled": "Images per second, compiled",
    "training": "Training in what time is left",
}


class Part:
    """A part as a process, or what became of it."""

    def __init__(self, name, folder):
        self.name, self.process, self.status, self.seconds = name, None, "not run", 0.0
        self.folder = folder

    def start(self, args, seconds):
        self.started, self.limit = time.monotonic(), seconds
        command = [
            sys.executable,
            PROGRAM,
            self.name,
            "--seconds",
            seconds,
            "--folder",
            args.folder,
        ]
        command += ["--data-dir", args.data_dir]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if args.rehearse else {})}
        with open(args.folder / f"{self.name}.log", "w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            # In a session of its own: Ctrl-C is for this process, which ends the parts.
            self.process = subprocess.Popen(
                list(map(str, command)), env=environment, start_new_session=True, **streams
            )
        self.status = "running"

    def look(self):
        """Return whether it has ended; end it where its time is over."""
        code = self.process.poll()
        self.seconds = time.monotonic() - self.started
        if code is None and self.seconds > self.limit:
            failed = any("failure" in row for row in self.results().get("rows", []))
            self.end(f"{'failed: ' if failed else ''}not finished after {self.limit:.0f} s")
        elif code is not None:
            self.end("done" if code == 0 else f"failed: exit code {code}")
        return self.status != "running"

    def end(self, status):
        """Kill what is left of it: forked processes, and those that a launcher put into sessions of
        their own."""
        self.status = status
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(self.process.pid).children(recursive=True)
            for process in [self.process, *left]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def results(self):
        """Return what it has written: {"notes": [lines], "rows": [{column: value}]}."""
        path = self.folder / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def shown(value):
    return (
        str(value)
        if type(value) is not float
        else f"{value:,.0f}"
        if abs(value) > 1000
        else f"{value:.4g}"
    )


def markdown(results, parts):
    """Return the report: of each part what became of it, its notes and its rows, or else the end of
    its log."""
    lines = ["# Report", "", f"{results['command']}, {results['date']}", ""]
    for part in parts:
        found = results["parts"][part.name]
        lines += [
            f"## {TITLES.get(part.name, part.name)}",
            "",
            f"{part.status}, {part.seconds:.0f} s",
            "",
        ]
        lines += [f"- {note}" for note in found.get("notes", [])] + [""]
        rows = found.get("rows", [])
        if columns := list(dict.fromkeys(name for row in rows for name in row)):
            cells = [
                columns,
                ["---"] * len(columns),
                *([row.get(name, "") for name in columns] for row in rows),
            ]
            lines += ["| " + " | ".join(map(shown, line)) + " |" for line in cells]
            lines.append("")
        if "failed" in part.status or "not finished" in part.status:
            lines += ["```", *found["log"].splitlines()[-15:], "```", ""]
    return "\n".join(lines)


def write(parts, args):
    results = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d %H:%M"), "parts": {}}
    for part in parts:
        log = args.folder / f"{part.name}.log"
        found = {"status": part.status, "seconds": part.seconds, **part.results()}
        found["log"] = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        results["parts"][part.name] = found
    for name, text in (
        ("results.json", json.dumps(results, indent=2)),
        ("report.md", markdown(results, parts)),
    ):
        (args.folder / f"{name}.tmp").write_text(text + "\n")
        (args.folder / f"{name}.tmp").replace(args.folder / name)


def run(groups, args):
    """Run the groups one after the other until the time is over; return all parts, and whether
    Ctrl-C came."""
    deadline, parts = (
        time.monotonic() + 60 * args.minutes,
        [[Part(name, args.folder) for name in group] for group in groups],
    )
    every = [part for group in parts for part in group]
    try:
        for group, limits in zip(parts, groups, strict=True):
            left = deadline - time.monotonic() - (RESERVED if group is not parts[-1] else 0)
            for part in group:
                if left < 10:
                    part.status = "dropped: no time was left"
                else:
                    part.start(args, min(left, limits[part.name]))
            running = [part for part in group if part.process]
            while running:
                time.sleep(0.05)
                for part in [part for part in running if part.look()]:
                    running.remove(part)
                    print(f"{part.name}: {part.status}, {part.seconds:.0f} s", flush=True)
                    write(every, args)
        return every, False
    except KeyboardInterrupt:
        for part in every:
            if part.status == "running":
                part.end("failed: interrupted")
        return every, True


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9, help="for everything (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=f"runs/gpu-report-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    parser.add_argument(
        "--data-dir",
        default="data",
        help="of CIFAR-10 for the training; synthetic data if not there",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="small numbers, on CPU: so it is without a GPU anyway",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(TITLES), default=list(TITLES), help="only these"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # also where a script has started it in the background
        signal.signal(number, signal.default_int_handler)
    chosen = [
        {name: limit for name, limit in group.items() if name in args.parts} for group in GROUPS
    ]
    parts, interrupted = run([group for group in chosen if group], args)
    write(parts, args)
    print(f"written: {args.folder}/report.md, results.json, and a log of each part")
    sys.exit(130 if interrupted else any("failed" in part.status for part in parts))


if __name__ == "__main__":
    main()
