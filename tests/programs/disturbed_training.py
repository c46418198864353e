"""A recipe's own `main`, its batches recorded, and disturbed where a test wants it. Launched with
JSON:

    {"recipe": "ddp_cifar", "directory": ..., "flags": [...],
     "disturbances": {"RANK": [n, what]}, "save": [what, n]}

The model has what a resumed run could get wrong (dropout, BatchNorm) and the data are few. Every
process appends a digest of each batch that it trains on to DIRECTORY/batches.RANK. A disturbance
happens to a process at the n-th step since its start: a signal by its name, "nan", which spoils the
step's batches, or "inf", which spoils its gradient. `save` kills the main process at the n-th
moment before or after an operation on the disk. `plain` leaves the recipe's simple_cnn, `device`
"cuda" leaves out `--cpu`, `dropout` is its probability, and the samples are divided by `fewer`.
"""

import collections
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import load
from torch import nn
from torch.distributed import distributed_c10d


class Compiled(nn.Sequential):
    def forward(self, x):  # of its own: torch 2.11 does not compile that of torch's nn.Sequential
        return super().forward(x)


def build_model(args, dropout=0.2):
    return (Compiled if getattr(args, "compile", False) else nn.Sequential)(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout), nn.MaxPool2d(2)
        ),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
    )


def watch_batches(recipe, directory, when, what):
    """Record the batches of every step, and disturb the n-th one."""
    train_step = recipe.train_step
    steps = itertools.count(1)

    def recorded(microbatches, spoil):
        for images, labels in microbatches:
            if spoil:
                images.fill_(torch.nan)
            with open(f"{directory}/batches.{os.environ.get('RANK', 0)}", "a") as file:
                content = images.cpu().numpy().tobytes() + labels.cpu().numpy().tobytes()
                file.write(hashlib.sha256(content).hexdigest() + "\n")
            yield images, labels

    def watched_step(accelerator, model, optimizer, scheduler, microbatches, *more):
        disturbance = what if next(steps) == when else None
        handle = None
        if disturbance == "inf":
            first = next(model.parameters())
            handle = first.register_hook(lambda gradient: gradient * torch.inf)
        elif disturbance not in (None, "nan"):
            os.kill(os.getpid(), signal.Signals[disturbance])
        batches = recorded(microbatches, disturbance == "nan")
        values = train_step(accelerator, model, optimizer, scheduler, batches, *more)
        if handle:
            handle.remove()
        return values

    recipe.train_step = watched_step


def kill_while_saving(recipe, operation, moment):
    """Before and after every operation on the disk: the n-th such moment of one kind is the
    process's last. With the operation "record", `moment` is a file: it gets the kinds of all
    moments until the end of the first save."""
    moments = collections.Counter()
    kinds = []

    def watched(function, name):
        def with_moments(*arguments, **options):
            for after in (False, True):
                if after:
                    result = function(*arguments, **options)
                if name == operation and moments[name] == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                moments[name] += 1
                kinds.append(name)
            return result

        return with_moments

    class File:
        def __init__(self, *arguments):
            self.file = watched(open, "open")(*arguments)
            self.write = watched(self.file.write, "write")

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

    def recorded_save(*arguments):
        save(*arguments)
        Path(moment).write_text("\n".join(kinds))
        recipe.Checkpoints.save = save

    if operation == "record":
        save = recipe.Checkpoints.save
        recipe.Checkpoints.save = recorded_save

    class WatchedPath(type(recipe.Path())):
        unlink = watched(type(recipe.Path()).unlink, "unlink")

    recipe.Path = WatchedPath
    replaced = {name: watched(getattr(os, name), name) for name in ("open", "fsync", "replace")}
    recipe.os = SimpleNamespace(**{**vars(os), **replaced})
    recipe.open = lambda path, *mode, **options: (File if str(path).endswith(".tmp") else open)(
        path, *mode, **options
    )


def watch_the_default_group():
    """On GPUs it takes objects through their memory: large ones have to go another way, by a group
    of the hosts."""
    pack = distributed_c10d._object_to_tensor

    def watched(value, device, group, *more):
        packed = pack(value, device, group, *more)
        assert len(packed[0]) < 20_000 or group not in (None, distributed_c10d.GroupMember.WORLD)
        return packed

    distributed_c10d._object_to_tensor = watched


def train(run, prepare=lambda recipe: None):
    recipe = load(f"recipes/{run['recipe']}.py")
    small = recipe.synthetic_images
    recipe.synthetic_images = lambda samples, seed: small(samples // run.get("fewer", 8), seed)
    if not run.get("plain"):  # dropout is a process's own
        recipe.build_model = partial(build_model, dropout=run.get("dropout", 0.2))
        watch_the_default_group()
    os.makedirs(run["directory"], exist_ok=True)
    rank = os.environ.get("RANK", "0")
    watch_batches(recipe, run["directory"], *run.get("disturbances", {}).get(rank, (0, None)))
    if rank == "0":
        kill_while_saving(recipe, *run.get("save", (None, 0)))
    prepare(recipe)
    flags = ["--data", "synthetic", "--model", "simple_cnn", "--epochs", 2, "--log-every", 3]
    flags += [] if run.get("device") == "cuda" else ["--cpu"]
    sys.argv = [
        str(word)
        for word in (run["recipe"], *flags, "--output-dir", run["directory"], *run["flags"])
    ]
    if rank == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        time.sleep(
            3
        )  # long enough for the others to find what the dead processes left in the launcher's store
    recipe.main()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
