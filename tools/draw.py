# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/pictures/ from trainings on CPU: `make results ARGS=--pictures`.

    python tools/draw.py                       # all of them
    python tools/draw.py ddp amp               # some
    python tools/draw.py runs/check/mine.json  # one that check.py has written, beside it

Each run is a recipe itself, whose methods of torch and Accelerate are timed or watched. Most
pictures show the last step of a ResNet-50, and end with machine and date.

    check.svg               one training in many ways, by tools/check.py
    pipeline.svg, ddp.svg   when two processes compute and communicate
    sharded.svg             what a process holds in memory, beside ddp
    amp.svg                 which tensors have 16 bits, beside fp32
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from datetime import date
from pathlib import Path

try:
    from matplotlib import pyplot
    from matplotlib.patches import Patch
except ImportError:
    sys.exit("draw: no picture without matplotlib: pip install matplotlib")

import torch
from accelerate import Accelerator
from machine import ROOT, commit, hardware
from torch import distributed
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

PICTURES = ROOT / "docs/pictures"
RESNET = "--data synthetic --stem imagenet --cpu --max-steps 3"
found = []  # in this process


# ----------------------------------------------------------- check: one training in many ways
CHECK = "recipes/ddp_cifar.py --also recipes/sharded_cifar.py recipes/pipeline_cifar.py "
CHECK += "--processes 1 2 4 --kills 3 --data synthetic --model simple_cnn --cpu --lr 0.02 "
CHECK += "--batch-size 16 --max-steps 72"


def run_check():
    subprocess.run([sys.executable, "tools/check.py", *CHECK.split()], cwd=ROOT, check=True)
    return ROOT / "runs/check/ddp_cifar.json"


def draw_check(figure, results):
    """Draw what check.py has written: the loss, and how much it differs in each run."""
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
    if not ends:
        sys.exit("draw: no picture: no runs were compared")
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


# ------------------------------------------------------------- pipeline and ddp: [what, begin, end]
TIMES = {"forward": "#4c78a8", "backward": "#f58518", "all-reduce": "#54a24b"}
CHUNKS = 16
PIPELINE = f"{RESNET} --batch-size 512 --chunks {CHUNKS} --split layer3.5"


def timed(what, function):
    def inner(*args, **kwargs):
        begin = time.time()
        result = function(*args, **kwargs)
        if torch.is_grad_enabled():  # not in evaluations
            found.append([what, begin, time.time()])
        return result

    return inner


def timed_all_reduce(group, bucket):
    """Average a bucket of gradients as DDP does, and note how long it was under way."""
    begin = time.time()

    def finish(future):
        found.append(["all-reduce", begin, time.time()])
        return future.value()

    return allreduce_hook(group, bucket).then(finish)


def watch_pipeline():
    for what in ("forward", "backward"):
        method = f"{what}_one_chunk"
        setattr(PipelineStage, method, timed(what, getattr(PipelineStage, method)))


def watch_ddp():
    make_ddp = DistributedDataParallel.__init__

    def make(ddp, *args, **kwargs):
        make_ddp(ddp, *args, **kwargs)
        ddp.register_comm_hook(distributed.group.WORLD, timed_all_reduce)

    DistributedDataParallel.__init__ = make
    DistributedDataParallel.forward = timed("forward", DistributedDataParallel.forward)
    Accelerator.backward = timed("backward", Accelerator.backward)


def last_step(traces, forwards):
    """Return each rank's events in its last step, in which there are so many forward passes, by
    their begin, in seconds since the first one."""
    begins = [[event for event in trace if event[0] == "forward"][-forwards][1] for trace in traces]
    return [
        sorted(
            (start - min(begins), end - min(begins), what)
            for what, start, end in trace
            if start >= begin
        )
        for trace, begin in zip(traces, begins, strict=True)
    ]


def bar(axes, row, start, end, what, height=0.8):
    box = {"height": height, "color": TIMES[what], "edgecolor": "white", "linewidth": 0.5}
    axes.barh(row, end - start, left=start, **box)


