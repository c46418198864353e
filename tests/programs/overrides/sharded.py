"""For copies in test_sharded.py: models, a loss, an optimizer."""

import itertools

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sharded_cifar import build_model, compute_loss, evaluate, log_line

plain_model, plain_loss, plain_evaluate = build_model, compute_loss, evaluate


def watched_model(args):
    model = plain_model(args)
    for layer in model[0][:2]:
        layer.register_forward_pre_hook(say_type)
    return model


def say_type(layer, _):
    log_line(f"{type(layer).__name__.removeprefix('FSDP')} computes in {layer.weight.dtype}")


def weighted_loss(model, batch, args):
    return {**plain_loss(model, batch, args), "weight": batch[1] + 0.5}


def model_of_five_units(args):
    pairs = itertools.pairwise((768, 64, 48, 32, 16, 10))
    units = [nn.Sequential(nn.Linear(*x), nn.BatchNorm1d(x[1]), nn.Tanh()) for x in pairs]
    return nn.Sequential(nn.Flatten(), *units)


def evaluate_and_shard_again(run, model, loader):
    results = plain_evaluate(run, model, loader)
    assert {type(x) for x in model.parameters()} == {DTensor}, "the root is not sharded"
    return results


class Masked(nn.Linear):
    def __init__(self, mask):
        super().__init__(10, 10)
        self.register_buffer("mask", mask, persistent=False)


class Tied(nn.Module):
    moves = True

    def __init__(self, args):
        super().__init__()
        mask = torch.rand(10)
        # Training reads it, and each rank changes it in its own way.
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.first = nn.Linear(3, 10)
        self.blocks = nn.Sequential(Masked(mask), Masked(mask))
        self.blocks[0].bias.requires_grad_(False)
        self.second = nn.Linear(10, 10)
        self.third = nn.Linear(10, 10)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(3)  # its statistics are those of each process's batches

    def forward(self, x):
        x = x.mean((2, 3))
        if self.training and self.moves:
            self.level = self.level.lerp(x.detach().mean(0), 0.3)  # another tensor
        elif self.training:
            self.cache = torch.cat([self.cache, self.cache[-1:] + 1])  # it grows
            x = x + self.cache.mean()
        x = self.norm(x) if self.moves else x
        x = self.first(x - self.level)
        for block in self.blocks:
            x = block(x) * block.mask
        return self.third(torch.relu(self.second(torch.relu(x))))
