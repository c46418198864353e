# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: the model sharded over all processes (FSDP2).

    accelerate launch --config_file accelerate_configs/4gpu.yaml recipes/sharded_cifar.py
    torchrun --nproc_per_node 8 recipes/sharded_cifar.py --replicas 2 --precision bf16

For a model that does not fit on one GPU: each of N processes keeps 1/N of the parameters, gradients
and optimizer state. A block's parameters are gathered for its forward and its backward pass, then
freed. The training is that of ddp_cifar.py. Rerunning the command resumes.

To make this file yours, replace `add_flags`, `load_data`, `build_model`, `compute_loss`, and
`make_optimizer`, and `shard_units` if your blocks are elsewhere; `shard` lists what a model needs.
"""

import argparse
import faulthandler
import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import count
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
    """Return {"your metric": number} of the whole test set, for metrics that are no means over
    samples. `outputs` has one item per sample, in the order of the test set: an object, or a row of
    the tensor, that `compute_loss` returns as "outputs". Replace this."""
    return {}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate. Replace this."""
    peak = args.lr * args.global_batch_size / 128  # --lr is for 128 samples
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    # Not fused: torch has no rule for it on shards (ResNet-50: 15 ms of host time, not 2).
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)
    # Warm-up (Goyal et al. 2017, arXiv:1706.02677), then decay, to about zero after the last step.
    shape = {"anneal_strategy": "linear", "cycle_momentum": False}
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps + 1, **shape)
    return optimizer, schedule


def train_step(run, model, optimizer, scheduler, microbatches):
    """Take one optimizer step over an iterator of batches. Return their values, and the norm of the
    gradient before clipping, or None if it is not needed. All stay on the device."""
    accelerator, args = run.accelerator, run.args
    step_values = []
    for index, batch in enumerate(microbatches):
        # The number in the whole step: dropout is then the same on any number of ranks.
        number = index * accelerator.num_processes + accelerator.process_index
        seed_rng(args.seed, run.step, number)
        with accelerator.accumulate(model):  # averages gradients in the last microbatch
            values, _ = checked(compute_loss(model, batch, args))
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
    """Return {"test_loss": mean, ...} over the test set. A signal ends the run after a batch."""
    accelerator = run.accelerator
    loader.set_epoch(0)  # the same random transforms in each evaluation
    modes = {module: module.training for module in model.modules()}  # a frozen one may be in eval
    model.eval()
    utils.broadcast(list(model.buffers()))  # in place: BatchNorm's statistics of rank 0
    sums = 0
    gathered = []
    for index, batch in enumerate(loader):
        seed_rng("evaluation", index * accelerator.num_processes + accelerator.process_index)
        values, outputs = checked(compute_loss(model, batch, run.args))
        sums += accelerator.gather_for_metrics(sample_rows(values)).sum(0)  # drops the padding
        if outputs is not None:
            gathered += gather_outputs([outputs])
        run.exit_if_stopped()
    model.reshard()  # FSDP keeps the root's parameters unsharded for a backward pass
    for module, mode in modes.items():
        module.training = mode
    results = means(values, sums, len(loader.dataset))
    results |= run.on_main_process(test_metrics, gathered[: len(loader.dataset)], run.args)
    return {f"test_{name}": float(value) for name, value in results.items()}


def main():
    args = parse_args(add_technique_flags, add_flags)
    check_bf16(args)
    run = Run(args, args.precision, storage=ShardedStorage)
    run.may_differ = {"replicas", "sync_each_batch", "activation_checkpointing"}
    accelerator = run.accelerator
    train_loader, test_loader = run.prepare_data(load_data(args, accelerator))
    model = build_sharded_model(run, make_mesh(accelerator, args.replicas))
    optimizer, scheduler = make_optimizer(model, args, run.total_steps)
    # Not the model: that would add DDP. Not the scheduler: it would advance once per process.
    optimizer = accelerator.prepare(optimizer)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.resume(states, partial(set_up, run, model, train_loader))
    for epoch in run.epochs():
        for microbatches in run.steps(epoch):
            values, grad_norm = train_step(run, model, optimizer, scheduler, microbatches)
            run.log_save_or_stop(values, grad_norm)
        run.log_evaluation(evaluate(run, model, test_loader))
    run.finish()
    # Free the model before its process group: otherwise gloo may abort at exit.
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    accelerator.end_training()


# --------------------------------------------------------------------------------------------- FSDP
def shard_units(model):
    """Return the modules that are sharded separately; FSDP keeps about two of them unsharded at a
    time. These are the elements of each nn.Sequential and nn.ModuleList: the blocks of most ResNets
    and transformers. The rest is sharded with the root. Replace this if your blocks are elsewhere.
    """
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
    on_gpu = not args.cpu and torch.cuda.is_available()
    emulated = on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
    if args.precision == "bf16" and emulated:
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
        return DeviceMesh.from_group(distributed.group.WORLD, device, mesh_dim_names=("shards",))
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
    if RANK == 0:
        whole = load_weights(build_model(args), args.weights)
        # Contiguous: torch sends the elements in the order in which they are in memory.
        weights = {name: x.contiguous() for name, x in whole.state_dict().items()}
    if run.cpu_group:
        try:
            distributed.barrier(run.cpu_group)
        except RuntimeError:
            exit_with_error("the main process has not built the model")
    with torch.device("meta"):  # shapes without memory
        model = build_model(args)
    check_units(model)
    shard(model, args, mesh)
    model.to_empty(device=run.accelerator.device)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(model, weights, options=options)
    buffers = dict(model.named_buffers())  # some are in no state dict
    if RANK == 0:
        for name, buffer in buffers.items():
            buffer.copy_(whole.get_buffer(name))
    utils.broadcast(list(buffers.values()))  # in place
    return model


def check_units(model):
    """Exit with an error if a parameter has no dimensions, or if it is in two units, or in one and
    the root: FSDP would make two parameters of it."""
    units = shard_units(model)
    inside = {module for unit in units for module in unit.modules()}
    root = [module for module in model.modules() if module not in inside]
    groups = [set(unit.parameters()) for unit in units]
    groups.append({p for module in root for p in module.parameters(recurse=False)})
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            exit_with_error(f"build_model: {name} has no dimensions: FSDP needs (1,), not ()")
        if sum(parameter in group for group in groups) > 1:
            what = f"{name} is in more than one unit, or in one and the root (tied weights)"
            remedy = "make one unit of the modules that share it, or leave both to the root"
            exit_with_error(f"shard_units: {what}: {remedy}")


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
        before = [buffer.clone() for buffer in unit.buffers()]
        try:
            yield
        finally:  # torch ends the second pass early, by an exception
            for buffer, value in zip(unit.buffers(), before, strict=True):
                buffer.copy_(value)

    unit.forward = partial(
        torch.utils.checkpoint.checkpoint,
        unit.forward,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), restored_buffers()),  # for the first and the second pass
    )


