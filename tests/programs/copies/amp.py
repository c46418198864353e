"""For a copy in test_amp.py. As in fp16 on a GPU: a scaler, and in the third step an infinite
gradient, on one rank only."""

import math
from itertools import count

import torch

from amp_cifar import RANK, Accelerator, compute_loss

plain_accelerator, plain_loss, calls = Accelerator, compute_loss, count(1)


def set_precision(args):
    args.precision = "fp16"


def Accelerator(**options):
    accelerator = plain_accelerator(**options)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return accelerator


def compute_loss(model, *arguments):
    values = plain_loss(model, *arguments)
    if model.training and next(calls) == 3 and RANK == 0:
        values["loss"].register_hook(lambda gradient: gradient * math.inf)
    return values
