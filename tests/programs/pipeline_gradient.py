"""Run by test_pipeline.py: the pipeline against the whole model over the same chunks.

Both take one step, whose update is the gradient itself, or several with momentum, in float64: the
rounding errors of float32 would hide a wrong gradient. Writes to argv[1], as JSON, {case: [largest
deviation of an update, largest update, last step's loss, the reference's]}, and the timeouts.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision
from accelerate import Accelerator
from conftest import load
from torch import nn
from torch.distributed import distributed_c10d

recipe = load("recipes/pipeline_cifar.py")
accelerator = Accelerator(cpu=True)
replicas = accelerator.num_processes // 2
plain_loss = recipe.compute_loss
answers = {}


def weighted_loss(model, batch, args):
    weight = batch[1] * (batch[1] + 1) // 2  # from 0 to 45
    return {**plain_loss(model, batch, args), "weight": weight}


def build_model(name):
    torch.manual_seed(0)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10).double()
    # The second stage begins with an operation in place, on the tensor that it has received.
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(inplace=True), nn.Linear(8, 10))
    model[1].requires_grad_(name != "frozen")
    model[0].register_buffer("rank", torch.zeros(()))
    return model.double()


def make_batches(steps, weighted):
    """Eight samples per pipeline and step. With weights half of them have none: on four processes
    a whole pipeline's share."""
    images, labels = recipe.synthetic_images(steps * 8 * replicas, seed=4)
    if weighted:
        labels[: len(labels) // 2] = 0
    images = images.permute(0, 3, 1, 2).double().sub(128).div(64)
    return list(zip(images.chunk(steps), labels.chunk(steps), strict=True))


def make_optimizer(model, steps):
    lr, momentum = (1, 0) if steps == 1 else (1e-3, 0.9)
    return torch.optim.SGD(model.parameters(), lr, momentum)


def train_whole(model, batches, chunks, clip_norm):
    """Train the whole model; return the last step's loss."""
    optimizer = make_optimizer(model, len(batches))
    for images, labels in batches:
        parts = zip(images.chunk(chunks), labels.chunk(chunks), strict=True)
        values = [recipe.compute_loss(model, part, None) for part in parts]
        losses = torch.cat([x["loss"] for x in values])
        weights = torch.cat([x.get("weight", torch.ones_like(x["loss"])) for x in values])
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        assert not clip_norm or norm > 2 * clip_norm, "clipping that changes little proves nothing"
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train_pipeline(args, whole, batches, accumulation):
    """Train in pipelines, each on its share of a batch; return one, and the last step's loss."""
    accelerator.gradient_accumulation_steps = accumulation
    args.batch_size = 8 // accumulation
    blocks = recipe.model_blocks(whole)
    recipe.set_split(args, list(blocks))
    model = recipe.Pipeline(args, accelerator, blocks)
    optimizer = accelerator.prepare_optimizer(make_optimizer(model, len(batches)))
    scheduler = SimpleNamespace(step=lambda: None)
    other_buffers = [x for module in model.others for x in module.buffers(recurse=False)]
    for buffer in other_buffers:
        buffer.fill_(accelerator.process_index)
    run = SimpleNamespace(accelerator=accelerator, args=args, step=1, line_due=False)
    for batch in batches:
        own = [x.chunk(replicas)[model.replicas.rank()].chunk(accumulation) for x in batch]
        microbatches = list(zip(*own, strict=True))
        values, _ = recipe.train_step(run, model, optimizer, scheduler, microbatches)
    assert all(x == 0 for x in other_buffers), "all pipelines have those of the first one"
    sums = accelerator.reduce(sum(recipe.sample_rows(x).sum(0) for x in values))
    return model, recipe.means(values[0], sums, 8 * replicas)["loss"]


def compare(name, schedule, chunks, accumulation=1, split=None, steps=1, clip=None, weighted=False):
    recipe.compute_loss = weighted_loss if weighted else plain_loss
    args = SimpleNamespace(schedule=schedule, chunks=chunks, split=split, clip_norm=clip, seed=0)
    whole, reference, initial = (build_model(name) for _ in range(3))
    batches = make_batches(steps, weighted)
    model, loss = train_pipeline(args, whole, batches, accumulation)
    own = accelerator.unwrap_model(model.stage).state_dict()
    default_group = SimpleNamespace(cpu_group=None)
    stages = recipe.collect_both_stages(default_group, {"model": own})
    if accelerator.is_main_process:
        expected_loss = train_whole(reference, batches, chunks * accumulation * replicas, clip)
        trained = stages[0]["model"] | stages[1]["model"]
        trained = {key.replace("/", "."): value for key, value in trained.items()}
        differences = []
        for before in (trained, dict(initial.named_parameters())):
            pairs = [(before[key], x) for key, x in reference.named_parameters()]
            differences.append(max((x - y).abs().max().item() for x, y in pairs))
        case = f"{name} {schedule} {chunks} {accumulation} {split} {steps} {clip} {weighted}"
        answers[case] = [*differences, loss, expected_loss]


if replicas == 3:
    compare("linear", "1f1b", 2, accumulation=2, steps=2)
else:
    compare("linear", "gpipe", 1)
    compare("linear", "1f1b", 8)
    compare("linear", "gpipe", 4, split="3", steps=3)
    compare("frozen", "gpipe", 2, clip=0.01)
    compare("linear", "gpipe", 4, weighted=True)
    compare("linear", "1f1b", 2, accumulation=2, clip=0.05, weighted=True)
    if replicas == 1:
        compare("resnet18", "1f1b", 2, split="bn1", steps=2)
# Those that the pipelines have made: all but the default one.
_, *groups = [group for group in distributed_c10d._world.pg_map if group is not None]
backends = [group._get_backend(torch.device("cpu")) for group in groups]
timeouts = [backend.options._timeout.total_seconds() for backend in backends]
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(json.dumps({"cases": answers, "timeouts": timeouts}))
accelerator.end_training()
