# SPDX-License-Identifier: Apache-2.0
"""The test's lines have test_auroc: each class against all others, and the mean over the classes.

It is exact, over all test samples of all processes. The model returns logits, (B, classes), and a
batch is (inputs, labels). A "weight" has no influence on it. A class without samples is left out.

Recipes: ddp, amp, sharded.
"""

import math

import torch


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


def mean_auroc(parts):
    """Return the mean over the classes of a list of ((B, classes) logits, (B,) labels)."""
    logits, labels = map(torch.cat, zip(*parts, strict=True))
    probabilities = logits.double().softmax(1)
    values = [auroc(column, labels == c) for c, column in enumerate(probabilities.T)]
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
