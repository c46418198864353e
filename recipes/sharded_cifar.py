# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "torchvision>=0.26", "accelerate>=1.10", "numpy>=2", "rich>=13"]
# ///
"""Fully sharded data parallelism: the model sharded over all processes (FSDP2).

    accelerate launch --config_file accelerate_configs/8gpu.yaml recipes/sharded_cifar.py \\
        --replicas 2 --precision bf16

For a model that does not fit on one GPU: each of N processes keeps 1/N of the parameters, gradients
and optimizer state. A block's parameters are gathered for its forward and its backward pass, then
freed. The training is that of ddp_cifar.py. Rerunning the command resumes.

To make this file yours, replace `add_flags`, `load_data`, `build_model`, `compute_loss`,
`test_metrics`, `make_optimizer`, and perhaps `shard_units`; `shard` lists what a model needs.
"""

import argparse
import faulthandler
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
from collections import OrderedDict
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import accelerate
import numpy
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches, utils
from rich.console import Console
from rich.progress import Progress
from torch import distributed, nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat. Replace this."""
    add = parser.add_argument
    add("--data", choices=("cifar10", "synthetic"), default="cifar10", help="default: cifar10")
    add("--data-dir", default="data", help="CIFAR-10 directory (downloaded if missing)")
    add("--model", choices=("resnet50", "simple_cnn"), default="resnet50", help="default: resnet50")
    add("--stem", choices=("cifar", "imagenet"), default="cifar", help="cifar (default): 3x3 conv")


def load_data(args, accelerator):
    """Return the DataLoaders of (images, labels) for training and test. Replace this.

    Write them as for one process: Accelerate divides the batches. Any map-style Dataset works, also
    with random transforms, workers and pin_memory: see `SeededSamples`."""
    if args.data == "synthetic":
        train_images, test_images = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
    else:
        train_images, test_images = cifar10(args.data_dir, accelerator)
    train_set = ImageTensors(*train_images, accelerator.device, augmentation_seed=args.seed)
    test_set = ImageTensors(*test_images, accelerator.device)
    options = {"batch_size": args.batch_size, "collate_fn": tuple}  # ImageTensors makes batches
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) in, (B, classes) logits out. Replace this."""
    if args.model == "simple_cnn":
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    else:
        model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True)
        if args.stem == "cifar":
            model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # keeps small images large
            model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)  # fastest for convolutions


def compute_loss(model, batch, args):
    """Return {"loss": (B,) float, "your metric": (B,) float or bool, ...}. Replace this.

    Call `model` itself, not its methods: its forward pass gathers the parameters. The mean of
    "loss" is minimised. For samples that count unequally add "weight": (B,), which weights all
    means over the whole global batch: for a sequence, "loss" is the mean over its tokens and
    "weight" their number. For class weights multiply the loss. "outputs" are for `test_metrics`."""
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}


def test_metrics(outputs, args):
    """Return {"your metric": number} of the whole test set, for metrics that are not per-sample
    means. `outputs` has one item per sample, in the order of the test set: an object, or a row of
    the tensor, that `compute_loss` returns as "outputs". Replace this."""
    return {}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate. Replace this."""
    peak = args.lr * args.global_batch_size / 128  # --lr is for 128 samples
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    # Not fused: torch has no rule for it on shards (ResNet-50: 15 ms of host time, not 2).
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)
    # Warm-up (Goyal et al. 2017, arXiv:1706.02677), then decay, to about zero after the last step.
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps + 1, anneal_strategy="linear", cycle_momentum=False
    )
    return optimizer, schedule


def train_step(run, model, optimizer, scheduler, microbatches):
    """Take one optimizer step over an iterator of batches. Return their values, and the norm of the
    gradient before clipping, or None if it is not needed. All stay on the device."""
    accelerator, args = run.accelerator, run.args
    step_values = []
    utils.broadcast(training_buffers(model))  # listed here: a module may replace its own
    for index, batch in enumerate(microbatches):
        # The number in the whole step: dropout is then the same on any number of ranks.
        number = index * accelerator.num_processes + accelerator.process_index
        seed_rng(args.seed, run.step, number)
        with accelerator.accumulate(model):  # averages gradients in the last microbatch
            values, _ = split_values(compute_loss(model, batch, args))
            accelerator.backward((values["loss"] * values.get("weight", 1)).mean())
        step_values.append(values)
    divide_by_mean_weight(accelerator, model, step_values)
    grad_norm = None
    if args.clip_norm:
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.clip_norm).full_tensor()
    elif run.line_due:
        grad_norm = total_norm(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return step_values, grad_norm


@torch.no_grad()
def evaluate(run, model, loader):
    """Return {"test_loss": mean, ...} over the test set. Each sample counts once."""
    utils.broadcast(list(model.buffers()))  # in place: BatchNorm's statistics of rank 0
    sums = 0
    outputs = []
    for batch, samples in run.test_batches(model, loader):
        values, rows = split_values(compute_loss(model, batch, run.args))
        sums += sample_rows(values)[:samples].sum(0)
        outputs += gather_outputs(run, rows)
    model.reshard()  # FSDP keeps the root's parameters unsharded for a backward pass
    results = means(values, run.accelerator.reduce(sums), len(loader.dataset))
    results |= run.on_main_process(test_metrics, outputs[: len(loader.dataset)], run.args)
    return {f"test_{name}": float(value) for name, value in results.items()}


def main():
    args = parse_args(__doc__, add_technique_flags, add_flags)
    check_bf16(args)
    run = Run(args, args.precision, methods=SHARDED)
    run.may_differ = {"replicas", "sync_each_batch", "activation_checkpointing"}
    accelerator = run.accelerator
    train_loader, test_loader = run.prepare_data(load_data(args, accelerator))
    model = build_sharded_model(run, make_mesh(accelerator, args.replicas))
    optimizer, scheduler = make_optimizer(model, args, run.total_steps)
    # Not the model: that would add DDP. Not the scheduler: it would advance once per process.
    optimizer = accelerator.prepare(optimizer)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.resume(states, partial(before_first_step, run, model, train_loader))
    for microbatches in run.steps():
        if microbatches is not None:
            values, grad_norm = train_step(run, model, optimizer, scheduler, microbatches)
            run.log_save_or_stop(values, grad_norm)
        if run.evaluation_due:
            run.metrics.write("evaluation", evaluate(run, model, test_loader))
    run.finish()


# --------------------------------------------------------------------------------------------- FSDP
def shard_units(model):
    """Return the modules that are sharded separately; FSDP keeps about two of them unsharded at a
    time. These are the elements of each nn.Sequential and nn.ModuleList: the blocks of most ResNets
    and transformers. The rest is sharded with the root. Replace this for blocks elsewhere."""
    units = []
    in_list = isinstance(model, nn.Sequential | nn.ModuleList)
    for child in model.children():
        has_forward = type(child).forward is not nn.Module.forward  # an nn.ModuleList has none
        if in_list and has_forward:
            units.append(child)
        else:
            units += shard_units(child)
    return [unit for unit in units if list(unit.parameters())]


def add_technique_flags(parser):
    """Add the flags of this technique."""
    add = parser.add_argument
    switch = {"action": "store_true"}
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    add("--replicas", type=positive(int), default=1, help="sharded models side by side (HSDP)")
    add("--sync-each-batch", help="accumulate gradients in shards: less memory, slower", **switch)
    add("--activation-checkpointing", help="recompute activations: less memory, slower", **switch)
    add("--compile", help="torch.compile for each unit (slow first step)", **switch)


def check_bf16(args):
    """Exit with an error if this GPU would emulate bf16, as CPUs do that have no bf16."""
    on_gpu = args.precision == "bf16" and not args.cpu and torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        exit_with_error(f"{torch.cuda.get_device_name()} has no bf16: choose another --precision")


def make_mesh(accelerator, replicas):
    """Return the device mesh: one row of processes, or `replicas` rows, each of which holds the
    model once. The groups of torch's `init_device_mesh` would have another timeout."""
    device = accelerator.device.type
    processes = accelerator.num_processes
    if processes % replicas:
        groups = f"{replicas} equal groups"
        exit_with_error(f"argument --replicas: {processes} process(es) do not make {groups}")
    if not distributed.is_initialized():  # Accelerate starts no process group for one process
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, None, TIMEOUT, 1, 0, distributed.HashStore())
    if replicas == 1:
        return DeviceMesh.from_group(distributed.group.WORLD, device)
    ranks = torch.arange(processes).view(replicas, -1)
    rows, _ = distributed.new_subgroups_by_enumeration(ranks.tolist(), TIMEOUT)
    columns, _ = distributed.new_subgroups_by_enumeration(ranks.T.tolist(), TIMEOUT)
    names = ("replicas", "shards")
    return DeviceMesh.from_group([columns, rows], device, ranks, mesh_dim_names=names)


