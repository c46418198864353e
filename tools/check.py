# SPDX-License-Identifier: Apache-2.0
"""Check that a copy of a recipe trains the same in every way on this machine: `make check`.

    python tools/check.py recipes/ddp_cifar.py --data synthetic --model simple_cnn
    python tools/check.py ../mine/train.py --text a.txt --cpu

Other flags are the copy's. It trains 12 steps, or if an epoch has 12 to 48 steps, four more than
these (--max-steps), with one size of microbatches: on one process, on two, on all GPUs, and on two
that SIGKILL ends in mid-epoch before a rerun resumes; a pipeline on two and four. All metrics of
all steps and the final weights have to be the same, after the kill bit for bit (CPU). On another
number of processes rounding differs, and training amplifies it. A perturbed run measures it: the
first run, with weights changed by 1e-5 of their values before the first update. Bounds are ten
times its differences. One above 1% tells nothing: that number is not judged, and from the step on
in which it is the loss or grad_norm, no number is. Then the learning rate is lowered, to a tenth
and to a thousandth. One step with microbatches of half the size is compared, too: a difference
there is reported, and no failure. Exit status 1: a run fails or differs; 3: the same, as far as
steps can be judged. Writes runs/check/NAME.json and .svg.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import plot
import running
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from shared_block import check_names, parts
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

CHANGE = 1e-5  # of the weights of the perturbed run; a difference that is always allowed
MARGIN = 10  # rounding moves a number by a hundredth of what that does, or as much
LIMIT = 0.01  # other trainings of the same model meet a larger bound
UNMOVED = torch.finfo(torch.float32).eps  # what rounding of a mean may do, such as of an accuracy
DECISIVE = ("loss", "grad_norm")
SMOOTH = (*DECISIVE, "test_loss", "learning_rate")
RATE_ROUNDING = 1e-12  # of a learning rate: thousands of roundings of float64
RATES = (1, 10, 1000)  # divisors of the learning rate: a lower one amplifies less
STEPS = 12  # or BEYOND_EPOCH more than an epoch has, if it has no more than LONGEST_EPOCH
BEYOND_EPOCH = 4
LONGEST_EPOCH = 48
# A run hangs that is in one step for so many times the longest step of the reference, and for so
# many seconds: other runs may share its processor, or those of other programs.
SLOWER = 50
LEAST_PATIENCE = 120
NO_BOUND = sys.float_info.max  # JSON has no infinity
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
# Whatever the copy says of cuBLAS's and cuDNN's precision and algorithms.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"  # torchrun's default: processes then divide the cores
# Names in metrics.jsonl that are not of the training, but of the machine and the moment.
MEASURED = {"event", "epoch", "step", "time", "seconds", "save_seconds", "samples_per_second"}
MEASURED |= {"data_wait", "slowest_rank", "peak_memory_gib"}
BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
BY_RANK = "Equal numbers of processes train the same, others do not: data, dropout or the loss "
BY_RANK += "depend on RANK or WORLD_SIZE, the loss depends on the microbatches of all ranks, or "
BY_RANK += "the forward pass updates a state, such as a codebook"
DIVIDED = "depends on how the batch is divided (BatchNorm, dropout, negatives within a microbatch, "
DIVIDED += 'a sum in place of a mean, a mean over tokens without "weight"): no failure'
AFTER_A_KILL = "Only the run that was killed differs: the copy has a state that is in no checkpoint"
AFTER_A_KILL += ", such as an attribute that the forward pass changes: make it a buffer"
SLOW = ": if it is slow and does not hang, add --hang-timeout SECONDS"
CAUSES = "Known causes and their remedies: docs/check.md"


def run_copy(task, copy, *flags):
    """Run a copy as the program of this process. `task` is "train", "change" to change the weights
    before the first update, or a checkpoint's name: SIGKILL in the first step after it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    generator = torch.Generator().manual_seed(0)
    changed = []  # optimizers

    @torch.no_grad()
    def change(optimizer, *_):
        if optimizer in changed:
            return
        changed.append(optimizer)
        for parameter in (x for group in optimizer.param_groups for x in group["params"]):
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # sharded
            noise = torch.randn(own.shape, generator=generator).to(own)
            own += own * noise * max(CHANGE, torch.finfo(own.dtype).eps)

    def kill(*_):
        patience = time.monotonic() + 10
        while any(Path(flags[-1]).glob("*.tmp")) and time.monotonic() < patience:
            time.sleep(0.01)  # until a save in the background is done, or the run might end first
        if any(Path(flags[-1]).glob(f"{task}*")):
            os.kill(os.getpid(), signal.SIGKILL)

    if task == "change":
        register_optimizer_step_pre_hook(change)
    elif task != "train":
        register_optimizer_step_post_hook(kill)
    running.run_script(copy, *flags)


