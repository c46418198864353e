"""Run by test_pipeline.py: the pipeline against the unsplit model over the same microbatches.

The recipe's own functions train for one step, whose update is the gradient itself, or for several with momentum; the
unsplit model does the same in one process. In float64: at its start ResNet-50 turns a rounding error of float32 into a
hundredth of its gradient within one step, whatever computes it.
Writes {case: [largest deviation of an update, largest update, loss of the last step, the reference's]} to argv[1].
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load, undo_zero_init
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

recipe = load("recipes/pipeline_cifar.py")
accelerator, path = Accelerator(cpu=True), Path(sys.argv[1])
mesh = init_device_mesh("cpu", (accelerator.num_processes // 2, 2), mesh_dim_names=("dp", "pp"))
pipeline, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
is_last = pipeline.rank() == 1
answers, models, references = {}, {}, {}


def make_optimizer(parameters, steps):
    optimizer = torch.optim.SGD(parameters, lr=1.0 if steps == 1 else 1e-3, momentum=0 if steps == 1 else 0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def unsplit(model, initial, batches, parts, steps):
    """Return how far each parameter moves in these steps, and the last loss."""
    optimizer, _ = make_optimizer(model.parameters(), steps)
    for x, y in batches:
        losses = [
            F.cross_entropy(model(part), target) / parts
            for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True)
        ]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() - initial[name] for name, value in model.named_parameters()}, sum(losses).item()


def compare(model_name, schedule_name, microbatches, split=None, steps=1, batch=16):
    args = SimpleNamespace(
        model=model_name, stem="imagenet", split=split, schedule=schedule_name, microbatches=microbatches
    )
    if model_name not in models:
        torch.manual_seed(0)
        models[model_name] = undo_zero_init(recipe.build_model(args).double().train())
    whole, reference = (copy.deepcopy(models[model_name]) for _ in range(2))
    initial = copy.deepcopy(whole.state_dict())
    images, labels = recipe.synthetic_images(steps * batch * replicas.size(), seed=4)
    images = images.permute(0, 3, 1, 2).double().sub(128).div(64)
    if model_name == "simple_cnn":
        images = F.avg_pool2d(images, 4)  # small images save time
    batches = list(zip(images.chunk(steps), labels.chunk(steps), strict=True))

    blocks = recipe.cut(recipe.model_blocks(whole), args)[pipeline.rank()]
    stage = recipe.make_pipeline(args, accelerator, blocks, pipeline, replicas)
    stage.others = []  # there are no buffers that training reads
    optimizer, scheduler = make_optimizer(stage.parameters(), steps)
    optimizer = accelerator.prepare_optimizer(optimizer)
    stage.train()
    mine = slice(batch * replicas.rank(), batch * (replicas.rank() + 1))
    for x, y in batches:
        metrics = recipe.train_step(accelerator, stage, optimizer, scheduler, (x[mine], y[mine]))
    rows = recipe.sample_rows(metrics).sum(0).float() if is_last else torch.zeros(4)
    loss, _, _, samples = accelerator.reduce(rows).tolist()
    assert bool(metrics) == is_last and samples == batch * replicas.size()
    state = accelerator.unwrap_model(stage).state_dict()
    if replicas.rank() == 0 and is_last:
        torch.save(state, path.with_suffix(".pt"))  # a socket would take longer
    distributed.barrier()

    if accelerator.is_main_process:
        parts = state, torch.load(path.with_suffix(".pt"), mmap=True)
        updated = {name.replace("/", "."): value for part in parts for name, value in part.items()}
        key = model_name, microbatches, steps, batch  # neither the schedule nor the cut is in the unsplit model
        if key not in references:
            references[key] = unsplit(reference, initial, batches, microbatches * replicas.size(), steps)
        moved, expected_loss = references[key]
        deviation = max((updated[name] - initial[name] - move).abs().max().item() for name, move in moved.items())
        largest = max(move.abs().max().item() for move in moved.values())
        case = f"{model_name} {schedule_name} {microbatches} {split} {steps}"
        answers[case] = [deviation, largest, loss / samples, expected_loss]
    distributed.barrier()


for microbatches in (1, 2, 4, 8):
    compare("simple_cnn", "gpipe", microbatches)
    if microbatches > 1:
        compare("simple_cnn", "1f1b", microbatches)
if accelerator.num_processes == 2:
    compare("resnet50", "gpipe", 2, steps=3, batch=8)
    compare("resnet50", "1f1b", 4)
    for split in ("bn1", "fc"):
        compare("resnet50", "gpipe", 2, split, batch=8)
if accelerator.num_processes == 4:
    compare("resnet50", "1f1b", 2, steps=2, batch=8)
if accelerator.is_main_process:
    path.write_text(json.dumps(answers))
accelerator.free_memory()
accelerator.end_training()