def build_sharded_model(run, mesh):
    """Return the model of `build_model`, with `--weights`, sharded. The main process builds the
    whole model in CPU memory, and sends the others their shards. No GPU ever holds all of it."""
    args = run.args
    weights = {}
    resumes = run.on_main_process(checkpoint_paths, run.directory)
    if RANK == 0 and not resumes:
        whole = load_weights(build_model(args), args.weights)
        whole.to(memory_format=torch.contiguous_format)  # torch sends elements as they lie there
        weights = whole.state_dict()
    if run.cpu_group:
        try:
            distributed.barrier(run.cpu_group)
        except RuntimeError:
            exit_with_error("the main process has not built the model")
    with torch.device("meta"):  # shapes without memory
        model = build_model(args)
    names = {name for name, _ in model.named_parameters()}
    shard(model, args, mesh)
    for name, _ in model.named_parameters():
        if name not in names:  # FSDP has made two parameters of tied weights
            what = f"{name} is in more than one unit, or in one and the root (tied weights)"
            remedy = "make one unit of the modules that share it, or leave both to the root"
            exit_with_error(f"shard_units: {what}: {remedy}")
    model.to_empty(device=run.accelerator.device)
    if resumes:  # a checkpoint has all of it
        return model
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(model, weights, options=options)
    buffers = dict(model.named_buffers())  # some are in no state dict
    if RANK == 0:
        for name, buffer in buffers.items():
            buffer.copy_(whole.get_buffer(name))
    utils.broadcast(list(buffers.values()))  # in place
    return model


def shard(model, args, mesh):
    """Shard the units of a model on the meta device over the mesh, and then the rest of the model
    (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277).

    Accelerate's own FSDP plugin needs GPUs. Here Accelerate supplies processes, devices, data and
    optimizer, and torch the sharding. The model must satisfy this:
    - `build_model` also runs on the meta device: no `.item()` in it, buffers instead of plain
      tensors, and no parameters without dimensions, which FSDP cannot shard.
    - Every process runs the same units in the same order, or the all-gathers deadlock: LayerDrop
      has to multiply a layer's output by 0 instead of not calling it.
    BatchNorm normalises over a process's own batch, as with DDP. Each process has its own running
    statistics. All evaluate with the main process's, which are saved.
    """
    model.to(memory_format=torch.contiguous_format)  # FSDP needs it; activations are channels_last
    norms = set()
    options = {}
    if args.precision == "bf16":
        # Norms with running statistics stay in fp32, as these are. LayerNorm is another class.
        norms = {x for x in model.modules() if isinstance(x, nn.modules.batchnorm._NormBase)}
        options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if norms and hasattr(fsdp.MixedPrecisionPolicy, "param_dtype_override_fn"):
        # From torch 2.15 on they need no groups of their own, which cost 15% on CPU.
        in_fp32 = {p for norm in norms for p in norm.parameters()}
        options["param_dtype_override_fn"] = lambda p: p.dtype if p in in_fp32 else None
        norms = set()
    units = shard_units(model)
    inside = [x for unit in units for x in unit.modules() if list(x.parameters())]
    if shared := [name for name, module in model.named_modules() if inside.count(module) > 1]:
        remedy = "make one unit of all that use it, or leave it to the root"
        exit_with_error(f"shard_units: {shared[0]} is in more than one unit: {remedy}")
    for unit in units:
        if args.compile:
            # Units of a class share a cache: for training, evaluation and its last, smaller batch.
            torch._dynamo.config.recompile_limit = max(8, 3 * len(units))
            unit.forward = torch.compile(unit.forward, dynamic=False)  # without FSDP's hooks
        if args.activation_checkpointing:
            checkpoint_activations(unit)
        shard_unit(unit, norms, mesh, fsdp.MixedPrecisionPolicy(**options))
    if options:
        options["output_dtype"] = torch.float32  # for the loss
    shard_unit(model, norms, mesh, fsdp.MixedPrecisionPolicy(**options))


def shard_unit(unit, norms, mesh, policy):
    """Shard what is left of a unit: first its `norms`, in one group in fp32, then the rest."""
    own = [x for x in unit.modules() if x in norms and list(x.parameters())]
    norms.difference_update(own)
    if own:
        fsdp.fully_shard(own, mesh=mesh)
    if unit not in own:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy)


def checkpoint_activations(unit):
    """Keep only the inputs of a unit's forward pass. The backward pass repeats it, and restores the
    buffers: BatchNorm's statistics have counted this batch already."""

    @contextmanager
    def restored_buffers():
        before = {name: buffer.clone() for name, buffer in unit.named_buffers()}
        try:
            yield
        finally:  # torch ends the second pass early, by an exception
            set_buffers(unit, before)

    unit.forward = partial(
        torch.utils.checkpoint.checkpoint,
        unit.forward,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), restored_buffers()),  # for the first and the second pass
    )


def before_first_step(run, model, _):
    """Before each forward pass, tell FSDP when to sum gradients."""

    def prepare_pass(*_):
        # Otherwise each rank has its own whole gradients until a step's last microbatch.
        sync = run.args.sync_each_batch or run.accelerator.sync_gradients
        model.set_requires_gradient_sync(sync)

    model.register_forward_pre_hook(prepare_pass)


# ------------------------------------------------------------------------------ sharded checkpoints
# Each checkpoint is a folder: .safetensors files of each rank for its shards of the parameters and
# of the optimizer's state, and run.pt for everything else and the checksums of these files. Nothing
# in it is a pickle that runs code. The functions in SHARDED take the place of Checkpoints' methods.
def collect_full_weights(checkpoints):
    """Return all weights, gathered to the CPU memory of the main process. A tensor with several
    names (tied weights) has the first one, as in Accelerate's `save_model`."""
    model = checkpoints.states["model"]
    names = {id(x): name for name, x in reversed(model.state_dict(keep_vars=True).items())}
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)  # {} on others
    return {name: x for name, x in weights.items() if name in names.values()}


def collect_with_shards(checkpoints):
    """Return the states. Those of the model are its parameters and buffers, each once (tied
    weights), and what `get_extra_state` of its modules returns."""
    states = Checkpoints.collect(checkpoints)
    model = checkpoints.states["model"]
    extra = {name: x for name, x in states["model"].items() if name.endswith("_extra_state")}
    states["model"] = dict(model.named_parameters()) | dict(model.named_buffers()) | extra
    return states


def load_shards(checkpoints, saved):
    """Load the states, of which `saved["folder"]` has the shards."""
    model = checkpoints.states["model"]
    optimizer = checkpoints.states["optimizer"]
    dcp_state.get_optimizer_state_dict(model, optimizer)  # creates the states
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if index not in saved["optimizer"]["state"]:  # it is frozen, or had no gradient yet
            optimizer.state.pop(parameter, None)
    shards = {}
    without_shards(collect_with_shards(checkpoints), shards)
    reader = dcp.HuggingFaceStorageReader(saved["folder"])
    dcp.load(shards, storage_reader=reader, process_group=checkpoints.run.cpu_group)
    set_buffers(model, saved["model"])
    for name, buffer in model.named_buffers():
        if buffer.shape != saved["model"][name].shape:  # a cache that has grown
            parent, _, last = name.rpartition(".")
            value = saved["model"][name].to(buffer.device, copy=True)
            setattr(model.get_submodule(parent), last, value)
    extra = {name: x for name, x in saved["model"].items() if name.endswith("_extra_state")}
    model.load_state_dict(extra, strict=False)
    for name in checkpoints.states.keys() - {"model"}:
        own = with_shards(deepcopy(saved[name]), shards, f"states/{name}")
        checkpoints.states[name].load_state_dict(own)


def read_folder(checkpoints, path):
    """Return everything but the shards, of which each rank verifies some: none reads all. Raise an
    error on all ranks if anything is damaged."""
    failure = None
    try:
        checkpoint = read_file(path / "run.pt")
        checksums = checkpoint["checksums"]
        if checksums.keys() != {file.name for file in path.glob("*.safetensors")}:
            raise ValueError("its files are not those that were written")
        for name in sorted(checksums)[RANK::WORLD_SIZE]:
            if checksum(path / name) != checksums[name]:
                raise ValueError(f"{name} is damaged, or not of this checkpoint")
    except Exception as error:
        failure = error
    gather_or_raise(checkpoints.run, failure)
    checkpoint["states"]["folder"] = str(path)
    return checkpoint


def write_folder(checkpoints, content, path):
    """Write a checkpoint: renamed into place after fsync, and after it was read again."""
    # Not one name for all steps: an NFS client may enter the folder that it once had this name.
    temporary = path.with_suffix(".tmp")
    shards = {}
    content["states"] = without_shards(content["states"], shards)
    try:
        checksums = write_shards(checkpoints, shards, temporary)
        if RANK == 0:
            torch.save({**content, "checksums": checksums}, temporary / "run.pt")
            fsync_path(temporary / "run.pt")
            read_file(temporary / "run.pt")
            fsync_path(temporary)
            if path.exists():  # damaged: this run has begun before it
                delete_folder(checkpoints, path)
            os.replace(temporary, path)
            fsync_path(path.parent)
    finally:
        if RANK == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def number_files(shards):
    """Return {name: number of the file of its shards, from 1}. A file gets shards until it has
    FILE_SIZE: torch copies a whole file in host memory, twice, and from a GPU three times."""
    numbers = {}
    number = 1
    size = 0
    for name, shard in shards.items():
        numbers[name] = number
        size += shard.to_local().nbytes
        if size >= FILE_SIZE:
            number += 1
            size = 0
    return numbers


