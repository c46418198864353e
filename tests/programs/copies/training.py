"""For copies in test_training.py and test_gpu.py: models, a loss, an optimizer."""

import torch
from torch import nn

from ddp_cifar import compute_loss

plain_loss = compute_loss


def model_with_dropout(args):
    layers = [nn.Conv2d(3, 4, 3, stride=2), nn.Dropout(0.5), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(196, 10))


def random_loss(model, batch, args):
    values = plain_loss(model, batch, args)
    return {**values, "loss": values["loss"] * torch.rand(len(batch[1]))}


class Model(nn.Sequential):
    def forward(self, images):  # before torch 2.15 a plain Sequential is not compiled
        return super().forward(images)


def model_to_compile(args):
    blocks = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return Model(*blocks, nn.Flatten(), nn.Linear(16, 10))


def adamw(model, args, total_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