def draw_pipeline(figure):
    for axes, schedule in zip(figure.subplots(2), ("gpipe", "1f1b"), strict=True):
        traces = measure(2, "pipeline", f"{PIPELINE} --schedule {schedule}", "pipeline")
        ranks = last_step(traces, CHUNKS)
        total = max(end for events in ranks for _, end, _ in events)
        for rank, events in enumerate(ranks):
            for event in events:
                bar(axes, f"stage {rank + 1}", *event)
            idle = 1 - sum(end - start for start, end, _ in events) / total
            axes.text(1.01 * total, rank, f"{idle:.0%} idle", va="center")
        axes.set(xlabel="seconds", xlim=(0, 1.12 * total), title=f"--schedule {schedule}")
        axes.invert_yaxis()
    formula = f"measured; ideal, with two equal stages: 1 / ({CHUNKS} + 1) = {1 / (CHUNKS + 1):.0%}"
    figure.suptitle(f"ResNet-50, ImageNet stem, batch 512; {formula}")
    legend(figure, {name: TIMES[name] for name in ("forward", "backward")})


def draw_ddp(figure):
    axes = figure.subplots()
    ranks = last_step(measure(2, "ddp", f"{RESNET} --batch-size 32", "ddp"), 1)
    for rank, events in enumerate(ranks):
        for start, end, what in events:
            below = what == "all-reduce"  # beside the computation, which continues
            bar(axes, rank + 0.35 * below, start, end, what, 0.3)
    axes.set(yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in range(len(ranks))])
    axes.set(xlabel="seconds", title="ResNet-50, ImageNet stem, batch 32 per process")
    axes.invert_yaxis()
    legend(
        figure,
        {
            "all-reduce (includes waiting)" if x == "all-reduce" else x: color
            for x, color in TIMES.items()
        },
    )


# --------------------------------------------------------- sharded: bytes at the peak, by their use
PARTS = {  # as MemTracker and FSDPMemTracker name them
    "parameters": ["Parameter", "Sharded Param"],
    "optimizer state": ["Optstate", "OptState"],
    "gradients": ["Gradient", "Other", "Sharded Grad"],
    "parameters, gathered": ["Unsharded Param", "All Gather"],
    "gradients, not yet sharded": ["Unsharded Grad", "Reduce Scatter"],
    "activations, temporary tensors": ["Activation", "Temp", "Inputs", "Buffer"],
}


def watch_memory():
    accumulate = Accelerator.accumulate
    buckets = []  # DDP's, of the newest step

    def keep(group, bucket):
        buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    @contextmanager
    def counted(accelerator, model):
        optimizer = accelerator._optimizers[0].optimizer
        if isinstance(model, DistributedDataParallel):
            if not hasattr(model, "hooked"):
                model.hooked = model.register_comm_hook(distributed.group.WORLD, keep)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *buckets)
        else:
            tracker = FSDPMemTracker(model, optimizer)
        buckets.clear()
        with accumulate(accelerator, model), tracker:
            yield
        [sizes] = tracker.get_tracker_snapshot("peak").values()  # of the only device
        sizes = {getattr(key, "value", key): size for key, size in sizes.items()}
        found[:] = [sum(sizes.get(key, 0) for key in keys) for keys in PARTS.values()]

    Accelerator.accumulate = counted


def draw_sharded(figure):
    axes = figure.subplots()
    for recipe in ("ddp", "sharded"):
        left = 0
        for index, size in enumerate(measure(4, recipe, f"{RESNET} --batch-size 8", "memory")[0]):
            axes.barh(recipe, size / 2**20, left=left, color=f"C{index}")
            left += size / 2**20
        axes.text(left, recipe, f" {left:.0f} MiB", va="center")
    axes.set(
        xlabel="MiB of rank 0", title="At the peak: ResNet-50, ImageNet stem, batch 8 per process"
    )
    axes.set(xlim=(0, 1.15 * axes.get_xlim()[1]))
    axes.invert_yaxis()
    legend(figure, {name: f"C{index}" for index, name in enumerate(PARTS)})


