"""What a recipe computes with is on its device, shown without a GPU: torch's fake tensors claim to
be on one, and raise an error when they are mixed with the CPU's. They have no values, and without a
driver no backward pass."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import both_stages, load
from test_recipes import RECIPES
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

GPU = torch.device("cuda", 0)


class Batches:
    """Three batches of a loader, without its sampler, which draws numbers and reads them."""

    def __init__(self, loader):
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler
        self.set_epoch = loader.dataset.set_epoch

    def __iter__(self):
        return iter([self.dataset.__getitems__([0, 1, 2])] * 3)


@pytest.fixture(params=RECIPES)
def on_gpu(request, monkeypatch):
    """(a recipe, its training and its test loader, the model, an accelerator), on the GPU that is
    not there."""

    def read(tensor):
        assert tensor.device == GPU, "collectives need it there"
        return [1.0] * len(tensor)

    # Fake parameters do not move: they are made where they belong.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    recipe = load(f"recipes/{request.param}.py")
    monkeypatch.setattr(FakeTensor, "tolist", read)
    monkeypatch.setattr(FakeTensor, "share_memory_", lambda tensor: tensor)
    monkeypatch.setattr(
        recipe.utils,
        "broadcast",
        lambda tensors: [read(tensor.flatten()[:1]) for tensor in tensors],
    )
    monkeypatch.setattr(
        recipe.utils, "broadcast_object_list", lambda objects, from_process: objects
    )
    monkeypatch.setattr(
        recipe, "test_metrics", lambda names, sums, samples: dict(zip(names, sums, strict=False))
    )
    accelerator = SimpleNamespace(
        device=GPU, process_index=0, gather_for_metrics=lambda x: x, reduce=lambda x: x
    )
    accelerator.main_process_first = accelerator.local_main_process_first = nullcontext
    args = SimpleNamespace(
        data="synthetic", model="simple_cnn", stem="cifar", batch_size=64, seed=0, split=None
    )
    with FakeTensorMode():
        loaders = [Batches(loader) for loader in recipe.load_data(args, accelerator)]
        with GPU:
            model = recipe.build_model(args)
        yield recipe, *loaders, model, accelerator, args


def test_batches_metrics_and_a_line_of_them_stay_on_the_gpu(on_gpu):
    recipe, loader, _, model, accelerator, _ = on_gpu
    loader.set_epoch(1)
    images, labels = batch = next(iter(loader))
    assert images.device == labels.device == GPU and images.is_contiguous(
        memory_format=torch.channels_last
    )
    metrics = recipe.compute_loss(model, batch)
    assert recipe.mean_loss(metrics).device == GPU
    written, run = (
        [],
        SimpleNamespace(
            names=[], totals=0, accelerator=accelerator, state={"model": model}, own_metrics=dict
        ),
    )
    vars(run).update(interval_start=0, logged=0, start=0, step=1, config={"global_batch_size": 1})
    run.write = lambda *line: written.append(line)
    recipe.Run.add(run, metrics)
    recipe.Run.log(run, 0.1)
    assert [event for event, _ in written] == ["train"]


def test_evaluations_stay_on_the_gpu(on_gpu):
    recipe, _, loader, model, accelerator, args = on_gpu
    if recipe.RECIPE != "pipeline_cifar":
        assert recipe.evaluate(accelerator, model, loader).keys() == {"loss", "accuracy"}
        return
    first, last = both_stages(recipe, model, args, nullcontext)

    def both(inputs=None, target=None):  # the last stage of a pipeline that is one process
        return last(
            first(inputs if inputs is not None else torch.zeros(len(target), 3, 32, 32, device=GPU))
        )

    last.schedule, last.replicas = (
        SimpleNamespace(eval=both),
        SimpleNamespace(size=lambda: 1, rank=lambda: 0),
    )
    last.pipeline, last.shapes = SimpleNamespace(rank=lambda: 1), None
    assert recipe.evaluate(accelerator, last, loader).keys() == {"loss", "accuracy"}