def set_up(run, model, _):
    """Before each forward pass, tell FSDP when to sum gradients, and broadcast buffers as DDP does:
    not BatchNorm's, which training does not read."""
    batchnorm = nn.modules.batchnorm._BatchNorm
    others = [module for module in model.modules() if not isinstance(module, batchnorm)]

    def prepare_pass(*_):
        # Otherwise each rank has its own whole gradients until a step's last microbatch.
        sync = run.args.sync_each_batch or run.accelerator.sync_gradients
        model.set_requires_gradient_sync(sync)
        if model.training:  # listed here, since a module may replace its buffers
            utils.broadcast([x for module in others for x in module.buffers(recurse=False)])

    model.register_forward_pre_hook(prepare_pass)


class ShardedStorage:
    """Keeps each checkpoint in a folder, with .safetensors files of each rank for its shards of the
    parameters and of the optimizer's state, and with run.pt for everything else and the checksums
    of these files. Nothing in it is a pickle that runs code."""

    pattern = f"step-{'[0-9]' * 8}"
    file_size = 2**28  # bytes: with less, a large model would be many thousand files
    parts = 1

    def __init__(self, run, states):
        self.directory = run.directory
        self.group = run.cpu_group
        self.model = states["model"]
        self.states = states
        self.rest = FileStorage(run, states)  # of run.pt

    def collect_weights(self):
        """Return all weights, gathered to the CPU memory of the main process. A tensor with several
        names (tied weights) has the first one, as in Accelerate's `save_model`."""
        named = reversed(self.model.state_dict(keep_vars=True).items())
        names = {id(x): name for name, x in named}
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = dcp_state.get_model_state_dict(self.model, options=options)  # {} on others
        return {name: x for name, x in weights.items() if name in names.values()}

    def collect(self):
        """Return the states without the shards."""
        return self.split_states()[0]

    def split_states(self):
        """Return the states without the shards, and {name: DTensor}, whatever holds them. Those of
        the model are its parameters and buffers, each once (tied weights)."""
        shards = {}
        states = self.rest.collect()
        states["model"] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return without_shards(states, shards), shards

    def load(self, saved):
        self.make_optimizer_states(saved["optimizer"]["state"])
        _, shards = self.split_states()
        reader = dcp.HuggingFaceStorageReader(saved["folder"])
        dcp.load(shards, storage_reader=reader, process_group=self.group)
        set_buffers(self.model, saved["model"])
        for name in self.states.keys() - {"model"}:
            own = with_shards(deepcopy(saved[name]), shards, f"states/{name}")
            self.states[name].load_state_dict(own)

    def make_optimizer_states(self, saved):
        """Create the states of the parameters that have some in `saved`."""
        optimizer = self.states["optimizer"]
        dcp_state.get_optimizer_state_dict(self.model, optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if index not in saved:  # it is frozen, or had no gradient yet
                optimizer.state.pop(parameter, None)

    def read(self, path):
        """Return everything but the shards, of which each rank verifies some: none reads all. Raise
        an error on all ranks if anything is damaged."""
        failure = None
        try:
            checkpoint = self.rest.read(path / "run.pt")
            checksums = checkpoint["checksums"]
            if checksums.keys() != {file.name for file in path.glob("*.safetensors")}:
                raise ValueError("it has not the files that were written")
            for name in sorted(checksums)[RANK::WORLD_SIZE]:
                if checksum(path / name) != checksums[name]:
                    raise ValueError(f"{name} is damaged, or not of this checkpoint")
        except Exception as error:
            failure = error
        raise_if_any_failed(failure)
        checkpoint["states"]["folder"] = str(path)
        return checkpoint

    def write(self, content, path):
        """Write a checkpoint: renamed into place after fsync, and after it was read again."""
        temporary = self.directory / "shards.tmp"
        try:
            checksums = self.write_shards(temporary)
            if RANK == 0:
                torch.save({**content, "checksums": checksums}, temporary / "run.pt")
                sync(temporary / "run.pt")
                self.rest.read(temporary / "run.pt")
                sync(temporary)
                if checksums.keys() != {file.name for file in temporary.glob("*.safetensors")}:
                    raise RuntimeError("all machines have to share the directory")
                if path.exists():  # damaged: this run has begun before it
                    self.delete(path)
                os.replace(temporary, path)
                sync(self.directory)
        finally:
            if RANK == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def file_numbers(self, shards):
        """Return {name: number of the file of its shards, from 1}. A file gets shards until it has
        `file_size`: torch copies a whole file in host memory, twice, and from a GPU three times."""
        numbers = {}
        number = 1
        size = 0
        for name, shard in shards.items():
            numbers[name] = number
            size += shard.to_local().nbytes
            if size >= self.file_size:
                number += 1
                size = 0
        return numbers

    def write_shards(self, directory):
        """Write each rank's shards to the disk. Return {file name: checksum} of all ranks' files,
        or raise an error on all ranks."""
        if RANK == 0:
            shutil.rmtree(directory, ignore_errors=True)  # a killed run may have left it
            directory.mkdir()  # torch would also make the output directory anew
        utils.wait_for_everyone()
        shards = self.split_states()[1]
        files = self.file_numbers(shards)  # torch uses rank 0's on all ranks: it has most rows
        writer = dcp.HuggingFaceStorageWriter(directory, files, save_distributed=True)
        writer.per_thread_copy_ahead = 0  # or copies of the shards would stay in pinned memory
        checksums = {}
        failure = None
        try:
            dcp.save(shards, storage_writer=writer, process_group=self.group)
            for path in directory.glob(f"shard-{RANK + 1:05}-*"):
                sync(path)  # torch 2.11 does that while a small file is in Python's buffer
                checksums[path.name] = checksum(path)
        except dcp.CheckpointException as error:  # equal on all ranks
            failure = next(iter(error.failures.values()))[0]
        except Exception as error:
            failure = error
        raise_if_any_failed(failure)
        of_ranks = utils.gather_object([checksums])
        return {name: value for part in of_ranks for name, value in part.items()}

    def delete(self, path):
        deleted = self.directory / "deleted.tmp"
        shutil.rmtree(deleted, ignore_errors=True)  # a killed run may have left it
        os.replace(path, deleted)  # deleting takes a while: no part stays under its name
        shutil.rmtree(deleted)


def raise_if_any_failed(error):
    """Raise an error on all ranks if `error` is not None on one of them: a rank's own if it is of
    memory or the file system, otherwise the same RuntimeError."""
    errors = list(filter(None, utils.gather_object([repr(error) if error else None])))
    if errors:
        own = isinstance(error, OSError | MemoryError)
        raise error if own else RuntimeError(errors[0])


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

    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels = labels.to(device)
        self.seed = augmentation_seed
        self.height, self.width = images.shape[1:3]
        self.statistics = torch.tensor([self.mean, self.std], device=device)
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
        mean, std = self.statistics
        images = images.float().div_(255).sub_(mean).div_(std)
        return images.permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, accelerator):
    """Return CIFAR-10's images and labels, for training and test: downloaded, if missing."""
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            train_set = torchvision.datasets.CIFAR10(directory, train=True, download=True)
            test_set = torchvision.datasets.CIFAR10(directory, train=False, download=True)
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