# ----------------------------------------------------------------------- amp: [kind, dtype, bytes]
DTYPES = {"torch.float32": "#4c78a8", "torch.bfloat16": "#f58518"}


def watch_amp():
    accumulate = Accelerator.accumulate
    sizes = Counter()

    def count(module, _, output):
        if not [*module.children()]:
            sizes[f"outputs of {type(module).__name__}", str(output.dtype)] += output.nbytes

    @contextmanager
    def counted(accelerator, model):
        sizes.clear()
        with accumulate(accelerator, model):
            yield
        for parameter, state in accelerator._optimizers[0].optimizer.state.items():
            tensors = {"parameters": parameter, "gradients": parameter.grad, **state}
            for kind, tensor in tensors.items():
                sizes[kind.replace("_buffer", ""), str(tensor.dtype)] += tensor.nbytes
        found[:] = [[*key, size] for key, size in sizes.items()]

    register_module_forward_hook(count)
    Accelerator.accumulate = counted


def draw_amp(figure):
    axes = figure.subplots()
    rows = []
    for offset, precision in ((-0.2, "fp32"), (0.2, "bf16")):
        flags = f"{RESNET} --batch-size 128 --precision {precision}"
        for kind, dtype, size in measure(2, "amp", flags, "amp")[0]:
            if size > 2**22:
                rows += [kind] * (kind not in rows)
                row = rows.index(kind) + offset
                drawn = axes.barh(row, size / 2**20, height=0.36, color=DTYPES[dtype])
                axes.bar_label(drawn, [f"{size / 2**20:.0f} ({precision})"], padding=3)
    axes.set(yticks=range(len(rows)), yticklabels=rows, xlabel="MiB (kinds above 4 MiB)")
    axes.set(xlim=(0, 1.2 * axes.get_xlim()[1]))
    axes.set(title="--precision fp32 and bf16: ResNet-50, ImageNet stem, batch 128 per process")
    axes.invert_yaxis()
    legend(figure, {name.removeprefix("torch."): color for name, color in DTYPES.items()})


# --------------------------------------------------------------------------------------------- main
DRAWN = {
    "pipeline": (draw_pipeline, (8, 4)),
    "ddp": (draw_ddp, (8, 4)),
    "sharded": (draw_sharded, (8, 2.6)),
    "amp": (draw_amp, (8, 4)),
}


def legend(figure, colors):
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def record(watch, recipe, *flags):
    """Run a recipe, in each process of the launcher, and write what was found."""
    globals()[f"watch_{watch}"]()
    sys.argv[1:] = flags
    runpy.run_path(recipe, run_name="__main__")
    Path(flags[-1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def measure(processes, recipe, flags, watch):
    """Run a recipe; return what was found in each process."""
    config, recipe = f"accelerate_configs/{processes}gpu.yaml", f"recipes/{recipe}_cifar.py"
    line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    line += ["--config_file", config, __file__, "record", watch, recipe, *flags.split()]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([*line, "--output-dir", directory], cwd=ROOT, check=True)
        paths = [Path(directory, f"{rank}.json") for rank in range(processes)]
        return [json.loads(path.read_text()) for path in paths]


def main(*names):
    pyplot.style.use(PICTURES / "svg.mplstyle")
    for name in names or ["check", *DRAWN]:
        if name == "check" or name.endswith(".json"):
            results = Path(run_check() if name == "check" else name)
            figure = pyplot.figure(figsize=(8, 5), layout="constrained")
            draw_check(figure, json.loads(results.read_text()))
            path = PICTURES / "check.svg" if name == "check" else results.with_suffix(".svg")
            figure.savefig(path, metadata={"Date": None})
            continue
        draw, size = DRAWN[name]
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        where = f"{hardware(0)}; torch {torch.__version__}; {date.today()}; commit {commit()}"
        figure.text(0.01, 0, where, va="top", fontsize=8)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    record(*sys.argv[2:]) if sys.argv[1:2] == ["record"] else main(*sys.argv[1:])
