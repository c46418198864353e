# Parts of a copy, not a program: make new COPY=../mine.py WITH=distillation
# SPDX-License-Identifier: Apache-2.0
"""Train a small network on CIFAR-10 to answer as a larger, trained one (Hinton et al. 2015).

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data synthetic \\
        --width 32 --epochs 1 --output-dir old
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data synthetic \\
        --epochs 2 --teacher old/model.safetensors

The paper is arXiv:1503.02531. Without --teacher the network learns from the labels alone, as the
first command's does. The teacher belongs to the data: its logits are a part of each batch. So it is
in no checkpoint, has no gradients, and is not sharded. Each process has a copy of it. A DataLoader
with workers would run it in them, on the CPU.

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
from accelerate import utils
from torch import nn
from torch.nn import functional as F

from ddp_cifar import exit_with_error


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--data", choices=("cifar10", "synthetic"), default="cifar10", help="default: cifar10")
    add("--data-dir", default="data", help="CIFAR-10 directory (downloaded if missing)")
    add("--width", type=int, default=16, help="channels of the first layer (16)")
    add("--teacher", metavar="PATH", help="model.safetensors of a run with --teacher-width")
    add("--teacher-width", type=int, default=32, help="channels of its first layer (32)")


def with_teacher(args, accelerator):
    """Return the collate_fn: (images, labels) in, images and (B, 1 + classes) float32 out, labels
    and the teacher's logits."""
    teacher = build_network(args.teacher_width).to(accelerator.device).eval()
    if args.teacher:
        try:
            teacher.load_state_dict(utils.load_state_dict(args.teacher))
        except (OSError, RuntimeError) as error:
            given = f"{args.teacher} with --teacher-width {args.teacher_width}"
            exit_with_error(f"argument --teacher: cannot load {given} ({error!r:.100})")

    @torch.no_grad()
    def collate(batch):
        images, labels = batch
        targets = [labels[:, None].float()]
        if args.teacher:
            with accelerator.autocast():
                targets.append(teacher(images).float())
        return images, torch.cat(targets, dim=1)

    return collate


def build_network(width):
    """Return a network for 32 x 32 images: (B, 3, 32, 32) in, (B, 10) logits out."""
    layers = [nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU()]
    for factor in (1, 2):
        layers.append(nn.Conv2d(factor * width, 2 * factor * width, 3, stride=2, padding=1))
        layers += [nn.BatchNorm2d(2 * factor * width), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 10))
    return network.to(memory_format=torch.channels_last)


def build_model(args):
    """Return the model, on the CPU."""
    return build_network(args.width)


def compute_loss(model, batch, args, temperature=4.0, share=0.9):
    """Return the loss: a `share` of it from the teacher's answers, the rest from the labels."""
    images, targets = batch
    labels = targets[:, 0].long()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    if targets.shape[1] > 1:
        ours = F.log_softmax(logits / temperature, dim=1)
        theirs = F.log_softmax(targets[:, 1:] / temperature, dim=1)
        divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1)
        loss = (1 - share) * loss + share * temperature**2 * divergence
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}