def write_shards(checkpoints, shards, folder):
    """Write each rank's shards to the disk. Return {file name: checksum} of all ranks' files, or
    raise an error on all ranks."""
    if RANK == 0:
        for unfinished in folder.parent.glob("step-*.tmp"):  # a killed run may have left one
            if re.fullmatch(r"step-\d{8}(\.deleted)?\.tmp", unfinished.name):
                shutil.rmtree(unfinished, ignore_errors=True)  # a link stays
        folder.mkdir()  # torch would also make the output directory anew
    gather_or_raise(checkpoints.run, None)  # all wait
    files = number_files(shards)  # torch uses rank 0's on all ranks: it has most rows
    writer = dcp.HuggingFaceStorageWriter(folder, files, save_distributed=True)
    writer.per_thread_copy_ahead = 0  # or copies of the shards would stay in pinned memory
    checksums = {}
    failure = None
    try:
        dcp.save(shards, storage_writer=writer, process_group=checkpoints.run.cpu_group)
        for path in folder.glob(f"shard-{RANK + 1:05}-*"):
            fsync_path(path)  # torch 2.11 does that while a small file is in Python's buffer
            checksums[path.name] = checksum(path)
    except dcp.CheckpointException as error:  # equal on all ranks
        failure = next(iter(error.failures.values()))[0]
    except Exception as error:
        failure = error
    of_ranks = gather_or_raise(checkpoints.run, failure, checksums)
    return {name: value for part in of_ranks for name, value in part.items()}


def delete_folder(checkpoints, path):
    deleted = path.with_suffix(".deleted.tmp")
    os.replace(path, deleted)  # deleting takes a while: no part stays under its name
    shutil.rmtree(deleted)


FILE_SIZE = 2**28  # bytes: with less, a large model would be many thousand files
SHARDED = {
    "collect_weights": collect_full_weights,
    "collect": collect_with_shards,
    "load": load_shards,
    "read": read_folder,
    "write": write_folder,
    "delete": delete_folder,
}


def gather_or_raise(run, error, value=None):
    """Return the values of all ranks, or raise the same error on all of them if one has an `error`:
    OSError if the file system or memory has failed it, so that the checkpoint may be intact. The
    group is not that of the steps: a thread may write a checkpoint."""
    is_external = isinstance(error, OSError | MemoryError)
    failure = (not is_external, f"{error!r} on {RANK_AND_HOST}") if error else None
    rows = [None] * WORLD_SIZE
    distributed.all_gather_object(rows, (failure, value), run.cpu_group)
    if failures := sorted(failure for failure, _ in rows if failure):
        is_damage, text = failures[0]
        raise RuntimeError(text) if is_damage else OSError(text)
    return [value for _, value in rows]


def without_shards(value, shards, name="states"):
    """Return nested dictionaries and lists with None for each DTensor, which `shards` gets under
    its name."""
    if isinstance(value, DTensor):
        shards[name] = value
        return None
    if isinstance(value, dict):
        return {key: without_shards(x, shards, f"{name}/{key}") for key, x in value.items()}
    if isinstance(value, list | tuple):
        parts = [without_shards(x, shards, f"{name}/{index}") for index, x in enumerate(value)]
        return type(value)(parts)
    return value


def with_shards(value, shards, name="states"):
    """Return what `without_shards` was called with."""
    if isinstance(value, dict):
        return {key: with_shards(x, shards, f"{name}/{key}") for key, x in value.items()}
    if isinstance(value, list | tuple):
        parts = [with_shards(x, shards, f"{name}/{index}") for index, x in enumerate(value)]
        return type(value)(parts)
    return shards.get(name, value)


def checksum(path):
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------- CIFAR-10
class ImageTensors(Dataset):
    """Images (N, H, W, 3) uint8 and labels (N,) int64 on the device. One indexing operation makes a
    batch: (B, 3, H, W) float32, channels_last, normalised, and (B,) int64. With
    `augmentation_seed`: zero padding by 4, a random crop, and a random flip."""

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels = labels.to(device)
        self.seed = augmentation_seed
        self.height, self.width = images.shape[1:3]
        self.mean = torch.tensor((0.4914, 0.4822, 0.4465), device=device)
        self.std = torch.tensor((0.2470, 0.2435, 0.2616), device=device)
        self.padding = pad = 0 if augmentation_seed is None else 4
        padded = F.pad(images, (0, 0, pad, pad, pad, pad))  # pairs for channels, W, H
        self.images = padded.to(device)
        # The rows are top, left and flip, the columns samples.
        self.augmentation = torch.zeros(3, len(labels), dtype=torch.int64, device=device)
        self.augmentation.share_memory_()  # persistent workers read the same numbers

    def __len__(self):
        return len(self.labels)

    def set_epoch(self, epoch):
        """Draw each sample's crop and flip: a function of (seed, epoch, index) alone."""
        if self.seed is None:
            return
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.randint(2 * self.padding + 1, (2, len(self)), generator=generator)
        flips = torch.randint(2, (1, len(self)), generator=generator)
        self.augmentation[:] = torch.cat((offsets, flips))

    def __getitems__(self, indices):
        device = self.labels.device
        index = torch.tensor(indices).to(device, non_blocking=True)
        top, left, flip = self.augmentation[:, index, None]
        rows = top + torch.arange(self.height, device=device)
        columns = torch.arange(self.width, device=device)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)
        images = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = images.float().div_(255).sub_(self.mean).div_(self.std)
        return images.permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, accelerator):
    """Return CIFAR-10's images and labels, for training and test: downloaded, if missing."""
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            train_set = torchvision.datasets.CIFAR10(directory, train=True, download=True)
            test_set = torchvision.datasets.CIFAR10(directory, train=False)
        except (OSError, RuntimeError) as error:
            exit_with_error(f"--data-dir {directory}: {error}: use --data synthetic")
    return [(torch.from_numpy(x.data), torch.tensor(x.targets)) for x in (train_set, test_set)]