# ===================================== shared infrastructure e506cce526b4: identical in all recipes
RECIPE = Path(__file__).stem
LAUNCHED = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
LAUNCHER = os.getppid()  # read early: it changes when the launcher dies
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
NAME = f"rank {RANK} on {socket.gethostname()}"
VERSIONS = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
UNFINISHED = "unfinished.tmp"  # the name of a file while it is written
TIMEOUT = timedelta(hours=6)  # of collectives. HangDetector ends a run that hangs
LAUNCHER_TIMEOUT = timedelta(minutes=1)  # of a connection to its store, which is there first


# ------------------------------------------------------------------------------------------ the run
class Run:
    """A training run: its Accelerator and flags, and what is counted, logged, saved and watched
    around its steps. Results depend on the order in which its methods do things.

    `handlers` are Accelerate's. A global batch is divided among `replicas` of the model, and into
    microbatches of a multiple of `multiple` samples. `storage` is the class that reads and writes
    checkpoints: FileStorage, unless one is given."""

    def __init__(self, args, precision, *handlers, replicas=WORLD_SIZE, multiple=1, storage=None):
        self.args = args
        self.precision = precision
        self.storage_type = storage
        self.may_differ = set()  # flags of this recipe that a resumed run need not repeat
        self.facts = {}  # shown and saved with the flags; they may differ, too
        self.directory = Path(args.output_dir)
        lock_output_directory(self.directory)
        set_run_id(self.directory)
        keep_script(self.directory)
        faulthandler.dump_traceback_later(args.hang_timeout)  # until a HangDetector watches
        exit_if_config_is_ignored(precision)
        gpus, threads = choose_device(args)
        self.log_every = args.log_every or (50 if gpus else 10)
        self.store = join_process_group(args, gpus) if WORLD_SIZE > 1 else distributed.HashStore()
        self.accelerator = make_accelerator(args, gpus, precision, handlers)
        torch.set_num_threads(threads)  # after Accelerate, which sets another number
        # A second group on the CPUs: gloo does not wait for the GPUs.
        self.cpu_group = distributed.new_group(None, TIMEOUT, "gloo") if WORLD_SIZE > 1 else None
        self.accumulation = set_batch_sizes(args, replicas, multiple)
        self.accelerator.gradient_accumulation_steps = self.accumulation
        seed_rng(args.seed)  # for the initial weights
        self.step = 0  # the newest one
        self.resumed_from = 0  # the step of the loaded checkpoint

    def prepare_data(self, loaders, prepare=Accelerator.prepare):
        """Return the loaders of `load_data`, made reproducible, and divided among the processes. An
        incomplete last global batch is dropped."""
        args = self.args
        loaders = reproducible(loaders, args)
        self.samples = [len(loader.dataset) for loader in loaders]
        loaders = prepare(self.accelerator, *loaders)
        self.train_loader = loaders[0]
        self.steps_per_epoch = len(self.train_loader) // self.accumulation
        if self.steps_per_epoch == 0:
            exit_with_error(f"the training set does not fill one batch of {args.global_batch_size}")
        self.total_steps = min(args.epochs * self.steps_per_epoch, args.max_steps or math.inf)
        return loaders

    def resume(self, states, set_up):
        """Load the newest intact checkpoint, if there is one, into `states`: {name: object with a
        state_dict}. They undo what `set_up`, which is called before, does to them. From here on a
        signal stops the run after a step, and a hang ends it."""
        self.model = states["model"]
        self.scheduler = states["scheduler"]
        self.config = self.describe(states["optimizer"])
        self.storage = (self.storage_type or FileStorage)(self, states)
        self.checkpoints = Checkpoints(self)
        # Not an attribute: a mapped file keeps its disk space after a later save deletes it.
        checkpoint = self.checkpoints.find()
        # Before a DataLoader starts workers: they inherit that signals do not end them.
        self.stop = StopSignal(self.cpu_group)
        self.step = self.resumed_from = checkpoint["step"] if checkpoint else 0
        set_up()
        if checkpoint:
            self.storage.load(checkpoint["states"])
        self.metrics = Metrics(self, checkpoint["metrics"] if checkpoint else "")
        self.hang = HangDetector(self)

    def describe(self, optimizer):
        """Return what summary.json and each checkpoint say: the flags, and what ran where."""
        git = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True, "text": True}
        rates = [x.get("max_lr", x.get("initial_lr", x["lr"])) for x in optimizer.param_groups]
        on_gpu = self.accelerator.device.type == "cuda"
        config = {
            "recipe": RECIPE,
            **vars(self.args),
            "precision": self.precision,
            "log_every": self.log_every,
            "accumulation": self.accumulation,
            "peak_learning_rate": rates if len(rates) > 1 else rates[0],
            "steps": self.total_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "samples": self.samples,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "world_size": WORLD_SIZE,
            "versions": VERSIONS,
            "commit": subprocess.run("git rev-parse HEAD", **git).stdout.strip(),  # "" without git
            **self.facts,
        }
        return json.loads(json.dumps(config, default=str))  # plain types, to be read again

    def epoch_of(self, step):
        return max(step - 1, 0) // self.steps_per_epoch

    def epochs(self):
        """Yield the epochs left, also one saved after its last step: its evaluation is missing."""
        for epoch in range(self.epoch_of(self.step), self.epoch_of(self.total_steps) + 1):
            self.metrics.start_line()
            yield epoch

    def steps(self, epoch):
        """Yield, for each step that is left of an epoch, an iterator over its microbatches."""
        before = epoch * self.steps_per_epoch
        done = max(before, self.step)
        skipped = (done - before) * self.accumulation
        loader = skip_first_batches(self.train_loader, skipped) if skipped else self.train_loader
        loader.set_epoch(epoch)  # for the order. Before Accelerate 1.15 skipping resets it
        loader.dataset.set_epoch(epoch)  # for random transforms
        batches = iter(loader)
        for step in range(done + 1, min(before + self.steps_per_epoch, self.total_steps) + 1):
            self.step = step
            self.learning_rate = self.scheduler.get_last_lr()[0]
            self.save_due = self.checkpoints.due(step)
            self.line_due = self.save_due or step % self.log_every == 0
            microbatches = (self.metrics.timed_next(batches) for _ in range(self.accumulation))
            yield microbatches
            list(microbatches)  # skips those that the step has not taken

    def log_save_or_stop(self, values, grad_norm=None, details=dict):
        """Do what is due after a step with these `values`. A run whose loss or weights must not be
        saved ends before they are. `details` returns more numbers for a line."""
        self.metrics.add(values)
        self.hang.progress += 1
        stopping = self.stop.vote()  # a signal, the same on all ranks, or 0
        if self.line_due or stopping:
            results, losses, norms, measured = self.metrics.gather(grad_norm)
            exit_if_not_finite(results["loss"], losses, norms[:, 0], self.step)
            exit_if_ranks_drift(norms, self.storage.parts, self.step)
            self.metrics.write("train", results, {**details(), **measured})
            self.metrics.start_line()
        if self.save_due or stopping:
            with self.hang.paused():
                seconds = self.checkpoints.save(self.step, self.metrics.text)
            self.metrics.write("checkpoint", {"save_seconds": seconds})
            self.metrics.start_line()
        self.exit_on_signal(stopping)

    def log_evaluation(self, results):
        self.metrics.write("evaluation", results)

    def exit_if_stopped(self):
        """After a batch of an evaluation, exit if a signal stops the run: the epoch is saved."""
        self.hang.progress += 1
        self.exit_on_signal(self.stop.vote())

    def exit_on_signal(self, stopping):
        """Exit if all ranks stop: together, or the launcher would kill those that save."""
        if stopping:
            self.hang.is_paused = True  # a tracker may take its time
            if RANK == 0:
                say(f"stopped after step {self.step}, which is saved: rerun the command to resume")
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.wait_for_everyone()
            exit_now(128 + stopping)

    def on_main_process(self, function, *arguments):
        """Return on all ranks what a function returns on the main one. Waiting is no hang."""
        with self.hang.paused():
            result = [function(*arguments) if RANK == 0 else None]
            if self.cpu_group:
                distributed.broadcast_object_list(result, 0, self.cpu_group)
        return result[0]

    def save_weights(self, name):
        """Write the weights of the whole model, a tensor of several names (tied weights) once."""
        weights = self.storage.collect_weights()
        save = partial(self.accelerator.save, weights, safe_serialization=True)
        self.on_main_process(replace_file, self.directory / name, save)

    def finish(self):
        """Write model.safetensors and summary.json, and print the results."""
        self.hang.is_paused = True  # there are no more steps
        self.save_weights("model.safetensors")
        self.metrics.finish()
        # Then the loaders are only variables of `main`: with these their workers end. At the exit,
        # multiprocessing would send them SIGTERM, which they block, and wait.
        del self.train_loader


