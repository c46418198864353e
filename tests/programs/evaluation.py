"""Run by test_training.py: evaluate test sets of many sizes, most of which divide nothing.

Writes {case: [means by the recipe's `evaluate` over all ranks, means by one formula over all
samples, mean of random numbers]} to argv[1], with samples that count equally and with weights.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load
from torch import distributed
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

recipe = load("recipes/ddp_cifar.py")
plain_loss = recipe.compute_loss
accelerator = Accelerator(cpu=True)
run = SimpleNamespace(accelerator=accelerator, args=None, is_paused=False)
run.watcher = SimpleNamespace(agreed_signal=lambda: 0)
run.exit_on = partial(recipe.Run.exit_on, run)
run.test_batches = partial(recipe.Run.test_batches, run)
run.data_parallel_size, run.ranks_per_batch = accelerator.num_processes, 1
run.step, run.steps_per_epoch = 5, 2
run.train_loader = DataLoader(recipe.SeededSamples(range(8), 0))
run.cpu_group = distributed.group.WORLD if accelerator.use_distributed else None
run.on_main_process = partial(recipe.Run.on_main_process, run)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.Generator().manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Dropout().eval())  # a frozen part
answers = {}
seen = []


def with_noise(samples):
    """Numbers of a collate_fn: they depend on how many samples a batch has."""
    inputs, labels = default_collate(samples)
    return inputs + torch.randn(len(inputs), 5), labels


def unweighted(model, batch, args):
    return {**plain_loss(model, batch, args), "noise": torch.rand(len(batch[1]))}


def weighted(model, batch, args):
    return {**unweighted(model, batch, args), "weight": batch[1] + 1}


def with_outputs(kind, model, batch, args):
    """The padding is as of sequences of tokens: rows as long as the batch's longest."""
    _, labels = batch
    rows = torch.arange(labels.max() + 1) <= labels[:, None]
    names = [f"sample {label}" for label in labels.tolist()]
    outputs = {"padding": rows.long(), "objects": names}[kind]
    return {**unweighted(model, batch, args), "outputs": outputs}


def test_metrics(outputs, args):
    seen.append(outputs)
    return {"outputs": torch.tensor(len(outputs))}  # as torchmetrics does


recipe.test_metrics = test_metrics


for size in (1, 3, 7, 8, 15, 16, 17, 33):
    inputs = torch.randn(size, 5, generator=data)
    labels = torch.randint(10, (size,), generator=data)
    dataset = recipe.SeededSamples(TensorDataset(inputs, labels), 0, is_test=True)
    loader = DataLoader(dataset, batch_size=4, collate_fn=with_noise)
    inputs = torch.cat([batch for batch, _ in loader])
    prepared, loader = accelerator.prepare(model, loader)
    logits = model(inputs)
    values = {
        "test_loss": F.cross_entropy(logits, labels, reduction="none"),
        "test_accuracy": logits.argmax(1) == labels,
    }
    in_order = {
        "padding": [label + 1 for label in labels.tolist()],
        "objects": [f"sample {label}" for label in labels.tolist()],
    }
    for kind in ("unweighted", "weighted", *in_order):
        weight = labels + 1.0 if kind == "weighted" else torch.ones(size)
        weight /= weight.sum()
        direct = {name: (x * weight).sum().item() for name, x in values.items()}
        plain = weighted if kind == "weighted" else unweighted
        recipe.compute_loss = partial(with_outputs, kind) if kind in in_order else plain
        told = recipe.evaluate(run, prepared, loader)
        assert run.train_loader.dataset.epoch == 2, "a test set may be read by it, too"
        direct["test_outputs"] = size if kind in in_order else 0
        expected = in_order.get(kind, []) if accelerator.is_main_process else []
        for outputs in seen:
            if kind == "padding":
                outputs = [row.sum().item() for row in outputs]
            assert outputs == expected
        assert len(seen) == accelerator.is_main_process
        seen.clear()
        answers[f"{size} {kind}"] = [told, direct, told.pop("test_noise")]
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(answers))
del prepared
accelerator.free_memory()
accelerator.end_training()
