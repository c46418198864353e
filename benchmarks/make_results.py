"""Put the measurements into README.md and benchmarks/README.md: `make results`.

    python benchmarks/make_results.py
    python benchmarks/make_results.py --publish runs/bench/cpu-x2.json

--publish first copies what bench.py has measured, the file with its .md and .svg, to
benchmarks/results/; a measurement that was interrupted, or has failures, is refused.

In benchmarks/results/, accuracy.md is the table of the summaries in accuracy/, by command and seed;
long.svg is the learning curve of the one whose metrics are there, too; screen.svg is what a
terminal shows of the run in screen/, drawn by the recipe's own display from its metrics. Between
`<!-- FILE -->` and `<!-- end -->` stands FILE's text; after `<!-- FILE short -->` only the measured
rows of its table, its command and its hardware. test_readme.py compares pages and files with what
this makes.
"""

import argparse
import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
LONG = RESULTS / "accuracy/ten-0.1-0.json"
SCREEN = RESULTS / "screen/summary.json"
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md"]


def launch_line(summary):
    """The command behind a summary, without the seed."""
    line = f"accelerate launch --config_file accelerate_configs/{summary['world_size']}gpu.yaml "
    line += f"recipes/{summary['recipe']}.py --stem {summary['stem']} --epochs {summary['epochs']}"
    defaults = {
        "batch_size": 128,
        "accumulation_steps": 1,
        "microbatches": 8,
        "lr": 0.1,
        "clip_norm": None,
    }
    if summary.get("accumulation", 1) > 1:
        line += f" --global-batch-size {summary['global_batch_size']}"
    return line + "".join(
        f" --{name.replace('_', '-')} {summary[name]}"
        for name, default in defaults.items()
        if summary.get(name, default) != default
    )


def when_and_with(summary):
    """The versions behind a summary, and its date."""
    return ", ".join(
        [*(f"{name} {version}" for name, version in summary["versions"].items()), summary["date"]]
    )


def accuracy_table(directory):
    """Return the table (Markdown) of the summaries in a directory: test accuracy by command, over
    the seeds."""
    runs = {}
    for path in sorted(directory.glob("*.json")):
        summary = json.loads(path.read_text())
        runs.setdefault((summary["epochs"], summary["lr"], launch_line(summary)), []).append(
            summary
        )
    lines = ["| test accuracy | seeds | command, with `--seed` |", "| ---: | --- | --- |"]
    for (_, _, command), summaries in sorted(runs.items(), key=lambda item: item[0]):
        values = [f"{100 * summary['test_accuracy']:.1f}%" for summary in summaries]
        seeds = ", ".join(str(summary["seed"]) for summary in summaries)
        lines.append(f"| {', '.join(values)} | {seeds} | `{command}` |")
    with_ = {when_and_with(summary) for summaries in runs.values() for summary in summaries}
    return "\n".join(lines) + f"\n\n- {'; '.join(sorted(with_))}.\n"


