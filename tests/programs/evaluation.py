"""Run by test_training.py: evaluate test sets of many sizes, most of which divide nothing.

Writes {case: [means by the recipe's `evaluate` over all ranks, means by one formula over all
samples]} to argv[1], with samples that count equally and with weights.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

recipe = load("recipes/ddp_cifar.py")
hang = SimpleNamespace(progress=0)
stop = SimpleNamespace(vote=lambda: 0)
unweighted = recipe.compute_loss
accelerator = Accelerator(cpu=True)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.Generator().manual_seed(0)
model = torch.nn.Linear(5, 10)
answers = {}


def weighted(model, batch):
    return {**unweighted(model, batch), "weight": batch[1] + 1}


for size in (1, 2, 3, 7, 8, 10, 15, 16, 17, 33):
    inputs = torch.randn(size, 5, generator=data)
    labels = torch.randint(10, (size,), generator=data)
    dataset = recipe.SeededSamples(TensorDataset(inputs, labels), 0)
    prepared, loader = accelerator.prepare(model, DataLoader(dataset, batch_size=4))
    logits = model(inputs)
    values = {
        "test_loss": F.cross_entropy(logits, labels, reduction="none"),
        "test_accuracy": logits.argmax(1) == labels,
    }
    for compute_loss in (unweighted, weighted):
        weight = labels + 1.0 if compute_loss is weighted else torch.ones(size)
        weight /= weight.sum()
        direct = {name: (x * weight).sum().item() for name, x in values.items()}
        recipe.compute_loss = compute_loss
        told = recipe.evaluate(accelerator, prepared, loader, hang, stop)
        answers[f"{size} {compute_loss.__name__}"] = [told, direct]
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(answers))
del prepared
accelerator.free_memory()
accelerator.end_training()
