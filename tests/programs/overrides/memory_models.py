"""For copies in test_memory.py."""

import torch
from torch import nn


def build_model(args):
    """Large weights, then large activations: their peak comes before there are gradients."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.Unflatten(1, (1, 32, 32)))
    convolution = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(hidden, convolution, nn.Sequential(nn.Flatten(), nn.Linear(32, 10)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 2**18), nn.Linear(2**18, 10))

    def forward(self, images):
        return self.layers(images)


def large_model(args):
    with torch.device("meta"):
        return Model()  # 3.2 GB


def adamw(model, args, total_steps):
    return torch.optim.AdamW(model.parameters()), None


def model_with_a_large_head(args):
    layers = [nn.Sequential(nn.Flatten(), nn.Linear(3072, 32))]
    layers += [nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True)) for _ in range(6)]
    return nn.Sequential(*layers, nn.ReLU6(), nn.Linear(32, 50_000), nn.Identity())
