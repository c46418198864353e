"""A recipe's own `main`, in which one rank stalls. Run by test_hangs.py with a description in JSON:

    {"recipe": "ddp_cifar", "flags": [...], "rank": 1, "where": "training", "how": "sleep"}

`how`: "sleep" (for ever), a signal by its name, or "skip", which leaves out the first gather of
`Metrics.log`. `where`: while it is "setting-up", before there is a process group; in `compute_loss`
while "training" (in the fifth step) or in an "evaluation"; in the "dataset" or in a "worker" of it;
or in "saving". "slowly" is everywhere, on all ranks, but each time for `seconds` only. A process
that a launcher has restarted does not stall.
"""

import itertools
import json
import os
import signal
import sys
import time

import torch
from conftest import load

run = json.loads(sys.argv[1])
recipe = load(f"recipes/{run['recipe']}.py")
small = recipe.synthetic_images
recipe.synthetic_images = lambda samples, seed: small(samples // 16, seed)
here = int(os.environ.get("RANK", 0)) == run["rank"]
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    here = False


def stall():
    if run["how"] == "sleep":
        time.sleep(1000)
    else:
        os.kill(os.getpid(), signal.Signals[run["how"]])


def stall_at(call, function):
    """Return the function, which stalls at its n-th call on the chosen rank."""
    calls = itertools.count(1)

    def stalling(*arguments, **options):
        if here and next(calls) == call:
            stall()
        return function(*arguments, **options)

    return stalling


def stall_inside(call, function):
    """Return the function, in whose n-th call `compute_loss` stalls, where it calls the model."""
    calls = itertools.count(1)
    compute_loss = recipe.compute_loss

    def stalling(*arguments, **options):
        if next(calls) == call:
            recipe.compute_loss = lambda model, batch: compute_loss(stall_at(1, model), batch)
        return function(*arguments, **options)

    return stalling


def slowed(function):
    """Return the function, which takes its time at its first call."""
    calls = itertools.count(1)

    def slow(*arguments, **options):
        if next(calls) == 1:
            time.sleep(run["seconds"])
        return function(*arguments, **options)

    return slow


class Worker(torch.utils.data.TensorDataset):
    __getitem__ = stall_at(100, torch.utils.data.TensorDataset.__getitem__)


def load_data(args, accelerator):
    data = Worker(torch.randn(320, 3, 8, 8), torch.zeros(320, dtype=torch.int64))
    train = recipe.DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=1)
    return train, recipe.DataLoader(data, args.batch_size)


evaluate = recipe.evaluate
make_accelerator = recipe.make_accelerator


def evaluate_slowly(accelerator, model, loader, hang):
    """Each batch takes less than the timeout, all of them together more."""
    progress = hang.made_progress
    hang.made_progress = lambda *step: (progress(*step), time.sleep(run["seconds"] / 4))
    result = evaluate(accelerator, model, loader, hang)
    hang.made_progress = progress
    return result


def skip_first_gather(*arguments):
    accelerator = make_accelerator(*arguments)
    gather = accelerator.gather

    def skip(row):
        accelerator.gather = gather
        return row.repeat(accelerator.num_processes, 1)

    if here:
        accelerator.gather = skip
    return accelerator


def begin_later(*arguments):
    """So that what the ranks print does not come at the same moment."""
    time.sleep(2 * here)
    return make_accelerator(*arguments)


checkpoints = [name for name in vars(recipe) if name.endswith("Checkpoints")][-1]
checkpoints = getattr(recipe, checkpoints)
if run["how"] == "skip":
    recipe.make_accelerator = skip_first_gather
elif run["where"] == "setting-up":
    recipe.make_accelerator = begin_later
    recipe.choose_device = stall_at(1, recipe.choose_device)
elif run["where"] == "training":
    recipe.train_step = stall_inside(5, recipe.train_step)
elif run["where"] == "evaluation":
    recipe.evaluate = stall_inside(1, recipe.evaluate)
elif run["where"] == "dataset":
    recipe.ImageTensors.__getitems__ = stall_at(9, recipe.ImageTensors.__getitems__)
elif run["where"] == "worker":
    recipe.load_data = load_data
elif run["where"] == "saving":
    checkpoints.collect_states = stall_at(2, checkpoints.collect_states)
else:
    recipe.load_data = slowed(recipe.load_data)
    recipe.train_step = slowed(recipe.train_step)
    checkpoints.collect_states = slowed(checkpoints.collect_states)
    recipe.evaluate = evaluate_slowly
flags = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--batch-size", 16]
sys.argv = [str(word) for word in (run["recipe"], *flags, *run["flags"])]
recipe.main()