# ------------------------------------------------------------------------------------------ metrics
def waits_for_other_ranks(function):
    """Mark a function in which a rank waits for others: `HangDetector` looks for this name."""

    def wait_for_other_ranks(*arguments):
        return function(*arguments)

    return wait_for_other_ranks


def total_norm(tensors):
    """Return the norm of all tensors together, also of sharded ones."""
    norm = nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def checked(returned):
    """Return the values that `compute_loss` returned, {name: (B,) tensor}, and its "outputs" or
    None. Exit with an error if they are anything else."""
    found = f"no dictionary but a {type(returned).__name__}"
    if isinstance(returned, dict):
        values = {name: value for name, value in returned.items() if name != "outputs"}
        outputs = returned.get("outputs")
        shapes = {name: getattr(x, "shape", type(x)) for name, x in values.items()}
        loss = shapes.get("loss")
        if isinstance(loss, torch.Size) and len(loss) == 1 and set(shapes.values()) == {loss}:
            if outputs is None or len(outputs) == loss[0]:
                return values, outputs
            shapes["outputs"] = f"{len(outputs)} of them"
        found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
    remedy = 'one value per sample (reduction="none"), and for tokens their number as "weight"'
    exit_with_error(f'compute_loss returned {found}: return {{"loss": tensor, ...}} with {remedy}')


def divide_by_mean_weight(accelerator, model, step_values):
    """Divide the gradients by the mean weight of the global batch, if there are weights."""
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


@waits_for_other_ranks
def means(names, sums, samples):
    """Return {name: mean} of summed `sample_rows`, (M + 2,). Exit unless of `samples` rows."""
    *totals, weight, counted = sums.tolist()
    if counted != samples:
        why = "compute_loss or a collate_fn leaves some out, or load_data changes args.batch_size"
        exit_with_error(f"{counted:g} values of compute_loss for {samples} samples: {why}")
    names = [name for name in names if name != "weight"]
    return {k: total / (weight or math.nan) for k, total in zip(names, totals, strict=True)}


def gather_outputs(parts):
    """Return, on the main process, the rows of all processes' `parts`, a list of "outputs"."""
    parts = utils.gather_object(utils.send_to_device(parts, "cpu"))
    return [row for part in parts for row in part] if RANK == 0 else []


