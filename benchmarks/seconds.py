# SPDX-License-Identifier: Apache-2.0
"""Measure seconds per step, and to the first step, of scripts that others.py knows.

    python benchmarks/seconds.py ../ours.py ../run_glue_no_trainer.py ../run_glue.py

Each trains the same tiny BERT on the same 960 texts, 8 per step, with a line every 10 steps, and
`ours.py` also with a line per step. All run once per round, on one process and on two. A step is
the mean from step 20 to step 110, without saves and evaluations. Processor time is user and system
time of a rank with its DataLoaders' workers: it changes less than seconds if other programs run.
The ratio is that of ms per step to the first script's in the same round, median and range.
Writes seconds.json and seconds.md to --output-dir.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from others_inputs import SCRIPTS, make_inputs

LINES = {"run_glue.py": "--logging_steps 10", "ours.py": "--log-every 10"}
ONE_EPOCH = {"ours.py": "--epochs 1 --checkpoint-every 1000"}
COLUMNS = ["ms per step", "processor ms per step", "s to step 1", "processor s to step 1"]


def watch(file, script, *words):
    """Run a script in this rank, and note seconds and processor time after some steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    process, steps = psutil.Process(), []

    def after_step(*_):
        steps.append(None)
        if len(steps) in (1, 20, 110):
            family = [process, *process.children(recursive=True)]
            used = sum(sum(one.cpu_times()[:4]) for one in family)  # also of workers that ended
            note = {"seconds": time.time() - process.create_time(), "processor": used}
            with open(f"{file}-{os.environ.get('RANK', 0)}.jsonl", "a") as notes:
                notes.write(json.dumps(note) + "\n")

    register_optimizer_step_post_hook(after_step)
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def measure(path, processes, line, directory, number):
    """Run a script once. Return the values of COLUMNS, the mean over the ranks."""
    command, *_ = SCRIPTS[path.name]
    own = directory / f"{path.stem}-{processes}-{line.replace(' ', '')}-{number}"
    values = {"out": own, "model": "bert", "batch": 8 // processes}
    words = command.format(**values).replace("_steps 5", "_steps 1000").split()
    words += [*line.split(), *ONE_EPOCH.get(path.name, "--num_train_epochs 1").split()]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", processes, "--standalone"]
    notes = directory / f"{own.name}.notes"
    launch = [*launcher, __file__, "watch", notes, path, *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache")}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    with open(directory / f"{own.name}.txt", "w") as output:
        options = {"cwd": directory / "inputs", "env": environment, "check": True}
        subprocess.run(list(map(str, launch)), stdout=output, stderr=output, **options)
    rows = []
    for rank in range(processes):
        lines = Path(f"{notes}-{rank}.jsonl").read_text().splitlines()
        first, warm, end = map(json.loads, lines)
        names = ("seconds", "processor")
        rows.append([(end[x] - warm[x]) / 90 * 1000 for x in names] + [first[x] for x in names])
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("scripts", nargs="+", type=Path, help="ours.py, run_glue_no_trainer.py, run_glue.py")
    add("--rounds", type=int, default=3, help="runs of each (3)")
    add("--output-dir", type=Path, default="runs/seconds", help="a new folder (runs/seconds)")
    args = parser.parse_args()
    directory = args.output_dir.resolve()
    make_inputs(directory / "inputs", texts=960)
    found = {}
    for number in range(args.rounds):
        for processes in (1, 2):
            for path in map(Path.resolve, args.scripts):
                for line in [LINES.get(path.name, "")] + ["--log-every 1"] * (path.stem == "ours"):
                    name = f"{path.name} {line}".strip()
                    one = measure(path, processes, line, directory, number)
                    print(f"round {number + 1}: {name} on {processes}:", *(f"{x:.1f}" for x in one))
                    found.setdefault(f"{name} on {processes}", []).append(one)
    heads = [*COLUMNS, "ratio"]
    text = f"| | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}\n"
    first = {}  # of each number of processes
    for name, rounds in found.items():
        columns = list(zip(*rounds, strict=True))
        seconds = first.setdefault(name.split()[-1], columns[0])
        columns.append([mine / theirs for mine, theirs in zip(columns[0], seconds, strict=True)])
        cells = [f"{statistics.median(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in columns]
        text += f"| {name} | {' | '.join(cells)} |\n"
    (directory / "seconds.json").write_text(json.dumps(found, indent=2) + "\n")
    (directory / "seconds.md").write_text(text)
    print(text)


if __name__ == "__main__":
    watch(*sys.argv[2:]) if sys.argv[1:2] == ["watch"] else main()
