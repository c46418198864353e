"""Launched by test_training.py: is the gradient that DDP applies the mean over the ranks' shards?

Every rank takes its shard of one batch through the recipe's ResNet-50, once by the recipe's own `train_step` in the
prepared model, and once per shard in an unprepared copy. Writes the largest deviation to argv[1].
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load
from torch.nn import functional as F

recipe = load("recipes/ddp_cifar.py")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
args = SimpleNamespace(model="resnet50", stem="imagenet")
plain = recipe.build_model(args)
for block in plain.modules():  # the zero-initialised scales would hide most of the network from the gradient
    if getattr(block, "weight", None) is not None and block.weight.dim() == 1:
        torch.nn.init.ones_(block.weight)
reference = copy.deepcopy(plain)
images, labels = recipe.synthetic_images(8 * accelerator.num_processes, seed=4)
shards = list(zip(images.permute(0, 3, 1, 2).div(255).split(8), labels.split(8), strict=True))

initial = copy.deepcopy(plain.state_dict())
optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)  # so that the update is the gradient itself
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer = accelerator.prepare(plain, optimizer)
model.train()
recipe.train_step(accelerator, model, optimizer, scheduler, *shards[accelerator.process_index])
applied = {name: initial[name] - value.detach() for name, value in accelerator.unwrap_model(model).named_parameters()}

for shard_images, shard_labels in shards:
    (F.cross_entropy(reference(shard_images), shard_labels) / len(shards)).backward()
largest = max(gradient.grad.abs().max().item() for gradient in reference.parameters())
deviation = max((applied[name] - value.grad).abs().max().item() for name, value in reference.named_parameters())
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps({"deviation": deviation, "largest": largest}))
accelerator.free_memory()
accelerator.end_training()
