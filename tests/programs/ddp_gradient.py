"""Run by test_training.py: is the gradient that DDP applies the mean over the ranks' microbatches?

Every rank takes its two microbatches of one step through the recipe's ResNet-50, by the recipe's
own `train_step` in the prepared model; a copy takes all of them one by one. In float64: at its
start the network turns a rounding error of float32 into a hundredth of its gradient. Writes the
largest deviation, the largest gradient, and the norm that was told and the one expected, to
argv[1].
"""

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load, undo_zero_init
from torch.nn import functional as F

recipe = load("recipes/ddp_cifar.py")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
ranks, mine = accelerator.num_processes, accelerator.process_index
torch.manual_seed(0)
plain = undo_zero_init(
    recipe.build_model(SimpleNamespace(model="resnet50", stem="imagenet")).double()
)
reference = copy.deepcopy(plain)
images, labels = recipe.synthetic_images(8 * ranks, seed=4)
images = images.permute(0, 3, 1, 2).double().div(255)
microbatches = list(zip(images.split(4), labels.split(4), strict=True))
initial = copy.deepcopy(plain.state_dict())
optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)  # so that the update is the gradient itself
model, optimizer = accelerator.prepare(plain, optimizer)
model.train()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
own = microbatches[2 * mine : 2 * mine + 2]
metrics, norm = recipe.train_step(accelerator, model, optimizer, scheduler, own, (0, 1), math.inf)
assert len(metrics) == 2
if accelerator.is_main_process:
    for x, y in microbatches:
        (F.cross_entropy(reference(x), y) / len(microbatches)).backward()
    pairs = [
        (initial[name] - plain.state_dict()[name], value.grad)
        for name, value in reference.named_parameters()
    ]
    deviation = max((applied - expected).abs().max().item() for applied, expected in pairs)
    largest = max(expected.abs().max().item() for _, expected in pairs)
    expected_norm = torch.nn.utils.get_total_norm([value.grad for value in reference.parameters()])
    answer = {"deviation": deviation, "largest": largest}
    answer["norm"] = [norm.item(), expected_norm.item()]
    Path(sys.argv[1]).write_text(json.dumps(answer))
accelerator.wait_for_everyone()
accelerator.free_memory()
accelerator.end_training()