def train(run, output):
    """Train to the end, and again after each kill. Return its `values_of`. If it fails, put a
    verdict and a reason into the run."""
    for number, task in enumerate(run["tasks"], 1):
        command = [sys.executable, *TORCHRUN, run["processes"], __file__, "run", task, run["copy"]]
        command = [str(x) for x in (*command, *run["flags"], "--output-dir", output)]
        code, lines = running.execute(command, {**os.environ, **ENVIRONMENT}, timeout=1e6)
        text = "".join(line for _, line in lines)
        log = output.with_name(f"{output.name}.{number}.txt")
        log.write_text(text)
        last = number == len(run["tasks"])
        if last != (code == 0) or not (last or any(output.glob(f"{task}*"))):
            steps = re.findall(r"^step (\d+)/", text, re.MULTILINE)
            run["verdict"] = f"fails after step {steps[-1]}" if steps else "fails in step 1"
            error = error_of(run["copy"], text)
            run["reason"] = f"{error}{SLOW if ': no step for ' in error else ''} ({log})"
            return {}
    begin = json.loads((output / "summary.json").read_text())["resumed_from"]
    expected = [0, *(int(task.removeprefix("step-")) for task in run["tasks"][:-1])][-1]
    if begin != expected:
        run |= {"verdict": "fails", "reason": f"it resumed from step {begin}, not {expected}"}
    return values_of(output)


def values_of(output):
    """Return {(step, event, name): value} of a run, of numbers and of the final weights."""
    values = {}
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        names = [name for name in line if name not in MEASURED]
        values |= {(line["step"], line["event"], name): line[name] for name in names}
    weights = load_file(output / "model.safetensors").items()
    return values | {(line["step"], "weights", name): tensor for name, tensor in weights}


def error_of(copy, text):
    """Return the line of an output that says why a run has failed: the copy's own, that of an
    exception, or the launcher's."""
    own = rf"^{re.escape(Path(copy).stem)}: error: .*"
    exception = r"^(?!torch\.distributed\.elastic)[\w.]+(?:Error|Exception)\b.*"
    for pattern in (own, exception, r"Signal \d+ .*", r"\S.*(?=\s*\Z)"):
        if found := re.search(pattern, text, re.MULTILINE):
            return found[0]
    return "no output"


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
        size = difference(*values)
        bound = max(bounds[key], RATE_ROUNDING if name == "learning_rate" else 0.0)
        values = [x.double().norm().item() if torch.is_tensor(x) else x for x in values]
        found = {"step": step, "event": event, "metric": name, "values": values}
        run["differences"].append({**found, "difference": size, "bound": bound})
        if size > bound and not run["reason"]:
            one, other = (math.nan if x is None else x for x in values)
            run["verdict"] = f"differs at step {step}"
            run["reason"] = f"{name} {one:.9g} and {other:.9g}, by {size:.1g}"
        elif size and not run["reason"]:
            run["verdict"] = "the same"
    unknown = [x for x in run["differences"] if x["metric"] in DECISIVE and x["bound"] > LIMIT]
    if unknown and run["verdict"] == "the same":
        last, run["undecided"] = unknown[0]["step"] - 1, unknown[0]["metric"]
        run["verdict"] = f"the same up to step {last}" if last else "not judged"


