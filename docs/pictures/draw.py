# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of this directory from a training step on CPU: `make results ARGS=--pictures`.

Each run is a recipe itself, in which methods of torch and Accelerate are timed or watched. A
picture shows the last of two steps of a ResNet-50.

    pipeline.svg, ddp.svg   when two processes compute and communicate
    sharded.svg             what each of four processes holds in memory
    amp.svg                 which tensors have 16 bits
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
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FLAGS = "--data synthetic --stem imagenet --cpu --batch-size 32 --max-steps 2 --log-every 1"
found = []  # in this process


# ------------------------------------------------------------- pipeline and ddp: [what, begin, end]
TIMES = {"forward": "#4c78a8", "backward": "#f58518", "all-reduce": "#54a24b"}


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


def draw_times(axes, command):
    """Draw a bar for each event of the last step: one row per process, all-reduces below it."""
    traces = measure(command, processes=2)
    forwards = 8 if command.startswith("pipeline") else 1  # per step
    begins = [[event for event in trace if event[0] == "forward"][-forwards][1] for trace in traces]
    colors = {}
    for rank, (trace, begin) in enumerate(zip(traces, begins, strict=True)):
        for what, start, end in trace:
            if start >= begin:
                row = rank + 0.45 * (what == "all-reduce")
                colors[what] = TIMES[what]
                box = {"height": 0.4, "color": colors[what], "edgecolor": "white"}
                axes.barh(row, end - start, left=start - min(begins), **box)
    axes.set(yticks=(0, 1), yticklabels=("rank 0", "rank 1"), xlabel="seconds")
    return colors


# ------------------------------------------------------- sharded: bytes at rest, bytes at the peak
PARTS = {  # as FSDPMemTracker names them
    "parameters, sharded": ["Sharded Param"],
    "optimizer state, sharded": ["OptState"],
    "gradients, sharded": ["Sharded Grad"],
    "parameters, gathered": ["Unsharded Param", "All Gather"],
    "gradients, not yet sharded": ["Unsharded Grad", "Reduce Scatter"],
    "activations and their gradients": ["Activation", "Temp", "Inputs", "Buffer"],
}


def watch_sharded():
    accumulate = Accelerator.accumulate

    @contextmanager
    def counted(accelerator, model):
        tracker = FSDPMemTracker(model, accelerator._optimizers[0].optimizer)
        with accumulate(accelerator, model), tracker:
            at_rest = tracker.get_tracker_snapshot()
            yield
        found.clear()
        for snapshot in (at_rest, tracker.get_tracker_snapshot("peak")):
            [sizes] = snapshot.values()  # of the only device
            sizes = {getattr(key, "value", key): size for key, size in sizes.items()}
            found.append([sum(sizes[key] for key in keys) for keys in PARTS.values()])

    Accelerator.accumulate = counted


def draw_sharded(axes, command):
    ranks = measure(command, processes=4)
    for rank, snapshots in enumerate(ranks):
        for when, sizes in zip(("at rest", "peak"), snapshots, strict=True):
            for index, size in enumerate(sizes):
                left = sum(sizes[:index]) / 2**20
                axes.barh(f"rank {rank}, {when}", size / 2**20, left=left, color=f"C{index}")
    whole = 3 * sum(at_rest[0] for at_rest, _ in ranks) / 2**20
    axes.axvline(whole, color="black", linestyle="--")
    axes.set(xlabel="MiB (dashed: parameters, gradients and optimizer state, unsharded)")
    return {name: f"C{index}" for index, name in enumerate(PARTS)}


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


def draw_amp(axes, command):
    for kind, dtype, size in measure(command, processes=2)[0]:
        bar = axes.barh(kind, size / 2**20, color=DTYPES[dtype])
        axes.bar_label(bar, [f"{size / 2**20:.2g}"], padding=3)
    axes.set(xlabel="MiB", xlim=(0, 110))
    return DTYPES


# --------------------------------------------------------------------------------------------- main
PICTURES = {
    "pipeline": (draw_times, ["pipeline --schedule gpipe", "pipeline --schedule 1f1b"]),
    "ddp": (draw_times, ["ddp"]),
    "sharded": (draw_sharded, ["sharded"]),
    "amp": (draw_amp, ["amp --precision bf16"]),
}


def record(directory, name, *flags):
    """Run a recipe, in each process of the launcher, and write what was found."""
    globals()[f"watch_{name}"]()
    sys.argv[1:] = [*flags, "--output-dir", directory]
    runpy.run_path(str(ROOT / f"recipes/{name}_cifar.py"), run_name="__main__")
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def measure(command, processes):
    """Run a recipe; return what was found in each process."""
    with tempfile.TemporaryDirectory() as directory:
        line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        line += ["--config_file", ROOT / f"accelerate_configs/{processes}gpu.yaml", __file__]
        subprocess.run([*line, directory, *command.split(), *FLAGS.split()], check=True)
        paths = [Path(directory, f"{rank}.json") for rank in range(processes)]
        return [json.loads(path.read_text()) for path in paths]


def main():
    from matplotlib import pyplot

    pyplot.style.use(HERE / "svg.mplstyle")
    for name, (draw, commands) in PICTURES.items():
        size = (8, 2.5 * len(commands))
        figure, plots = pyplot.subplots(len(commands), figsize=size, squeeze=False)
        for axes, command in zip(plots[:, 0], commands, strict=True):
            colors = draw(axes, command)
            axes.set_title(command)
            axes.invert_yaxis()
            handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
            axes.legend(handles, colors, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.tight_layout()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    record(*sys.argv[1:]) if sys.argv[1:] else main()
