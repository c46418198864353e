"""For copies in test_checkpoints.py: a model with all that is in no tensor of its state dict, a
dataset that is in both loaders, and steps that say what they map. ENDS is the step in whose
evaluation all ranks end."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_cifar import build_model, evaluate, load_data, log_line, train_step

plain_data, plain_model = load_data, build_model
plain_step, plain_evaluate = train_step, evaluate
LEVEL = torch.tensor([1, 2, 3], dtype=torch.int16)  # which gloo cannot send


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)  # in no state dict
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.cache = torch.zeros(len(self.cache) + 1)  # another size than in a new process
        return x * (1 + self.calls / 100 + self.steps / 100)


def load_data(args, accelerator):
    train, _ = plain_data(args, accelerator)
    return train, DataLoader(train.dataset, args.batch_size, collate_fn=tuple)


def growing_model(args):
    log_line(f"builds a model on {torch.zeros(1).device}")
    return plain_model(args).insert(0, nn.Sequential(Growing()))


def quantised_model(args):
    model = growing_model(args)
    weight = torch.ones(4, dtype=torch.int8)
    model[0][0].quantised = nn.Parameter(weight, requires_grad=False)
    return model


def train_step(run, model, optimizer, *arguments):
    log_line(f"mapped files: {'/step-' in Path('/proc/self/maps').read_text()}")
    for module in model.modules():
        if isinstance(module, Growing):
            module.steps += 1
    results = plain_step(run, model, optimizer, *arguments)
    for state in optimizer.state.values():
        assert state.get("level", LEVEL).equal(LEVEL), "on each rank"
        state["level"] = LEVEL.clone()
    return results


def evaluate(run, *arguments):
    if run.step == int(os.environ.get("ENDS", 0)):
        os._exit(7)
    return plain_evaluate(run, *arguments)
