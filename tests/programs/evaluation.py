"""Run by test_training.py: evaluate test sets of many sizes, most of which divide nothing.

Writes {size: [means by the recipe's `evaluate` over all ranks, means by one formula over all
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
hang = SimpleNamespace(made_progress=lambda: None)
stop = SimpleNamespace(requested=lambda: 0)
unweighted = recipe.compute_loss
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.Generator().manual_seed(0)
model = torch.nn.Linear(5, 10)
answers = {}


def weighted(model, batch):
    images, labels = batch
    return {**unweighted(model, batch), "weight": labels + 1, "positive": images[:, 0] > 0}


for size in (1, 2, 3, 7, 8, 10, 15, 16, 17, 33):
    inputs = torch.randn(size, 5, generator=data)
    labels = torch.randint(10, (size,), generator=data)
    dataset = recipe.SeededSamples(TensorDataset(inputs, labels), 0)
    prepared, loader = accelerator.prepare(model, DataLoader(dataset, batch_size=4))
    logits = model(inputs)
    losses = F.cross_entropy(logits, labels, reduction="none")
    hits = (logits.argmax(1) == labels).double()
    recipe.compute_loss = unweighted
    direct = {"test_loss": losses.mean().item(), "test_accuracy": hits.mean().item()}
    answers[size] = [recipe.evaluate(accelerator, prepared, loader, hang, stop), direct]
    recipe.compute_loss = weighted
    weight = (labels + 1.0) / (labels + 1.0).sum()
    direct = {
        "test_loss": (losses * weight).sum().item(),
        "test_accuracy": (hits * weight).sum().item(),
        "test_positive": ((inputs[:, 0] > 0) * weight).sum().item(),
    }
    told = recipe.evaluate(accelerator, prepared, loader, hang, stop)
    answers[f"{size} weighted"] = [told, direct]
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(answers))
del prepared
accelerator.free_memory()
accelerator.end_training()
