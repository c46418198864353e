# Parts of a copy, not a program: make new COPY=../mine.py WITH=best_weights
# SPDX-License-Identifier: Apache-2.0
"""best.safetensors has the weights of the lowest test loss; five higher ones end the run.

The file is replaced atomically. Rerun after such a stop, the command trains no further. With
validation the loss is that of the validation samples. For another metric, replace "loss" in
`evaluations_since_best`, with its sign changed if more is better.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

import json
import math

PATIENCE = 5  # evaluations without a lower loss, after which the training stops


def evaluations_since_best(metrics_text):
    """Return how many evaluations came after that of the lowest loss, also in a resumed run."""
    lines = map(json.loads, metrics_text.splitlines())
    lines = [line for line in lines if line["event"] == "evaluation"]
    losses = [line.get("validation_loss", line.get("test_loss")) for line in lines]
    losses = [math.inf if loss is None else loss for loss in losses]  # None is NaN or infinity
    return len(losses) - 1 - losses.index(min(losses))
