# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among all processes (FSDP2).

    accelerate launch --config_file accelerate_configs/4gpu.yaml recipes/sharded_cifar.py
    accelerate launch --config_file accelerate_configs/8gpu.yaml recipes/sharded_cifar.py --replicas 2
    accelerate launch --config_file accelerate_configs/4gpu.yaml recipes/sharded_cifar.py --precision bf16

For a model that does not fit on one GPU. Each of N processes keeps 1/N of every block; a block is all-gathered for its
forward and its backward pass, then freed, and its gradients are reduce-scattered (Rajbhandari et al. 2020,
arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277). The training is that of ddp_cifar.py at the same global batch.
Accelerate's own FSDP plugin needs GPUs: it supplies processes, devices, data and optimizer here, torch the sharding.

No GPU ever holds all parameters (but all gradients, with --accumulation-steps and without --sync-each-batch). The main
process builds the whole model in CPU memory (beside --weights, if given), and sends each rank its shards. If it does
not fit there, skip `send_weights` and let each rank fill its shards: by the modules' `reset_parameters()` (the weights
then depend on the world size), or by `dcp.load` from a checkpoint of this recipe or any folder of .safetensors files.

BatchNorm normalises over a process's own batch, as in ddp_cifar.py. Its running statistics are not sharded, and every
process has its own: all evaluate with the main process's, which are those that are saved.

To make this file yours, replace `load_data`, `build_model` and `compute_loss`, and change what you like above the line
"machinery". Below it is shared code: checkpoints and resuming, signals, metrics, flags. Of that, only --data,
--data-dir, --model, --stem and the data sets at the end are specific to this example.
`shard_units` has to know your model's blocks, and `build_model` is called on the meta device, too: no `.item()` there,
buffers instead of plain tensors, and no parameters without dimensions, which FSDP cannot shard. With
--activation-checkpointing, forward passes must not change other buffers than running statistics: they are repeated.
On several machines the output directory has to be one that all share.
"""

import argparse
import atexit
import gc
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ContextDecorator, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from pickle import UnpicklingError

import accelerate
import numpy
import psutil
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches, utils
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

RECIPE = "sharded_cifar"


def load_data(args, accelerator):
    """Return the DataLoaders of (images, labels) batches for training and test. Replace this with your own data.

    Write them as for one process, without DistributedSampler: Accelerate divides the batches among the processes. Any
    map-style Dataset works, also with random transforms and workers: see `SeededSamples`. To download, see `cifar10`.
    """
    if args.data == "synthetic":
        train_set, test_set = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
    else:
        train_set, test_set = cifar10(args.data_dir, accelerator)
    train_set = ImageTensors(*train_set, accelerator.device, augmentation_seed=args.seed)
    test_set = ImageTensors(*test_set, accelerator.device)
    options = {
        "batch_size": args.batch_size,
        "collate_fn": tuple,
    }  # ImageTensors makes whole batches
    return DataLoader(train_set, shuffle=True, drop_last=True, **options), DataLoader(
        test_set, **options
    )


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) images in, (B, classes) logits out. Replace this with your own."""
    if args.model == "simple_cnn":
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    else:
        model = torchvision.models.resnet50(
            num_classes=10, zero_init_residual=True
        )  # blocks begin as the identity
        if (
            args.stem == "cifar"
        ):  # 32 x 32 images are small already: do not shrink them fourfold before the first block
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.to(
        memory_format=torch.channels_last
    )  # the layout in which convolutions are fastest


def compute_loss(model, batch):
    """Return {"loss": (B,) float, "your metric": (B,) float or bool, ...}. Replace this with your own.

    Call `model` itself, not its methods: its forward pass is what synchronises the gradients. The mean of "loss" is
    minimised, the means of all are reported. If samples count unequally, add "weight": (B,). For sequences, "loss" is
    then each one's mean over its tokens, and "weight" their number; the loss is the weighted mean within a microbatch,
    and microbatches and processes count equally.
    """
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(1) == labels,
    }


def shard_units(model):
    """Return the modules to shard one by one, of which about two are whole at a time (one prefetched): the elements of
    every nn.Sequential and nn.ModuleList, but not what is inside them. These are the blocks of torchvision's ResNets
    and transformers, and the layers of a plain Sequential. What is in none of them is sharded with the root.

    Replace this where your model's blocks are elsewhere. A unit must not share a parameter with another or with the
    root, and all processes have to run the same units in the same order (of LayerDrop: multiply the output by 0).
    """
    units = []
    for child in model.children():
        listed = (
            isinstance(model, nn.Sequential | nn.ModuleList)
            and type(child).forward is not nn.Module.forward
        )
        units += [child] if listed else shard_units(child)
    return [unit for unit in units if any(True for _ in unit.parameters())]


def shard(model, args, mesh, bf16):
    """Shard the units of a model on the meta device over the mesh, and then what is left of it."""
    options = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy(),
    }
    fp32, precision = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if bf16:  # gathered and computed in bf16; gradients reduced in fp32
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.to(
        memory_format=torch.contiguous_format
    )  # FSDP requires it; activations stay channels_last
    for unit in [*shard_units(model), model]:
        norms = [
            module
            for module in unit.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
        ]
        if args.activation_checkpointing and unit is not model:
            checkpoint_activations(unit, norms)
        own = [norm for norm in norms if norm.affine and not isinstance(norm, FSDPModule)]
        if bf16 and own:  # a separate group: fp32 statistics need fp32 weights
            fully_shard(own, mp_policy=fp32, **options)
        if bf16 and unit is model:
            precision = replace(precision, output_dtype=torch.float32)  # for the loss
        fully_shard(unit, mp_policy=precision, **options)


def checkpoint_activations(unit, norms):
    """Keep only the inputs of a unit's forward pass; the backward pass repeats it, without counting its batch in the
    running statistics of its BatchNorms and InstanceNorms, `norms`, once more."""

    @contextmanager
    def frozen_statistics():
        kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, count) in zip(norms, kept, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count

    options = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), frozen_statistics())}
    unit.forward = partial(checkpointed, unit.forward, **options)


def send_weights(whole, model, accelerator, mesh, offload):
    """Fill the shards, and the buffers, from the main process's `whole` model (None elsewhere), tensor by tensor."""
    model.to_empty(device="cpu" if offload else accelerator.device)
    tensors = dict(chain(whole.named_parameters(), whole.named_buffers())) if whole else {}
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        tensor = torch.empty(value.shape, dtype=value.dtype, device=accelerator.device)
        if whole:
            tensor.copy_(tensors[name].detach())
        if isinstance(value, DTensor):
            value.to_local().detach().copy_(
                distribute_tensor(tensor, mesh, value.placements).to_local()
            )
        else:
            distributed.broadcast(tensor, 0)
            value.data = tensor


