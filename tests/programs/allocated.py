"""Runs a recipe and writes, for each rank, how many bytes of CPU tensors it held at most in its last
optimizer step, beyond those that it held before it built its model, by the allocator's events:

    allocated.py RESULT RECIPE [the recipe's flags]

The result is RESULT-RANK.json: a number. The profiler sees each allocation of the CPU allocator,
also the scratch memory inside of operations, and knows nothing of benchmarks/memory.py.
"""

import json
import os
import sys
from itertools import accumulate

from conftest import load
from torch.profiler import ProfilerActivity, profile, record_function

result, path, *flags = sys.argv[1:]
recipe = load(path)
build_model = recipe.build_model
train_step = recipe.train_step


def marked_build(args):
    with record_function("built"):
        return build_model(args)


def marked_step(*args):
    with record_function("step"):
        return train_step(*args)


recipe.build_model = marked_build
recipe.train_step = marked_step
recipe.evaluate = lambda *_: {}
sys.argv[1:] = flags
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    recipe.main()
events = profiler.profiler.kineto_results.events()
built = min(event.start_ns() for event in events if event.name() == "built")
step = max(event.start_ns() for event in events if event.name() == "step")
(end,) = {e.end_ns() for e in events if e.name() == "step" and e.start_ns() == step}
changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
times = [time for time, _ in changes]
sums = list(accumulate(size for _, size in changes))
before = [total for time, total in zip(times, sums, strict=True) if time < built][-1]
during = [total for time, total in zip(times, sums, strict=True) if step <= time <= end]
with open(f"{result}-{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(max(during) - before, file)
