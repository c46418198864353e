# SPDX-License-Identifier: Apache-2.0
"""Check that a copy of a recipe trains the same in every way on this machine: `make check`.

    python tools/check.py recipes/ddp_cifar.py --data synthetic --model simple_cnn
    python tools/check.py ../mine/train.py --text a.txt --cpu

Other flags are the copy's. It trains 12 steps (--max-steps) with one size of microbatches: on one
process, on two, on all GPUs, and on two that SIGKILL ends in mid-epoch before a rerun
resumes; a pipeline on two and four. All metrics of all steps and the final weights have to be the
same, after the kill bit for bit (CPU). On another number of processes rounding differs, and
training amplifies it. A yardstick measures how much: the first run, with initial weights changed by
1e-5 of their values. In step N, a relative difference may be 1e-5, or 3 N times the yardstick's up
to the next step. Exits with status 1 if a run fails or differs. Writes runs/check/NAME.json, .svg.
"""

import argparse
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path

import machine
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

CHANGE = 1e-5  # of the yardstick's initial weights; a difference that is always allowed
ERROR = r"^(?:[\w.-]+: error: [^\n]*|Traceback .*?^\w[^\n]*)"  # a recipe's, or a traceback
NO_BOUND = sys.float_info.max  # JSON has no infinity
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
# Names in metrics.jsonl that are not of the training, but of the machine and the moment.
MEASURED = {"event", "epoch", "step", "time", "seconds", "save_seconds", "samples_per_second"}
MEASURED |= {"data_wait", "slowest_rank", "peak_memory_gib"}
BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
CAUSES = "Known causes and their remedies: docs/adapting.md, make check"