def synthetic_images(samples, seed):
    """Return ten classes, smooth patterns with noise: (N, 32, 32, 3) uint8 and (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
    patterns = 128 + 32 * patterns.contiguous()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = torch.randn(samples, 32, 32, 3, generator=generator).mul_(48).add_(patterns[labels])
    return images.clamp_(0, 255).byte(), labels


# ================= shared infrastructure 68a309d67706: identical in all recipes, edit only above it
SCRIPT = os.path.join(os.getcwd(), sys.argv[0])  # the file that is run: this one, in most cases
RECIPE = Path(SCRIPT).stem
FILES = (__file__, SCRIPT)  # an error is reported by its line in these
LAUNCHED = bool({"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"} & os.environ.keys())
LAUNCHER = os.getppid()  # read early: it changes when the launcher dies
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
RANK_AND_HOST = f"rank {RANK} on {socket.gethostname()}"
VERSIONS = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
TIMEOUT = timedelta(hours=6)  # of collectives. The Watcher ends a run that hangs
LAUNCHER_TIMEOUT = timedelta(minutes=1)  # to connect to its store, which exists before the ranks


# ------------------------------------------------------------------------------------------ the run
class Run:
    """A training run: its Accelerator and flags, and what is counted, logged, saved and watched
    around its steps. Results depend on the order in which its methods do things.

    `handlers` are Accelerate's. Each batch is computed by `ranks_per_batch` neighbouring ranks, and
    has a multiple of `multiple` samples. `methods`, {name: function}, take the place of those of
    Checkpoints."""

    def __init__(self, args, precision, *handlers, ranks_per_batch=1, multiple=1, methods=None):
        self.args = args
        self.precision = precision
        self.methods = methods or {}
        self.ranks_per_batch = ranks_per_batch  # ranks r and r + ranks_per_batch: the same weights
        self.data_parallel_size = WORLD_SIZE // ranks_per_batch
        self.may_differ = set()  # flags of this recipe that a resumed run need not repeat
        self.directory = Path(args.output_dir)
        lock_output_directory(self.directory)
        faulthandler.dump_traceback_later(args.hang_timeout)  # until the Watcher looks for hangs
        exit_if_config_is_ignored(precision)
        cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "."))  # torch's default is in /tmp
        is_foreign = cache.exists() and cache.stat().st_uid not in (0, os.getuid())
        if is_foreign and vars(args).get("compile"):  # which runs what is there
            exit_with_error(f"{cache} belongs to another user: set TORCHINDUCTOR_CACHE_DIR")
        gpus, threads = choose_device(args)
        args.log_every = args.log_every or (50 if gpus else 10)
        self.store = join_process_group(args, gpus) if WORLD_SIZE > 1 else distributed.HashStore()
        self.accumulation = set_batch_sizes(args, self.data_parallel_size, multiple)
        self.accelerator = make_accelerator(args, gpus, precision, handlers, self.accumulation)
        torch.set_num_threads(threads)  # after Accelerate, which sets another number
        # A second group on the CPUs: gloo does not wait for the GPUs.
        self.cpu_group = distributed.new_group(None, TIMEOUT, "gloo") if WORLD_SIZE > 1 else None
        seed_rng(args.seed)  # for the initial weights
        self.is_paused = True  # then it may take any time without a step

    def prepare_data(self, loaders, prepare=Accelerator.prepare):
        """Return the loaders of `load_data`, made reproducible, and divided among the processes. An
        incomplete last global batch is dropped."""
        args = self.args
        loaders = make_reproducible(loaders, args)
        self.samples = [len(loader.dataset) for loader in loaders]
        loaders = prepare(self.accelerator, *loaders)
        self.train_loader = loaders[0]
        self.steps_per_epoch = len(self.train_loader) // self.accumulation
        if self.steps_per_epoch == 0:
            exit_with_error(f"the training set does not fill one batch of {args.global_batch_size}")
        self.total_steps = min(args.epochs * self.steps_per_epoch, args.max_steps or math.inf)
        return loaders

    def resume(self, states, before_first_step):
        """Load the newest intact checkpoint, if there is one, into `states`: {name: object with a
        state_dict}. It overwrites what `before_first_step`, called first, has done to them. From
        here on a signal or a hang ends the run."""
        self.model = states["model"]
        self.scheduler = states["scheduler"]
        self.config = self.describe(states["optimizer"])
        self.checkpoints = Checkpoints(self, states)
        # A local variable: as an attribute it would keep the file mapped, and its disk space used.
        checkpoint = self.checkpoints.find()
        self.watcher = Watcher(self)  # before a DataLoader starts workers
        self.resumed_from = self.step = checkpoint["step"] if checkpoint else 0
        scripts = sorted(self.directory.glob(f"{RECIPE}.from-*.py"))
        if RANK == 0 and (not scripts or scripts[-1].read_text() != Path(SCRIPT).read_text()):
            path = self.directory / f"{RECIPE}.from-{self.step:08}.py"
            replace_file(path, partial(shutil.copyfile, SCRIPT))
        before_first_step()
        if checkpoint:
            self.checkpoints.load(checkpoint["states"])
        self.metrics = Metrics(self, checkpoint["metrics"] if checkpoint else "")
        self.is_paused = False
        faulthandler.cancel_dump_traceback_later()

    def describe(self, optimizer):
        """Return what summary.json and each checkpoint say: the flags, and what ran where."""
        rates = [x.get("max_lr", x.get("initial_lr", x["lr"])) for x in optimizer.param_groups]
        config = {
            "recipe": RECIPE,
            **vars(self.args),
            "precision": self.precision,
            "accumulation": self.accumulation,
            "peak_learning_rate": [float(x) for x in rates] if len(rates) > 1 else float(rates[0]),
            "steps": self.total_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "samples": self.samples,
            "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
            "world_size": WORLD_SIZE,
            "versions": VERSIONS,
        }
        return json.loads(json.dumps(config, default=str))  # plain types, to be read again

    def steps(self):
        """Yield, for each step that is left, an iterator over its microbatches. Before them yield
        None if an evaluation is due: it is missing after a resume, or all that --epochs 0 does."""
        args = self.args
        every = args.evaluate_every or self.steps_per_epoch
        self.evaluation_due = self.is_due(every)
        if self.evaluation_due:
            yield None
        while self.step < self.total_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            skipped = done * self.accumulation
            loader = skip_first_batches(self.train_loader, skipped) if done else self.train_loader
            loader.set_epoch(epoch)  # for the order. Before Accelerate 1.15 skipping resets it
            loader.dataset.set_epoch(epoch)  # for random transforms
            batches = iter(loader)
            last = min((epoch + 1) * self.steps_per_epoch, self.total_steps)
            while self.step < last:
                self.step += 1
                self.learning_rate = float(self.scheduler.get_last_lr()[0])
                self.evaluation_due = self.is_due(every)  # of a saved step: a signal may end it
                self.save_due = self.is_due(every, args.checkpoint_every or self.steps_per_epoch)
                self.line_due = self.save_due or self.step % args.log_every == 0
                microbatches = (self.metrics.timed_next(batches) for _ in range(self.accumulation))
                yield microbatches
                list(microbatches)  # skips those that the step has not taken

    def is_due(self, *intervals):
        """Return whether this step is the last one, or a multiple of one of the intervals."""
        is_multiple = self.step > 0 and any(self.step % x == 0 for x in intervals)
        return is_multiple or self.step == self.total_steps

    def log_save_or_stop(self, values, grad_norm=None, details=None):
        """Do what is due after a step with these `values`. Exit before saving if the loss or the
        weights are not finite, or differ between ranks. `details` are more numbers for a line."""
        self.metrics.add(values)
        stopping = self.watcher.agreed_signal()
        if self.line_due or stopping:
            results, ranks, measured = self.metrics.gather(grad_norm)
            exit_if_ranks_are_wrong(self, **ranks)
            self.metrics.write("train", results, {**(details or {}), **measured})
        if self.save_due or stopping:
            self.is_paused = True
            seconds = self.checkpoints.save(self.step, self.metrics.text)
            self.is_paused = False
            self.metrics.write("checkpoint", {"save_seconds": seconds})
        self.exit_on(stopping)

    def test_batches(self, model, loader):
        """Yield each batch of a test set, and how many of its samples count: the last batch of some
        ranks may only fill up. Meanwhile the model is in eval mode, and a signal ends the run."""
        modes = {module: module.training for module in model.modules()}  # frozen ones may be in it
        model.eval()
        loader.set_epoch(0)  # the same random transforms in each evaluation
        for index, batch in enumerate(loader):
            number = index * self.data_parallel_size + RANK // self.ranks_per_batch
            seed_rng("evaluation", number)
            left = len(loader.dataset) - number * loader.batch_sampler.batch_size
            yield batch, max(0, left)
            self.exit_on(self.watcher.agreed_signal())  # the step is saved
        for module, mode in modes.items():
            module.training = mode
        # A dataset may be in both loaders.
        self.train_loader.dataset.set_epoch(max(self.step - 1, 0) // self.steps_per_epoch)

    def exit_on(self, number):
        """Exit on a signal, unless it is 0, which all ranks have agreed on."""
        if number:
            self.close()
            if RANK == 0:
                remedy = "rerun the command to resume"
                log_line(f"stopped after step {self.step}, which is saved: {remedy}")
            exit_now(128 + number)

    def close(self):
        """Finish the trackers, and wait for all ranks: the launcher would kill those that save."""
        self.is_paused = True
        self.checkpoints.wait()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.wait_for_everyone()

    def on_main_process(self, function, *arguments):
        """Return on all ranks what a function returns on the main one. Waiting is no hang."""
        before, self.is_paused = self.is_paused, True
        result = [function(*arguments) if RANK == 0 else None]
        if self.cpu_group:
            distributed.broadcast_object_list(result, 0, self.cpu_group)
        self.is_paused = before
        return result[0]

    def save_weights(self, name):
        """Write the weights of the whole model, a tensor of several names (tied weights) once."""
        weights = self.checkpoints.collect_weights()
        # Accelerate drops a tensor's second name from an OrderedDict alone.
        weights = OrderedDict((name, x) for name, x in weights.items() if torch.is_tensor(x))
        save = partial(self.accelerator.save, weights, safe_serialization=True)
        self.on_main_process(replace_file, self.directory / name, save)

    def finish(self):
        """Write model.safetensors and summary.json, print the results, and wait for all ranks."""
        self.is_paused = True  # there are no more steps
        self.save_weights("model.safetensors")
        self.metrics.finish()
        self.close()


# ------------------------------------------------------------------------------------------ metrics
def total_norm(tensors):
    """Return the norm of all tensors together, also of sharded ones."""
    norm = nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def split_values(returned):
    """Return what `compute_loss` returned in two parts: its values, {name: (B,) tensor}, and its
    "outputs" or None. Exit with an error if it is anything else."""
    values = dict(returned) if isinstance(returned, dict) else {type(returned).__name__: returned}
    outputs = values.pop("outputs", None)
    shapes = {name: getattr(value, "shape", ()) for name, value in values.items()}
    if outputs is not None:
        shapes["outputs"] = torch.Size([len(outputs)])
    loss = shapes.get("loss", ())
    if len(loss) != 1 or set(shapes.values()) != {loss}:
        problem = ", ".join(f"{name}: {tuple(shape)}" for name, shape in shapes.items())
        remedy = 'one value per sample (reduction="none"), and for tokens their number as "weight"'
        exit_with_error(f'compute_loss returned {problem}: return {{"loss": tensor}} with {remedy}')
    return values, outputs


def divide_by_mean_weight(accelerator, model, step_values):
    """Divide the gradients by the mean weight of the global batch, if there are weights. They are
    those of mean(weight * loss), so the loss is sum(weight * loss) / sum(weight)."""
    if "weight" not in step_values[0]:
        return
    weights = torch.cat([values["weight"].detach().float() for values in step_values])
    total, samples = accelerator.reduce(torch.stack([weights, torch.ones_like(weights)]).sum(1))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= total / samples


def sample_rows(values):
    """Return (B, M + 2) float64, a row per sample: M values times its weight, its weight, 1."""
    weight = values.get("weight", torch.ones_like(values["loss"])).detach().double()
    columns = [value.detach() * weight for name, value in values.items() if name != "weight"]
    return torch.stack([*columns, weight, torch.ones_like(weight)], dim=1)


def means(names, sums, samples):
    """Return {name: mean} of summed `sample_rows`, (M + 2,), which were as many as `samples`."""
    *totals, weight, rows = sums.tolist()
    if rows != samples:
        why = "compute_loss or a collate_fn leaves some out, or load_data changes args.batch_size"
        exit_with_error(f"{rows:g} values of compute_loss for {samples} samples: {why}")
    if weight == 0:
        exit_with_error('every "weight" of compute_loss is 0')
    names = [name for name in names if name != "weight"]
    return {name: total / weight for name, total in zip(names, totals, strict=True)}


def gather_outputs(run, rows):
    """Return, on the main process, the rows of all processes, if any, and on the others none."""
    if rows is None:
        return []
    rows = utils.send_to_device(rows, "cpu")
    gathered = [rows]
    if run.cpu_group:
        gathered = [None] * WORLD_SIZE if RANK == 0 else None
        distributed.gather_object(rows, gathered, 0, run.cpu_group)
    return [row for part in gathered or [] for row in part]


class Metrics:
    """Means over all processes, for the screen, metrics.jsonl, summary.json and a tracker."""

    def __init__(self, run, text):
        self.run = run
        self.text = text  # of metrics.jsonl, from the checkpoint
        self.latest_values = {}  # by name, or None: JSON has neither NaN nor infinity
        self.started = time.time()
        self.names = []
        path = run.directory / "metrics.jsonl"
        replace_file(path, lambda temporary: temporary.write_text(text))
        self.file = open(os.devnull if RANK else path, "a", buffering=1)
        run.accelerator.init_trackers(RECIPE, {name: str(x) for name, x in run.config.items()})
        self.console = Console(quiet=RANK > 0, highlight=False, markup=False, soft_wrap=True)
        plain = RANK > 0 or not self.console.is_interactive
        # Not redirected: a worker would wait for a lock that was held when it was forked.
        self.progress = Progress(
            console=self.console, disable=plain, redirect_stdout=False, redirect_stderr=False
        )
        self.bar = self.progress.add_task("steps", total=run.total_steps, completed=run.step)
        self.console.print_json(data={**run.config, "resumed_from": run.step})
        self.progress.start()
        self.console.show_cursor()  # a killed run would leave it hidden
        self.start_interval()

    def start_interval(self):
        """Begin the next line's interval, which has no evaluation and no checkpoint."""
        self.interval_began = self.run.step
        self.sums = 0  # of `sample_rows`
        self.data_seconds = 0.0  # in which this process waited for data
        self.clock = time.perf_counter()

    def timed_next(self, batches):
        began = time.perf_counter()
        batch = next(batches)
        self.data_seconds += time.perf_counter() - began
        return batch

    def add(self, step_values):
        """Add the values of a step's microbatches."""
        for values in step_values:
            self.names = self.names or list(values)
            if list(values) != self.names:
                exit_with_error("compute_loss: return the same keys for every batch")
            self.sums = self.sums + sample_rows(values).sum(0)
        self.progress.advance(self.bar)

    def gather(self, grad_norm):
        """Return the means since the last line over all ranks; {"losses": each rank's sum, (P,),
        "norms": of its weights and gradients, (P, 1 or 2)}; and what was measured besides."""
        run = self.run
        # Frozen weights may be integers, which have no norm.
        norms = [total_norm(p for p in run.model.parameters() if p.requires_grad)]
        norms += [] if grad_norm is None else [grad_norm]
        memory = torch.cuda.max_memory_allocated() or getrusage(RUSAGE_SELF).ru_maxrss * 1024
        used = torch.tensor([self.data_seconds, memory / 2**30])
        norms = torch.stack([x.to(self.sums) for x in norms])  # that of no tensors is on the CPU
        row = torch.cat([self.sums, norms, used.to(self.sums, non_blocking=True)])
        rows = run.accelerator.gather(row[None]).cpu()
        sums, norms, waited, memory = rows.split([len(self.sums), len(norms), 1, 1], dim=1)
        seconds = time.perf_counter() - self.clock
        samples = (run.step - self.interval_began) * run.args.global_batch_size
        results = means(self.names, sums.sum(0), samples)
        ranks = {"losses": sums[:, list(results).index("loss")], "norms": norms}
        results |= {"learning_rate": run.learning_rate, "samples_per_second": samples / seconds}
        if grad_norm is not None:
            results["grad_norm"] = norms[0, 1].item()
        measured = {"seconds": seconds, "data_wait": waited.max().item() / seconds}
        measured["slowest_rank"] = waited.argmax().item()
        measured["peak_memory_gib"] = memory.max().item()
        return results, ranks, measured

    def write(self, event, results, details=None):
        """Write all numbers to metrics.jsonl and the tracker, and `results` to the screen."""
        run = self.run
        numbers = {**results, **(details or {})}
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        self.latest_values |= finite
        epoch = max(run.step - 1, 0) // run.steps_per_epoch + 1
        line = {"event": event, "epoch": epoch, "step": run.step, "time": time.time()}
        line = json.dumps(line | finite) + "\n"
        self.text += line
        self.file.write(line)
        run.accelerator.log({f"{event}/{k}": x for k, x in numbers.items()}, step=run.step)
        shown = [f"{k} {x:,.0f}" if abs(x) >= 1000 else f"{k} {x:.3g}" for k, x in results.items()]
        shown = " ".join(shown).replace("learning_rate", "lr")
        shown = shown.replace("samples_per_second", "samples/s")
        if self.progress.disable and event == "train":
            left = (run.total_steps - run.step) * run.args.global_batch_size
            shown += f" eta {timedelta(seconds=round(left / results['samples_per_second']))}"
        with suppress(OSError, SystemExit):  # Ctrl-C also ends a `tee` that reads the pipe
            self.console.print(f"step {run.step}/{run.total_steps} epoch {epoch} {shown}")
        self.start_interval()

    def finish(self):
        """Print the results and, unless this run only evaluated another, write summary.json."""
        run = self.run
        self.progress.stop()
        results = {"resumed_from": run.resumed_from, **self.latest_values}
        results["seconds"] = time.time() - self.started
        self.console.print_json(data=results)
        summary = run.directory / "summary.json"
        has_trained = run.step > run.resumed_from or run.total_steps == 0
        if has_trained or not summary.exists():
            text = json.dumps({**run.config, **results}, indent=2) + "\n"
            replace_file(summary, lambda path: path.write_text(text))


