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
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F


def compute_loss(model, batch, args):
    """Return {"loss": (B,) float, ...}, and logits and labels for `test_metrics`."""
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    outputs = torch.column_stack((logits.detach(), labels))
    return {"loss": loss, "accuracy": logits.argmax(1) == labels, "outputs": outputs}


def test_metrics(outputs, args):
    """Return {"auroc": the mean over the classes} of all test samples' logits and labels. It is NaN
    if they are all of one class."""
    logits, labels = torch.stack(outputs).double().tensor_split([-1], dim=1)
    classes = labels.unique().long().tolist()
    if len(classes) == 1:
        return {"auroc": math.nan}
    scores = logits.softmax(1)
    values = [roc_auc_score(labels.squeeze(1) == c, scores[:, c]) for c in classes]
    return {"auroc": float(sum(values) / len(values))}
