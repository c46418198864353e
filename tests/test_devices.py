"""A training computes on its device, shown without a GPU: torch's fake tensors claim to be on one,
and raise an error when they are mixed with the CPU's. They have no values, and without a driver no
backward pass. `evaluate` and the shared infrastructure are the same text in amp and sharded."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import load
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

GPU = torch.device("cuda", 0)


def same(tensor, *_):
    assert tensor.device == GPU, "a collective of GPUs needs it there"
    return tensor


class Batches:
    """Three batches of a loader, without its sampler, which draws numbers and reads them."""

    def __init__(self, loader):
        self.dataset = loader.dataset
        self.set_epoch = loader.dataset.set_epoch
        self.batch_sampler = SimpleNamespace(batch_size=3)

    def __iter__(self):
        return iter([self.dataset.__getitems__([0, 1, 2])] * 3)


@pytest.fixture
def on_gpu(monkeypatch):
    """(recipe, training batches, test batches, model, accelerator), on a GPU that is not there."""
    recipe = load("recipes/ddp_cifar.py")
    # Fake parameters do not move: they are made where they belong.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [1.0] * len(tensor))
    monkeypatch.setattr(FakeTensor, "__bool__", lambda tensor: True, raising=False)
    monkeypatch.setattr(FakeTensor, "item", lambda tensor: 1.0)
    monkeypatch.setattr(FakeTensor, "__float__", lambda tensor: 1.0, raising=False)
    monkeypatch.setattr(FakeTensor, "share_memory_", lambda tensor: tensor)
    monkeypatch.setattr(recipe.utils, "broadcast", lambda tensors: [same(x) for x in tensors])
    monkeypatch.setattr(recipe, "means", lambda names, *_: dict.fromkeys(names, 1.0))
    collectives = {"gather": same, "reduce": same}
    accelerator = SimpleNamespace(device=GPU, process_index=0, num_processes=1, **collectives)
    args = SimpleNamespace(data="synthetic", model="simple_cnn", batch_size=64, seed=0)
    with FakeTensorMode():
        loaders = [Batches(loader) for loader in recipe.load_data(args, accelerator)]
        with GPU:
            model = recipe.build_model(args)
        yield recipe, *loaders, model, accelerator


def test_batches_metrics_a_line_of_them_and_an_evaluation_stay_on_the_gpu(on_gpu, monkeypatch):
    recipe, loader, test_loader, model, accelerator = on_gpu
    loader.set_epoch(1)
    images, labels = batch = next(iter(loader))
    assert images.device == labels.device == GPU
    assert images.is_contiguous(memory_format=torch.channels_last)
    values, _ = recipe.split_values(recipe.compute_loss(model, batch, None))
    assert values["loss"].device == GPU
    run = SimpleNamespace(accelerator=accelerator, model=model, step=1, learning_rate=0.1)
    run.args = SimpleNamespace(global_batch_size=3)
    metrics = SimpleNamespace(run=run, names=[], sums=0, data_seconds=0.0, clock=0.0)
    metrics.interval_began = 0
    vars(metrics).update(bar=0, progress=SimpleNamespace(advance=lambda bar: None))
    recipe.Metrics.add(metrics, [values, values])
    assert metrics.sums.device == GPU
    line, ranks, _ = recipe.Metrics.gather(metrics, torch.ones((), device=GPU))
    assert line["grad_norm"] == 1 and ranks["norms"].shape == (1, 2)
    # As a frozen stage of a pipeline. Fake tensors take a number from the CPU, real ones do not.
    model.requires_grad_(False)
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors, **k: stack([*map(same, tensors)], **k))
    _, ranks, _ = recipe.Metrics.gather(metrics, torch.ones((), device=GPU))
    assert ranks["norms"].shape == (1, 2)
    # An evaluation, too.
    run.watcher = SimpleNamespace(agreed_signal=lambda: 0)
    run.exit_on = lambda number: None
    run.data_parallel_size, run.ranks_per_batch = 1, 1
    run.train_loader, run.steps_per_epoch = loader, 1
    run.test_batches = partial(recipe.Run.test_batches, run)
    run.on_main_process = lambda function, *arguments: function(*arguments)
    test = recipe.evaluate(run, model, test_loader)
    assert test.keys() == {"test_loss", "test_accuracy"}
    rows = recipe.gather_outputs(SimpleNamespace(cpu_group=None), values["loss"])
    assert {row.device.type for row in rows} == {"cpu"}, "of a whole test set"