def exit_if_ranks_are_wrong(run, losses, norms):
    """Exit with an error unless each rank's loss and weights are finite, and the norms of ranks
    with the same weights about the same. Shapes are those of `Metrics.gather`."""
    non_finite = {"the loss": ~losses.isfinite(), "the weights": ~norms[:, 0].isfinite()}
    ranks = {k: x.nonzero().flatten().tolist()[:8] for k, x in non_finite.items() if x.any()}
    if ranks:
        problem = ", ".join(f"{name} of ranks {numbers}" for name, numbers in ranks.items())
        interval = f"between steps {run.metrics.interval_began} and {run.step}, nothing was saved"
        remedy = 'lower --lr, or set --clip-norm 1; or is every "weight" of a step 0?'
        exit_with_error(f"not finite {interval}: {problem}: {remedy}")
    norms = norms.reshape(-1, run.ranks_per_batch, norms.shape[1])
    same = norms.isclose(norms[:1], rtol=1e-5, atol=0, equal_nan=True).all(dim=2).flatten()
    if not same.all():
        ranks = (~same).nonzero().flatten().tolist()[:8]
        error = f"ranks {ranks} have other weights than rank 0 at step {run.step}, not saved"
        remedy = "call model(...), not its methods; use all parameters; do not pass one rank's loss"
        exit_with_error(f"{error}: {remedy} to a scheduler (ReduceLROnPlateau)")


# -------------------------------------------------------------------------------- reproducible data
def set_batch_sizes(args, data_parallel_size, multiple):
    """Set the global batch size, and divide each share of it into equal microbatches. Return how
    many there are, and set their size."""
    args.global_batch_size = args.global_batch_size or args.batch_size * data_parallel_size
    divisor = data_parallel_size * multiple
    share, rest = divmod(args.global_batch_size, divisor)
    if rest:
        exit_with_error(f"argument --global-batch-size: choose a multiple of {divisor}")
    largest = max(1, args.batch_size // multiple)
    accumulation = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= largest)
    args.batch_size = share // accumulation * multiple
    return accumulation


def seed_rng(*key):
    """Make all that torch, NumPy and Python draw from here on a function of `key` alone."""
    random.seed(repr(key))
    seed = random.getrandbits(32)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class SeededSamples(Dataset):
    """A dataset whose random numbers, and a collate_fn's, depend on (seed, epoch, index) alone. A
    test set is read in order, and a batch ends with it: Accelerate would fill up the last one."""

    def __init__(self, dataset, seed, is_test=False):
        self.dataset = dataset
        self.seed = seed
        self.is_test = is_test
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # for persistent workers
        self.set_epoch(0)

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)
        for dataset in datasets_in(self.dataset):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def __getitem__(self, index):
        seed_rng(self.seed, self.epoch.item(), index)
        return self.dataset[index]

    def __getitems__(self, indices):
        if self.is_test:
            indices = indices[: len(self) - indices[0]]
        inner = self.dataset
        while isinstance(inner, torch.utils.data.Subset):  # it has the method in any case
            inner = inner.dataset
        if not hasattr(inner, "__getitems__"):
            return [self[index] for index in indices]
        seed_rng(self.seed, self.epoch.item(), indices[0])
        return self.dataset.__getitems__(indices)