def train_step(accelerator, model, optimizer, scheduler, batch, clip_norm=None):
    """Run one batch forward and backward; after the last of `accumulation_steps`, step optimizer and scheduler.

    Returns the metrics of `compute_loss`, on the device: reading them here would synchronise in every step.
    """
    with accelerator.accumulate(model):
        metrics = compute_loss(model, batch)
        accelerator.backward(mean_loss(metrics))
        if clip_norm and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if (
            accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
        ):  # fp16 skips on overflow
            scheduler.step()
        optimizer.zero_grad()
    return metrics


def lr_lambda(step, total_steps):
    """Return the factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up over the first
    fifth of the run, then linear decay to zero. The peak scales linearly with the global batch, which needs the warm-up
    (Goyal et al. 2017, arXiv:1706.02677)."""
    warmup = max(1, total_steps // 5)
    return min((step + 1) / warmup, (total_steps - step) / max(1, total_steps - warmup))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return {"test_loss": mean, ..., "samples": n}, each sample counted once; exit with an error if any is missing."""
    frozen = [module for module in model.modules() if not module.training]  # to stay in eval mode
    model.eval()
    utils.broadcast(
        list(model.buffers())
    )  # in place: all ranks evaluate with rank 0's BatchNorm statistics
    loader.set_epoch(0)  # the same random transforms in each evaluation
    totals = 0
    for index, batch in enumerate(loader):
        seed_rng("evaluation", index, accelerator.process_index)
        metrics = compute_loss(model, batch)
        totals += accelerator.gather_for_metrics(sample_rows(metrics)).sum(
            0
        )  # drops the last batches' padding
    model.train()  # undoes what a module may do in `eval`, such as merging weights
    for module in frozen:
        module.training = False
    return test_metrics(metrics, totals.tolist(), len(loader.dataset))


def training_loop(run, accelerator, model, optimizer, scheduler, train_loader, test_loader, args):
    """Train from the step at which `run` begins, and evaluate after each epoch; return the last evaluation."""
    for epoch in run.epochs():
        for step, microbatches in run.steps(epoch, train_loader):
            learning_rate = scheduler.get_last_lr()[0]
            for index, batch in enumerate(microbatches):
                seed_rng(
                    args.seed, step, index, accelerator.process_index
                )  # a resumed run repeats dropout
                run.add(train_step(accelerator, model, optimizer, scheduler, batch, args.clip_norm))
            run.finish_step(step, learning_rate)  # metrics, checkpoint, signals
        test = evaluate(accelerator, model, test_loader)
        run.write("evaluation", test)
    return test


def save_weights(model, path, is_main_process):
    """Write model.safetensors, gathered tensor by tensor: no process ever holds the whole model for it."""
    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
    names |= {
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
    }
    names |= {torch.bool: "BOOL", torch.complex64: "C64"}
    # Largest elements first: aligned without gaps, as the format demands.
    values = sorted(model.state_dict().items(), key=lambda item: -item[1].element_size())
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, value in values:
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    temporary = path.with_suffix(".tmp")  # an earlier one stays until this is whole
    with open(temporary if is_main_process else os.devnull, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, value in values:
            whole = (
                value.full_tensor() if isinstance(value, DTensor) else value
            )  # in which all processes take part
            whole = whole.detach().cpu()  # on all of them: none may run ahead of the file
            file.write(whole.flatten().view(torch.uint8).numpy() if is_main_process else b"")
    if is_main_process:
        temporary.replace(path)


def main():
    args = parse_args(
        precision={
            "choices": ("fp32", "bf16"),
            "default": "fp32",
            "help": "bf16: gradients are summed in fp32",
        },
        replicas={
            "type": int,
            "default": 1,
            "help": "sharded models side by side, such as one per node (HSDP)",
        },
        accumulation_steps={"type": int, "default": 1, "help": "batches per optimizer step"},
        sync_each_batch={
            "action": "store_true",
            "help": "accumulate gradients in shards, not whole: less memory",
        },
        clip_norm={"type": float, "help": "clip the whole model's gradient to this norm"},
        activation_checkpointing={
            "action": "store_true",
            "help": "compute activations twice instead of keeping them",
        },
        cpu_offload={
            "action": "store_true",
            "help": "shards in the hosts' memory, on the GPU only while in use",
        },
    )
    processes = utils.get_int_from_env(["WORLD_SIZE"], 1)
    if processes % args.replicas:
        exit_with_error(
            f"argument --replicas: {args.replicas} do not divide the {processes} process(es)"
        )
    if args.cpu_offload and (args.cpu or not torch.cuda.is_available()):
        exit_with_error(
            "argument --cpu-offload: there is nothing to offload without a GPU, leave it out"
        )
    accelerator = make_accelerator(args, args.precision)
    if (
        args.precision == "bf16"
        and torch.cuda.is_available()
        and not torch.cuda.is_bf16_supported(False)
    ):
        exit_with_error(f"{torch.cuda.get_device_name()} has no bf16, choose --precision fp32")
    utils.set_seed(args.seed)  # for the initial weights; each step calls `seed_rng`
    train_loader, test_loader = accelerator.prepare(
        *reproducible(load_data(args, accelerator), args.seed)
    )
    # An incomplete last global batch is dropped, so that N processes take the same steps as one process with N
    # microbatches. `min`: never accumulate over more than an epoch.
    accumulation_steps = accelerator.gradient_accumulation_steps = min(
        args.accumulation_steps, len(train_loader)
    )
    if accumulation_steps == 0:
        exit_with_error(
            f"{len(train_loader.dataset)} training samples do not fill a global batch: lower --batch-size"
        )
    steps_per_epoch = len(train_loader) // accumulation_steps
    total_steps = min(args.epochs * steps_per_epoch, args.max_steps or math.inf)
    global_batch = args.batch_size * accumulation_steps * accelerator.num_processes
    peak_lr = args.lr * global_batch / 128

    mesh = make_mesh(accelerator, args)
    whole = (
        load_weights(accelerator, build_model(args), args) if accelerator.is_main_process else None
    )
    wait_for_main_process(accelerator)
    with torch.device("meta"):  # shapes without memory
        model = build_model(args)
    total = sum(p.numel() for p in model.parameters())
    units = [set(unit.parameters()) for unit in shard_units(model)]
    inside = {module for unit in shard_units(model) for module in unit.modules()}
    units += [
        {p for module in {*model.modules()} - inside for p in module.parameters(recurse=False)}
    ]  # the root
    if len(set(chain(*units))) < sum(map(len, units)):
        exit_with_error(
            "shard_units: a unit shares a parameter with another or with the root: put both into one"
        )
    sizes = [sum(p.numel() for p in parameters) for parameters in units]
    shard(model, args, mesh, accelerator.mixed_precision == "bf16")
    send_weights(whole, model, accelerator, mesh, args.cpu_offload)
    del whole
    if not (
        args.sync_each_batch or args.cpu_offload
    ):  # gradients stay whole on each rank until the last microbatch
        model.register_forward_pre_hook(
            lambda *_: model.set_requires_gradient_sync(accelerator.sync_gradients)
        )
    # Training reads no BatchNorm buffers: those are broadcast in `evaluate` alone, others before each pass, too.
    owners = [
        module
        for module in model.modules()
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if others := [buffer for module in owners for buffer in module.buffers(recurse=False)]:
        model.register_forward_pre_hook(lambda *_: utils.broadcast(others) and None)
    # Not fused: torch has no rule for a fused SGD on sharded parameters (there is one for Adam and AdamW).
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_lambda(step, max(1, total_steps))
    )
    shards = Shards(model, optimizer, accelerator.device)
    # Not the model: Accelerate would wrap it in DDP.
    optimizer = accelerator.prepare(optimizer)

    config = {
        "precision": "fp32",
        **vars(args),
        "global_batch_size": global_batch,
        "peak_learning_rate": peak_lr,
    }
    config |= {"steps": total_steps, "steps_per_epoch": steps_per_epoch}
    mine = sum(p.to_local().numel() for p in model.parameters())
    config["holds"] = (
        f"{mine:,} of {total:,} parameters per process, {max(sizes):,} in the largest unit"
    )
    run = ShardedRun(accelerator, config, {"model": shards, "scheduler": scheduler})
    test = training_loop(
        run, accelerator, model, optimizer, scheduler, train_loader, test_loader, args
    )
    save_weights(model, Path(args.output_dir, "model.safetensors"), accelerator.is_main_process)
    run.finish(test)
    # Free the model before the process group: at the interpreter's exit, gloo may abort.
    run = shards = scheduler = None
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    accelerator.end_training()


# ==================================================================================== machinery, shared by the recipes
def mean_loss(metrics):
    """Return the mean loss, weighted by "weight" if given: the scalar to backpropagate."""
    weight = metrics.get("weight")
    return (
        metrics["loss"].mean()
        if weight is None
        else (metrics["loss"] * weight).sum() / weight.sum()
    )


def sample_rows(metrics):
    """Return (B, M + 2) float32, a row per sample: its M metrics times its weight, its weight, and 1. `means` divides
    their sums over all batches and ranks. Exits with an error unless all metrics are (B,)."""
    for name, value in metrics.items():
        shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
        if len(shape) != 1 or shape != tuple(metrics["loss"].shape):
            exit_with_error(f'compute_loss: "{name}" is {shape}: return one value per sample, (B,)')
    weight = metrics.get("weight", torch.ones_like(metrics["loss"])).detach()
    columns = [value.detach() * weight for name, value in metrics.items() if name != "weight"]
    return torch.stack([*columns, weight, torch.ones_like(weight)], dim=1).float()


def means(names, sums):
    """Return {name: mean}, from the names of the metrics and the sums of `sample_rows`."""
    weight = sums[-2] or math.nan
    return dict(
        zip(
            [name for name in names if name != "weight"],
            [x / weight for x in sums[:-2]],
            strict=True,
        )
    )


def test_metrics(names, sums, samples):
    """Return the means of an evaluation; exit with an error unless all `samples` of the test set were counted."""
    if (counted := int(sums[-1])) != samples:
        exit_with_error(
            f"evaluate: {counted} of {samples} samples counted: return one value per sample, no drop_last"
        )
    return {f"test_{name}": value for name, value in means(names, sums).items()} | {
        "samples": samples
    }


def seed_rng(*key):
    """Make the random numbers that torch, NumPy and Python draw from here on a function of `key` alone."""
    random.seed(repr(key))
    seed = random.getrandbits(32)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class SeededSamples(Dataset):
    """A map-style dataset that seeds the random numbers of each sample by (seed, epoch, index): its random transforms
    do not depend on the rank or the worker, and are the same in a resumed run."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed
        self.epoch = torch.zeros(
            (), dtype=torch.int64
        ).share_memory_()  # so that persistent workers see it change

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __getitem__(self, index):
        seed_rng(self.seed, self.epoch.item(), index)
        return self.dataset[index]


def reproducible(loaders, seed):
    """Return the loaders for training and test, their datasets wrapped in `SeededSamples` unless they, or those whose
    Subsets they are, have a `set_epoch`, and then have to seed themselves. Exit with an error if the loaders cannot be
    divided among processes and resumed exactly."""
    for loader, drop_last in zip(loaders, (True, False), strict=True):
        kinds = (
            type(loader.batch_sampler),
            type(getattr(loader.batch_sampler, "sampler", loader.sampler)),
        )
        if kinds not in ((BatchSampler, RandomSampler), (BatchSampler, SequentialSampler)):
            names = " and ".join(kind.__name__ for kind in (type(loader.dataset), *kinds))
            exit_with_error(
                f"load_data: cannot resume {names} exactly: use a Dataset or Subset, batch_size, shuffle"
            )
        if loader.batch_sampler.drop_last != drop_last or len(loader.dataset) == 0:
            exit_with_error(
                "load_data: training needs drop_last=True, the test drop_last=False and some samples"
            )
        inner = loader.dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        if hasattr(inner, "set_epoch"):
            loader.dataset.set_epoch = inner.set_epoch
        else:
            vars(loader)["dataset"] = SeededSamples(
                loader.dataset, seed
            )  # DataLoader forbids assigning it
        loader.dataset.set_epoch(0)
    return loaders


def load_weights(accelerator, model, args):
    """Return the model, with `--weights` as far as names and shapes fit: a head for other classes stays as it is."""
    own = model.state_dict()
    if not all(map(torch.is_tensor, own.values())):
        exit_with_error(
            "build_model: get_extra_state has to return a tensor, which model.safetensors can hold"
        )
    if not model.training:
        exit_with_error(
            "build_model: the model is in eval mode, as from_pretrained returns it: return model.train()"
        )
    if args.weights is not None:
        try:
            weights = utils.load_state_dict(args.weights)  # runs no code
            fits = {
                name: x for name, x in weights.items() if name in own and own[name].shape == x.shape
            }
        except Exception as error:  # whatever another kind of file makes the readers stumble over
            exit_with_error(f"argument --weights: cannot load {args.weights} ({error!r:.200})")
        filled = {
            own[name].data_ptr() for name in fits
        }  # a name tied to another one is not in every file
        misfits = sorted(
            name for name in own | weights if name not in own or own[name].data_ptr() not in filled
        )
        if not fits or (misfits and args.epochs == 0):
            exit_with_error(
                f"argument --weights: {args.weights} does not fit this model: {', '.join(misfits)}"
            )
        model.load_state_dict(fits, strict=False)
        accelerator.print(
            f"loaded {args.weights}; names that do not fit: {', '.join(misfits) or 'nothing'}"
        )
    return model


# What may differ between a checkpoint and the run that resumes from it; all else that both have must be equal.
IGNORED_KEYS = """data_dir output_dir cpu device log_every checkpoint_every keep resume weights world_size batch_size
    accumulation_steps microbatches schedule bubble pipelines replicas precision_chosen compile tracker versions date
    holds sync_each_batch activation_checkpointing cpu_offload""".split()
LAUNCHER = os.getppid()  # asked early: once it has died, the parent is another
TIMEOUT = timedelta(
    hours=2
)  # for whoever waits for the main process's download, or for its reading a checkpoint
FORMAT = 3
PATTERN = f"step-{'[0-9]' * 8}"  # a folder


def find_checkpoint(config, read):
    """Return the checkpoint of `--resume` (auto: the newest intact one) or None, and, if it is unusable or of another
    run, why."""
    paths, checkpoint, problems = (
        sorted(Path(config["output_dir"]).glob(PATTERN), reverse=True),
        None,
        [],
    )
    named = Path(config["resume"])
    if (
        config["resume"] != "auto"
        and paths
        and named.exists()
        and not named.parent.samefile(paths[0].parent)
    ):
        return (
            None,
            f"{config['output_dir']} holds the checkpoints of another run: choose another --output-dir",
        )
    for path in paths if config["resume"] == "auto" else [config["resume"]]:
        try:
            checkpoint = read(path)
            break
        except Exception as error:  # whatever a torn file makes the readers of zip, pickle and tensors stumble over
            problems.append(f"cannot load {path} ({error!r:.200})")
    if checkpoint is None and problems:
        return (
            None,
            f"{'; '.join(problems)}: choose another checkpoint, or another --output-dir to start afresh",
        )
    if problems or not checkpoint:
        print(*problems or ["no checkpoint yet, starting afresh"], file=sys.stderr, sep="\n")
    theirs = checkpoint["config"] if checkpoint else config
    names = [
        name
        for name in config
        if name not in IGNORED_KEYS and theirs.get(name, config[name]) != config[name]
    ]
    if names:
        differences = "; ".join(
            f"{name} is {theirs[name]} there, {config[name]} here" for name in names
        )
        return None, f"{path} is of another run: {differences}"
    return checkpoint, None


class SignalHandler:
    """On SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any rank, or when the launcher dies, all ranks stop two steps later at
    most: they agree by a gloo all-reduce on the CPU, which overlaps a step, so that no GPU waits."""

    received = 0  # the first of them: of the process, which `exit_with_error` asks, too

    def __init__(self, accelerator):
        self.pending_reduce, self.signal_tensor = None, torch.zeros(1, dtype=torch.int64)
        self.signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            self.signals.remove(signal.SIGHUP)
        for number in self.signals:
            signal.signal(number, self.receive)
        # Block them, which DataLoader's workers inherit: a signal to the whole process group must not kill them first.
        resource_tracker.ensure_running()  # it starts with the first spawned worker, and would unblock them again
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_USE_FULLGRAPH"} & os.environ.keys()
        self.launcher = LAUNCHER if launched else None  # it may die without passing the signal on
        atexit.register(
            kill_workers
        )  # before the interpreter waits for them for ever: they have SIGTERM blocked, too
        self.group = (
            distributed.new_group(None, TIMEOUT, "gloo") if accelerator.use_distributed else None
        )

    def receive(self, number, frame=None):
        SignalHandler.received = self.received or number

    def should_stop(self):
        """Return the signal on which all processes stop now, or 0: the result of the all-reduce begun one call ago."""
        self.receive(max(signal.sigpending() & self.signals, default=0))
        if self.launcher and os.getppid() != self.launcher:
            self.receive(signal.SIGTERM)
        if self.group is None:
            return self.received
        if self.pending_reduce:
            self.pending_reduce.wait()
        stop = self.signal_tensor.item()
        self.signal_tensor.fill_(self.received)
        self.pending_reduce = distributed.all_reduce(
            self.signal_tensor, distributed.ReduceOp.MAX, self.group, True
        )
        return stop


def kill_workers():
    """Kill the DataLoaders' workers."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    for worker in active_children():
        worker.kill()


class Unbreakable(ContextDecorator, suppress):
    """Decorates a method of an output stream, to drop its errors: the terminal or the reader of a pipe is gone, or the
    disk is full, which must not end a training before its next checkpoint."""


class Run:
    """What surrounds the steps of a training: resuming, metrics on the screen and in files, checkpoints, signals.

    `state`: {name: object with a state_dict}, saved per `stage` of a pipeline; `before_loading` runs before they load.
    Throughput is over all processes, without evaluations, checkpoints and the first line of metrics, which is warm-up.
    """

    def __init__(self, accelerator, config, state, before_loading=lambda: None, stage=0):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.write, stream.flush = (
                Unbreakable(OSError)(method) for method in (stream.write, stream.flush)
            )
        self.signals = SignalHandler(accelerator)
        main = accelerator.is_main_process
        config |= {
            "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu"
        }
        versions = {
            package.__name__: package.__version__ for package in (torch, torchvision, accelerate)
        }
        config |= {
            "world_size": accelerator.num_processes,
            "versions": versions,
            "date": time.strftime("%Y-%m-%d"),
        }
        config = json.dumps(
            {"recipe": RECIPE, **config},
            default=lambda x: float(x) if hasattr(x, "item") else str(x),
        )
        self.config = config = json.loads(config)
        found = (
            [*find_checkpoint(config, self.read)]
            if main and config["resume"] is not None
            else [None, None]
        )
        if self.signals.group:  # gloo: the default group would take it through the GPUs' memory
            distributed.broadcast_object_list(found, 0, self.signals.group)
        checkpoint, problem = found
        try:
            if checkpoint:
                before_loading()
                for name, thing in state.items():
                    thing.load_state_dict(checkpoint["states"][stage][name])
        except (KeyError, RuntimeError, ValueError) as error:
            problem = f"stage {stage} of the checkpoint does not fit this model ({error!r:.200})"
        for misfit in filter(None, utils.gather_object([problem])):
            exit_with_error(f"argument --resume: {misfit}")
        for later in Path(config["output_dir"]).glob(PATTERN) if main and checkpoint else ():
            if (
                later.name > f"step-{checkpoint['step']:08}.pt"
            ):  # or the next auto would resume from it
                renamed = later.rename(f"{later}.abandoned-{time.time():.0f}")
                print(f"{later}: later than what this run resumes, renamed to {renamed}")
        self.start, self.metrics = (
            (checkpoint["step"], checkpoint["metrics"]) if checkpoint else (0, "")
        )
        self.accelerator, self.state, self.step, self.logged = (
            accelerator,
            state,
            self.start,
            self.start,
        )
        self.total_steps, self.steps_per_epoch = config["steps"], config["steps_per_epoch"]
        self.names, self.totals, self.samples, self.seconds = [], 0, 0, 0.0
        self.started = self.saved = time.time()
        self.own_metrics = dict  # a recipe may set another: what it adds to every line of metrics, and to the summary
        self.file = open(
            Path(config["output_dir"], "metrics.jsonl") if main else os.devnull, "w", buffering=1
        )
        self.file.write = Unbreakable(OSError)(self.file.write)
        self.file.write(self.metrics)
        accelerator.init_trackers(
            RECIPE, {k: v for k, v in config.items() if isinstance(v, int | float | str)}
        )
        self.console = Console(quiet=not main, highlight=False, markup=False, soft_wrap=True)
        options = {
            "disable": not (main and self.console.is_interactive),
            "redirect_stderr": os.isatty(2),
        }
        self.progress = Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=self.console, **options
        )
        self.task = self.progress.add_task("steps", total=self.total_steps, completed=self.start)
        self.show("run", config | {"resumed_from": self.start})
        self.progress.start()

    @staticmethod
    def read(path):
        """Return the content of a checkpoint; raises anything at all where it is not an intact one."""
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # runs no code
        if damaged or checkpoint["format"] != FORMAT:
            raise ValueError(f"{damaged} is damaged" if damaged else f"not of format {FORMAT}")
        return checkpoint

    def show(self, title, values):
        rows = [
            f"  {name}: {value}"
            for name, value in values.items()
            if value is not None and value is not False
        ]
        self.console.print(title, *rows, sep="\n")

    def epochs(self):
        """Return the epochs left, also one that was saved after its last step: its evaluation is missing."""
        return range(
            max(self.start - 1, 0) // self.steps_per_epoch,
            -(-self.total_steps // self.steps_per_epoch) or 1,
        )

    def steps(self, epoch, loader):
        """Yield (step, its microbatches) for what is left of an epoch."""
        loader.set_epoch(epoch)
        loader.dataset.set_epoch(epoch)  # some prepared loaders do not pass it on
        accumulation_steps = self.accelerator.gradient_accumulation_steps
        skipped = (self.step - epoch * self.steps_per_epoch) * accumulation_steps
        batches = iter(skip_first_batches(loader, skipped) if skipped else loader)
        self.interval_start = time.perf_counter()
        for step in range(
            self.step + 1, min((epoch + 1) * self.steps_per_epoch, self.total_steps) + 1
        ):
            yield step, islice(batches, accumulation_steps)

    def add(self, metrics):
        """Add a microbatch's metrics to this rank's totals."""
        if self.names not in ([], list(metrics)):
            exit_with_error("compute_loss: return the same keys for every batch")
        self.names, self.totals = list(metrics), self.totals + sample_rows(metrics).sum(0)

    def finish_step(self, step, learning_rate):
        """After each optimizer step: log, save a checkpoint and stop, if any of them is due."""
        self.step, stop, epoch_ends = (
            step,
            self.signals.should_stop(),
            step % self.steps_per_epoch == 0,
        )
        self.progress.advance(self.task)
        save = (
            stop
            or step == self.total_steps
            or step % (self.config["checkpoint_every"] or math.inf) == 0
        )
        if epoch_ends and not save:  # on a fast machine saving takes as long as an epoch
            (save,) = utils.broadcast_object_list([time.time() - self.saved > 60])
        if save or epoch_ends or step % self.config["log_every"] == 0:
            self.log(learning_rate)
        if save:
            self.save(step)
        if stop:
            self.exit(
                128 + stop,
                f"stopped after step {step}, which is saved: continue with --resume auto",
            )

    def log(self, learning_rate):
        """Write a line of metrics, the means over all processes since the last; exit where something is not finite."""
        norm = torch.nn.utils.get_total_norm(self.state["model"].parameters())
        totals = self.accelerator.reduce(
            torch.cat((self.totals, norm[None].float()))
        ).tolist()  # waits for the device
        seconds, rate = time.perf_counter() - self.interval_start, None
        values, samples = means(self.names, totals[:-1]), totals[-2]
        if not math.isfinite(values["loss"] + totals[-1]):
            where = f"since a step between {self.logged + 1} and {self.step} (--log-every 1 shows which)"
            self.exit(
                1,
                f"error: loss or weights are not finite {where}, not saved: lower --lr, or set --clip-norm 1",
            )
        expected = (self.step - self.logged) * self.config["global_batch_size"]
        if not math.isclose(samples, expected, rel_tol=1e-3):  # float32 sums
            remedy = (
                "compute_loss has to return one value per sample, and load_data to use --batch-size"
            )
            exit_with_error(f"{samples:.0f} values for {expected} samples: {remedy}")
        if self.logged > self.start:
            self.samples, self.seconds, rate = (
                self.samples + int(samples),
                self.seconds + seconds,
                samples / seconds,
            )
        self.totals, self.logged = 0, self.step
        values |= {"learning_rate": learning_rate, "samples_per_second": rate, **self.own_metrics()}
        self.write("train", values)
        self.interval_start = time.perf_counter()

    def write(self, event, values):
        """Put a line into metrics.jsonl, on the screen and to the trackers."""
        epoch = max(self.step - 1, 0) // self.steps_per_epoch + 1
        line = (
            json.dumps(
                {"event": event, "epoch": epoch, "step": self.step, "time": time.time(), **values}
            )
            + "\n"
        )
        self.metrics += line
        self.file.write(line)
        values = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self.accelerator.log(
            {f"{event}/{name}": value for name, value in values.items()}, step=self.step
        )
        text = " ".join(f"{name} {value:,.4g}" for name, value in values.items())
        self.console.print(f"step {self.step}/{self.total_steps} epoch {epoch} {text}")

    def collect_state(self):
        """Return what the main process saves: state dicts by name, for each stage of a pipeline."""
        return [{name: thing.state_dict() for name, thing in self.state.items()}]

    def save(self, step):
        """Write step-N.pt, which is there whole or not at all, then delete all but the newest `--keep`."""
        content, problem = (
            {"format": FORMAT, "config": self.config, "step": step, "metrics": self.metrics},
            None,
        )
        content["states"] = self.collect_state()
        # A learning rate that is a NumPy number could not be read again without running code.
        content = utils.recursively_apply(
            numpy.generic.item, content, test_type=lambda x: isinstance(x, numpy.generic)
        )
        directory, name = Path(self.config["output_dir"]), f"step-{step:08}.pt"
        try:
            if self.accelerator.is_main_process:
                with open(directory / "checkpoint.tmp", "wb") as file:
                    torch.save(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                torch.load(
                    directory / "checkpoint.tmp", "cpu", weights_only=True, mmap=True
                )  # or no resume could
                os.replace(directory / "checkpoint.tmp", directory / name)
                entry = os.open(directory, os.O_RDONLY)
                os.fsync(entry)  # or a power failure could undo the rename
                os.close(entry)
                for old in sorted(directory.glob(PATTERN))[: -self.config["keep"]]:
                    old.unlink(missing_ok=True)
        except (OSError, RuntimeError, UnpicklingError) as error:
            if (directory / "checkpoint.tmp").is_file():
                (directory / "checkpoint.tmp").unlink()
            problem = f"error: cannot write {name} ({error.__context__ or error!r}), earlier ones stay: --resume auto"
        if problem := utils.broadcast_object_list([problem])[0]:
            self.exit(1, problem)
        self.saved, self.interval_start = time.time(), time.perf_counter()

    def exit(self, status, message):
        """Exit before the training is complete, once all ranks have reached this call."""
        self.progress.stop()
        self.accelerator.print(f"{RECIPE}: {message}", file=sys.stderr, flush=True)
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        kill_workers()  # under forkserver they would outlive this process
        os._exit(status)  # all at once, or the launcher would kill the slower ranks

    def finish(self, test):
        """Print the results and write summary.json, unless a finished run was only evaluated again."""
        self.progress.stop()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        peak = torch.cuda.max_memory_allocated() if self.accelerator.device.type == "cuda" else peak
        peaks, rate = (
            utils.gather_object([peak]),
            self.samples / self.seconds if self.samples else None,
        )
        losses = [
            line["loss"]
            for line in map(json.loads, self.metrics.splitlines())
            if line["event"] == "train"
        ]
        results = {
            "train_loss": losses[-1] if losses else None,
            **test,
            "seconds": time.time() - self.started,
        }
        results |= {
            "samples_per_second": rate,
            "measured_samples": self.samples,
            "measured_seconds": self.seconds,
        }
        results |= {
            "peak_memory_bytes": max(peaks),
            "rank_peak_memory_bytes": peaks,
            **self.own_metrics(),
        }
        self.show("results", results)
        path = Path(self.config["output_dir"], "summary.json")
        if self.accelerator.is_main_process and not (
            path.exists() and self.start == self.total_steps
        ):
            temporary = path.with_suffix(".tmp")  # a torn summary.json would stay for good
            temporary.write_text(
                json.dumps({**self.config, "resumed_from": self.start, **results}, indent=2) + "\n"
            )
            temporary.replace(path)


def make_mesh(accelerator, args):
    """Return the device mesh: one row of processes, or `--replicas` rows, each of which holds the model once."""
    device, processes = accelerator.device.type, accelerator.num_processes
    if not distributed.is_initialized():  # Accelerate starts no process group for one process
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    shape = (processes,) if args.replicas == 1 else (args.replicas, processes // args.replicas)
    names = ("replicas", "shards")[-len(shape) :]
    # NCCL has no collectives for CPU tensors: gloo for those.
    backends = dict.fromkeys(names, "cpu:gloo,cuda:nccl") if args.cpu_offload else None
    return init_device_mesh(device, shape, mesh_dim_names=names, backend_override=backends)


def wait_for_main_process(accelerator):
    """Wait until the main process has built its model; where it ended with an error, leave the last word to it."""
    try:
        accelerator.wait_for_everyone()
    except RuntimeError as error:
        exit_with_error(f"the main process has ended ({error!r:.80})")


def held_bytes(tensors):
    """Return how many bytes this process holds for these tensors, of sharded ones with its padding."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values()
    )


