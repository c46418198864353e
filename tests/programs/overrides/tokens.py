"""For copies in test_tokens.py: sequences that count by their tokens, and a scaler for amp."""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from amp_cifar import Run, make_accelerator

# The mean of means is another one. At a batch size of 1 process 1 of two has no targets.
LENGTHS = [2, 0, 47, 0, 5, 0, 30, 0]


class Sequences(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (LENGTHS[index] + 1,), generator=generator)


def padded(sequences):
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True)


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "collate_fn": padded}
    # Not shuffled: each process has always the same four sequences.
    return DataLoader(Sequences(), drop_last=True, **options), DataLoader(Sequences(), **options)


def build_model(args):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 20))


def compute_loss(model, batch, args):
    logits = model(batch[:, :-1]).transpose(1, 2)
    counted = (batch[:, 1:] != 0).sum(1)
    losses = F.cross_entropy(logits, batch[:, 1:], ignore_index=0, reduction="none").sum(1)
    return {"loss": losses / counted.clamp(min=1), "weight": counted}


def make_optimizer(model, args, total_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


plain_description, accelerator_without_scaler = Run.describe, make_accelerator
plain_loss = compute_loss


def describe_as_fp16(run, optimizer):
    run.accelerator.native_amp = True  # as on a GPU, but for autocast
    run.accelerator.state._mixed_precision = "fp16"
    return plain_description(run, optimizer)


def accelerator_with_scaler(*arguments):
    accelerator = accelerator_without_scaler(*arguments)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return accelerator


calls = []


def overflow(model, batch, args):
    calls.append(model.training)
    values = plain_loss(model, batch, args)
    # The first microbatch of the third step of process 1 alone.
    if sum(calls) == 5 and model.training and os.environ["RANK"] == "1":
        values["loss"].register_hook(lambda gradient: gradient * math.nan)
    return values
