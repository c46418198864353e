# SPDX-License-Identifier: Apache-2.0
"""Train a network without labels on two views of each image (SimCLR, Chen et al. 2020).

    torchrun --nproc_per_node 2 mine.py --data synthetic --batch-size 32 --epochs 1

The paper is arXiv:2002.05709. For each view, the model has to find the other view of the image.
The negatives are the other images of the microbatch: a larger --batch-size adds some, more
processes or accumulated microbatches do not. So the training depends on the size of a microbatch,
and not on the world size. Test metrics do: the last batches are filled up with other images.

Group: vision. Recipes: ddp, amp, sharded.
"""

import torch
from torch import nn
from torch.nn import functional as F


def build_model(args):
    """Return an encoder with a projection head behind it: (B, 3, 32, 32) in, (B, 128) out."""
    layers, before = [], 3
    for width in (64, 128, 256):
        conv = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    head = [nn.Linear(256 * 16, 256), nn.ReLU(), nn.Linear(256, 128)]
    model = nn.Sequential(*layers, nn.Flatten(), *head)
    return model.to(memory_format=torch.channels_last)


def random_view(images):
    """Return of each image a part, perhaps mirrored, with another contrast and brightness of each
    color: (B, C, H, W) in and out."""

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(len(images), *shape, device=images.device)

    size = uniform(0.4, 1, 1)  # of the part, relative to the image
    place = torch.zeros(len(images), 2, 3, device=images.device)
    place[:, :, 2] = uniform(-1, 1, 2) * (1 - size)
    mirror = uniform(-1, 1).sign()
    place[:, 0, 0] = size[:, 0] * mirror
    place[:, 1, 1] = size[:, 0]
    grid = F.affine_grid(place, images.shape, align_corners=False)
    views = F.grid_sample(images, grid, align_corners=False)
    channels = images.shape[1]
    return views * uniform(0.6, 1.4, channels, 1, 1) + uniform(-0.4, 0.4, channels, 1, 1)


def compute_loss(model, batch, args, temperature=0.5):
    """Return the mean loss of both views of each image, and how many of the two found the other."""
    images, _ = batch
    size = len(images)
    views = torch.cat((random_view(images), random_view(images)))
    outputs = F.normalize(model(views.contiguous(memory_format=torch.channels_last)))
    similarity = outputs @ outputs.T / temperature
    similarity.fill_diagonal_(float("-inf"))  # no view is its own partner
    partners = torch.arange(2 * size, device=images.device).roll(size)
    losses = F.cross_entropy(similarity, partners, reduction="none")
    found = (similarity.argmax(1) == partners).float()
    return {"loss": losses.view(2, size).mean(0), "accuracy": found.view(2, size).mean(0)}
