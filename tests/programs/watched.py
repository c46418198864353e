"""Launched by test_resume.py and others: a recipe's own `main`, watched, and disturbed where a test wants it.

    watched.py RECIPE LOG DISTURBANCES [flags of the recipe]

The model has what a resumed run could get wrong (dropout, BatchNorm) and the data are few. Every process appends a line
with a digest of each batch that it trains on to LOG.RANK. DISTURBANCES is JSON, {"RANK": [n, what]}: what happens to
that process at the n-th batch since its start, a signal by its name, or "nan": the batch is not finite.
"""

import hashlib
import json
import os
import signal
import sys

import torch
from conftest import load
from torch import nn

name, log, disturbances, *flags = sys.argv[1:]
rank = os.environ.get("RANK", "0")
when, what = json.loads(disturbances).get(rank, [0, None])
recipe = load(f"recipes/{name}.py")
original_images = recipe.synthetic_images
recipe.synthetic_images = lambda samples, seed: original_images(samples // 8, seed)
recipe.build_model = lambda args: nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2)),
    nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
)
(step_name,) = (word for word in vars(recipe) if word.endswith("train_step"))
original_step, batches = getattr(recipe, step_name), 0


def watched_step(*arguments):
    global batches
    batches += 1
    images, labels = (argument for argument in arguments if torch.is_tensor(argument))
    if batches == when and what == "nan":
        images.fill_(torch.nan)
    elif batches == when:
        os.kill(os.getpid(), signal.Signals[what])
    with open(f"{log}.{rank}", "a") as file:
        file.write(hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest() + "\n")
    return original_step(*arguments)


setattr(recipe, step_name, watched_step)
sys.argv = [f"recipes/{name}.py", *flags]
recipe.main()
