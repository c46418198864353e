# Parts of a copy, not a program: make new COPY=../mine.py WITH=diffusion
# SPDX-License-Identifier: Apache-2.0
"""Train a denoising diffusion model on CIFAR-10 (Ho et al. 2020, arXiv:2006.11239).

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data synthetic \\
        --batch-size 32 --epochs 1

The model predicts the noise in an image. Times and noise are drawn in `compute_loss`: with equal
microbatches they are the same at any world size, except in the last batches of an evaluation if
these are incomplete. At the end, samples.png shows 64 images made from noise.

Group: vision. Recipes: ddp, amp, sharded.
"""

import math
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from ddp_cifar import seed_rng


class Block(nn.Module):
    """A residual block; the time scales and shifts its normalised activations."""

    def __init__(self, width, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.time = nn.Linear(64, 2 * width)
        self.first = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x, time):
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        return x + self.second(F.silu(self.first(F.silu(self.norm(x) * (1 + scale) + shift))))


class Denoiser(nn.Module):
    """(B, 3, H, W) noisy images and (B,) times from 0 to 1 in, (B, 3, H, W) noise out."""

    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Conv2d(12, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, dilation) for dilation in (1, 2, 4, 2, 1))
        self.last = nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x, time):
        angles = time[:, None] * math.pi * 2 ** torch.linspace(0, 8, 32, device=x.device)
        time = torch.cat((angles.sin(), angles.cos()), dim=1)
        x = self.first(F.pixel_unshuffle(x, 2))  # 2 x 2 pixels are one
        for block in self.blocks:
            x = block(x, time)
        return F.pixel_shuffle(self.last(x), 2)


def build_model(args):
    """Return the model, on the CPU."""
    return Denoiser()


def shares(time):
    """Return the shares of image and noise at each time (Nichol and Dhariwal 2021,
    arXiv:2102.09672, with continuous times): their squares add up to 1."""
    angle = time[:, None, None, None] * math.pi / 2
    return angle.cos(), angle.sin()


def compute_loss(model, batch, args):
    """Return the squared error of the predicted noise, one value per image."""
    images, _ = batch
    time = torch.rand(len(images), device=images.device)
    noise = torch.randn_like(images)
    of_image, of_noise = shares(time)
    predicted = model(of_image * images + of_noise * noise, time)
    return {"loss": (predicted - noise).square().mean((1, 2, 3))}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate, whose peak is `--lr`
    at any batch size."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR  # warm-up, then decay
    return optimizer, schedule(optimizer, peaks, total_steps + 1, cycle_momentum=False)


@torch.no_grad()
def save_samples(accelerator, model, args, steps=50):
    """Turn noise into 64 images step by step (DDIM, Song et al. 2020, arXiv:2010.02502). All ranks
    compute the same, since a sharded model needs them."""
    seed_rng(args.seed, "samples")
    x = torch.randn(64, 3, 32, 32, device=accelerator.device)
    times = torch.linspace(0.98, 0, steps + 1, device=accelerator.device)
    for now, then in pairwise(times):
        noise = model(x, now.expand(64))
        (of_image, of_noise), (image_then, noise_then) = shares(now[None]), shares(then[None])
        x = image_then * (x - of_noise * noise) / of_image + noise_then * noise
    if accelerator.is_main_process:
        path = Path(args.output_dir, "samples.png")
        torchvision.utils.save_image(x, path, normalize=True, value_range=(-2, 2))