class Metrics:
    """Means over all processes, for the screen, metrics.jsonl, summary.json and a tracker."""

    def __init__(self, run, text):
        self.run = run
        self.text = text  # of metrics.jsonl, from the checkpoint
        self.newest = {}  # value of each name, or None: JSON has neither NaN nor infinity
        self.started = time.time()
        self.names = []
        is_main = RANK == 0
        path = run.directory / "metrics.jsonl" if is_main else os.devnull
        self.file = open(path, "w", buffering=1)
        self.file.write(text)
        run.accelerator.init_trackers(RECIPE, {name: str(x) for name, x in run.config.items()})
        self.console = Console(quiet=not is_main, highlight=False, markup=False, soft_wrap=True)
        plain = not (is_main and self.console.is_interactive)
        # Not redirected: a worker would wait for a lock that was held when it was forked.
        self.progress = Progress(
            console=self.console, disable=plain, redirect_stdout=False, redirect_stderr=False
        )
        self.bar = self.progress.add_task("steps", total=run.total_steps, completed=run.step)
        self.console.print_json(data={**run.config, "resumed_from": run.step}, highlight=False)
        self.progress.start()
        self.console.show_cursor()  # a killed run would leave it hidden

    def start_line(self):
        """Begin the next line here: evaluations and checkpoints do not count in its throughput."""
        self.last_line = self.run.step
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
            if self.names not in ([], list(values)):
                exit_with_error("compute_loss: return the same keys for every batch")
            self.names = list(values)
            self.sums = self.sums + sample_rows(values).sum(0)
        self.progress.advance(self.bar)

    @waits_for_other_ranks
    def gather(self, grad_norm):
        """Return the means since the last line over all ranks, each rank's sum of losses, its norms
        of weights and gradients (P, 1 or 2), and what was measured besides."""
        run = self.run
        norms = [total_norm(run.model.parameters())]
        norms += [] if grad_norm is None else [grad_norm]
        memory = torch.cuda.max_memory_allocated() or getrusage(RUSAGE_SELF).ru_maxrss * 1024
        used = torch.tensor([self.data_seconds, memory / 2**30])
        row = [self.sums, torch.stack(norms).to(self.sums), used.to(self.sums, non_blocking=True)]
        rows = run.accelerator.gather(torch.cat(row)[None]).cpu()
        sums, norms, waited, memory = rows.split([len(self.sums), len(norms), 1, 1], dim=1)
        seconds = time.perf_counter() - self.clock
        samples = (run.step - self.last_line) * run.args.global_batch_size
        results = means(self.names, sums.sum(0), samples)
        losses = sums[:, list(results).index("loss")]
        results |= {"learning_rate": run.learning_rate, "samples_per_second": samples / seconds}
        if grad_norm is not None:
            results["grad_norm"] = norms[0, 1].item()
        measured = {"seconds": seconds, "data_wait": waited.max().item() / seconds}
        measured["slowest_rank"] = waited.argmax().item()
        measured["peak_memory_gib"] = memory.max().item()
        return results, losses, norms, measured

    def write(self, event, results, details=None):
        """Put a line into metrics.jsonl, to the tracker and, without `details`, on the screen."""
        run = self.run
        numbers = {**results, **(details or {})}
        self.newest |= {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        epoch = run.epoch_of(run.step) + 1
        line = {"event": event, "epoch": epoch, "step": run.step, "time": time.time()}
        line = json.dumps(line | {name: self.newest[name] for name in numbers}) + "\n"
        self.text += line
        self.file.write(line)
        run.accelerator.log({f"{event}/{k}": x for k, x in numbers.items()}, step=run.step)
        shown = " ".join(f"{name} {float(f'{x:.3g}'):,}" for name, x in results.items())
        shown = shown.replace("learning_rate", "lr").replace("samples_per_second", "samples/s")
        if self.progress.disable and event == "train":
            left = (run.total_steps - run.step) * run.args.global_batch_size
            shown += f" eta {timedelta(seconds=round(left / results['samples_per_second']))}"
        with suppress(OSError, SystemExit):  # Ctrl-C also ends a `tee` that reads the pipe
            self.console.print(f"step {run.step}/{run.total_steps} epoch {epoch} {shown}")

    def finish(self):
        """Print the results and, unless this run only evaluated another, write summary.json."""
        run = self.run
        self.progress.stop()
        results = {"resumed_from": run.resumed_from, **self.newest}
        results["seconds"] = time.time() - self.started
        self.console.print_json(data=results, highlight=False)
        summary = run.directory / "summary.json"
        if run.step > run.resumed_from or run.step == 0 or not summary.exists():
            text = json.dumps({**run.config, **results}, indent=2) + "\n"
            replace_file(summary, lambda path: path.write_text(text))


def exit_if_not_finite(loss, losses, norms, step):
    """Exit with an error unless the mean loss is finite, and each rank's norm of the weights."""
    if not math.isfinite(loss + norms.sum()):
        wrong = {"the loss": ~losses.isfinite(), "the weights": ~norms.isfinite()}
        ranks = {k: x.nonzero().flatten().tolist() for k, x in wrong.items() if x.any()}
        told = [f"{k} of ranks {x[:8]}" for k, x in ranks.items()] or ["all weights are 0"]
        error = f"not finite at step {step}, which is not saved, or since the line before it"
        exit_with_error(f"{error}: {', '.join(told)}: lower --lr, or set --clip-norm 1")


def exit_if_ranks_drift(norms, parts, step):
    """Exit with an error unless ranks r and r + parts, for each r, have about the same row."""
    norms = norms.reshape(-1, parts, norms.shape[1])
    same = norms.isclose(norms[:1], rtol=1e-5, atol=0, equal_nan=True).all(dim=2).flatten()
    if not same.all():
        ranks = (~same).nonzero().flatten().tolist()
        error = f"at step {step}, which is not saved, ranks {ranks[:8]} have other weights"
        remedy = "call model(...), not its methods; use all parameters; give schedulers no own loss"
        exit_with_error(f"{error} than rank 0: {remedy}")


# -------------------------------------------------------------------------------- reproducible data
def set_batch_sizes(args, replicas, multiple):
    """Divide each replica's share of a global batch into equal microbatches. Return how many."""
    args.global_batch_size = args.global_batch_size or args.batch_size * replicas
    share, rest = divmod(args.global_batch_size, replicas * multiple)
    if rest:
        exit_with_error(f"argument --global-batch-size: choose a multiple of {replicas * multiple}")
    largest = max(1, args.batch_size // multiple)
    accumulation = next(n for n in count(1) if share % n == 0 and share // n <= largest)
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
    """A dataset whose random numbers, and a collate_fn's, depend on (seed, epoch, index) alone."""

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
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
    inner = getattr(dataset, "datasets", ())
    inner = inner.values() if isinstance(inner, dict) else inner
    for one in (getattr(dataset, "dataset", None), *inner):
        if isinstance(one, Dataset):
            yield from datasets_in(one)


def reproducible(loaders, args):
    """Return the loaders with `SeededSamples`; exit if one cannot be resumed exactly."""
    samplers = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    two = len(loaders) == 2
    for drop_last, loader in zip((True, False), loaders, strict=two):
        batches = loader.batch_sampler
        known = type(batches) is torch.utils.data.BatchSampler and type(batches.sampler) in samplers
        same_size = two and (loader.batch_size == args.batch_size or not drop_last)
        some = drop_last or len(loader.dataset)  # `prepare_data` tells of too few for training
        if not (known and some and batches.drop_last == drop_last and same_size):
            needs = f"batch_size=args.batch_size ({args.batch_size}), drop_last={drop_last}"
            remedy = f"a map-style Dataset or Subset that is not empty, {needs}, no own sampler"
            exit_with_error(f"load_data: each of two DataLoaders needs {remedy}")
        # DataLoader forbids an assignment, since a sampler may belong to the dataset.
        object.__setattr__(loader, "dataset", SeededSamples(loader.dataset, args.seed))
    return loaders


# -------------------------------------------------------------------------------------- checkpoints
class Checkpoints:
    """When a checkpoint is due, which one is intact and of this run, and which ones are kept. The
    run's storage knows what is in one, and how."""

    def __init__(self, run):
        self.run = run
        self.storage = run.storage
        free = {"data_dir", "weights", "batch_size", "cpu", "threads", "output_dir", "keep"}
        free |= {"checkpoint_every", "log_every", "tracker", "hang_timeout", "compile"}
        free |= {"accumulation", "device", "world_size", "versions", "commit"}
        self.may_differ = {*free, *run.facts, *run.may_differ}

    def paths(self):
        return sorted(self.run.directory.glob(self.storage.pattern))

    def find(self):
        """Return the newest intact checkpoint, the same on all ranks and of this run, or None."""
        run = self.run
        paths = self.paths()[::-1]
        files = [path.read_text() for path in run.directory.glob("run.id")]
        files += [path.name for path in paths]
        seen = {"samples": run.samples, "files in --output-dir": files}
        remedy = "all machines have to share data and directory"
        exit_if_ranks_differ(run.store, "files", seen, remedy)
        for path in paths:
            if checkpoint := self.read_if_intact(path):
                ours, theirs = run.config, checkpoint["config"]
                names = sorted((ours.keys() & theirs.keys()) - self.may_differ)
                wrong = [f"{x} {theirs[x]}, not {ours[x]}" for x in names if ours[x] != theirs[x]]
                if wrong:
                    exit_with_error(f"{path} has {'; '.join(wrong)}: choose another --output-dir")
                run.accelerator.print(f"{RECIPE}: resuming from {path}, of {run.total_steps} steps")
                return checkpoint
        if paths:
            exit_with_error(f"{run.directory} has no intact checkpoint: choose another")
        return None

    def read_if_intact(self, path):
        """Return a checkpoint, or None if it is damaged. Exit unless all ranks see the same."""
        checkpoint = damage = None
        try:
            checkpoint = self.storage.read(path)
        except (OSError, MemoryError) as error:  # this rank's: the file may be intact
            exit_with_error(f"{NAME} cannot read {path} ({error}): try again, or delete it")
        except Exception as error:
            damage = f"{error!r:.200}"
        exit_if_ranks_differ(self.run.store, path.name, {path.name: damage}, "rerun the command")
        if damage:
            self.run.accelerator.print(f"{RECIPE}: skipping damaged {path} ({damage})")
        return checkpoint

    def due(self, step):
        every = (self.run.steps_per_epoch, self.run.args.checkpoint_every or math.inf)
        return step == self.run.total_steps or any(step % x == 0 for x in every)

    def save(self, step, metrics_text):
        """Write a checkpoint, and delete old ones. Return how long it took, in s. All ranks wait
        for the end: in the next step they would wait for rank 0, and take that for a hang."""
        run = self.run
        began = time.perf_counter()
        states = self.storage.collect()
        content = {"config": run.config, "step": step, "metrics": metrics_text, "states": states}
        path = run.directory / self.storage.pattern.replace("[0-9]" * 8, f"{step:08}")
        try:
            self.storage.write(content, path)
            if RANK == 0:
                written = [x for x in self.paths() if x <= path]  # later ones are damaged
                for old in written[: -run.args.keep]:
                    self.storage.delete(old)
        except Exception as error:
            Path(run.directory, UNFINISHED).unlink(missing_ok=True)  # frees the disk
            error = error.__context__ or error
            exit_with_error(f"cannot write {path}, earlier ones stay ({error!r:.200})")
        if run.cpu_group:
            distributed.barrier(run.cpu_group)
        return time.perf_counter() - began


class FileStorage:
    """Keeps each checkpoint of `states`, {name: object with a state_dict}, in a file that the main
    process writes. A recipe whose states are not whole there gives `Run` another class."""

    pattern = f"step-{'[0-9]' * 8}.pt"
    parts = 1  # ranks r and r + parts hold the same weights

    def __init__(self, run, states):
        self.run = run
        self.states = states

    def collect_weights(self):
        """Return the weights of the whole model. Those of the main process are written."""
        return self.states["model"].state_dict()

    def collect(self):
        """Return the states. Those of the main process are written."""
        states = {name: thing.state_dict() for name, thing in self.states.items()}
        # Buffers of their own: some are in no state dict.
        models = {name: x for name, x in self.states.items() if isinstance(x, nn.Module)}
        return states | {"buffers": {k: dict(x.named_buffers()) for k, x in models.items()}}

    def load(self, saved):
        for name, thing in self.states.items():
            # An optimizer may keep tensors that it gets, and with them the mapped file.
            is_model = isinstance(thing, nn.Module)
            thing.load_state_dict(saved[name] if is_model else deepcopy(saved[name]))
        for name, buffers in saved.get("buffers", {}).items():
            set_buffers(self.states[name], buffers)

    def read(self, path):
        """Return a checkpoint on the CPU. Raise an error of any type if it is damaged."""
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at the checksums
            raise ValueError("wrong checksum")
        return torch.load(path, "cpu", weights_only=True, mmap=True)  # runs no code

    def write(self, content, path):
        """Write a checkpoint: renamed into place after fsync, and after it was read again."""

        def write_and_read(temporary):
            with open(temporary, "wb") as file:  # its errors have a reason, torch's have none
                torch.save(content, file)
            torch.load(temporary, "cpu", weights_only=True, mmap=True)  # raises on other types

        replace_file(path, write_and_read)

    def delete(self, path):
        path.unlink(missing_ok=True)


def set_buffers(model, values):
    """Copy {name: tensor} into a model's buffers. A cache that has grown stays as it is."""
    for name, buffer in model.named_buffers():
        if name in values and buffer.shape == values[name].shape:
            buffer.copy_(values[name])


def replace_file(path, write):
    """On the main process, make a file by `write`: renamed into place after fsync."""
    if RANK == 0:
        temporary = path.with_name(UNFINISHED)
        temporary.touch()
        mode = temporary.stat().st_mode  # follows the umask, unlike that of safetensors
        write(temporary)
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


def sync(path):
    """Make a file, or the names in a directory, last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_weights(model, path):
    """Return the model, with the weights at `path`, if given, as far as names and shapes fit."""
    if not model.training:  # from_pretrained returns it so
        exit_with_error("build_model: the model is in eval mode: return model.train()")
    if path:
        own = model.state_dict()
        try:
            weights = utils.load_state_dict(path)  # runs no code
        except Exception as error:  # the readers raise many types
            exit_with_error(f"argument --weights: cannot load {path} ({error!r:.100})")
        for wrapper in ("module.", "_orig_mod.", "module."):  # DDP and torch.compile, either first
            weights = {k if k in own else k.removeprefix(wrapper): weights[k] for k in weights}
        fitting = {k: x for k, x in weights.items() if k in own and own[k].shape == x.shape}
        if not fitting:
            exit_with_error(f"argument --weights: no tensor of {path} fits this model")
        missing = ", ".join(model.load_state_dict(fitting, strict=False).missing_keys)
        if RANK == 0:
            say(f"loaded {len(fitting)} of {len(own)} tensors of {path}, not: {missing or 'none'}")
    return model


# ----------------------------------------------------------------------------------------- stopping
class StopSignal:
    """On a signal to any rank, or the launcher's death, all ranks stop after the same step."""

    def __init__(self, group):
        self.group = group  # of all ranks on their CPUs, or None
        self.received = 0  # the first signal
        self.highest = torch.zeros(1, dtype=torch.int64)  # of the signals of all ranks
        self.pending = None
        self.signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
            self.signals.remove(signal.SIGHUP)
        # Python writes a signal's number there even while the main thread is in C code.
        self.numbers, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self.numbers.settimeout(1)
        signal.set_wakeup_fd(self.wakeup.fileno())
        for number in self.signals:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.watch, daemon=True).start()
        # DataLoader's workers inherit the mask: they must live until the next checkpoint.
        resource_tracker.ensure_running()  # started later, it would unblock them
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

    def watch(self):
        """Note the first signal, or that the launcher has died, and say so."""
        number = 0
        while number not in self.signals:
            with suppress(TimeoutError):
                number = self.numbers.recv(1)[0]
            if LAUNCHED and os.getppid() != LAUNCHER:
                number = signal.SIGTERM
        self.received = number
        if LOCAL_RANK == 0:
            say(f"{signal.Signals(number).name}: stopping after the next step (Ctrl-\\ aborts)")

    @waits_for_other_ranks
    def vote(self):
        """Return the signal on which all ranks stop, or 0, as of the call before: so the all-reduce
        overlaps a step."""
        if self.pending:
            self.pending.wait()
        result = self.highest.item()
        self.highest.fill_(self.received)
        if self.group:
            maximum = distributed.ReduceOp.MAX
            self.pending = distributed.all_reduce(self.highest, maximum, self.group, async_op=True)
        return result


class HangDetector:
    """Ends a run without a step for --hang-timeout seconds, with --compile six times as long. The
    rank that hangs does not report, or came the least far and, of equals, waits for no other: it is
    in none of these files, and in no function marked @waits_for_other_ranks."""

    files = re.compile(f"{torch.__path__[0]}/(?!utils/data/)|{accelerate.__path__[0]}/")

    def __init__(self, run):
        self.timeout = run.args.hang_timeout * (6 if vars(run.args).get("compile") else 1)
        self.store = run.store
        self.directory = run.directory
        self.progress = 0  # steps and batches
        self.is_paused = False
        self.names = utils.gather_object([NAME])
        threading.Thread(target=self.watch, daemon=True).start()
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def paused(self):
        """Within this context a run may take any time without a step."""
        before, self.is_paused = self.is_paused, True
        yield
        self.is_paused = before

    def watch(self):
        tick = min(5.0, self.timeout / 20)
        idle = 0.0
        while idle < self.timeout:
            before = self.progress
            time.sleep(tick)
            stalls = self.progress == before and not self.is_paused
            idle = idle + tick if stalls else 0.0
        faulthandler.dump_traceback_later(self.timeout, exit=True)  # if the store never answers
        with suppress(RuntimeError):  # the process that has the store has ended
            self.report(sys._current_frames()[threading.main_thread().ident])
            self.name_the_rank()
            self.store.wait(["named"])
        time.sleep(2 * tick)  # so that all ranks read it
        exit_now(1)

    def report(self, frame):
        """Print this rank's stack, or write it to a file. Tell the others how far it came."""
        stack = traceback.extract_stack(frame)
        head = f"{RECIPE}: no step for {self.timeout:g} s, {NAME} is at\n"
        text = "".join([head, *traceback.format_list(stack)])
        if WORLD_SIZE > 8:
            Path(self.directory, f"stack-{RANK}.txt").write_text(text)
        else:
            os.write(2, text.encode())  # one call: ranks do not mix lines
        at = [line for line in stack if line.filename == __file__][-1]
        marked = any(line.name == "wait_for_other_ranks" for line in stack)
        waits = marked or bool(self.files.search(stack[-1].filename))
        self.store.set(NAME, json.dumps([self.progress, waits, f"line {at.lineno}, in {at.name}"]))
        if self.store.add("reports", 1) == WORLD_SIZE:
            self.store.set("all reports", "")

    def name_the_rank(self):
        """Print, on the first rank that has reported, which ones hang."""
        with suppress(RuntimeError):  # a rank that was stopped does not report
            self.store.wait(["all reports"], timedelta(seconds=self.timeout / 2))
        present = (name for name in self.names if self.store.check([name]))
        if NAME == next(present):
            reports = {name: [-1, False, "no report"] for name in self.names}
            reports |= {name: json.loads(self.store.get(name)) for name in (NAME, *present)}
            # If all of these wait, one of them has left out a collective operation.
            first = min(reports.values())[:2]
            stalled = [f"{name} ({x[2]})" for name, x in reports.items() if x[:2] == first]
            files = f", stacks in {self.directory}/stack-*.txt" if WORLD_SIZE > 8 else ""
            told = f"because of {', '.join(stalled[:8])}{files}"
            say_error(f"no step for {self.timeout:g} s {told}")
            self.store.set("named", "")


def say(message):
    """Print a line to stderr. Ctrl-C also ends a `tee` that reads it: that is no error."""
    with suppress(OSError):
        line = f"{RECIPE}: {message}".replace("\n", " ")
        start = "\r\x1b[K" if sys.stderr.isatty() else ""  # over the progress bar
        sys.stderr.write(f"{start}{line}\n")  # one call, unlike `print`
        sys.stderr.flush()


def say_error(message):
    """Print an error in one line. The launcher repeats it in its last lines."""
    say(f"error: {message}")
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}))


