"""Run by gpu_report_parts.py, as a process of forked.py:

    timed_training.py CHANGE STEPS SECONDS RECIPE FLAGS...

A recipe as bench.py measures it (`measure_training`), with one thing changed, or timed; "epoch" is
its own `main`. Writes what it has timed to timings.json: {name: the seconds of every time}. Where
RANK is set, the model is in DDP, also on one GPU. The run fails if the change was not made, or if
DDP left a compiled model in one piece.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import accelerate
import torch
from conftest import ddp_on_one_rank, load
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.profiler import ProfilerActivity, profile, schedule

change, least_steps, least_seconds, name, *flags = sys.argv[1:]
sys.argv = [name, *flags]
bench = load("benchmarks/bench.py")
recipe = bench.load(name)
cuda = torch.cuda.is_available()
seconds = defaultdict(list)
SGD = torch.optim.SGD
made = []  # what is to be measured, each time that it was made
gradient_bytes = []  # of each model in DDP
partitions = []  # of each graph of a compiled model in DDP


def write():
    Path("timings.json").write_text(json.dumps(seconds))


def wait():
    if cuda:
        torch.cuda.synchronize()


def timed(name, function, whole=False):
    """Return the function so that its time is kept: the host's, or with `whole` until the device is
    ready."""

    def inner(*args, **options):
        if whole:
            wait()
        before = time.perf_counter()
        result = function(*args, **options)
        if whole:
            wait()
        seconds[name].append(time.perf_counter() - before)
        if whole:  # rare ones: they are kept when the time is over
            write()
        return result

    return inner


def after_each_step(before, after):
    """Call these functions around each step of the training."""
    left_in = recipe.Steps.left_in

    def watched(steps, epoch):
        before()
        for each in left_in(steps, epoch):
            yield each
            after()
            before()

    recipe.Steps.left_in = watched


def time_the_parts():
    """Each step begins when the device is ready, or the host would wait for it in one of the
    parts."""
    began = []
    batches_of = recipe.Steps.timed

    def begin():
        wait()
        began[:] = [time.perf_counter()]

    def end():
        seconds["step"].append(time.perf_counter() - began[0])

    def batches(steps, loader):
        inner = batches_of(steps, loader)
        draw = timed("data", next)
        while (batch := draw(inner, None)) is not None:
            yield batch

    optimizer = accelerate.optimizer.AcceleratedOptimizer
    host = {
        "seed_rng": (recipe, "seed_rng"),
        "compute_loss": (recipe, "compute_loss"),
        "backward": (accelerate.Accelerator, "backward"),
        "optimizer": (optimizer, "step"),
        "zero_grad": (optimizer, "zero_grad"),
        "schedule": (torch.optim.lr_scheduler.LambdaLR, "step"),
        "metrics": (recipe.Metrics, "add"),
        "hang": (recipe.HangDetector, "made_progress"),
        "signals": (recipe.StopSignal, "requested"),
    }
    for part, (owner, attribute) in host.items():
        setattr(owner, attribute, timed(part, getattr(owner, attribute)))
    recipe.Steps.timed = batches
    after_each_step(begin, end)


class DDP(torch.nn.parallel.DistributedDataParallel):
    """Notes that it was made."""

    kind = "DDP"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        made.append(self.kind)
        gradient_bytes.append(sum(p.nbytes for p in self.parameters() if p.requires_grad))


class AlwaysBroadcast(DDP):
    """The recipes switch it off after it is made."""

    kind = "broadcast buffers"
    broadcast_buffers = property(lambda self: True, lambda self, value: None)


class BatchedCopy(DDP):
    """Of torch 2.15 on; Accelerate's DistributedDataParallelKwargs does not know it."""

    kind = "batched gradient copy"

    def __init__(self, *args, **options):
        super().__init__(*args, batched_grad_copy=True, **options)


def foreach_sgd(*args, **options):
    made.append("foreach SGD")
    return SGD(*args, **{**options, "fused": False, "foreach": True})


def count_partitions():
    """Keep into how many parts, each compiled by itself, DDP splits a compiled model: between them
    it can send gradients."""
    compile_fn = DDPOptimizer.compile_fn

    def counted(optimizer, *args, **options):
        compiled = compile_fn(optimizer, *args, **options)
        partitions.append(len(optimizer.buckets))
        return compiled

    DDPOptimizer.compile_fn = counted


def save_profile(profiler):
    kind = "device" if cuda else "cpu"
    for order in ("self_cpu_time_total", f"self_{kind}_time_total"):
        averages = profiler.key_averages()
        table = averages.table(sort_by=order, row_limit=30, max_name_column_width=70)
        Path(f"{order}.txt").write_text(f"{profiled_steps} steps\n{table}\n")
    profiler.export_chrome_trace("trace.json.gz")


kinds = {kind.kind: kind for kind in (AlwaysBroadcast, BatchedCopy)}
changes = ["nothing", *kinds, "foreach SGD", "parts", "profile", "epoch"]
if change not in changes:
    sys.exit(f"timed_training: no change {change!r}, choose from {', '.join(changes)}")
ddp_on_one_rank()
count_partitions()
torch.nn.parallel.DistributedDataParallel = kinds.get(change, DDP)
if change == "foreach SGD":
    torch.optim.SGD = foreach_sgd
elif change == "parts":
    time_the_parts()

write()
if change == "profile":
    first, profiled_steps = (20, 10) if cuda else (1, 2)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(wait=first, warmup=2, active=profiled_steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=save_profile) as profiler:
        after_each_step(lambda: None, profiler.step)
        bench.measure_training(recipe, least_steps, least_seconds)
elif change == "epoch":
    recipe.Checkpoints.save = timed("save", recipe.Checkpoints.save, True)
    recipe.evaluate = timed("evaluate", recipe.evaluate, True)
    recipe.Metrics.log = timed("a line of metrics", recipe.Metrics.log, True)
    recipe.load_data = timed("load_data", recipe.load_data, True)
    small = recipe.synthetic_images
    if cuda:  # as many as in CIFAR-10, about
        recipe.synthetic_images = lambda samples, seed: small(10 * samples, seed)
    recipe.main()
else:
    bench.measure_training(recipe, least_steps, least_seconds)
write()
expected = [change] if change in kinds else ["DDP"] if "RANK" in os.environ else []
if change == "foreach SGD":
    expected.append(change)
assert sorted(made) == sorted(expected), f"what was measured has {made}, and not {expected}"
# DDP has a bucket of its own for the first gradients; a smaller model stays whole.
if "--compile" in flags and max(gradient_bytes) > torch.distributed._DEFAULT_FIRST_BUCKET_BYTES:
    assert max(partitions, default=0) > 1, f"DDP split the compiled model into {partitions} parts"
