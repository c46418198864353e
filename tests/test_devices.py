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
from torch.utils.data import DataLoader

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

    # Fake parameters do not move: they are made where they belong.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    recipe = load(f"recipes/{request.param}.py")
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [1.0] * len(tensor))
    monkeypatch.setattr(FakeTensor, "item", lambda tensor: 1.0)
    monkeypatch.setattr(FakeTensor, "__float__", lambda tensor: 1.0, raising=False)
    monkeypatch.setattr(FakeTensor, "share_memory_", lambda tensor: tensor)
    monkeypatch.setattr(recipe.utils, "broadcast", lambda tensors: [same(x) for x in tensors])
    monkeypatch.setattr(recipe.utils, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(recipe, "test_metrics", lambda names, sums, samples: list(names))
    collectives = {"gather": same, "gather_for_metrics": same, "reduce": same}
    accelerator = SimpleNamespace(
        device=GPU, process_index=0, num_processes=1, is_main_process=True, **collectives
    )
    accelerator.main_process_first = accelerator.local_main_process_first = nullcontext
    args = {"data": "synthetic", "model": "simple_cnn", "stem": "cifar", "batch_size": 64}
    args = SimpleNamespace(**args, seed=0, split=None)
    with FakeTensorMode():
        loaders = [Batches(loader) for loader in recipe.load_data(args, accelerator)]
        with GPU:
            model = recipe.build_model(args)
        yield recipe, *loaders, model, accelerator, args


def same(tensor, *_):
    assert tensor.device == GPU, "collectives need it there"
    return tensor


def test_batches_metrics_and_a_line_of_them_stay_on_the_gpu(on_gpu, monkeypatch):
    recipe, loader, _, model, accelerator, _ = on_gpu
    loader.set_epoch(1)
    images, labels = batch = next(iter(loader))
    assert images.device == labels.device == GPU
    assert images.is_contiguous(memory_format=torch.channels_last)
    values = recipe.compute_loss(model, batch)
    assert recipe.mean_loss(values).device == GPU
    written = []
    monkeypatch.setattr(recipe.Metrics, "open_outputs", lambda metrics: None)
    monkeypatch.setattr(recipe.Metrics, "write", lambda metrics, *line: written.append(line))
    monkeypatch.setattr(recipe.Metrics, "exit_if_not_finite", lambda metrics, *_: None)
    steps = SimpleNamespace(done=0, waited=0.0)
    metrics = recipe.Metrics(accelerator, {"global_batch_size": 3, "output_dir": "."}, steps, None)
    metrics.display = SimpleNamespace(advance=lambda: None)
    metrics.start_clock()
    metrics.add(1, [values, values])
    assert metrics.sums.device == GPU
    metrics.log(torch.ones((), device=GPU), 0.1, torch.ones((), device=GPU))
    assert [event for event, *_ in written] == ["train"]


def test_evaluations_stay_on_the_gpu(on_gpu, monkeypatch):
    recipe, _, loader, model, accelerator, args = on_gpu
    hang = SimpleNamespace(made_progress=lambda: None)
    if recipe.RECIPE != "pipeline_cifar":
        assert recipe.evaluate(accelerator, model, loader, hang) == ["loss", "accuracy"]
        return
    # Both stages in this process.
    first, last = both_stages(recipe, model, args, nullcontext)

    def both(target, return_outputs):
        images = torch.zeros(len(target), 3, 32, 32, device=GPU)
        recipe.part_of_loss(last(first(images)), target, (1, 1), last.metrics)

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 1)
    replicas = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    last.schedule = SimpleNamespace(eval=both)
    parts = {"group": group, "replicas": replicas, "batch_shapes": None, "microbatches": 1}
    for name, value in {**parts, "metrics": []}.items():
        setattr(last, name, value)
    monkeypatch.setattr(recipe, "send_buffers", lambda model, buffers: list(map(same, buffers)))
    assert recipe.evaluate(accelerator, last, loader, hang) == ["loss", "accuracy"]


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"pin_memory": True}, {}])
@pytest.mark.parametrize("part", [False, True])
def test_data_on_a_gpu_need_a_loader_without_workers_and_pinning(options, part, monkeypatch):
    """They would fail in the worker, or in the thread that pins; on CPU both work. "meta" stands
    for the GPU."""
    recipe = load("recipes/ddp_cifar.py")
    errors = []
    monkeypatch.setattr(recipe, "exit_with_error", errors.append)
    monkeypatch.setattr(torch.Tensor, "share_memory_", lambda tensor: tensor)
    images = torch.zeros(8, 32, 32, 3, dtype=torch.uint8)
    for device in ("cpu", "meta"):
        data = recipe.ImageTensors(images, torch.zeros(8, dtype=torch.int64), device)
        data = torch.utils.data.Subset(data, range(4)) if part else data
        loader = DataLoader(data, 4, collate_fn=tuple, **options)
        recipe.check_loader(loader, drop_last=False)
        assert len(errors) == (device == "meta" and options != {})
    for error in errors:
        assert error.startswith("load_data: ImageTensors.") and " is on the GPU" in error
        assert "set num_workers=0 and pin_memory=False" in error