def run_copy(task, copy, *flags):
    """Run a copy as the program of this process. `task` is "train", "change" to change the initial
    weights, or a checkpoint's name: SIGKILL in the first step after it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    type(torch.backends.cudnn).benchmark = False  # the copy's True does not reach cuDNN
    add_param_group = torch.optim.Optimizer.add_param_group
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def add_changed(optimizer, group):
        add_param_group(optimizer, group)
        for parameter in optimizer.param_groups[-1]["params"]:
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # sharded
            noise = torch.randn(own.shape, generator=generator).to(own)
            own += own * noise * max(CHANGE, torch.finfo(own.dtype).eps)

    def kill(*_):
        if any(Path(flags[-1]).glob(f"{task}*")):
            os.kill(os.getpid(), signal.SIGKILL)

    if task == "change":
        torch.optim.Optimizer.add_param_group = add_changed
    elif task != "train":
        register_optimizer_step_post_hook(kill)
    sys.argv = [copy, *flags]
    sys.path[0] = str(Path(copy).parent)
    runpy.run_path(copy, run_name="__main__")


def train(run, output):
    """Train to the end, and again after each kill. Return {(step, event, name): value}, of numbers
    and of the final weights. If it fails, put a verdict and a reason into the run."""
    for number, task in enumerate(run["tasks"], 1):
        command = [sys.executable, *TORCHRUN, run["processes"], __file__, "run", task, run["copy"]]
        command = [str(x) for x in (*command, *run["flags"], "--output-dir", output)]
        code, lines = machine.execute(command, {**os.environ, **ENVIRONMENT}, timeout=1e6)
        text = "".join(line for _, line in lines)
        output.with_name(f"{output.name}.{number}.txt").write_text(text)
        last = number == len(run["tasks"])
        if last != (code == 0) or not (last or any(output.glob(f"{task}*"))):
            steps = re.findall(r"^step (\d+)/", text, re.MULTILINE)
            run["verdict"] = f"fails after step {steps[-1]}" if steps else "fails in step 1"
            found = re.search(ERROR, text, re.MULTILINE | re.DOTALL)
            run["reason"] = found[0] if found else text[-1000:]
            return {}
    begin = json.loads((output / "summary.json").read_text())["resumed_from"]
    if f"step-{begin:08}" not in ("step-00000000", *run["tasks"])[-2:]:
        run |= {"verdict": "fails", "reason": f"it resumed from step {begin}"}
    values = {}
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        names = [name for name in line if name not in MEASURED]
        values |= {(line["step"], line["event"], name): line[name] for name in names}
    weights = load_file(output / "model.safetensors").items()
    return values | {(line["step"], "weights", name): tensor for name, tensor in weights}


def difference(one, other):
    """Return the relative difference of two numbers or tensors, by their norms."""
    if one is None or other is None or (torch.is_tensor(one) and one.shape != other.shape):
        return 0.0 if one is other else NO_BOUND
    one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
    scale = max(one.norm().item(), other.norm().item())
    return (one - other).norm().item() / scale if scale else 0.0


def compare(run, ours, theirs, bounds, of_rank_0):
    """Put all differences and a verdict into a run. Weights with names `of_rank_0`, BatchNorm's
    statistics, are left out, and evaluations if there are any, because they compute with them."""
    run["verdict"] = "bit for bit"
    depends = any(name.endswith(of_rank_0) for _, _, name in theirs)
    for key in [*theirs, *sorted(ours.keys() - theirs.keys())]:
        step, event, name = key
        if name.endswith(of_rank_0) or (depends and event == "evaluation"):
            continue
        values = [theirs.get(key), ours.get(key)]
        size, bound = difference(*values), bounds[key]
        values = [x.double().norm().item() if torch.is_tensor(x) else x for x in values]
        found = {"step": step, "event": event, "metric": name, "values": values}
        run["differences"].append({**found, "difference": size, "bound": bound})
        if size > bound and not run["reason"]:
            one, other = (math.nan if x is None else x for x in values)
            run["verdict"] = f"differs at step {step}"
            run["reason"] = f"{name} {one:.9g} and {other:.9g}, by {size:.1g}"
        elif size and not run["reason"]:
            run["verdict"] = "the same" if bound < NO_BOUND else ""


def share_of_bound(found):
    return found["difference"] / (found["bound"] or CHANGE)


def bounds_of(yardstick):
    """Return {(step, event, name): bound}."""
    largest, bounds = defaultdict(float), defaultdict(lambda: CHANGE)
    for x in yardstick["differences"]:
        name = x["metric"]
        largest[name] = max(largest[name], x["difference"])
        most = largest[name] or max(largest.values())  # an accuracy changes in jumps
        for step in (x["step"] - 1, x["step"]):  # in one of them the difference may pass through 0
            bounds[step, x["event"], name] = max(CHANGE, 3 * step * most)
    return bounds


def check(args, directory, console):
    """Train in all ways and compare. Return the runs: the reference, its yardstick, the others."""
    first, *more = args.processes
    runs, values = [], {}

    def add(name, against="", bounds=None, **given):
        run = {"name": name, "against": against, "processes": first, "copy": args.copy}
        run |= {"flags": args.flags, "tasks": ["train"], "differences": [], **given}
        run |= {"verdict": "", "reason": ""}
        with console.status(f"{name} ..."):
            values[name] = train(run, directory / name)
        if against and not run["reason"]:
            same = run["processes"] == first or run["tasks"][1:]  # as the one it is compared with
            compare(run, values[name], values[against], bounds, () if same else BATCHNORM)
        console.print(f"{name}: {run['verdict'] or 'done'}")
        runs.append(run)
        return run

    name = f"{first} process{'es' * (first > 1)}"
    if add(name)["reason"]:
        return runs
    bounds = defaultdict(float)  # on CPU, the killed run's
    if more or args.also or args.gpus:
        bounds = bounds_of(add("yardstick", name, defaultdict(lambda: NO_BOUND), tasks=["change"]))
    for number in more:
        add(f"{number} processes", name, bounds, processes=number)
    for path in args.also:
        add(f"{path.stem} on 2", name, bounds, processes=2, copy=path)
    whole = runs[2] if more else runs[0]
    if whole["differences"] or not whole["reason"]:
        summary = json.loads((directory / name / "summary.json").read_text())
        kills = range(1, args.kills + 1)
        every = max(1, (2 * summary["steps"] - 2) // (2 * args.kills + 1))
        epoch = summary["steps_per_epoch"]
        every = next((n for n in range(every, 0, -1) if all(n * k % epoch for k in kills)), every)
        tasks = [*(f"step-{every * k:08}" for k in kills), "train"]
        flags = ["--checkpoint-every", every, *args.flags]
        given = {"processes": whole["processes"], "tasks": tasks, "flags": flags}
        # A GPU may round in another way, but not much in the first step: there it is noise.
        later = {key: bound for key, bound in bounds.items() if key[0] > 1}
        bounds = defaultdict(lambda: CHANGE, later) if args.gpus else defaultdict(float)
        add(f"{whole['name']}, killed", whole["name"], bounds, **given)
    return runs


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("copy", type=Path, help="a copy of ddp, amp, sharded or pipeline; its flags follow")
    add("--processes", type=int, nargs="+", help="numbers to compare (1, 2 and all GPUs)")
    add("--also", type=Path, nargs="+", default=[], help="other recipes, on two processes")
    add("--kills", type=int, default=1, help="how often SIGKILL ends the killed run (1)")
    add("--batch-size", type=int, help="of a microbatch (8; pipeline: 16)")
    add("--global-batch-size", type=int, help="of a step")
    args, flags = parser.parse_known_args()
    args.copy = args.copy.expanduser()
    for path in (args.copy, *args.also):
        if not path.is_file() or "--checkpoint-every" not in path.read_text():
            parser.error(f"{path} is not a copy of ddp, amp, sharded or pipeline_cifar.py")
    args.gpus = 0 if "--cpu" in flags else torch.cuda.device_count()
    stages = 2 if "--chunks" in args.copy.read_text() else 1
    counts = sorted({stages, 2 * stages, args.gpus // stages * stages} - {0})
    args.processes = args.processes or [n for n in counts if n <= max(args.gpus or n, stages)]
    batch = args.batch_size or 8 * stages
    share = batch * math.lcm(*(n // stages for n in args.processes))
    total = args.global_batch_size or 2 * share
    if total % share:
        parser.error(f"argument --global-batch-size: choose a multiple of {share}")
    args.flags = ["--max-steps", 12, "--hang-timeout", 120, *flags, "--log-every", 1]
    args.flags += ["--batch-size", batch, "--global-batch-size", total]
    return args


def main():
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 100)
    results = Path("runs/check", f"{args.copy.stem}.json")
    directory = results.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    content = {"date": str(date.today()), "command": sys.argv[1:], "commit": machine.commit()}
    content |= {"hardware": machine.hardware(args.gpus), "gpus": args.gpus}
    content |= {"python": sys.version.split()[0], "versions": machine.VERSIONS}
    content |= {"runs": (runs := check(args, directory, console))}
    table = Table("run", "compared with", "nearest to its bound", "verdict", box=None)
    for run in (run for run in runs[1:] if run["name"] != "yardstick"):
        worst = max(run["differences"], key=share_of_bound, default=None)
        found = worst and "{difference:.1g} of {bound:.1g}, {metric}, step {step}".format(**worst)
        table.add_row(run["name"], run["against"], found, run["verdict"])
    problems = [f"{x['name']}: {x['verdict']}: {x['reason']}" for x in runs if x["reason"]]
    causes = [CAUSES] if problems and runs[1:] else []
    console.print(table, *problems, *causes, sep="\n", soft_wrap=True)
    results.write_text(json.dumps(content, indent=1, default=str) + "\n")
    subprocess.run([sys.executable, machine.ROOT / "tools/draw.py", results])
    if not problems:
        shutil.rmtree(directory)
    sys.exit(bool(problems))


if __name__ == "__main__":
    run_copy(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main()