def judged_of(run):
    """Return the differences that have a bound, and the one nearest to its bound in words."""
    judged = [x for x in run["differences"] if x["bound"] < NO_BOUND]
    worst = max(judged, key=lambda x: x["difference"] / (x["bound"] or CHANGE), default=None)
    words = "{difference:.1g} of {bound:.1g}, {metric}, step {step}"
    return judged, words.format(**worst) if worst else ""


def bounds_of(differences, least=CHANGE):
    """Return {(step, event, name): bound}, none below `least`, and the last step that can be
    judged."""
    largest, bounds = defaultdict(float), defaultdict(lambda: LIMIT)
    for x in differences:
        name = x["metric"]
        largest[name] = max(largest[name], x["difference"])
        bound = max(least, MARGIN * largest[name])
        # A metric of the copy's own that has not moved may change in jumps, as an accuracy does.
        if largest[name] <= UNMOVED and name not in SMOOTH and x["event"] != "weights":
            bound = LIMIT
        for step in {max(1, x["step"] - 1), x["step"]}:  # in one of them it may pass through 0
            bounds[step, x["event"], name] = bound if bound <= LIMIT else NO_BOUND
    unknown = [key[0] for key in bounds if key[2] in DECISIVE and bounds[key] == NO_BOUND]
    last = min(unknown, default=math.inf) - 1
    return bounds | {key: NO_BOUND for key in bounds if key[0] > last}, last


