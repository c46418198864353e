"""Run by test_amp.py: an overflow in the scaled gradients, and clipping, in the recipe's own
training step.

The Accelerator gets a GradScaler that works on CPU. Step 2 of 4 has an infinite gradient. Writes
for each step the loss scale, whether it was skipped, the learning rate, and the norm of the update;
and the update's norm when clipped.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from conftest import load

recipe = load("recipes/amp_cifar.py")
accelerator = Accelerator(cpu=True, mixed_precision="fp16")
accelerator.native_amp = True  # as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def setup(lr=1.0):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accelerator.free_memory()
    optimizer = accelerator.prepare_optimizer(optimizer)
    return model, optimizer, scheduler


images, labels = torch.randn(8, 6), torch.randint(3, (8,))
model, optimizer, scheduler = setup()
steps = []
for step in range(4):
    if step == 2:
        handle = model.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = model.weight.detach().clone()
    batches = iter([(images, labels)])
    recipe.train_step(accelerator, model, optimizer, scheduler, batches, (0, step), None)
    if step == 2:
        handle.remove()
    steps.append(
        {
            "scale": accelerator.scaler.get_scale(),
            "skipped": accelerator.optimizer_step_was_skipped,
            "learning_rate": scheduler.get_last_lr()[0],
            "told": recipe.loss_scaling(accelerator, scheduler, step + 1),
            "moved": (model.weight - before).norm().item(),
        }
    )

norms = {}
for clip_norm in (None, 0.01):
    model, optimizer, scheduler = setup()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches = iter([(images, labels)])
    _, told = recipe.train_step(
        accelerator, model, optimizer, scheduler, batches, (0, 1), clip_norm
    )
    moved = [new - old for new, old in zip(model.parameters(), before, strict=True)]
    norms[str(clip_norm)] = torch.cat([part.flatten() for part in moved]).norm().item()
norms["told"] = told.item()
Path(sys.argv[1]).write_text(json.dumps({"steps": steps, "norms": norms}))
