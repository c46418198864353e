# SPDX-License-Identifier: Apache-2.0
"""Pictures of what the processes of a pipeline and of DDP do in a training step, measured on CPU:
`make results ARGS=--pictures`, which writes results/pipeline.svg and results/ddp.svg.

Each run is a recipe's own `main` on two processes, in which torch's PipelineStage or
DistributedDataParallel is timed. The picture shows the last step.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import ROOT, run_recipe
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

RUNS = {
    "pipeline": ["pipeline_cifar --schedule gpipe", "pipeline_cifar --schedule 1f1b"],
    "ddp": ["ddp_cifar"],
}
COMMON = "--data synthetic --stem imagenet --cpu --batch-size 32 --max-steps 2 --log-every 1"
COLORS = {"forward": "#4c78a8", "backward": "#f58518", "all-reduce": "#54a24b"}
events = []  # of this process: [what, begin, end] in seconds


def timed(what, function):
    def inner(*args, **kwargs):
        begin = time.time()
        result = function(*args, **kwargs)
        events.append([what, begin, time.time()])
        return result

    return inner


def timed_all_reduce(group, bucket):
    """Average a bucket of gradients as DDP does, and note how long it was under way."""
    begin = time.time()

    def finish(future):
        events.append(["all-reduce", begin, time.time()])
        return future.value()

    return allreduce_hook(group, bucket).then(finish)


def record(directory, name, *flags):
    """Run a recipe, in each process of the launcher, and write its events."""
    import accelerate

    make_ddp = DistributedDataParallel.__init__

    def make(ddp, *args, **kwargs):
        make_ddp(ddp, *args, **kwargs)
        ddp.register_comm_hook(distributed.group.WORLD, timed_all_reduce)

    if name == "pipeline_cifar":
        for what in ("forward", "backward"):
            method = f"{what}_one_chunk"
            setattr(PipelineStage, method, timed(what, getattr(PipelineStage, method)))
    else:
        forward, backward = DistributedDataParallel.forward, accelerate.Accelerator.backward
        DistributedDataParallel.__init__ = make
        DistributedDataParallel.forward = timed("forward", forward)
        accelerate.Accelerator.backward = timed("backward", backward)
    run_recipe(name, *flags, "--output-dir", directory)
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(events))


def traces(recipe):
    """Run a recipe on two processes; return the events of each in its last step."""
    with tempfile.TemporaryDirectory() as directory:
        line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        line += ["--config_file", ROOT / "accelerate_configs/2gpu.yaml", __file__, directory]
        subprocess.run([*line, *recipe.split(), *COMMON.split()], check=True)
        found = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in (0, 1)]
    forwards = 8 if recipe.startswith("pipeline") else 1  # per step
    begins = [[event for event in each if event[0] == "forward"][-forwards][1] for each in found]
    last = [
        [event for event in each if event[1] >= begin]
        for each, begin in zip(found, begins, strict=True)
    ]
    start = min(event[1] for each in last for event in each)
    return [[[what, a - start, b - start] for what, a, b in each] for each in last]


def draw(kind, results, pyplot):
    """Measure, and draw a bar for each event: one row per process, all-reduces below it."""
    figure, plots = pyplot.subplots(
        len(RUNS[kind]), figsize=(8, 2 * len(RUNS[kind])), squeeze=False
    )
    for axes, recipe in zip(plots[:, 0], RUNS[kind], strict=True):
        for rank, found in enumerate(traces(recipe)):
            for what, begin, end in found:
                row = rank + 0.45 * (what == "all-reduce")
                box = {"height": 0.4, "color": COLORS[what], "edgecolor": "white"}
                axes.barh(row, end - begin, left=begin, **box)
        axes.set(title=recipe, yticks=(0, 1), yticklabels=("rank 0", "rank 1"), xlabel="seconds")
        axes.invert_yaxis()
        names = [name for name in COLORS if kind == "ddp" or name != "all-reduce"]
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in names]
        axes.legend(handles, names, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(results / f"{kind}.svg", metadata={"Date": None})


if __name__ == "__main__":
    record(*sys.argv[1:])