def datasets_in(dataset):
    """Yield a dataset, and those in its attributes `dataset` and `datasets`."""
    yield dataset
    inner = pytree.tree_leaves(getattr(dataset, "datasets", ()))  # a list or a dictionary
    for one in (getattr(dataset, "dataset", None), *inner):
        if isinstance(one, Dataset):
            yield from datasets_in(one)


def make_reproducible(loaders, args):
    """Return two loaders, with `SeededSamples`. Exit with an error if one cannot be resumed exactly
    or leaves out samples of the test set."""
    if len(loaders) != 2:
        exit_with_error("load_data: return two DataLoaders, for training and test")
    samplers = [torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler]
    for is_training, loader in zip((True, False), loaders, strict=True):
        batches = loader.batch_sampler
        is_standard = type(batches) is torch.utils.data.BatchSampler
        is_standard = is_standard and type(batches.sampler) in samplers[: 1 + is_training]
        has_size = loader.batch_size == args.batch_size or not is_training
        needs = {
            "a map-style Dataset, and no sampler: see examples/lib/order.py": is_standard,
            f"drop_last={is_training}": is_standard and batches.drop_last == is_training,
            f"batch_size=args.batch_size ({args.batch_size})": has_size,
            # `prepare_data` counts those for training. A stream has no length.
            "samples": is_training or (is_standard and len(loader.dataset)),
        }
        if broken := [need for need, is_met in needs.items() if not is_met]:
            which = "training" if is_training else "test"
            exit_with_error(f"load_data: the DataLoader for {which} needs {broken[0]}")
        # DataLoader forbids an assignment, since a sampler may belong to the dataset.
        dataset = SeededSamples(loader.dataset, args.seed, is_test=not is_training)
        object.__setattr__(loader, "dataset", dataset)
    return loaders


# -------------------------------------------------------------------------------------- checkpoints
class Checkpoints:
    """The checkpoints of `states`, {name: object with a state_dict}: which is intact and of this
    run, and which are kept. Here each is a file that the main process writes. A recipe whose states
    are not whole there gives `Run` functions in place of these methods."""

    may_differ = (
        "data_dir weights batch_size cpu threads output_dir keep checkpoint_every evaluate_every "
        "log_every tracker hang_timeout compile accumulation device world_size versions"
    )

    def __init__(self, run, states):
        self.run = run
        self.states = states
        vars(self).update({name: partial(function, self) for name, function in run.methods.items()})

    def find(self):
        """Return the newest intact checkpoint of this run, or None. The states in it may be on the
        main process alone. Exit with an error if it is of other flags or data."""
        run = self.run
        may_differ = {*self.may_differ.split(), *run.may_differ}
        paths = checkpoint_paths(run.directory)[::-1]
        files = [path.read_text() for path in run.directory.glob("run.id")]
        files += [path.name for path in paths]
        visible_to_this_rank = {"samples": run.samples, "files in --output-dir": files}
        remedy = "all machines have to share data and directory"
        exit_if_ranks_differ(run.store, "files", visible_to_this_rank, remedy)
        for path in paths:
            try:
                content = self.read(path)
            except (OSError, MemoryError) as error:  # the file may be intact
                exit_with_error(f"cannot read {path} ({error}): try again, or delete it")
            except Exception as error:
                content = {"damage": f"{error!r:.200}"}
            states = content.pop("states", None)
            content = run.on_main_process(lambda found: found, content)
            if "damage" in content:
                run.accelerator.print(f"{RECIPE}: skipping damaged {path} ({content['damage']})")
                continue
            old, new = content["config"], run.config
            names = sorted((old.keys() & new.keys()) - may_differ)
            conflicts = [f"{x} {old[x]!s:.80}, not {new[x]}" for x in names if old[x] != new[x]]
            if conflicts:
                exit_with_error(f"{path} has {'; '.join(conflicts)}: choose another --output-dir")
            run.accelerator.print(f"{RECIPE}: resuming from {path}, of {run.total_steps} steps")
            return content | {"states": states}
        if paths:
            exit_with_error(f"{run.directory} has no intact checkpoint: choose another")

    def save(self, step, metrics):
        """Write a checkpoint, and delete old ones. Return how long it took, in s. All ranks wait
        for the end: in the next step they would wait for rank 0, and take that for a hang."""
        run = self.run
        began = time.perf_counter()
        content = {"config": run.config, "step": step, "metrics": metrics, "states": self.collect()}
        path = run.directory / f"step-{step:08}"
        try:
            self.write(content, path)
            if RANK == 0:
                # Later ones were skipped as damaged, and are not counted in --keep.
                written = [x for x in checkpoint_paths(run.directory) if x.stem <= path.stem]
                for old in written[: -run.args.keep]:
                    self.delete(old)
        except Exception as error:
            Path(run.directory, "unfinished.pt.tmp").unlink(missing_ok=True)  # frees the disk
            error = error if isinstance(error, OSError) else error.__context__ or error
            exit_with_error(f"cannot write {path}, earlier ones stay ({error!r:.200})")
        if run.cpu_group:
            distributed.barrier(run.cpu_group)
        return time.perf_counter() - began

    def wait(self):
        """Return when all is written: for a `save` that leaves that to a thread."""

    def collect_weights(self):
        """Return the weights of the whole model. Those of the main process are written."""
        return self.states["model"].state_dict()

    def collect(self):
        """Return the states. Those of the main process are written."""
        models = {name: x for name, x in self.states.items() if isinstance(x, nn.Module)}
        states = {name: thing.state_dict() for name, thing in self.states.items()}
        # Non-persistent buffers are in no state dict.
        return states | {"buffers": {k: dict(x.named_buffers()) for k, x in models.items()}}

    def load(self, saved, is_wanted=True):
        """Load the main process's states into those of all ranks on which they are wanted."""
        for name, thing in self.states.items():
            state = saved and [saved[name], saved["buffers"].get(name, {})]
            on_device = isinstance(thing, nn.Module | torch.optim.Optimizer)
            state, buffers = broadcast_state(self.run, state, on_device)
            if is_wanted:
                thing.load_state_dict(state)
            if is_wanted and buffers:
                set_buffers(thing, buffers)

    def read(self, path):
        """Return a checkpoint, or {} on other processes. Raise an error of any type if damaged."""
        return read_file(path) if RANK == 0 else {}

    def write(self, content, path):
        """Write a checkpoint: renamed into place after fsync, and after it was read again."""

        def write_and_read(temporary):
            with open(temporary, "wb") as file:  # raises OSError with a reason, unlike torch.save
                torch.save(content, file)
            torch.load(temporary, "cpu", weights_only=True, mmap=True)  # raises on other types

        replace_file(path.with_suffix(".pt"), write_and_read)

    def delete(self, path):
        path.unlink(missing_ok=True)


def checkpoint_paths(directory):
    """Return the paths of all checkpoints, the oldest first. Other names are their owner's."""
    return sorted(x for x in directory.iterdir() if re.fullmatch(r"step-\d{8}(\.pt)?", x.name))


def broadcast_state(run, state, on_device):
    """Return the main process's nested `state` on all ranks. Its tensors travel one by one, so that
    no rank holds all of them on its CPU, unless they stay there."""
    device = run.accelerator.device if on_device else torch.device("cpu")
    group = None if on_device else run.cpu_group
    leaves, structure = pytree.tree_flatten(state)
    # Small tensors, such as an optimizer's counters, are sent whole, and stay on the CPU.
    outline = [
        x.to("meta") if torch.is_tensor(x) and x.numel() > 1 else deepcopy(x) for x in leaves
    ]
    outline, structure = run.on_main_process(lambda: (outline, structure))
    for index, x in enumerate(outline):
        if getattr(x, "is_meta", False):
            outline[index] = received = torch.empty_like(x, device=device)
            if RANK == 0:
                received.copy_(leaves[index])
            if run.cpu_group:  # as bytes: gloo has not all dtypes
                data = torch.empty(0, dtype=torch.uint8, device=device)
                distributed.broadcast(data.set_(received.untyped_storage()), 0, group)
    return pytree.tree_unflatten(outline, structure)


def read_file(path):
    """Return a checkpoint's file on the CPU. Raise an error of any type if it is damaged."""
    if zipfile.ZipFile(path).testzip():  # torch.load does not look at the checksums
        raise ValueError("wrong checksum")
    content = torch.load(path, "cpu", weights_only=True, mmap=True)  # runs no code
    if any(n > os.path.getsize(path) for n, _ in enumerate(pytree.tree_iter(content))):
        raise ValueError("a value is in itself, or in very many places")
    return content


def training_buffers(model):
    """Return the buffers that a training step may read: all but BatchNorm's statistics."""
    modules = [x for x in model.modules() if not isinstance(x, nn.modules.batchnorm._BatchNorm)]
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def set_buffers(model, values):
    """Copy {name: tensor} into a model's buffers, but those of another shape, as of a cache."""
    for name, buffer in model.named_buffers():
        if name in values and buffer.shape == values[name].shape:
            buffer.copy_(values[name])


