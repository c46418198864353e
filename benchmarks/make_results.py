# SPDX-License-Identifier: Apache-2.0
"""Put the measurements into the pages: `make results`. Nothing else writes to benchmarks/results/.

    python benchmarks/make_results.py
    python benchmarks/make_results.py --publish runs/bench/cpu-x2.json  # what bench.py has measured

It makes accuracy.md from the summaries in accuracy.jsonl (one row per command), long.svg from the
metrics of one of those runs, and screen.svg from the lines of a terminal. --pictures records these
again, and draws docs/pictures/check.svg. On the pages, FILE's text stands between `<!-- FILE -->`
and `<!-- end -->`.
"""

import argparse
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import memory
import plot
from bench import ROOT
from rich.console import Console
from rich.text import Text

RESULTS = ROOT / "benchmarks/results"
LAUNCH = "accelerate launch --config_file accelerate_configs/"
CHECK = "recipes/ddp_cifar.py --also recipes/sharded_cifar.py recipes/pipeline_cifar.py "
CHECK += "--processes 1 2 4 --kills 3 --data synthetic --model simple_cnn --cpu --lr 0.02 "
CHECK += "--batch-size 16 --max-steps 72"
SCREEN = RESULTS / "screen.txt"
SCREEN_COMMAND = (
    "accelerate launch --config_file accelerate_configs/2gpu.yaml recipes/ddp_cifar.py "
    "--data synthetic --stem imagenet --cpu --batch-size 32 --lr 0.05 --epochs 1 "
    "--output-dir runs/screen"
)
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def launch_line(summary):
    """Return the end of the command behind a summary, without the seed, with today's flags."""
    name = summary["recipe"]
    directory = "recipes/" if (ROOT / f"recipes/{name}.py").exists() else ""
    line = f"{summary['world_size']}gpu.yaml {directory}{name}.py"
    line += f" --stem {summary['stem']}" if "stem" in summary else ""
    line += f" --epochs {summary['epochs']}"
    # The first one's name was accumulation_steps on 2026-11-22.
    if max(summary.get(name, 1) for name in ("accumulation", "accumulation_steps")) > 1:
        line += f" --global-batch-size {summary['global_batch_size']}"
    defaults = {"batch_size": 128, "microbatches": 8, "lr": 0.1}
    defaults |= {"clip_norm": None, "evaluate_every": None}
    for name, default in defaults.items():
        if summary.get(name, default) != default:
            line += f" --{name.replace('_', '-')} {summary[name]}"
    return line + " --compile" * summary.get("compile", False)


def accuracy_table():
    """Return the table (Markdown) of accuracy.jsonl: test accuracy by command, over the seeds."""
    runs = {}
    for summary in map(json.loads, (RESULTS / "accuracy.jsonl").read_text().splitlines()):
        order = [summary[name] for name in ("epochs", "recipe", "global_batch_size", "lr")]
        runs.setdefault((*order, launch_line(summary)), []).append(summary)
    lines = [f"| test accuracy | seeds | `{LAUNCH}`... |", "| ---: | --- | --- |"]
    for (*_, line), summaries in sorted(runs.items()):
        values = ", ".join(f"{summary['test_accuracy']:.2%}" for summary in summaries)
        seeds = ", ".join(str(summary["seed"]) for summary in summaries)
        lines.append(f"| {values} | {seeds} | `{line}` |")
    return "\n".join(lines) + "\n"


def in_terminal(command, awaited):
    """Run a command in a terminal, and press Ctrl-C when it has printed `awaited`, if ever. Return
    its output."""
    output = bytearray()
    pressed = []

    def read(descriptor):
        data = os.read(descriptor, 4096)
        output.extend(data)
        if awaited in output and not pressed:
            pressed.append(os.write(descriptor, b"\x03"))
        return data

    pty.spawn(command, read)
    return output.decode().replace("\r", "")


def record_screen():
    """Return the recipe's own lines, and the progress bar, of a run that Ctrl-C stops and a rerun
    resumes."""
    shutil.rmtree(ROOT / "runs/screen", ignore_errors=True)
    os.chdir(ROOT)
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    program = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    shown = []
    for awaited in (b"step 30/", b"no such line"):
        output = in_terminal([*program, *SCREEN_COMMAND.split()[1:]], awaited)
        shown += [f"$ {SCREEN_COMMAND}", *re.findall(r"\^C|(?:ddp_cifar: |step \d+/).*", output)]
    return "\n".join([*shown, re.findall(r"steps [^\n]*?0:00:00", output)[-1]]) + "\n"


def drawn_screen(text):
    """Return a picture (SVG) of a terminal that shows a text."""
    terminal = {"file": io.StringIO(), "force_terminal": True, "width": 100, "record": True}
    console = Console(**terminal)
    console.print(Text.from_ansi(text.rstrip()))
    picture = console.export_svg(title="", unique_id="screen").replace("\u00a0", "&#160;")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # GitHub blocks them


def memory_page():
    """Return what memory.py prints, with its command."""
    table, _, notes = "\n".join(memory.lines(ROOT / "recipes/ddp_cifar.py", [])).partition("\n\n")
    return f"{table}\n\n`python benchmarks/memory.py`\n\n{notes}\n"


def filled(page):
    """Return a page's text with the result files' current content."""

    def block(match):
        marker, file, end = match.groups()
        return f"{marker}\n{(ROOT / file).read_text().strip()}\n{end}"

    marked = r"(<!-- (benchmarks/results/\S+) -->)\n.*?\n?(<!-- end -->)"
    return re.sub(marked, block, page, flags=re.DOTALL)


def publish(path, results):
    """Copy a measurement of bench.py; return what speaks against it, or None."""
    if path.suffix != ".json" or not path.exists():
        return f"{path} is not a file that bench.py has written: name its .json"
    content = json.loads(path.read_text())
    failed = [one["recipe"] for one in content["configurations"] if one["failure"]]
    if failed:
        return f"{path} has failures: {', '.join(failed)}"
    if not re.fullmatch(r"\d+ of \d+ rounds", content["settings"]["measured"]):
        return f"{path} is not complete: {content['settings']['measured']}"
    for suffix in (".json", ".md"):
        shutil.copy(path.with_suffix(suffix), results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--publish", type=Path, metavar="PATH", help="the .json that bench.py has written")
    add("--memory", action="store_true", help="compute memory.md and chats.md again")
    add("--pictures", action="store_true", help="draw check.svg and screen.svg again")
    args = parser.parse_args()
    problem = publish(args.publish, RESULTS) if args.publish else None
    if problem:
        sys.exit(f"make_results: {problem}")
    if args.memory:
        sys.argv = sys.argv[:1]
        (RESULTS / "memory.md").write_text(memory_page())
        (RESULTS / "chats.md").write_text("\n".join(memory.lines_of_chat()) + "\n")
    (RESULTS / "accuracy.md").write_text(accuracy_table())
    curve = plot.draw({"resnet20.py, seed 0": plot.read(RESULTS / "long")})
    curve.savefig(RESULTS / "long.svg", metadata={"Date": None})
    if args.pictures:
        command = [sys.executable, "tools/check.py", *CHECK.split()]
        subprocess.run(command, cwd=ROOT, check=True)
        shutil.copy(ROOT / "runs/check/ddp_cifar.svg", ROOT / "docs/pictures/check.svg")
        SCREEN.write_text(record_screen())
    (RESULTS / "screen.svg").write_text(drawn_screen(SCREEN.read_text()))
    for path in PAGES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
