"""For copies in test_resume.py: buffers of no state dict, and steps that say what they map."""

import os
from pathlib import Path

import torch
from torch import nn

from ddp_cifar import build_model, say, train_step

plain_model, plain_step = build_model, train_step


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)  # in no state dict
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.cache = torch.zeros(len(self.cache) + 1)  # another size than in a new process
        return x * (1 + self.calls / 100)


def build_model(args):
    return plain_model(args).insert(0, nn.Sequential(Growing()))


def train_step(run, *arguments):
    if run.step == int(os.environ.get("ENDS", 0)):
        os._exit(7)
    say(f"mapped files: {'/step-' in Path('/proc/self/maps').read_text()}")
    return plain_step(run, *arguments)