def replace_file(path, write):
    """On the main process, make a file by `write`: renamed into place after fsync."""
    if RANK == 0:
        temporary = path.with_name(f"unfinished{path.suffix}.tmp")  # a thread may write another
        temporary.unlink(missing_ok=True)  # a link leads elsewhere
        temporary.touch()
        mode = temporary.stat().st_mode  # follows the umask, unlike that of safetensors
        write(temporary)
        temporary.chmod(mode)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)


def fsync_path(path):
    """Make a file, or the names in a directory, last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_weights(model, path):
    """Return the model, with the weights at `path`, if given, as far as names and shapes match."""
    if not model.training:  # from_pretrained returns it so
        exit_with_error("build_model: the model is in eval mode: return model.train()")
    if path:
        own = model.state_dict()
        try:
            weights = utils.load_state_dict(path)  # runs no code
            inner = [x for x in weights.values() if isinstance(x, dict)]  # of a checkpoint
            inner += [y for x in inner for y in x.values() if isinstance(y, dict)]
            matching = max((fitting(own, one) for one in (weights, *inner)), key=len)
            missing = ", ".join(model.load_state_dict(matching, strict=False).missing_keys)
        except Exception as error:  # the readers raise many types
            exit_with_error(f"argument --weights: cannot load {path} ({error!r:.100})")
        if not matching:
            keys = ", ".join(f"{key!s:.80}" for key in [*weights][:8])
            exit_with_error(f"argument --weights: nothing in {path} fits this model: it has {keys}")
        if RANK == 0:
            counts = f"{len(matching)} of {len(own)} tensors"
            log_line(f"loaded {counts} of {path}, not: {missing or 'none'}")
    return model


def fitting(own, weights):
    """Return the tensors of `weights` that fit a state dict by their names and shapes."""
    wrappers = r"^(module\.|_orig_mod\.)+"  # of DDP and torch.compile
    tensors = {k: x for k, x in weights.items() if torch.is_tensor(x)}
    tensors = {k if k in own else re.sub(wrappers, "", str(k)): x for k, x in tensors.items()}
    return {k: x for k, x in tensors.items() if k in own and own[k].shape == x.shape}


# ------------------------------------------------------------------------ signals, hangs, errors
class Watcher:
    """A thread that notices, also while the training waits, signals, the launcher's death, and
    hangs. After the first two, on any rank, all ranks stop after the same step.

    A run without a step for --hang-timeout seconds, with --compile six times as long, ends. Each
    rank reports how many steps it took, and whether it waits for others, in a library. Named are
    the ranks that did not report; if all did, those with the fewest steps; of these, the ones that
    do not wait."""

    library = re.compile(
        f"{re.escape(torch.__path__[0])}/(?!utils/data/)|{re.escape(accelerate.__path__[0])}/"
    )

    def __init__(self, run):
        self.run = run
        self.timeout = run.args.hang_timeout * (6 if vars(run.args).get("compile") else 1)
        self.names = utils.gather_object([RANK_AND_HOST])
        self.steps = 0  # and batches of an evaluation
        self.received = 0  # the first signal
        self.sent = torch.zeros(1, dtype=torch.int64)  # rank 0's signal
        self.pending = None
        self.signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            self.signals.remove(signal.SIGHUP)
        for number in self.signals:
            signal.signal(number, self.note_signal)  # where a library's thread gets it
        # DataLoader's workers inherit the mask: they must live until the next checkpoint.
        resource_tracker.ensure_running()  # started later, it would unblock them
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(target=self.watch, daemon=True).start()

    def note_signal(self, number, *_):
        """Note the first signal, in the store for rank 0, and print a line."""
        if not self.received:
            self.received = number
            with suppress(RuntimeError):  # the store ends with its launcher
                self.run.store.set("signal", str(number))
            if LOCAL_RANK == 0:
                name = signal.Signals(number).name
                log_line(f"{name}: stopping after the next step (Ctrl-\\ aborts)")

    def agreed_signal(self):
        """Count a step. Return the signal on which all ranks stop, or 0: that which rank 0 found in
        the call before, so that the broadcast overlaps a step."""
        self.steps += 1
        if self.pending:
            self.pending.wait()
        result = self.sent.item()
        self.sent.fill_(self.received)
        with suppress(RuntimeError):  # the store ends with its launcher
            if RANK == 0 and self.run.store.check(["signal"]):
                self.sent.fill_(int(self.run.store.get("signal")))
        if self.run.cpu_group:
            self.pending = distributed.broadcast(self.sent, 0, self.run.cpu_group, async_op=True)
        return result

    def watch(self):
        tick = min(1.0, self.timeout / 20)
        idle = 0.0  # counted, not by a clock: a run may be suspended
        while idle < self.timeout:
            before = self.steps
            if signalled := signal.sigtimedwait(self.signals, tick):
                self.note_signal(signalled.si_signo)
            if LAUNCHED and os.getppid() != LAUNCHER:
                self.note_signal(signal.SIGTERM)
            stalls = self.steps == before and not self.run.is_paused
            idle = idle + tick if stalls else 0.0
        faulthandler.dump_traceback_later(self.timeout, exit=True)  # if the store never answers
        with suppress(RuntimeError):  # the process that has the store has ended
            self.report(sys._current_frames()[threading.main_thread().ident])
            self.run.store.wait(["identified"])
        exit_now(1)

    def report(self, frame):
        """Print this rank's stack, or write it to a file. Report to the others. The first rank that
        reports identifies those that hang."""
        text = "".join(traceback.format_stack(frame))
        text = f"{RECIPE}: no step for {self.timeout:g} s, {RANK_AND_HOST} is at\n{text}"
        if WORLD_SIZE > 8:
            Path(self.run.directory, f"stack-{RANK}.txt").write_text(text)
        else:
            os.write(2, text.encode())  # one call: ranks do not mix lines
        waits = bool(self.library.search(frame.f_code.co_filename))
        while frame.f_code.co_filename not in FILES:
            frame = frame.f_back
        file = Path(frame.f_code.co_filename).name
        place = f"line {frame.f_lineno} of {file}, in {frame.f_code.co_name}"
        self.run.store.set(RANK_AND_HOST, json.dumps([self.steps, waits, place]))
        if self.run.store.add("reports", 1) == 1:
            self.identify()

    def identify(self):
        """Print which ranks hang."""
        with suppress(RuntimeError):  # a rank that was stopped does not report
            self.run.store.wait(self.names, timedelta(seconds=self.timeout / 2))
        reporters = [name for name in self.names if self.run.store.check([name])]
        reports = {name: [-1, False, "no report"] for name in self.names}
        reports |= {name: json.loads(self.run.store.get(name)) for name in reporters}
        least = min([steps, waits] for steps, waits, _ in reports.values())
        culprits = [f"{name} ({x[2]})" for name, x in reports.items() if x[:2] == least]
        files = f", stacks in {self.run.directory}/stack-*.txt" if WORLD_SIZE > 8 else ""
        log_error(f"no step for {self.timeout:g} s because of {', '.join(culprits[:8])}{files}")
        self.run.store.set("identified", "")


def log_line(message):
    """Print a line to stderr, and return it: what could control the terminal is a space in it."""
    line = "".join(x if x.isprintable() else " " for x in f"{RECIPE}: {message}")
    with suppress(OSError):  # Ctrl-C also ends a `tee` that reads it
        start = "\r\x1b[K" if sys.stderr.isatty() else ""  # over the progress bar
        sys.stderr.write(f"{start}{line}\n")  # one call, unlike `print`
    return line


def log_error(message):
    """Print an error in one line. The launcher repeats it in its last lines."""
    line = log_line(f"error: {message}")
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = line.partition(": error: ")[2]
        report = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": report}))


def exit_if_ranks_differ(store, topic, values, remedy):
    """Exit with an error unless all ranks have rank 0's {name: value}."""
    store.set(f"{topic} {RANK}", json.dumps([RANK_AND_HOST, values], default=str))
    if RANK == 0:
        ranks = map(json.loads, store.multi_get([f"{topic} {x}" for x in range(WORLD_SIZE)]))
        (_, own), *others = ranks
        mismatches = [
            f"{name}: {own[name]} on {RANK_AND_HOST}, but {theirs.get(name)} on {rank}"
            for name in own
            for rank, theirs in others
            if theirs.get(name) != own[name]
        ]
        store.set(topic, f"{mismatches[0]} ({len(mismatches)} in all)" if mismatches else "")
    if difference := store.get(topic).decode():
        exit_with_error(f"{difference}: {remedy}")


def start(main):
    """Call `main`, and end the process. The first rank of each machine prints an error at once. By
    SIGTERM the launcher then ends the others, which wait for seconds. An exception waits one more,
    since another rank's end may have caused it."""
    try:
        main()
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            exit_with_error(str(error.code), 1)
        exit_now(error.code or 0)
    except KeyboardInterrupt:
        exit_now(128 + signal.SIGINT)
    except Exception as error:
        exit_with_exception(error)
    exit_now(0)


def exit_with_exception(error):
    """Print a line with the place, and a traceback unless the system or network is the cause."""
    text = traceback.format_exc()
    places = rf'File "({"|".join(map(re.escape, FILES))})", line (\d+), in (.+)'
    file, line, function = re.findall(places, text)[-1]
    lines = str(error).strip().rstrip(".").splitlines() or [""]
    lines = dict.fromkeys(f"{line:.200}" for line in (lines[0], *lines[-2:]))
    message = f"{type(error).__name__}: {' ... '.join(lines)}"
    message += f", in {function}, line {line} of {Path(file).name}"
    is_external = isinstance(error, OSError | distributed.DistNetworkError)
    exit_with_error(message, 1, "" if is_external else text, wait=1)


