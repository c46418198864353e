"""Run by test_sharded.py, as processes of forked.py:

    sharded_gradient.py ANSWER.json REPLICAS CHECKPOINTING

One step of ResNet-50 in float64, with a quarter of its channels, sharded by the recipe's functions,
and in the main process the same step of the whole model, over the same samples divided in the same
way: BatchNorm normalises over a process's batch.
Writes the largest deviation of a gradient, the largest gradient, how many bytes each process holds
of parameters, gradients and momentum, how many the whole model has, how many the parameters of the
largest unit and of what is in none, and the most that were whole at a time.
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

BATCH = 4  # with two, BatchNorm behind the last stage would make nothing but +1 and -1 of them

recipe = load("recipes/sharded_cifar.py")
path, replicas = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
args = SimpleNamespace(
    precision="fp32",
    replicas=replicas,
    activation_checkpointing=sys.argv[3] == "True",
    cpu_offload=False,
)
accelerator.cpu_group = None
mesh = recipe.make_mesh(accelerator, args)


class NarrowResNet(torchvision.models.ResNet):
    def __init__(self):
        super().__init__(torchvision.models.resnet.Bottleneck, [3, 4, 6, 3])
        self.fc = nn.Linear(512, 10)

    def _make_layer(self, block, planes, *more, **options):
        return super()._make_layer(block, planes // 4, *more, **options)


def size(parameter):
    return parameter.numel() * parameter.element_size()


torch.manual_seed(0)
whole = NarrowResNet().double() if accelerator.is_main_process else None
with torch.device("meta"):
    model = NarrowResNet().double()
units = [sum(size(p) for p in unit.parameters()) for unit in recipe.shard_units(model)]
unit, root = max(units), sum(size(p) for p in model.parameters()) - sum(units)
recipe.shard(model, args, mesh)
recipe.send_weights(whole, model, accelerator, mesh, offload=False)
gathered = []
# Where the parameters are, on which FSDP puts whole ones for a while: `model.parameters()` would
# search for them, in 360 calls.
places = [(module._parameters, name) for module in model.modules() for name in module._parameters]


def watch(*_):
    now = [parameters[name] for parameters, name in places if parameters[name] is not None]
    gathered.append(sum(size(p) for p in now if not isinstance(p, DTensor)))


def watch_backward(module, inputs, output):
    output.register_hook(watch)


for module in model.modules():
    module.register_forward_pre_hook(watch)
    module.register_forward_hook(watch_backward)
images, labels = recipe.synthetic_images(BATCH * accelerator.num_processes, seed=4)
images = images.permute(0, 3, 1, 2).double().sub(128).div(64)
batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


optimizer = make_optimizer(model)
mine = recipe.held_after_first_step(model, optimizer)
accelerator.backward(
    recipe.mean_loss(recipe.compute_loss(model, batches[accelerator.process_index]))
)
gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
optimizer.step()
held = utils.gather_object([sum(mine.values())])
if accelerator.is_main_process:
    for batch in batches:
        (recipe.mean_loss(recipe.compute_loss(whole, batch)) / len(batches)).backward()
    whole_optimizer = make_optimizer(whole)
    everything = recipe.held_after_first_step(whole, whole_optimizer)
    expected = {name: p.grad.clone() for name, p in whole.named_parameters()}
    whole_optimizer.step()
    answer = {"held": held, "whole": sum(everything.values()), "unit": unit, "root": root}
    answer["gathered"] = max(gathered)
    answer["deviation"] = max(
        (gradients[name] - value).abs().max().item() for name, value in expected.items()
    )
    answer["largest"] = max(value.abs().max().item() for value in expected.values())
    Path(path).write_text(json.dumps(answer))
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
