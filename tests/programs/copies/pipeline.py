"""For copies in test_pipeline.py: outputs of the last stages, and weights tied within a stage."""

import sys

import torch
from torch import nn

from pipeline_cifar import compute_loss

plain_loss = compute_loss


def loss_with_outputs(model, batch, args):
    kind = batch[1] if "--batch-size=24" in sys.argv else [{"label": x} for x in batch[1]]
    return {**plain_loss(model, batch, args), "outputs": kind}


def places(outputs, args):
    labels = [x if torch.is_tensor(x) else x["label"] for x in outputs]
    return {"places": sum(place * label.item() for place, label in enumerate(labels))}


def tied_model(args):
    block, one, other = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    first = [nn.Flatten(), nn.Linear(3072, 16), block, nn.BatchNorm1d(16), block]
    one.weight = other.weight
    return nn.Sequential(*first, one, other, nn.Linear(16, 10))
