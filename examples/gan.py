# Parts of a copy, not a program: make new COPY=../mine.py WITH=gan
# SPDX-License-Identifier: Apache-2.0
"""Train a generator of images against a critic on CIFAR-10 (GAN, Goodfellow et al. 2014).

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data synthetic \\
        --batch-size 32 --epochs 2

The paper is arXiv:1406.2661. One backward pass computes both players' gradients, and one optimizer
updates both at once: the critic's loss sees detached images, the generator's a critic with detached
weights. Neither loss shows progress: look at samples.png, 64 images made at the end. --clip-norm
clips both players' gradients together.

Group: vision. Recipes: ddp, amp.
"""

from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ddp_cifar import seed_rng

LATENT = 64


class Game(nn.Module):
    """Both players: (B, 3, 32, 32) images in, (B,) losses of critic and generator out."""

    def __init__(self, width=32):
        super().__init__()
        layers = [nn.Unflatten(1, (LATENT, 1, 1)), nn.ConvTranspose2d(LATENT, 4 * width, 4)]
        for factor in (4, 2, 1):
            layers += [nn.GroupNorm(8, factor * width), nn.ReLU()]
            layers.append(nn.ConvTranspose2d(factor * width, max(1, factor // 2) * width, 4, 2, 1))
        self.generator = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, 3, 3, padding=1))
        layers, before = [], 3
        for factor in (1, 2, 4):
            layers += [nn.Conv2d(before, factor * width, 4, 2, 1), nn.LeakyReLU(0.2)]
            before = factor * width
        self.critic = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 1))

    def forward(self, images):
        made = self.generator(torch.randn(len(images), LATENT, device=images.device))
        of_critic = F.softplus(-self.critic(images)) + F.softplus(self.critic(made.detach()))
        weights = {name: x.detach() for name, x in self.critic.named_parameters()}
        of_generator = F.softplus(-functional_call(self.critic, weights, made))
        return of_critic.squeeze(1), of_generator.squeeze(1)


def build_model(args):
    """Return the model, on the CPU."""
    return Game()


def compute_loss(model, batch, args):
    """Return the losses of both players, and their sum, whose gradient is each player's own."""
    images, _ = batch
    critic, generator = model(images)
    return {"loss": critic + generator, "critic": critic, "generator": generator}


def make_optimizer(model, args, total_steps):
    """Return the optimizer of both players, and the schedule: a constant rate, `--lr`."""
    # Also the default of --lr is that of DCGAN (Radford et al. 2015, arXiv:1511.06434).
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.5, 0.999), fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@torch.no_grad()
def save_samples(accelerator, model, args):
    """Write 64 generated images."""
    seed_rng(args.seed, "samples")
    if accelerator.is_main_process:
        images = model.generator(torch.randn(64, LATENT, device=accelerator.device))
        path = Path(args.output_dir, "samples.png")
        torchvision.utils.save_image(images, path, normalize=True, value_range=(-2, 2))
