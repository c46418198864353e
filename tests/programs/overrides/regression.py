"""For copies in test_recipes.py: a reader's own data, flags, model and loss, without images."""

import random
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipeline_cifar import sequential_blocks


class Noisy(Dataset):
    def __init__(self, samples):
        self.inputs = torch.linspace(-1, 1, 12 * samples).double().view(12, samples).T.sin()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(12) * numpy.random.rand() + random.random()
        return self.inputs[index] + 0.1 * noise, self.inputs[index].cumsum(0)[::4]


def add_flags(parser):
    parser.add_argument("--workers", type=int)
    parser.add_argument("--source", type=Path, default=Path())


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "num_workers": args.workers}
    train_loader = DataLoader(Noisy(100), shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(Noisy(37), **options)


def build_model(args):
    frozen = nn.Dropout().eval()  # also after an evaluation
    return nn.Sequential(nn.Linear(12, 30), nn.ReLU(), frozen, nn.Linear(30, 3)).double()


def model_blocks(model):  # of the pipeline
    return sequential_blocks(model)


def compute_loss(model, batch, args):
    inputs, targets = batch
    error = model(inputs) - targets
    values = {"largest": error.abs().amax(1), "below": error.mean(1) < 0}
    values |= {"constant": torch.full_like(error[:, 0], 2e4), "outputs": error}
    return {"loss": error.square().mean(1), **values}


def test_metrics(outputs, args):
    return {"by_place": sum(place * row.mean() for place, row in enumerate(outputs))}
