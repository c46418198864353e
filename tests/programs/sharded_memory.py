"""Run by test_sharded.py, as processes of forked.py: sharded_memory.py ANSWER

One step of five of ResNet-50's blocks in float64, with a quarter of their channels, sharded by the
recipe's functions. Writes the bytes of parameters, gradients and momentum of each process, of all
parameters, of those of the largest unit and of the root, the most bytes that were unsharded at a
time, and the timeouts of the mesh's process groups.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision
from accelerate import Accelerator, utils
from conftest import load
from torch import nn
from torch.distributed.tensor import DTensor

recipe = load("recipes/sharded_cifar.py")
accelerator = Accelerator(cpu=True)
mesh = recipe.make_mesh(accelerator, replicas=2)


class NarrowResNet(torchvision.models.ResNet):
    def __init__(self):
        super().__init__(torchvision.models.resnet.Bottleneck, [1, 1, 1, 2])
        self.fc = nn.Linear(512, 10)

    def _make_layer(self, block, planes, *more, **options):
        return super()._make_layer(block, planes // 4, *more, **options)


def build_model(args):
    torch.manual_seed(0)
    return NarrowResNet().double().to(memory_format=torch.channels_last)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def held_bytes(model, optimizer):
    """Bytes of parameters, gradients and momentum on this process, with padding."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in local}
    return sum(storage.nbytes() for storage in storages.values())


recipe.build_model = build_model
whole = build_model(None)
units = [sum(size(p) for p in unit.parameters()) for unit in recipe.shard_units(whole)]
parameters = sum(size(p) for p in whole.parameters())
args = SimpleNamespace(weights=None, precision="fp32", compile=False, activation_checkpointing=True)
run = SimpleNamespace(args=args, accelerator=accelerator, cpu_group=None, directory=None)
run.on_main_process = lambda *_: []  # no checkpoint
model = recipe.build_sharded_model(run, mesh)
gathered = []
# FSDP puts unsharded parameters there for a while. `model.parameters()` would be slow.
places = [(module._parameters, name) for module in model.modules() for name in module._parameters]


def watch(*_):
    now = [parameters[name] for parameters, name in places if parameters[name] is not None]
    gathered.append(sum(size(p) for p in now if not isinstance(p, DTensor)))


def watch_backward(module, inputs, output):
    output.register_hook(watch)


for module in model.modules():
    module.register_forward_pre_hook(watch)
    module.register_forward_hook(watch_backward)
images, labels = torch.randn(2, 3, 32, 32).double(), torch.zeros(2).long()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
recipe.compute_loss(model, (images, labels), args)["loss"].mean().backward()
optimizer.step()
held = utils.gather_object([held_bytes(model, optimizer)])
if accelerator.is_main_process:
    groups = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
    answer = {
        "held": held,
        "parameters": parameters,
        "unit": max(units),
        "root": parameters - sum(units),
        "gathered": max(gathered),
        "timeouts": [group.options._timeout.total_seconds() for group in groups],
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
