# SPDX-License-Identifier: Apache-2.0
"""Draw trainings from their metrics.jsonl, also while they run: `make plot RUNS="runs/a runs/b"`.

    python tools/plot.py runs/a runs/b --output runs/plot.svg

A metric has a panel, a run a colour. null in a line is a gap. The x axis shows steps, or epochs if
the runs have different numbers of steps per epoch. Prints where the time of each run went. Its
first line of metrics has compiling and other warm-up in it.
"""

import argparse
import json
import math
import sys
from pathlib import Path

STYLE = Path(__file__).parents[1] / "docs/pictures/svg.mplstyle"


def read(directory):
    """Return {(event, metric): {step: value}} of a run, and its steps per epoch: None before the
    first evaluation."""
    path = Path(directory, "metrics.jsonl")
    if not path.is_file():
        sys.exit(f"plot: no metrics.jsonl in {directory}: name the --output-dir of a training")
    curves, steps_per_epoch = {}, None
    for line in path.read_text().split("\n")[:-1]:  # the last one is empty, or not yet complete
        values = json.loads(line)
        if values["event"] == "evaluation":
            steps_per_epoch = steps_per_epoch or values["step"] / values["epoch"]
        for name in values.keys() - {"event", "epoch", "step", "time"}:
            value = math.nan if values[name] is None else values[name]  # a gap
            curves.setdefault((values["event"], name), {})[values["step"]] = value
    return curves, steps_per_epoch


def seconds_of(directory):
    """Return {what: seconds} of a run: those of its lines, or else those since the line before."""
    spent = {"steps up to the first line": 0.0, "train": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
    text = Path(directory, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    for before, line in zip([{}, *lines], lines, strict=False):
        which = line["event"] if before else "steps up to the first line"
        since = line["time"] - before.get("time", line["time"])
        spent[which] += line.get("seconds", line.get("save_seconds", since))
    return spent


def draw(runs):
    """Return the figure of {directory: what `read` returns}: a panel for each metric, a colour for
    each run."""
    from matplotlib import pyplot

    pyplot.style.use(["petroff10", STYLE])  # colours that the colour-blind can tell apart
    found = {key for curves, _ in runs.values() for key in curves}
    epochs = {steps for _, steps in runs.values()}
    in_epochs = len(epochs) > 1 and None not in epochs
    panels = [("train", "loss"), *sorted(key for key in found if key[0] == "evaluation")]
    panels += [("train", "learning_rate"), ("train", "samples_per_second")]
    panels = [key for key in panels if key in found]
    if not panels:
        sys.exit(f"plot: no metrics yet in {', '.join(runs)}: wait for the first line")
    rows = math.ceil(len(panels) / 2)
    options = {"figsize": (9, 2.6 * rows), "layout": "constrained"}
    figure, grid = pyplot.subplots(rows, 2, sharex=True, squeeze=False, **options)
    handles = {}
    for axes, key in zip(grid.flat, panels, strict=False):
        for index, (directory, (curves, steps_per_epoch)) in enumerate(runs.items()):
            unit = steps_per_epoch if in_epochs else 1
            steps = [step / unit for step in curves.get(key, {})]
            values = list(curves.get(key, {}).values())
            marker = "o" if key[0] == "evaluation" else None  # a single one is a point
            line = {"color": f"C{index}", "linewidth": 1.3, "marker": marker, "markersize": 3}
            [handles[directory]] = axes.plot(steps, values, **line)
        axes.set(xlabel="epoch" if in_epochs else "step", ylabel=key[1].replace("_", " "))
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.3)
        if key[1] == "samples_per_second":
            axes.set_ylim(bottom=0)  # or noise would look large
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.legend(handles.values(), handles, loc="outside upper left", frameon=False, ncols=3)
    return figure


def draw_check(results):
    """Return the figure of what check.py has found: the loss, and how much it differs in each run.
    `results` is the content of its JSON file, with at least one run that was compared."""
    from matplotlib import pyplot

    pyplot.style.use(STYLE)
    figure = pyplot.figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    ends = []
    for run in results["runs"]:
        lines = [x for x in run["differences"] if (x["event"], x["metric"]) == ("train", "loss")]
        if not lines:  # the reference, or a run that failed
            continue
        losses = {x["step"]: x["values"][0] for x in lines}
        sizes = [x["difference"] for x in lines]
        dashes = "--" if run["name"] == "perturbed" else "-"
        [line] = below.plot(list(losses), sizes, dashes, linewidth=1)
        ends.append((sizes[-1], run["name"], line.get_color()))
        kills = [int(task.removeprefix("step-")) + 1 for task in run["tasks"][:-1]]
        above.plot(kills, [losses[step] for step in kills], "kX", label="SIGKILL", zorder=3)
    above.plot(list(losses), list(losses.values()), color="black", linewidth=1)
    for place, (_, name, color) in enumerate(sorted(ends)):
        where = {"transform": below.transAxes, "va": "center"}
        below.text(1.01, (place + 0.5) / len(ends), name, color=color, **where)
    above.legend(*[[x[-1]] for x in above.get_legend_handles_labels()])
    above.set(ylabel="loss", title=Path(results["command"][0]).name)
    below.set_yscale("symlog", linthresh=1e-9)
    below.set(xlabel="step", ylabel="relative difference\nof the loss")
    where = f"{results['hardware']}; torch {results['versions']['torch']}; {results['date']}; "
    figure.supxlabel(f"{where}commit {results['commit']}", fontsize=8)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a training's --output-dir")
    parser.add_argument("--output", default="runs/plot.svg", help="the picture: .svg, .png or .pdf")
    args = parser.parse_args()
    figure = draw({directory: read(directory) for directory in args.runs})
    for directory in args.runs:
        spent = [f"{name} {number:.0f} s" for name, number in seconds_of(directory).items()]
        print(f"{directory}: {', '.join(spent)}")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output)
    print(f"plot: wrote {args.output}")


if __name__ == "__main__":
    main()
