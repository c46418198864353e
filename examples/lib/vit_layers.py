# SPDX-License-Identifier: Apache-2.0
"""The layers of torchvision's VisionTransformer, for vit.py: in order, and how deep they are."""

import re

import torch
from torch import nn


class Tokens(nn.Module):
    """(B, W, H, W) of patches in; out (B, 1 + H * W, W), with class token and positions."""

    def __init__(self, model):
        super().__init__()
        self.class_token = model.class_token
        self.pos_embedding = model.encoder.pos_embedding

    def forward(self, x):
        tokens = torch.cat((self.class_token.expand(len(x), -1, -1), x.flatten(2).mT), dim=1)
        return tokens + self.pos_embedding


class FirstToken(nn.Module):
    def forward(self, x):
        return x[:, 0]


def model_blocks(model):
    """Return {name: block} in order of execution."""
    layers = model.encoder.layers.named_children()
    return {
        "conv_proj": model.conv_proj,
        "encoder": Tokens(model),
        **{f"encoder.layers.{name}": layer for name, layer in layers},
        "encoder.ln": model.encoder.ln,
        "first_token": FirstToken(),
        "heads": model.heads,
    }


def depth_of(name, layers):
    """Return the depth of a parameter: 0 below the first layer, layers + 1 above the last one."""
    if found := re.search(r"encoder_layer_(\d+)", name):
        return int(found[1]) + 1
    return 0 if re.search("conv_proj|class_token|pos_embedding", name) else layers + 1