def exit_with_error(message, status=2, details="", wait=0):
    """Print an error in one line, and exit. Any rank may call this, in any thread."""
    if LOCAL_RANK > 0:
        if threading.current_thread() is not threading.main_thread():
            sys.exit(message)  # to be raised in the main thread, which alone can handle SIGTERM
        wait += 4 + LOCAL_RANK
        message = f"rank {RANK}: {message}"
    if wait:  # the launcher may end it by SIGTERM, which the Watcher has blocked
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    time.sleep(wait)
    sys.stderr.write("".join(x for x in details if x.isprintable() or x == "\n"))
    log_error(message)
    exit_now(status)


def exit_now(status):
    """End this process, and its DataLoaders' workers, without a tear-down: gloo may abort in it."""
    with suppress(OSError):
        sys.stdout.flush()
    try:
        for worker in active_children():
            worker.kill()
    finally:  # torch raises an error when a worker dies
        os._exit(status)


# ------------------------------------------------------------------------- command line and launch
PER_MACHINE = {"data_dir", "weights", "threads", "output_dir"}
UNSUPPORTED = "USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM USE_PARALLELISM_CONFIG DYNAMO_BACKEND".split()


def positive(kind):
    """Return the type of a flag for `kind`, int or float, that is above 0 and finite."""

    def number(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{value} is not above 0")
        return value

    return number


def parse_args(description, *declarations):
    """Return the parsed flags: those of all recipes, and those that each of `declarations` adds,
    which may change the defaults of earlier ones, or declare them anew."""
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=description, conflict_handler="resolve", **layout)
    parser.error = exit_with_error
    add = parser.add_argument
    whole = positive(int)
    real = positive(float)
    add("--weights", metavar="PATH", help="start from model.safetensors, or any checkpoint")
    add("--epochs", type=int, default=30, help="passes (%(default)s); 0 only evaluates")
    add("--max-steps", type=whole, help="stop after so many steps")
    add("--batch-size", type=whole, default=128, help="largest microbatch (%(default)s)")
    add("--global-batch-size", type=whole, help="samples per step, all processes")
    add("--lr", type=real, default=0.1, help="learning rate, see make_optimizer (%(default)s)")
    add("--clip-norm", type=real, help="clip the gradient to this norm")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    on_cpu = utils.parse_flag_from_env("ACCELERATE_USE_CPU")  # accelerate launch --cpu
    add("--cpu", action="store_true", default=on_cpu, help="train on CPU")
    add("--threads", type=whole, help="CPU threads (cores / processes)")
    add("--output-dir", default=f"runs/{RECIPE}", help="default: %(default)s")
    add("--evaluate-every", type=whole, help="steps between evaluations (an epoch's)")
    add("--checkpoint-every", type=whole, help="steps between checkpoints (an epoch's)")
    add("--keep", type=whole, default=2, help="kept checkpoints (%(default)s)")
    add("--log-every", type=whole, help="steps between lines (GPUs: 50, CPU: 10)")
    add("--tracker", help="tensorboard, wandb, ...")
    add("--hang-timeout", type=real, default=600, help="seconds without a step (%(default)s)")
    for declare in declarations:
        declare(parser)
    args = parser.parse_args()
    if args.epochs < 0:
        exit_with_error(f"argument --epochs: {args.epochs} is below 0")
    if on_cpu and WORLD_SIZE == 1 and "MASTER_PORT" in os.environ:  # for several processes
        exit_with_error("on CPU the launcher starts one process: give --cpu to the recipe alone")
    return args


def lock_output_directory(directory):
    """Make the directory. Exit with an error if another run uses it. Give the run a random id, or
    its former one if it resumes: for W&B, and for `find`."""
    directory.mkdir(parents=True, exist_ok=True)
    if RANK > 0:
        return
    # It stays open, and nothing else opens the file: closing it, however opened, ends the lock.
    descriptor = os.open(directory / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)
    except BlockingIOError:
        remedy = "if its machine has died, wait two minutes for NFS, or delete run.lock"
        exit_with_error(f"--output-dir {directory} is in use by another run: {remedy}")
    except OSError as error:  # some NFS and Lustre servers have no locks
        log_line(f"{directory} cannot be locked ({error.strerror}): start no second run in it")
    path = directory / "run.id"
    has_id = path.exists() and re.fullmatch(rb"[0-9a-f]{16}", path.read_bytes())
    if not (has_id and checkpoint_paths(directory)):
        replace_file(path, lambda temporary: temporary.write_text(os.urandom(8).hex()))
    os.environ.setdefault("WANDB_RUN_ID", path.read_text())
    os.environ.setdefault("WANDB_RESUME", "allow")


def exit_if_config_is_ignored(precision):
    """Exit with an error if the launcher was told to do something that this recipe would ignore."""
    supported = {"MIXED_PRECISION": precision, "GRADIENT_ACCUMULATION_STEPS": "1"}
    for name in (*UNSUPPORTED, *supported):
        value = os.environ.get(f"ACCELERATE_{name}", "no").lower()
        if value not in ("no", "false", supported.get(name)):  # it would be ignored
            exit_with_error(f"the launcher's {name.lower()} is {value}: see this recipe's --help")


def choose_device(args):
    """Select this process's GPU. Return the number of GPUs, and of CPU threads per process."""
    visible = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]  # ROCm reads the second one first
    if args.cpu:
        os.environ |= dict.fromkeys(visible, "-1")  # or Accelerate's barriers would go to GPUs
    gpus = 0
    if torch.cuda.is_available() and not args.cpu:
        torch.cuda.init()  # before, torch counts GPUs of which a process has one part (MIG)
        gpus = torch.cuda.device_count()
    are_hidden = any(os.environ.get(name) in ("", "-1") for name in visible)
    drivers = ("/dev/nvidia0", "/dev/kfd", shutil.which("nvidia-smi") or "")
    if any(map(os.path.exists, drivers)) and not (gpus or are_hidden):
        remedy = "update the driver, or install torch's build for CUDA or ROCm; or add --cpu"
        exit_with_error(f"torch cannot use the GPUs: {remedy}")
    if gpus > LOCAL_WORLD_SIZE and LOCAL_RANK == 0:
        log_line(f"{gpus - LOCAL_WORLD_SIZE} of {gpus} GPUs are unused: start one process per GPU")
    if gpus:
        if LOCAL_RANK >= gpus:  # each rank sees its own GPU alone, by which Accelerate goes
            os.environ["LOCAL_RANK"] = str(LOCAL_RANK % gpus)
        torch.cuda.set_device(LOCAL_RANK % gpus)
        # The class of torch 2.11 to 2.14, whose monitor must not abort before the Watcher.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(TIMEOUT.seconds))
        torch.set_float32_matmul_precision("high")  # TF32, which convolutions use by default
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", 0))
    if not threads or (LAUNCHED and not args.threads and threads == 1):  # the launcher's default
        threads = max(1, len(os.sched_getaffinity(0)) // LOCAL_WORLD_SIZE)
    return gpus, threads


def join_process_group(args, gpus):
    """Make the process group of all ranks, if they were started alike. Return its store."""
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = LAUNCHER_TIMEOUT if of_launcher else TIMEOUT
    store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
    store.set_timeout(TIMEOUT)
    if of_launcher:  # it keeps the addresses of processes that died before a restart
        store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    if 0 < gpus < LOCAL_WORLD_SIZE:  # right, if each process sees its own
        if store.add(str(torch.cuda.get_device_properties().uuid), 1) > 1:
            problem = f"{LOCAL_WORLD_SIZE} processes, {gpus} GPU(s)"
            exit_with_error(f"{problem}: start one per GPU, or add --cpu")
    must_match = {name: x for name, x in vars(args).items() if name not in PER_MACHINE}
    must_match |= {"versions": VERSIONS, "GPUs": bool(gpus)}
    exit_if_ranks_differ(store, "flags", must_match, "start the same command on all machines")
    backend = "nccl" if gpus else "gloo"
    if WORLD_SIZE > 64:  # connect only ranks that communicate: all would be N x N addresses
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")  # DDP's errors name parameters
    distributed.set_debug_level_from_env()
    distributed.init_process_group(backend, None, TIMEOUT, WORLD_SIZE, RANK, store)
    return store


def make_accelerator(args, gpus, precision, handlers, accumulation):
    """Return the Accelerator. Exit with an error if it does not see all processes."""
    plugin = utils.GradientAccumulationPlugin(accumulation, sync_with_dataloader=False)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
    loading.data_seed = random.Random(args.seed).getrandbits(31)  # Accelerate adds the epoch
    accelerator = Accelerator(
        cpu=not gpus,  # or processes on a machine without GPUs would not see each other
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=loading,
        gradient_accumulation_plugin=plugin,
        kwargs_handlers=handlers,
    )
    if WORLD_SIZE != accelerator.num_processes:
        exit_with_error("processes do not see each other: start them with accelerate launch")
    return accelerator


if __name__ == "__main__":
    start(main)