class Check:
    """The runs of a copy: the reference, the perturbed one, the others."""

    def __init__(self, args, directory, console):
        self.args, self.directory, self.console = args, directory, console
        self.runs, self.values = [], {}

    def add(self, name, against="", bounds=None, **given):
        """Train in one way, compare, and return the run."""
        first = self.args.processes[0]
        run = {"name": name, "against": against, "processes": first, "copy": self.args.copy}
        run |= {"flags": self.args.flags, "tasks": ["train"], "differences": [], **given}
        run |= {"verdict": "", "reason": "", "undecided": "", "remark": ""}
        shutil.rmtree(self.directory / name, ignore_errors=True)  # of a higher learning rate
        with self.console.status(f"{name} ..."):
            self.values[name] = train(run, self.directory / name)
        if against and not run["reason"]:
            same = run["processes"] == first or run["tasks"][1:]  # as the one it is compared with
            left_out = () if same else BATCHNORM
            compare(run, self.values[name], self.values[against], bounds, left_out)
        if name == "perturbed" and not run["reason"]:
            run |= {"verdict": "", "undecided": ""}  # it is the measure
        else:
            self.console.print(f"{name}: {run['verdict'] or 'done'}")
        self.runs.append(run)
        return run

    def all(self):
        """Train in all ways, as far as the results can be compared. Return the runs."""
        first, *more = self.args.processes
        name = f"{first} process{'es' * (first > 1)}"
        compared = more or self.args.also or self.args.gpus
        if not self.add_reference(name) or (compared and not self.add_perturbed(name)):
            return self.runs
        for number in more:
            self.add(f"{number} processes", name, self.bounds, processes=number)
        for path in self.args.also:
            self.add(f"{path.stem} on 2", name, self.bounds, processes=2, copy=path)
        whole = self.runs[2] if more else self.runs[0]
        if compared and self.args.batch % 2 == 0:
            self.add_half(name)
        if whole["differences"] or not whole["reason"]:
            self.add_killed(whole)
        return self.runs

    def add_reference(self, name):
        """Train the reference, up to the second epoch if it is near. Set the time after which the
        other runs hang. Return whether it has trained."""
        if self.add(name)["reason"]:
            return False
        output = self.directory / name
        summary = json.loads((output / "summary.json").read_text())
        epoch = summary["steps_per_epoch"]
        if not self.args.max_steps and STEPS <= epoch <= LONGEST_EPOCH:
            self.args.max_steps = epoch + BEYOND_EPOCH
            self.console.print(f"up to the second epoch: --max-steps {self.args.max_steps}")
            self.args.flags += ["--max-steps", self.args.max_steps]
            self.runs.clear()
            return self.add_reference(name)
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        longest = max(line.get("seconds", 0.0) for line in lines)
        patience = max(LEAST_PATIENCE, SLOWER * longest)
        self.args.flags = ["--hang-timeout", round(patience), *self.args.flags]
        return True

    def add_half(self, name):
        """Train one step with microbatches of half the size. A difference is only reported."""
        size = self.args.batch // 2
        flags = [*self.args.flags, "--max-steps", 1, "--batch-size", size]
        run = self.add(f"microbatches of {size}", flags=flags)
        run["against"] = name
        if not run["reason"]:
            first = [
                {key: x for key, x in self.values[one].items() if key[:2] == (1, "train")}
                for one in (run["name"], name)
            ]
            rate = {(1, "train", "learning_rate"): NO_BOUND}  # by the number of steps
            compare(run, *first, self.bounds | rate, ())
        if run["reason"]:
            run |= {"remark": f"{run['reason']}: {DIVIDED}", "reason": "", "verdict": "reported"}

    def add_perturbed(self, name):
        """Set the bounds. If they judge some of the steps only, begin again at a lower learning
        rate. Return whether they can be set."""
        summary = json.loads((self.directory / name / "summary.json").read_text())
        flags = self.args.flags
        unchanged = defaultdict(lambda: NO_BOUND)  # step 1 computes with the reference's weights
        unchanged |= {(1, "train", x): CHANGE if self.args.gpus else 0.0 for x in DECISIVE}
        for divisor in RATES:
            if divisor > 1:
                self.args.flags = [*flags, "--lr", summary["lr"] / divisor]
                self.console.print(f"a lower rate amplifies less: --lr {summary['lr'] / divisor:g}")
                self.runs.clear()
                if self.add(name)["reason"]:
                    return False
            perturbed = self.add("perturbed", name, unchanged, tasks=["change"])
            if perturbed["reason"]:
                perturbed["reason"] += ", in two equal runs"
                return False
            # Weights in 16 bits, which may be frozen and so not perturbed, round by more.
            tensors = [x for x in self.values[name].values() if torch.is_tensor(x)]
            units = [torch.finfo(x.dtype).eps / 2 for x in tensors if x.is_floating_point()]
            self.bounds, last = bounds_of(perturbed["differences"], max(CHANGE, *units))
            judged = min(last, summary["steps"])
            self.console.print(f"perturbed: judges {judged} of {summary['steps']} steps")
            if judged == summary["steps"]:
                break
        return True

    def add_killed(self, whole):
        """Kill a run and resume it, and compare it with `whole`."""
        args = self.args
        summary = json.loads((self.directory / whole["name"] / "summary.json").read_text())
        kills = range(1, args.kills + 1)
        every = max(1, (2 * summary["steps"] - 2) // (2 * args.kills + 1))
        epoch = summary["steps_per_epoch"]
        every = next((n for n in range(every, 0, -1) if all(n * k % epoch for k in kills)), every)
        tasks = [*(f"step-{every * k:08}" for k in kills), "train"]
        flags = ["--checkpoint-every", every, *args.flags]
        given = {"processes": whole["processes"], "tasks": tasks, "flags": flags}
        bounds = defaultdict(float)
        if args.gpus:  # they may round in another way, but not much in the first step, if not noisy
            later = {key: bound for key, bound in self.bounds.items() if key[0] > 1}
            bounds = defaultdict(lambda: CHANGE, later)
        self.add(f"{whole['name']}, killed", whole["name"], bounds, **given)


def exit_with_error(message):
    print(f"check: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("copy", type=Path, help="a copy of ddp, amp, sharded or pipeline; its flags follow")
    add("--processes", type=int, nargs="+", help="numbers to compare (1, 2 and all GPUs)")
    add("--also", type=Path, nargs="+", default=[], help="other recipes, on two processes")
    add("--kills", type=int, default=1, help="how often SIGKILL ends the killed run (1)")
    add("--max-steps", type=int, help="of a run (12, or some more to reach the second epoch)")
    add("--batch-size", type=int, help="of a microbatch (8; pipeline: 16)")
    add("--global-batch-size", type=int, help="of a step")
    parser.error = exit_with_error
    args, flags = parser.parse_known_args()
    args.copy = args.copy.expanduser()
    for path in (args.copy, *args.also):
        if not path.is_file():
            parser.error(f"there is no file {path}")
        try:
            own, _, block = parts(path)
            check_names(path, own, block)
        except (OSError, SyntaxError, ValueError) as error:
            parser.error(str(error))
    args.gpus = 0 if "--cpu" in flags else torch.cuda.device_count()
    stages = 2 if "--chunks" in args.copy.read_text() else 1
    counts = sorted({stages, 2 * stages, args.gpus // stages * stages} - {0})
    args.processes = args.processes or [n for n in counts if n <= max(args.gpus or n, stages)]
    args.batch = args.batch_size or 8 * stages
    share = args.batch * math.lcm(*(n // stages for n in args.processes))
    total = args.global_batch_size or 2 * share
    if total % share:
        parser.error(f"argument --global-batch-size: choose a multiple of {share}")
    args.flags = [*flags, "--log-every", 1, "--max-steps", args.max_steps or STEPS]
    args.flags += ["--batch-size", args.batch, "--global-batch-size", total]
    return args


def draw(content, path):
    try:
        plot.draw_check(content).savefig(path, metadata={"Date": None})
    except ImportError:
        print("check: no picture without matplotlib: pip install matplotlib", file=sys.stderr)


def main():
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    console = Console(markup=False, width=None if sys.stdout.isatty() else 100)
    results = Path("runs/check", f"{args.copy.stem}.json")
    directory = results.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    content = running.describe(args.gpus) | {"gpus": args.gpus}
    content |= {"runs": (runs := Check(args, directory, console).all())}
    table = Table("run", "compared with", "judged", "nearest to its bound", "verdict", box=None)
    for run in (run for run in runs[1:] if run["name"] != "perturbed"):
        judged, nearest = judged_of(run)
        count = f"{len(judged)} of {len(run['differences'])}"
        table.add_row(run["name"], run["against"], count, nearest, run["verdict"])
    problems = [f"{x['name']}: {x['verdict']}: {x['reason']}" for x in runs if x["reason"]]
    causes = [CAUSES] if problems and runs[1:] else []
    last = runs[-1]
    if last["verdict"] == "bit for bit" and any(x["verdict"] == "differs at step 1" for x in runs):
        causes.insert(0, BY_RANK)
    if len(problems) == 1 and last["tasks"][1:] and last["verdict"].startswith("differs"):
        causes.insert(0, AFTER_A_KILL)
    remarks = [f"{x['name']}: {x['remark']}" for x in runs if x["remark"]]
    line = "{name}: {verdict}; later, rounding decides {undecided}"
    unknown = [line.format(**run) for run in runs if run["undecided"]]
    console.print(table, *problems, *unknown, *remarks, *causes, sep="\n", soft_wrap=True)
    text = json.dumps(content, indent=1, default=str)
    results.write_text(f"{text}\n")
    if any(run["differences"] for run in runs):
        draw(json.loads(text), results.with_suffix(".svg"))
    if not (problems or unknown):
        shutil.rmtree(directory)
    sys.exit(1 if problems else 3 if unknown else 0)


if __name__ == "__main__":
    run_copy(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main()