def curve(summary, metrics):
    """Return the learning curve (SVG) of a run, from the paths of its summary.json and
    metrics.jsonl: accuracy in training and on the test set by epoch."""
    summary = json.loads(summary.read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    left, top, width, height = 50, 60, 560, 280
    epochs = max(1, round(summary["steps"] / summary["steps_per_epoch"]))

    def text(x, y, content, look=""):
        return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{content}</text>'

    def line(event, name, look):
        points = [
            (line["step"] / summary["steps"], line[name])
            for line in lines
            if line["event"] == event
        ]
        way = " L".join(f"{left + width * x:.1f} {top + height * (1 - y):.1f}" for x, y in points)
        return f'<path d="M{way}" fill="none" {look}/>'

    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
    style += 'width="680" height="390"'
    title = (
        f"{summary['recipe']}, {summary['model']}, {summary['stem']} stem, {summary['precision']}"
    )
    parts = [
        f"<svg {style}>",
        '<rect width="100%" height="100%" fill="white"/>',
        text(10, 22, f"CIFAR-10, accuracy by epoch: {title}", 'font-weight="bold"'),
        text(10, 40, f"{summary['device']}, {when_and_with(summary)}", 'fill="#555"'),
    ]
    for tenth in range(0, 11, 2):
        y = top + height * (1 - tenth / 10)
        parts.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#ddd"/>')
        parts.append(text(left - 8, y + 4, f"{10 * tenth}%", 'text-anchor="end"'))
    for epoch in range(0, epochs + 1, max(1, epochs // 10)):
        parts.append(
            text(left + width * epoch / epochs, top + height + 20, epoch, 'text-anchor="middle"')
        )
    parts += [
        line("train", "accuracy", 'stroke="#f58518"'),
        line("evaluation", "test_accuracy", 'stroke="#4c78a8" stroke-width="2.5"'),
        text(left + width - 130, top + height - 40, "training", 'fill="#f58518"'),
        text(
            left + width - 130,
            top + height - 20,
            f"test: {summary['test_accuracy']:.2%} at the end",
            'fill="#4c78a8"',
        ),
    ]
    return "\n".join([*parts, "</svg>\n"])


def screen(summary, metrics, lines=12):
    """Return a picture (SVG) of the terminal at the end of a run, from the paths of its
    summary.json and metrics.jsonl: the last lines of metrics, as the recipe's own Display shows
    them, and its progress bar."""
    summary = json.loads(summary.read_text())
    path = ROOT / f"recipes/{summary['recipe']}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    terminal = {"file": io.StringIO(), "force_terminal": True, "width": 184, "record": True}
    # Not soft_wrap: there is no terminal to wrap the lines.
    recipe.Console = lambda **options: Console(**{**options, **terminal, "soft_wrap": False})
    display = recipe.Display(True, summary["steps"], summary["steps"])
    for line in [json.loads(line) for line in metrics.read_text().splitlines()][-lines:]:
        about = {name: line.pop(name) for name in ("event", "epoch", "step", "time")}
        head = f"step {about['step']}/{summary['steps']} epoch {about['epoch']}"
        details = ("slowest_data_wait", "slowest_data_rank")  # of which the screen shows nothing
        shown = {name: x for name, x in line.items() if name not in details and x is not None}
        display.line(head, shown)
    display.console.print(display.progress)
    drawn = display.console.export_svg(title=launch_line(summary), unique_id="screen")
    return drawn.replace("\u00a0", "&#160;")


def short(content):
    """The measured rows of a result file's table, and a line with its command, its hardware,
    versions and date."""
    table, command, notes, *_ = content.split("\n\n")
    rows = [row for row in table.splitlines() if "| computed |" not in row]
    return "\n".join(rows) + f"\n\n{command}: {notes.splitlines()[0].removeprefix('- ')}"


def filled(page):
    """Return a page's text with the result files' current content."""

    def block(match):
        marker, file, shortened, end = match.groups()
        content = (ROOT / file).read_text().strip()
        return f"{marker}\n{short(content) if shortened else content}\n{end}"

    return re.sub(
        r"(<!-- (benchmarks/results/\S+)( short)? -->)\n.*?\n?(<!-- end -->)",
        block,
        page,
        flags=re.DOTALL,
    )


def publish(path, results):
    """Copy a measurement of bench.py; return what speaks against it, or None."""
    if path.suffix != ".json" or not path.exists():
        return f"{path} is not a file that bench.py has written: name its .json"
    content = json.loads(path.read_text())
    failed = [one["recipe"] for one in content["configurations"] if one["failure"]]
    if failed:
        return f"{path} has failures: {', '.join(failed)}"
    how_much = content["settings"]["measured"]
    files = [path.with_suffix(suffix) for suffix in (".json", ".md", ".svg")]
    if not re.fullmatch(r"\d+ of \d+ rounds", how_much) or not all(map(Path.exists, files)):
        return f"{path} is not complete: {how_much}"
    for file in files:
        shutil.copy(file, results)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    help = "the .json of a measurement by bench.py, to be copied to benchmarks/results/"
    parser.add_argument("--publish", type=Path, metavar="PATH", help=help)
    args = parser.parse_args()
    problem = publish(args.publish, RESULTS) if args.publish else None
    if problem:
        sys.exit(f"make_results: {problem}")
    (RESULTS / "accuracy.md").write_text(accuracy_table(RESULTS / "accuracy"))
    (RESULTS / "long.svg").write_text(curve(LONG, LONG.with_suffix(".jsonl")))
    drawn = screen(SCREEN, SCREEN.with_name("metrics.jsonl"))
    (RESULTS / "screen.svg").write_text(drawn)
    for path in PAGES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
