# Parts of a copy, not a program: make new COPY=../mine.py WITH=resnet20
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-20 on CIFAR-10 to a published accuracy: 91.25% (He et al. 2015, arXiv:1512.03385).

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data-dir data \\
        --epochs 50 --global-batch-size 128

It has 0.27 million parameters: two CPU cores train it in about an hour. amp_cifar.py uses bf16,
which CPUs with AMX or AVX-512-BF16 multiply faster. The model and the augmentation are the paper's;
the optimizer and the schedule are the recipe's. CIFAR-10 is downloaded if missing.

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters, which pads new channels with zeros:
    (B, C, H, W) in, (B, width, H / stride, W / stride) out."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.more = width - channels

    def forward(self, images):
        outputs = F.relu(self.bn1(self.conv1(images)))
        outputs = self.bn2(self.conv2(outputs))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        return F.relu(outputs + F.pad(shortcut, (0, 0, 0, 0, 0, self.more)))


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) in, (B, 10) logits out."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for index in range(3):
            layers.append(Block(channels, width, 2 if index == 0 < width - channels else 1))
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # He et al. 2015, arXiv:1502.01852
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model.to(memory_format=torch.channels_last)