def exit_if_ranks_differ(store, topic, values, remedy):
    """Exit with an error unless all ranks have rank 0's {name: value}."""
    store.set(f"{topic} {RANK}", json.dumps([NAME, values], default=str))
    if RANK == 0:
        (_, own), *others = [json.loads(store.get(f"{topic} {x}")) for x in range(WORLD_SIZE)]
        wrong = [(k, name, x.get(k)) for k in own for name, x in others if x.get(k) != own[k]]
        told = [f"{k}: {own[k]} on {NAME}, but {x} on {name}" for k, name, x in wrong]
        store.set(topic, f"{told[0]} ({len(told)} in all)" if told else "")
    if difference := store.get(topic).decode():
        exit_with_error(f"{difference}: {remedy}")


# The first rank of each machine prints at once. By SIGTERM the launcher then ends the others, which
# wait for seconds. An exception waits one more, since another rank's end may have caused it.
def exit_with_exception(error):
    """Print a line with the place in this file, above it a traceback, unless the system or the
    network is the cause."""
    text = traceback.format_exc()
    place = re.findall(rf'File "{re.escape(__file__)}", line (\d+), in (.+)', text)[-1]
    lines = str(error).strip().rstrip(".").splitlines() or [""]
    lines = dict.fromkeys(f"{line:.200}" for line in (lines[0], *lines[-2:]))
    message = f"{type(error).__name__}: {' ... '.join(lines)}"
    message += f", in {place[1]}, line {place[0]} of {Path(__file__).name}"
    outside = isinstance(error, OSError | distributed.DistNetworkError)
    exit_with_error(message, 1, "" if outside else text, wait=1)


