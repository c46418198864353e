"""Run by test_sharded.py, as processes of forked.py: sharded_weights.py ANSWER.json

A step of the recipe over the same 8 samples, which weigh unequally, divided into microbatches in
each way that the number of processes allows; and the same step of a plain model, with the exact
weighted mean. Writes, for each way, the error of the update relative to the update, and how far the
reported norm of the gradient is from the plain model's, relative to it. In float64.
"""

import copy
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, utils
from conftest import load
from torch.nn import functional as F

WEIGHTS = {
    "unequal": [47, 2, 3.5, 11, 29, 5, 0.25, 8],
    "zero": [3, 7, 2, 11, 0, 0, 0, 0],  # of whole microbatches and, with several, of processes
}

recipe = load("recipes/sharded_cifar.py")
accelerator = Accelerator(cpu=True)
accelerator.cpu_group = None
processes, mine = accelerator.num_processes, accelerator.process_index
torch.manual_seed(0)
whole = recipe.build_model(SimpleNamespace(model="simple_cnn")).double()
images, labels = recipe.synthetic_images(8, seed=4)
images = images.permute(0, 3, 1, 2).double().sub(128).div(64)
images = F.avg_pool2d(images, 4)  # small images save time


def compute_loss(model, batch):
    images, labels, weight = batch
    return {"loss": F.cross_entropy(model(images), labels, reduction="none"), "weight": weight}


def update(model, step):
    """The update of each parameter in a step of SGD at a learning rate of 1."""
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = step(model, optimizer)
    change = {name: initial[name] - p.detach() for name, p in model.named_parameters()}
    change = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in change.values()]
    return torch.cat([x.flatten() for x in change]), norm


def plain(weight, clip_norm):
    def step(model, optimizer):
        losses = compute_loss(model, (images, labels, weight))["loss"]
        ((losses * weight).sum() / weight.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        optimizer.step()
        return norm.item()

    return update(copy.deepcopy(whole), step)


def sharded(weight, clip_norm, microbatches, sync_each_batch):
    args = SimpleNamespace(
        model="simple_cnn",
        weights=None,
        precision="fp32",
        replicas=1,
        activation_checkpointing=False,
        cpu_offload=False,
        sync_each_batch=sync_each_batch,
    )
    accelerator.gradient_accumulation_steps = microbatches
    accelerator.step = 0
    recipe.build_model = lambda args: copy.deepcopy(whole).to(torch.empty(0).device)
    model = recipe.build_sharded_model(args, accelerator)
    share = [x.chunk(processes)[mine].chunk(microbatches) for x in (images, labels, weight)]

    def step(model, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer = accelerator.prepare(optimizer)
        batches = zip(*share, strict=True)
        seed = (0, 1)
        _, norm = recipe.train_step(
            accelerator, model, optimizer, scheduler, batches, seed, clip_norm
        )
        return norm and norm.item()

    return update(model, step)


recipe.compute_loss = compute_loss
answer = {}
for name, clip_norm in itertools.product(WEIGHTS, (None, math.inf, 0.02)):
    weight = torch.tensor(WEIGHTS[name], dtype=torch.float64)
    expected, norm = plain(weight, clip_norm)
    for microbatches, each in itertools.product((1, 2, 4, 8), (False, True)):
        if processes * microbatches > 8:
            continue
        found, found_norm = sharded(weight, clip_norm, microbatches, each)
        case = f"{name}, clipped to {clip_norm}, {microbatches} microbatches, sync each: {each}"
        answer[case] = {
            "update": ((found - expected).norm() / expected.norm()).item(),
            "norm": None if clip_norm is None else abs(found_norm - norm) / norm,
            "clipped": clip_norm is not None and norm > clip_norm,
        }
answers = utils.gather_object([answer])
if accelerator.is_main_process:
    assert all(one == answer for one in answers)
    Path(sys.argv[1]).write_text(json.dumps(answer))
accelerator.free_memory()
accelerator.end_training()
