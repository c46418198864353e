"""For copies in test_pipeline.py: models, weighted losses, outputs of the last stages."""

import torch
from torch import nn
from torch.distributed import distributed_c10d

from pipeline_cifar import RANK, build_model, compute_loss, main, train_step

plain_model, plain_loss = build_model, compute_loss
plain_main, plain_step = main, train_step


def main():
    plain_main()
    for group in filter(None, distributed_c10d._world.pg_map):
        print("timeout:", group._get_backend(torch.device("cpu")).options._timeout)


def weighted_loss(model, batch, args):
    return {**plain_loss(model, batch, args), "weight": batch[1] * (batch[1] > 7)}


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pipeline", torch.zeros(()))

    def forward(self, x):
        return x + self.pipeline


def train_step(run, model, *arguments):
    for module in model.modules():
        if isinstance(module, Shift):
            module.pipeline.fill_(RANK // 2)  # the other pipelines get that of the first one
    return plain_step(run, model, *arguments)


def model_that_works_in_place(args):
    first, second, last = plain_model(args)
    return nn.Sequential(Shift(), first, Shift(), nn.SiLU(inplace=True), second, last)


def model_with_a_frozen_stage(args):
    frozen = nn.Linear(768, 8).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), frozen, nn.ReLU(), nn.Linear(8, 10))


def model_with_batchnorm(args):
    first = nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8)
    return nn.Sequential(*first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def loss_with_outputs(model, batch, args):
    return {**plain_loss(model, batch, args), "outputs": [{"label": x} for x in batch[1]]}


def places(outputs, args):
    return {"places": sum(place * x["label"].item() for place, x in enumerate(outputs))}


def tied_model(args):
    block, one, other = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    first = [nn.Flatten(), nn.Linear(3072, 16), block, nn.BatchNorm1d(16), block]
    one.weight = other.weight
    return nn.Sequential(*first, one, other, nn.Linear(16, 10))
