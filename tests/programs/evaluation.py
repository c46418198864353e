"""Launched by test_training.py: evaluate test sets of many sizes, most of which divide nothing.

Writes {size: [what the recipe's `evaluate` says over all ranks, what a loop in one process says]} to argv[1].
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from conftest import load
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

recipe = load("recipes/ddp_cifar.py")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(5, 10)
answers, interruption = {}, recipe.Interruption(accelerator)
for size in (1, 2, 3, 7, 8, 10, 15, 16, 17, 33):
    inputs, labels = torch.randn(size, 5), torch.randint(10, (size,))
    prepared, loader = accelerator.prepare(model, DataLoader(TensorDataset(inputs, labels), batch_size=4))
    logits = model(inputs)
    direct = {
        "test_loss": F.cross_entropy(logits, labels).item(),
        "test_accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "samples": size,
    }
    answers[size] = [recipe.evaluate(accelerator, prepared, loader, interruption), direct]
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(answers))
del prepared
accelerator.free_memory()
accelerator.end_training()
