"""Run by gpu_report_parts.py, as a process of forked.py: timed_training.py CHANGE STEPS SECONDS
RECIPE FLAGS...

A recipe as bench.py measures it (`run_recipe`), with one thing changed, or timed; "epoch" is its
own `main`. Writes what it has timed to timings.json: {name: the seconds of every time}.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import accelerate
import torch
from conftest import load
from torch.profiler import ProfilerActivity, profile, schedule

change, *arguments = sys.argv[1:]
name = arguments[2]
bench, seconds, sys.argv = load("benchmarks/bench.py"), defaultdict(list), [name, *arguments[3:]]
recipe, cuda = bench.load(name), torch.cuda.is_available()
bench.load = lambda name: recipe
DDP, SGD = torch.nn.parallel.DistributedDataParallel, torch.optim.SGD


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


def time_the_parts():
    """Each step begins when the device is ready, or the host would wait for it in one of the
    parts."""
    host, began = {}, []

    def batches(loader, count):
        for _ in range(count):
            wait()
            began[:] = [time.perf_counter()]
            yield timed("data", next)(loader)

    def finish_step(*args, finish=recipe.Run.finish_step):
        finish(*args)
        seconds["step"].append(time.perf_counter() - began[0])

    host["seed_rng"], host["compute_loss"] = (recipe, "seed_rng"), (recipe, "compute_loss")
    host["backward"], host["metrics"] = (accelerate.Accelerator, "backward"), (recipe.Run, "add")
    host["signals"] = recipe.SignalHandler, "should_stop"
    host["optimizer"] = accelerate.optimizer.AcceleratedOptimizer, "step"
    host["zero_grad"] = accelerate.optimizer.AcceleratedOptimizer, "zero_grad"
    host["schedule"] = torch.optim.lr_scheduler.LambdaLR, "step"
    for part, (owner, attribute) in host.items():
        setattr(owner, attribute, timed(part, getattr(owner, attribute)))
    recipe.islice, recipe.Run.finish_step = batches, finish_step


class AlwaysBroadcast(DDP):
    """The recipes switch it off after it is made."""

    broadcast_buffers = property(lambda self: True, lambda self, value: None)


class BatchedCopy(DDP):
    """Of torch 2.15 on; Accelerate's DistributedDataParallelKwargs does not know it."""

    def __init__(self, *args, **options):
        super().__init__(*args, batched_grad_copy=True, **options)


if change == "broadcast buffers":
    torch.nn.parallel.DistributedDataParallel = AlwaysBroadcast
elif change == "batched gradient copy":
    torch.nn.parallel.DistributedDataParallel = BatchedCopy
elif change == "foreach SGD":
    torch.optim.SGD = lambda *args, **options: SGD(
        *args, **{**options, "fused": False, "foreach": True}
    )
elif change == "parts":
    time_the_parts()

write()
if change == "profile":
    first, count = (20, 10) if cuda else (1, 2)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]

    def keep(profiler):
        kind = "device" if cuda else "cpu"
        for order in ("self_cpu_time_total", f"self_{kind}_time_total"):
            table = profiler.key_averages().table(
                sort_by=order, row_limit=30, max_name_column_width=70
            )
            Path(f"{order}.txt").write_text(f"{count} steps\n{table}\n")
        profiler.export_chrome_trace("trace.json.gz")

    plan = schedule(wait=first, warmup=2, active=count, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=keep) as profiler:
        finish_step = recipe.Run.finish_step
        recipe.Run.finish_step = lambda *args: (finish_step(*args), profiler.step())
        bench.run_recipe(*arguments)
elif change == "epoch":
    recipe.Run.save, recipe.evaluate = (
        timed("save", recipe.Run.save, True),
        timed("evaluate", recipe.evaluate, True),
    )
    recipe.Run.log = timed("a line of metrics", recipe.Run.log, True)
    recipe.load_data, small = timed("load_data", recipe.load_data, True), recipe.synthetic_images
    if cuda:  # as many as in CIFAR-10, about
        recipe.synthetic_images = lambda samples, seed: small(10 * samples, seed)
    recipe.main()
else:
    bench.run_recipe(*arguments)
write()
