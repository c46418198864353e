"""A recipe's own `main`, its batches recorded, and disturbed where a test wants it. Launched with
JSON:

    {"recipe": "ddp_cifar", "directory": ..., "flags": [...],
     "disturbances": {"RANK": [n, what]}}

The model has what a resumed run could get wrong (dropout, BatchNorm) and the data are few. Every
process appends a digest of each batch that it trains on to DIRECTORY/batches.RANK. A disturbance
happens to a process at the n-th step since its start: a signal by its name, or "stall"; those of
RANK.1 happen where the launcher has restarted it once. `plain` leaves the recipe's model, narrower;
`in_float64` trains in it.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time

import torch
from conftest import IN_FLOAT64, load
from torch import nn


def build_model(args):
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)
        ),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
    )


def narrow(build_model):
    """Return `build_model` with fewer channels in simple_cnn, as conftest's NARROW."""

    def build(args):
        model = build_model(args)
        if args.model == "simple_cnn":
            model[0][0] = nn.Conv2d(3, 8, 3, padding=1)
            model[1][0] = nn.Conv2d(8, 16, 3, padding=1)
            model[2][1] = nn.Linear(16, 10)
        return model.to(memory_format=torch.channels_last)

    return build


def watch_batches(recipe, directory, when, what):
    """Record the batches of every step, and disturb the n-th one."""
    train_step = recipe.train_step
    steps = itertools.count(1)

    def watched_step(run, model, optimizer, scheduler, microbatches):
        assert all(module.training for module in model.modules()), "after an evaluation, too"
        assert run.args.clip_norm == 9, "in a step without a line, too"
        microbatches = list(microbatches)
        disturbance = what if next(steps) == when else None
        if disturbance == "stall":
            time.sleep(1000)
        elif disturbance:
            os.kill(os.getpid(), signal.Signals[disturbance])
            while not run.watcher.received:  # by a thread, which may have to wait for a core
                time.sleep(0.01)
        with open(f"{directory}/batches.{os.environ.get('RANK', 0)}", "a") as file:
            for images, labels in microbatches:
                content = images.numpy().tobytes() + labels.numpy().tobytes()
                file.write(hashlib.sha256(content).hexdigest() + "\n")
        return train_step(run, model, optimizer, scheduler, microbatches)

    recipe.train_step = watched_step


def train(run, prepare=lambda recipe: None):
    recipe = load(f"recipes/{run['recipe']}.py")
    small = recipe.synthetic_images
    recipe.synthetic_images = lambda samples, seed: small(samples // 8, seed)
    # Dropout is a process's own.
    recipe.build_model = narrow(recipe.build_model) if run.get("plain") else build_model
    if run.get("in_float64"):
        exec(IN_FLOAT64, vars(recipe))
    os.makedirs(run["directory"], exist_ok=True)
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = rank if attempt == "0" else f"{rank}.{attempt}"
    watch_batches(recipe, run["directory"], *run.get("disturbances", {}).get(name, (0, None)))
    prepare(recipe)
    flags = ["--data", "synthetic", "--model", "simple_cnn", "--epochs", 2, "--log-every", 3]
    flags += ["--cpu", "--clip-norm", 9, "--output-dir", run["directory"], *run["flags"]]
    sys.argv = [run["recipe"], *map(str, flags)]
    if rank == "0" and attempt != "0":
        time.sleep(3)  # so that the others find what the dead ranks left in the launcher's store
    recipe.main()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
