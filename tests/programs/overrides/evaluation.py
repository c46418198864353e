"""For copies in test_training.py: they evaluate test sets of many sizes, most of which divide
nothing, in two ways: with weights and objects as outputs, and with padded rows."""

import json
from itertools import product
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ddp_cifar import RANK, Run, add_flags, add_technique_flags, evaluate, parse_args

CASES = [*product((1, 3, 7, 8, 15, 16, 17, 33), ("objects", "rows"))]


def data(size):
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator).double()
    return inputs, torch.randint(10, (size,), generator=generator)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.Dropout().eval()).double()  # a frozen part


def with_noise(samples):
    inputs, labels = default_collate(samples)
    return inputs, labels, torch.rand(len(labels))


def compute_loss(model, batch, args):
    inputs, labels, noise = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, reduction="none")
    hits = logits.argmax(1) == labels
    values = {"loss": loss, "accuracy": hits, "noise": noise + torch.rand(len(labels))}
    if args.kind == "objects":
        return {**values, "weight": labels + 1, "outputs": [{"label": x} for x in labels.tolist()]}
    rows = torch.arange(labels.max() + 1) <= labels[:, None]  # as long as the batch's longest
    return {**values, "outputs": rows.long()}


def test_metrics(outputs, args):
    labels = [x["label"] if args.kind == "objects" else x.sum() - 1 for x in outputs]
    return {"places": torch.tensor(sum(place * x for place, x in enumerate(labels)))}


def main():
    args = parse_args("", add_technique_flags, add_flags)
    run = Run(args, "fp32")
    run.step, run.watcher = 0, SimpleNamespace(agreed_signal=lambda: 0)
    model = make_model()
    answers = []
    for size, args.kind in CASES:
        train = DataLoader(TensorDataset(*data(64)), args.batch_size, shuffle=True, drop_last=True)
        test = DataLoader(TensorDataset(*data(size)), 4, collate_fn=with_noise)
        _, loader = run.prepare_data((train, test))
        answers.append(evaluate(run, model, loader))
        assert [part.training for part in (model, *model)] == [True, True, False]
    if RANK == 0:
        (run.directory / "answers").write_text(json.dumps(answers))