def exit_with_error(message, status=2, details="", wait=0):
    """Print an error in one line, and exit. Any rank may call this."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if LOCAL_RANK > 0:
        wait += 4 + LOCAL_RANK
        message = f"rank {RANK}: {message}"
    time.sleep(wait)
    sys.stderr.write(details)
    say_error(message)
    exit_now(status)


def exit_now(status):
    """End this process, and its DataLoaders' workers, without a tear-down: gloo may abort in it."""
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

    def convert(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{value} is not above 0")
        return value

    convert.__name__ = kind.__name__  # argparse names it if `kind` raises an error
    return convert


def parse_args(*declarations):
    """Return the parsed flags: those of all recipes, and those that each of `declarations` adds,
    which may change the defaults of earlier ones, or declare them anew."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, conflict_handler="resolve"
    )
    parser.error = exit_with_error
    add = parser.add_argument
    whole = positive(int)
    real = positive(float)
    add("--weights", metavar="PATH", help="model.safetensors or a state dict to start from")
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
    add("--checkpoint-every", type=whole, help="steps between checkpoints")
    add("--keep", type=whole, default=2, help="kept checkpoints (%(default)s)")
    add("--log-every", type=whole, help="steps between lines (GPUs: 50, CPU: 10)")
    add("--tracker", help="tensorboard, wandb, ...")
    add("--hang-timeout", type=real, default=600, help="seconds without a step (%(default)s)")
    for declare in declarations:
        declare(parser)
    args = parser.parse_args()
    if args.epochs < 0:
        exit_with_error(f"argument --epochs: {args.epochs} is below 0")
    return args


def lock_output_directory(directory):
    """Make the directory. Exit with an error if another run uses it."""
    directory.mkdir(parents=True, exist_ok=True)
    if RANK > 0:
        return
    # It stays open, and nothing else opens the file: closing it, however opened, ends the lock.
    descriptor = os.open(directory / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)
    except BlockingIOError:
        exit_with_error(f"--output-dir {directory} is in use by another run")
    except OSError as error:  # some NFS and Lustre servers have no locks
        say(f"{directory} cannot be locked ({error.strerror}): start no second run in it")


def set_run_id(directory):
    """Give the run a random id, or its former one if it resumes: for W&B, and for `find`."""
    path = directory / "run.id"
    if RANK == 0:
        if not (path.exists() and any(directory.glob("step-*"))):
            replace_file(path, lambda temporary: temporary.write_text(os.urandom(8).hex()))
        os.environ.setdefault("WANDB_RUN_ID", path.read_text())
        os.environ.setdefault("WANDB_RESUME", "allow")


def keep_script(directory):
    """Copy this file into the directory. Another one that wrote the checkpoints stays there."""
    copy = directory / Path(__file__).name
    if RANK > 0 or (copy.exists() and copy.read_bytes() == Path(__file__).read_bytes()):
        return
    checkpoints = sorted(directory.glob("step-*"))
    if copy.exists() and checkpoints:
        earlier = copy.with_name(f"{RECIPE}.{checkpoints[-1].stem}.py")
        if not earlier.exists():
            copy.replace(earlier)
        say(f"this script has changed: {earlier} is the one of the newest checkpoint")
    shutil.copyfile(__file__, copy)


def exit_if_config_is_ignored(precision):
    """Exit with an error if the launcher was told to do something that this recipe would ignore."""
    mixed_precision = "no" if precision == "fp32" else precision
    supported = {"MIXED_PRECISION": mixed_precision, "GRADIENT_ACCUMULATION_STEPS": "1"}
    for name in (*UNSUPPORTED, *supported):
        value = os.environ.get(f"ACCELERATE_{name}", "no").lower()
        if value not in ("no", "false", supported.get(name)):  # it would be ignored
            exit_with_error(f"the launcher's {name.lower()} is {value}: see this recipe's --help")


def choose_device(args):
    """Select this process's GPU. Return the number of GPUs, and of CPU threads per process."""
    visible = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]  # ROCm reads the second one first
    if args.cpu:
        os.environ |= dict.fromkeys(visible, "-1")  # or Accelerate's barriers would go to GPUs
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = 0
    if torch.cuda.is_available() and not args.cpu:
        torch.cuda.init()  # before, torch counts GPUs of which a process has one part (MIG)
        gpus = torch.cuda.device_count()
    hidden = any(os.environ.get(name) in ("", "-1") for name in visible)
    present = any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))) or shutil.which("nvidia-smi")
    if present and not (gpus or hidden):
        remedy = "update the driver, or install torch's build for CUDA or ROCm; or add --cpu"
        exit_with_error(f"torch cannot use the GPUs: {remedy}")
    if 0 < gpus < processes:
        exit_with_error(f"{processes} processes, {gpus} GPU(s): start one per GPU, or add --cpu")
    if gpus > processes and LOCAL_RANK == 0:
        say(f"{gpus - processes} of {gpus} GPUs are not used: start one process per GPU")
    if gpus:
        torch.cuda.set_device(LOCAL_RANK)
        torch.set_float32_matmul_precision("high")  # TF32, which convolutions use by default
        # Shapes rarely change: time the algorithms once.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", 0))
    if not threads or (LAUNCHED and not args.threads and threads == 1):  # the launcher's default
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return gpus, threads


