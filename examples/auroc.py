# Parts of a copy, not a program: make new COPY=../mine.py WITH=auroc
# SPDX-License-Identifier: Apache-2.0
"""The test's lines have test_auroc: each class against all others, and the mean over the classes.

It is exact, over all test samples of all processes. The model returns logits, (B, classes), and a
batch is (inputs, labels). A "weight" has no influence on it. A class without samples is left out.
An edited `compute_loss` has to return "outputs": torch.column_stack((logits.detach(), labels)).

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

import math

import torch
from torch.nn import functional as F


def auroc(scores, positive):
    """Return the area under the ROC curve of (N,) scores, where `positive`, (N,), is True or False:
    how often a positive sample has a higher score than a negative one. Equal scores count half
    (Hanley & McNeil 1982). Return NaN if there are no samples of one kind."""
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)  # sorted
    sizes = sizes.double()
    ranks = (sizes.cumsum(0) - (sizes - 1) / 2)[group]  # from 1; equal scores have their mean rank
    positives = positive.sum().item()
    pairs = positives * (len(positive) - positives)
    won = ranks[positive].sum().item() - positives * (positives + 1) / 2
    return won / pairs if pairs else math.nan


def compute_loss(model, batch, args):
    """Return {"loss": (B,) float, ...}, and logits and labels for `test_metrics`."""
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    outputs = torch.column_stack((logits.detach(), labels))
    return {"loss": loss, "accuracy": logits.argmax(1) == labels, "outputs": outputs}


def test_metrics(outputs, args):
    """Return {"auroc": the mean over the classes} of all test samples' logits and labels."""
    logits, labels = torch.stack(outputs).double().tensor_split([-1], dim=1)
    columns = enumerate(logits.softmax(1).T)
    values = [auroc(column, labels.squeeze(1) == c) for c, column in columns]
    values = [value for value in values if not math.isnan(value)]
    return {"auroc": sum(values) / len(values) if values else math.nan}
