"""For copies whose --compile is tested: a model, and how many graphs were compiled."""

import torch
from torch import nn

from ddp_cifar import main

plain_main = main


class Model(nn.Sequential):
    def forward(self, images):  # before torch 2.15 a plain Sequential is not compiled
        return super().forward(images)


def model_to_compile(args):
    blocks = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return Model(*blocks, nn.Flatten(), nn.Linear(16, 10))


def main():
    plain_main()
    print("graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
