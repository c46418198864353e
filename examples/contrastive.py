# Parts of a copy, not a program: make new COPY=../mine.py WITH=contrastive
# SPDX-License-Identifier: Apache-2.0
"""Train a network without labels on two views of each image (SimCLR, Chen et al. 2020).

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data synthetic \\
        --batch-size 32 --epochs 1

The paper is arXiv:2002.05709. For each view, the model has to find the other view of the image. The
negatives are all other images of the global batch, on all processes and in all microbatches:
--global-batch-size sets their number. With the same one, any number of processes and any
--batch-size train the same. Each image goes through the model twice for this. A view is a function
of (seed, epoch, image). "recall_at_1" is the share of the views that find their partner, in a step
in its global batch, in a test in the whole test set. Do not compare the loss of a test with that of
a step: it grows with the number of negatives. The model has no BatchNorm, which would normalise
over a microbatch.

Group: vision. Recipes: ddp, amp, sharded.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lib.negatives import loss_among_all, means_among_all, nt_xent, with_cached_gradients

TEMPERATURE = 0.5


class Encoder(nn.Sequential):
    """(B, 2, 3, H, W) in, two views of each image, and (B, 2, D) out. A product of two embeddings
    is the cosine divided by the temperature."""

    def forward(self, views):
        images = views.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        outputs = F.normalize(super().forward(images)) / TEMPERATURE**0.5
        return outputs.unflatten(0, (-1, 2))


def build_model(args):
    """Return an encoder with a projection head behind it, for images of 32 x 32."""
    layers, before = [], 3
    for width in (64, 128, 256):
        conv = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(8, width), nn.ReLU()]
        before = width
    head = [nn.Linear(256 * 16, 256), nn.ReLU(), nn.Linear(256, 128)]
    return Encoder(*layers, nn.Flatten(), *head).to(memory_format=torch.channels_last)


class TwoViews(Dataset):
    """Batches of two random views of each of the images of a dataset, (B, 2, 3, H, W)."""

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        self.numbers = torch.zeros(2, len(dataset), 10).share_memory_()  # for persistent workers

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        seed = random.Random(f"{self.seed}/{epoch}/views").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        self.numbers[:] = torch.rand(self.numbers.shape, generator=generator)

    def __getitems__(self, indices):
        images, _ = self.dataset.__getitems__(indices)
        numbers = self.numbers[:, indices].to(images)
        return (torch.stack([random_view(images, x) for x in numbers], dim=1),)


def random_view(images, numbers):
    """Return of each image a part, perhaps mirrored, with another contrast and brightness of each
    color: (B, 3, H, W) in and out. `numbers` are (B, 10) from 0 to 1."""
    size, center, mirror, contrast, brightness = numbers.split([1, 2, 1, 3, 3], dim=1)
    size = 0.4 + 0.6 * size  # of the part, relative to the image
    place = images.new_zeros(len(images), 2, 3)
    place[:, :, 2] = (2 * center - 1) * (1 - size)
    place[:, :1, 0] = size * (mirror - 0.5).sign()
    place[:, 1:, 1] = size
    grid = F.affine_grid(place, images.shape, align_corners=False)
    views = F.grid_sample(images, grid, align_corners=False)
    contrast, brightness = (x[:, :, None, None] for x in (contrast, brightness))
    return views * (0.6 + 0.8 * contrast) + (0.8 * brightness - 0.4)


def compute_loss(model, batch, args):
    """Return {"loss": (B,), "recall_at_1": (B,)} of the two views of each image."""
    return loss_among_all(model, batch, nt_xent)


def test_metrics(outputs, args):
    """Return the same of the whole test set, in place of the means over batches."""
    return means_among_all(outputs, nt_xent)