def join_process_group(args, gpus):
    """Make the process group of all ranks, if they were started alike. Return its store."""
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = LAUNCHER_TIMEOUT if of_launcher else TIMEOUT
    store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
    store.set_timeout(TIMEOUT)
    if of_launcher:  # it keeps the addresses of processes that died before a restart
        store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    started = {name: x for name, x in vars(args).items() if name not in PER_MACHINE}
    started |= {"versions": VERSIONS, "GPUs": bool(gpus)}
    exit_if_ranks_differ(store, "flags", started, "start the same command on all machines")
    backend = "nccl" if gpus else "gloo"
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")  # DDP's errors name parameters
    distributed.set_debug_level_from_env()
    distributed.init_process_group(backend, None, TIMEOUT, WORLD_SIZE, RANK, store)
    return store


def make_accelerator(args, gpus, precision, handlers):
    """Return the Accelerator. Exit with an error if it does not see all processes."""
    plugin = utils.GradientAccumulationPlugin(1, sync_with_dataloader=False)  # `Run` counts them
    loading = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
    loading.data_seed = random.Random(args.seed).getrandbits(31)  # Accelerate adds the epoch
    accelerator = Accelerator(
        cpu=not gpus,  # or processes on a machine without GPUs would not see each other
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=loading,
        gradient_accumulation_plugin=plugin,
        kwargs_handlers=[utils.InitProcessGroupKwargs(timeout=TIMEOUT), *handlers],
    )
    if WORLD_SIZE != accelerator.num_processes:
        exit_with_error("processes do not see each other: start them with accelerate launch")
    return accelerator


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        exit_with_exception(error)