def checksum(path):
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Shards:
    """A sharded model and its optimizer, as `Run` wants them: `tensors` are what is sharded, `state_dict` all else."""

    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device, self.held = model, optimizer, device, {}
        self.hook = optimizer.register_step_post_hook(self.measure)

    def measure(self, *_):
        """Once, while there are gradients: the bytes of each kind that this process holds."""
        self.hook.remove()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kinds = {"parameter": self.model.parameters(), "gradient": gradients}
        kinds["optimizer"] = [value for value in states if torch.is_tensor(value)]
        self.held = {f"{name}_bytes": held_bytes(tensors) for name, tensors in kinds.items()}

    def parameters(self):
        """For `Run.log`, which looks for NaN and inf: [the norm of all local shards], not the parameters."""
        return [
            torch.nn.utils.get_total_norm([p.to_local() for p in self.model.parameters()]).to(
                self.device
            )
        ]

    def tensors(self):
        """Return {name: DTensor} of parameters and optimizer states."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in {
                "parameter": parameter,
                **self.optimizer.state.get(parameter, {}),
            }.items():
                if isinstance(value, DTensor):
                    found[f"{name}/{key}"] = value
        return found

    def state_dict(self):
        optimizer = self.optimizer.state_dict()
        for index, state in optimizer["state"].items():
            optimizer["state"][index] = {
                key: x for key, x in state.items() if not isinstance(x, DTensor)
            }
        return {"buffers": dict(self.model.named_buffers()), "optimizer": optimizer}

    def load_state_dict(self, saved):
        get_optimizer_state_dict(
            self.model, self.optimizer
        )  # creates them, as the first step would
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter in [
            p for i, p in enumerate(parameters) if i not in saved["optimizer"]["state"]
        ]:
            self.optimizer.state.pop(parameter, None)  # it is frozen, or had no gradient yet
        states = self.optimizer.state_dict()["state"]
        for index, state in saved["optimizer"]["state"].items():
            states[index].update(state)
        self.optimizer.load_state_dict({**saved["optimizer"], "state": states})
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        try:
            dcp.load(self.tensors(), storage_reader=dcp.HuggingFaceStorageReader(saved["folder"]))
        except CheckpointException as error:
            raise RuntimeError(*error.failures.values()) from error


class ShardedRun(Run):
    """A run whose checkpoint step-N is a folder: the shards, in files of each process, and in run.pt all else, with
    the shards' checksums. Nothing in it is a pickle that could run code."""

    @staticmethod
    def read(path):
        checkpoint = Run.read(Path(path, "run.pt"))
        files = sorted(Path(path).glob("*.safetensors"))
        with ThreadPoolExecutor() as pool:
            found = dict(zip([file.name for file in files], pool.map(checksum, files), strict=True))
        if damaged := sorted(found.items() ^ checkpoint["checksums"].items()):
            raise ValueError(f"{damaged[0][0]} is damaged, missing, or not of this checkpoint")
        checkpoint["states"][0]["model"]["folder"] = str(path)
        return checkpoint

    def save(self, step):
        """Write the folder step-N, which is there whole or not at all, then delete all but the newest `--keep`."""
        content = {"format": FORMAT, "config": self.config, "step": step, "metrics": self.metrics}
        content["states"] = self.collect_state()
        content = utils.recursively_apply(
            numpy.generic.item, content, test_type=lambda x: isinstance(x, numpy.generic)
        )
        main, name, problem = self.accelerator.is_main_process, f"step-{step:08}", None
        directory, mine, names = Path(self.config["output_dir"]), {}, []
        temporary = directory / "checkpoint.tmp"
        if main:
            shutil.rmtree(temporary, ignore_errors=True)  # what a killed run has left
        self.accelerator.wait_for_everyone()  # before any rank creates it anew
        try:
            tensors = self.state["model"].tensors()
            # Eight files of a process, one after the other: each is made in memory before it is written.
            files = {tensor: 1 + index * 8 // len(tensors) for index, tensor in enumerate(tensors)}
            writer = dcp.HuggingFaceStorageWriter(temporary, files, save_distributed=True)
            dcp.save(tensors, storage_writer=writer)  # each process its own shards, to the disk
            names = sorted(path.name for path in temporary.iterdir())
            share = names[self.accelerator.process_index :: self.accelerator.num_processes]
            mine = {name: checksum(temporary / name) for name in share}
        except (CheckpointException, OSError) as error:
            failures = getattr(error, "failures", {0: (error,)})
            problem = f"{next(iter(failures.values()))[0]!r:.200}"
        problems, seen, checksums = zip(*utils.gather_object([(problem, names, mine)]), strict=True)
        problem = next(filter(None, problems), None)
        if not problem and any(names != seen[0] for names in seen):
            problem = f"processes see different files: {directory} has to be a directory that all machines share"
        content["checksums"] = {name: value for part in checksums for name, value in part.items()}
        try:
            if main and not problem:
                with open(temporary / "run.pt", "wb") as file:
                    torch.save(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                torch.load(
                    temporary / "run.pt", "cpu", weights_only=True, mmap=True
                )  # or no resume could
                self.sync_directory(temporary)
                os.replace(temporary, directory / name)
                self.sync_directory(directory)
                for old in sorted(directory.glob(PATTERN))[: -self.config["keep"]]:
                    os.replace(
                        old, temporary
                    )  # deleting takes a while: none is there in part under its name
                    shutil.rmtree(temporary)
        except (OSError, RuntimeError, UnpicklingError) as error:
            problem = f"{error.__context__ or error!r}"
        if problem := utils.broadcast_object_list([problem])[0]:
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
            self.exit(
                1, f"error: cannot write {name} ({problem}), earlier ones stay: --resume auto"
            )
        self.saved, self.interval_start = time.time(), time.perf_counter()

    @staticmethod
    def sync_directory(path):
        entry = os.open(path, os.O_RDONLY)
        os.fsync(entry)  # or a power failure could undo what was renamed in it
        os.close(entry)

    def finish(self, test):
        held = utils.gather_object([self.state["model"].held])
        by_rank = {f"rank_{name}": [one[name] for one in held] for name in held[0]}
        super().finish({**test, **by_rank})


def exit_with_error(message):
    """Print an error in one line, from one process per node, and exit with status 2."""
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if SignalHandler.received:  # the launcher's, sent before this rank came here
            os._exit(2)
        time.sleep(
            60
        )  # the launcher kills all ranks when one exits: let local rank 0 print and exit first
    print(f"{RECIPE}: error: {message}".replace("\n", " "), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)  # without the tear-down, in which gloo may abort


def parse_args(**own_flags):
    """Return the parsed flags, with `own_flags`, {name: options of add_argument}, and lock the output directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = exit_with_error

    def add(name, help, **options):
        default = "" if options.get("default") is None else " (default: %(default)s)"
        parser.add_argument(name, help=help + default, **options)

    add(
        "--data",
        "synthetic needs no files, no network",
        choices=("cifar10", "synthetic"),
        default="cifar10",
    )
    add("--data-dir", "where CIFAR-10 is, or is downloaded to", default="data")
    add("--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    add(
        "--stem",
        "of resnet50: 3x3, or ImageNet's 7x7",
        choices=("cifar", "imagenet"),
        default="cifar",
    )
    add(
        "--weights",
        "start from model.safetensors, or a state dict as torchvision's",
        metavar="PATH",
    )
    add("--epochs", "passes over the training set; 0 only evaluates", type=int, default=30)
    add("--max-steps", "stop after this many optimizer steps", type=int)
    add("--batch-size", "samples per batch of the DataLoader", type=int, default=128)
    add("--lr", "peak learning rate per 128 samples of global batch", type=float, default=0.1)
    add("--seed", "of weights, order and augmentation", type=int, default=0)
    for name, options in own_flags.items():
        add(f"--{name.replace('_', '-')}", **options)
    add("--cpu", "do not use the GPUs: processes on CPU cores, over gloo", action="store_true")
    add("--output-dir", "for checkpoints, metrics, summary and weights", default=f"runs/{RECIPE}")
    add(
        "--checkpoint-every",
        "optimizer steps between checkpoints, besides those at epochs' ends",
        type=int,
    )
    add("--keep", "how many checkpoints to keep", type=int, default=2)
    add(
        "--resume",
        "resume from a checkpoint; auto: the newest in the output directory",
        metavar="{auto,PATH}",
    )
    add(
        "--log-every",
        "optimizer steps between lines of metrics (default: 50 on GPUs, 10 on CPU)",
        type=int,
    )
    add(
        "--tracker",
        "where metrics go, too",
        choices=[x.value for x in accelerate.tracking.get_available_trackers()],
    )
    args = parser.parse_args()
    unchecked = own_flags.keys() - {
        "accumulation_steps",
        "clip_norm",
        "microbatches",
        "replicas",
    }  # a copy's own
    for name, value in vars(args).items():
        low, flag = -1 if name in ("epochs", "seed") else 0, f"--{name.replace('_', '-')}"
        if type(value) in (int, float) and name not in unchecked and not low < value < 2**32:
            exit_with_error(
                f"argument {flag}: {value}, choose a number above {low} and below {2**32}"
            )
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        if (
            int(os.environ.get("RANK", 0)) == 0
        ):  # two runs in one directory would destroy each other's checkpoints
            lock = os.open(
                Path(args.output_dir, "run.lock"), os.O_RDWR | os.O_CREAT, 0o666
            )  # until this process ends
            os.lockf(lock, os.F_TLOCK, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".ljust(99).encode())
    except BlockingIOError:
        owner = os.read(lock, 99).decode().strip()
        exit_with_error(
            f"{args.output_dir} is in use by {owner}: stop it, or choose another --output-dir"
        )
    except OSError as error:
        exit_with_error(
            f"argument --output-dir: cannot write to {args.output_dir} ({error.strerror}), choose another"
        )
    checkpoints = list(Path(args.output_dir).glob("step-*"))
    restarts = [
        int(os.environ.get(name, 0))
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    ]
    launched = (
        psutil.Process(os.getppid()).create_time() if restarts[0] else 0
    )  # older ones are not of this launch
    if any(restarts) and any(path.stat().st_mtime > launched for path in checkpoints):
        args.resume = "auto"
    if checkpoints and args.resume is None:
        exit_with_error(
            f"{args.output_dir} holds a run's checkpoints: --resume auto, or choose another --output-dir"
        )
    return args


def make_accelerator(args, precision, *handlers):
    """Return the Accelerator, on GPUs or, where there are none, on CPU; exit with an error where that cannot work, or
    where the launcher was told something that this recipe does not do."""
    mixed_precision = "no" if precision == "fp32" else precision
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # Accelerate's barriers would go to the GPUs all the same
        )
    rank, processes = (
        utils.get_int_from_env(["LOCAL_RANK"], 0),
        utils.get_int_from_env(["LOCAL_WORLD_SIZE"], 1),
    )
    gpus = torch.cuda.device_count()
    if not gpus and not args.cpu and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        exit_with_error(
            "this Slurm job has GPUs and this step none: srun --gpus-per-node=N, or --cpu to do without"
        )
    if 0 < gpus < processes:
        exit_with_error(
            f"{processes} processes, {gpus} GPU(s): launch with --num_processes {gpus}, or use --cpu"
        )
    if gpus:
        try:
            torch.cuda.set_device(rank)
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            remedy = "if it or its driver is too old for this torch, see pytorch.org/get-started"
            exit_with_error(
                f"torch {torch.__version__} cannot use this GPU ({error!s:.200}): {remedy}"
            )
        torch.backends.cudnn.benchmark = True  # shapes rarely change: time the algorithms once
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // processes))  # the launcher's default is one
    args.log_every = args.log_every or (50 if gpus else 10)
    supported = dict.fromkeys(
        "USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM USE_PARALLELISM_CONFIG".split(), "false"
    )
    supported |= {
        "GRADIENT_ACCUMULATION_STEPS": str(getattr(args, "accumulation_steps", 1)),
        "DYNAMO_BACKEND": "no",
    }
    for name, ours in (supported | {"MIXED_PRECISION": mixed_precision}).items():
        told = os.environ.get(f"ACCELERATE_{name}", ours).lower()
        if told not in ("no", ours):
            exit_with_error(
                f"the launcher's {name.lower()} is {told}, which this recipe does not do: see its --help"
            )
    if (
        utils.get_int_from_env(["WORLD_SIZE"], 1) > processes
        and "GLOO_SOCKET_IFNAME" not in os.environ
    ):
        # gloo would take the address of the host's name, often 127.0.1.1: take the interface to the first machine.
        # On the first machine that may be loopback, too: take the default route's.
        for host in (os.environ["MASTER_ADDR"], "192.0.2.1"):
            family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                own = probe.getsockname()[0]
            if not own.startswith("127.") or host in ("localhost", "127.0.0.1"):
                break
        interfaces = [
            name
            for name, found in psutil.net_if_addrs().items()
            if own in [x.address for x in found]
        ]
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[0]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection(
                (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), 60
            ).close()
        except OSError as error:  # torch would look for its store until TIMEOUT
            exit_with_error(
                f"the launcher, or that of the first machine, has ended ({error}): its output says why"
            )
        if attempt := utils.get_int_from_env(["TORCHELASTIC_RESTART_COUNT"], 0):
            # The store still has the addresses of the processes that died: keep the new ones from dialling them.
            store, rank, world_size = next(distributed.rendezvous("env://"))
            store = distributed.PrefixStore(f"attempt {attempt}", store)
            distributed.init_process_group(
                "nccl" if gpus else "gloo", None, TIMEOUT, world_size, rank, store
            )
    data_seed = random.Random(args.seed).getrandbits(
        31
    )  # Accelerate adds the epoch: the seeds must not overlap
    accelerator = Accelerator(
        cpu=not gpus,  # without it, processes on a machine without GPUs would not see each other
        mixed_precision=mixed_precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=data_seed, non_blocking=True
        ),
        kwargs_handlers=[utils.InitProcessGroupKwargs(timeout=TIMEOUT), *handlers],
    )
    launched = utils.get_int_from_env(
        ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"], 1
    )
    if launched != (seen := accelerator.num_processes):
        exit_with_error(
            f"{launched} processes were started, this one sees {seen}: start them with accelerate launch"
        )
    return accelerator


class ImageTensors(Dataset):
    """Images as one tensor on the device; one indexing operation selects, crops, flips and normalises a whole batch.

    (N, H, W, 3) uint8 and (N,) int64 in; batches of (B, 3, H, W) float32, channels_last, and (B,) int64 out. With
    `augmentation_seed`: zero padding by 4, a random crop back to H x W, and a horizontal flip with probability 1/2.
    """

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels, self.seed, self.size = labels.to(device), augmentation_seed, images.shape[1:3]
        self.statistics = torch.tensor([self.mean, self.std], device=device)
        self.padding = 0 if augmentation_seed is None else 4
        self.images = F.pad(images, (0, 0) + 4 * (self.padding,)).contiguous().to(device)
        self.augmentation = torch.zeros(
            3, len(labels), dtype=torch.int64, device=device
        ).share_memory_()  # for workers

    def __len__(self):
        return len(self.labels)

    def set_epoch(self, epoch):
        """Draw crop and flip of every sample from (seed, epoch, index) alone, whichever process holds it."""
        if self.seed is not None:
            generator = torch.Generator().manual_seed(
                random.Random(f"{self.seed}/{epoch}").getrandbits(32)
            )
            offsets = torch.randint(2 * self.padding + 1, (2, len(self)), generator=generator)
            self.augmentation[:] = torch.cat(
                (offsets, torch.randint(2, (1, len(self)), generator=generator))
            )

    def __getitems__(self, indices):
        index = torch.tensor(indices).to(self.labels.device, non_blocking=True)
        top, left, flip = self.augmentation[:, index, None]
        rows, columns = (torch.arange(size, device=index.device) for size in self.size)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)
        images = self.images[index[:, None, None], (top + rows)[:, :, None], columns[:, None, :]]
        mean, std = self.statistics
        return images.float().div_(255).sub_(mean).div_(std).permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, accelerator):
    """CIFAR-10 by torchvision, which downloads it where it is missing and verifies it, one process per machine first:
    (N, 32, 32, 3) uint8 and (N,) int64 for training, and for the test."""
    problem = None  # told below: no process may exit while others wait for it
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            sets = [
                torchvision.datasets.CIFAR10(directory, train=train, download=True)
                for train in (True, False)
            ]
        except (OSError, RuntimeError) as error:
            problem = f"no intact CIFAR-10 in --data-dir {directory}, download failed ({error}): --data synthetic"
    for found in filter(None, utils.gather_object([problem])):
        exit_with_error(found)
    return [(torch.from_numpy(dataset.data), torch.tensor(dataset.targets)) for dataset in sets]


def synthetic_images(samples, seed):
    """Ten classes that a network can learn, each a smooth pattern under noise: (N, 32, 32, 3) uint8, (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = (
        128
        + 32 * F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1).contiguous()
    )
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = torch.randn(samples, 32, 32, 3, generator=generator).mul_(48).add_(patterns[labels])
    return images.clamp_(0, 255).byte(), labels


if __name__ == "__main__":
    main()
