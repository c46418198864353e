# SPDX-License-Identifier: Apache-2.0
"""best.safetensors has the weights of the lowest test loss; five evaluations without one stop.

The file is replaced atomically. Rerun after such a stop, the command trains no further. For another
metric, replace "test_loss" in `evaluations_since_best`, with its sign changed if more is better.

Recipes: ddp, amp, pipeline, sharded.
"""

import json
import math
import os
from pathlib import Path

PATIENCE = 5  # evaluations without a lower loss, after which the training stops


def evaluations_since_best(metrics):
    """Return how many evaluations came after that of the lowest loss, also in a resumed run."""
    lines = map(json.loads, metrics.text.splitlines())
    losses = [line["test_loss"] for line in lines if line["event"] == "evaluation"]
    losses = [math.inf if loss is None else loss for loss in losses]  # None is NaN or infinity
    return len(losses) - 1 - losses.index(min(losses))


def rename_to_best(accelerator, directory):
    """Give the weights that were saved last the name best.safetensors."""
    if accelerator.is_main_process:
        path = Path(directory, "model.safetensors")
        os.replace(path, path.with_name("best.safetensors"))
