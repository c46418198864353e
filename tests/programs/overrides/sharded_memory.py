"""For a copy in test_sharded.py: the bytes that each rank holds after its first step, the most that
were unsharded at a time, and the timeouts of the mesh's process groups. All units are equal."""

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sharded_cifar import RANK, make_mesh, make_optimizer

plain_mesh, plain_optimizer = make_mesh, make_optimizer
timeouts, gathered = [], []


def build_model(args):
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), *(nn.Linear(192, 192) for _ in range(9)))


def make_mesh(*arguments):
    mesh = plain_mesh(*arguments)
    groups = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
    timeouts.extend(group.options._timeout.total_seconds() for group in groups)
    return mesh


def make_optimizer(model, args, total_steps):
    optimizer, scheduler = plain_optimizer(model, args, total_steps)
    optimizer.register_step_post_hook(partial(write, model))
    for module in model.modules():
        module.register_forward_pre_hook(partial(watch, model))
        module.register_forward_hook(partial(watch_backward, model))
    return optimizer, scheduler


def watch(model, *_):
    """FSDP puts unsharded parameters in the places of the sharded ones for a while."""
    now = [p for module in model.modules() for p in module._parameters.values() if p is not None]
    gathered.append(sum(p.nbytes for p in now if not isinstance(p, DTensor)))


def watch_backward(model, module, inputs, output):
    if output.requires_grad:
        output.register_hook(partial(watch, model))


def write(model, optimizer, *_):
    """Parameters, gradients and momentum, with padding."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    storages = [x.to_local().untyped_storage() for x in tensors if isinstance(x, DTensor)]
    held = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
    Path(f"held.{RANK}").write_text(json.dumps([held, max(gathered), timeouts]))
