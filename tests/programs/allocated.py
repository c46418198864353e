"""Runs a recipe and writes, for each rank, how many bytes it held at most in its last optimizer
step, beyond those that it held before it built its model:

    allocated.py RESULT RECIPE [the recipe's flags]

RESULT-RANK.json has "allocator": by the profiler's events of the CPU allocator, with the scratch
memory inside of operations and of gloo; and "tensors": by a dispatch mode, without those.
"""

import json
import os
import sys
from itertools import accumulate

from conftest import ROOT, load
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(ROOT / "benchmarks"))
from memory import LiveBytes

result, path, *flags = sys.argv[1:]
recipe = load(path)
build_model = recipe.build_model
train_step = recipe.train_step
counter = LiveBytes()
before = []


def marked_build(args):
    before.append(counter.live)
    with record_function("built"):
        return build_model(args)


def marked_step(*args):
    counter.timeline.clear()
    with record_function("step"):
        result = train_step(*args)
    before[1:] = [max(counter.timeline)]
    return result


recipe.build_model = marked_build
recipe.train_step = marked_step
recipe.evaluate = lambda *_: {}
sys.argv[1:] = flags
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, counter:
    recipe.main()

events = profiler.profiler.kineto_results.events()
built = min(event.start_ns() for event in events if event.name() == "built")
step = max(events, key=lambda event: event.start_ns() if event.name() == "step" else 0)
changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
times = [time for time, _ in changes]
sums = list(accumulate(size for _, size in changes))
held = [total for time, total in zip(times, sums, strict=True) if time < built][-1]
during = [
    total
    for time, total in zip(times, sums, strict=True)
    if step.start_ns() <= time <= step.end_ns()
]
content = {"allocator": max(during) - held, "tensors": before[1] - before[0]}
with open(f"{result}-{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(content, file)
