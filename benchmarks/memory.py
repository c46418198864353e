# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory a training needs, computed without a GPU: `bench.py --memory`.

    python benchmarks/bench.py --memory
    python benchmarks/bench.py --memory recipes/sharded_cifar.py --precision bf16 --batch-size 64
    python benchmarks/bench.py --memory mine.py --model large

Without a file: all recipes with ResNet-50 (CIFAR stem, 32 x 32) and with a ViT-L/16 (224 x 224), on
1, 2, 4 and 8 GPUs, written to `--output-dir` (benchmarks/results) as memory.md. With a recipe or a
copy of one, and its flags: that training, with its own `load_data`, `build_model`, `compute_loss`,
`make_optimizer` and `train_step`. Of `--data cifar10 synthetic`, synthetic is the default here.

Some optimizer steps run on fake tensors, which have shapes but no memory. A dispatch mode adds up
the storages that are alive after every operation: weights, gradients, momentum, saved activations,
what the backward pass needs meanwhile, FSDP's gathered units (over a process group without peers),
DDP's buckets, the microbatches that a pipeline's schedule holds. Two batch sizes give each moment
of a step as a constant and a part per sample: a model whose memory is not linear in the batch, such
as a loss over all pairs, is not described by that.

Not counted, and left to a margin of 2 GiB: CUDA's context, NCCL's buffers, workspaces of cuDNN and
cuBLAS, what the caching allocator rounds up, a data set that is kept on the GPU (CIFAR-10: 0.2
GiB). `torch.compile` changes what is saved; evaluations and checkpoints need less than a step.
"""

import argparse
import gc
import importlib.util
import inspect
import math
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import torch
from accelerate import utils
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torchvision.models.vision_transformer import EncoderBlock

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
MIB = 2**20
MARGIN = 2 * GIB
CARDS = (16, 24, 40, 80, 141)  # in GB of 10^9 bytes: no card of that name has less
COUNTS = (1, 2, 4, 8)
VARIANTS = [
    ("data_parallel_cifar", ""),
    ("ddp_cifar", ""),
    ("amp_cifar", "--precision bf16"),
    ("pipeline_cifar", ""),
    ("pipeline_cifar", "--precision bf16 --schedule 1f1b"),
    ("sharded_cifar", ""),
    ("sharded_cifar", "--precision bf16 --activation-checkpointing"),
]


# ---------------------------------------------------------------------------------- counting bytes
class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all storages that operations have made and that are still alive.

    `live` is the sum now, `timeline` the sums after each operation since it was last cleared.
    """

    def __init__(self):
        super().__init__()
        self.live = 0
        self.timeline = []
        self.storages = {}  # {address: (weak reference, bytes)}

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self.counted_resize()  # by which FSDP frees and allocates
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes here again, with the local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.device.type != "meta":
                self.count(tensor.untyped_storage())
        self.timeline.append(self.live)
        return result

    def counted_resize(self):
        def resize(storage, size):
            result = self.resize(storage, size)
            self.count(storage)
            return result

        return resize

    def count(self, storage):
        """Count a storage that is new, or has another size than before."""
        address = storage._cdata
        reference, before = self.storages.get(address, (None, 0))
        if reference is None:
            reference = ref(storage, partial(self.forget, address))
        size = storage.nbytes()
        self.storages[address] = reference, size
        self.live += size - before

    def forget(self, address, _):
        _, size = self.storages.pop(address)
        self.live -= size


class CudaCasts(TorchFunctionMode):
    """Casts to fp32 what autocast computes in fp32 on CUDA, but not on CPU."""

    functions = (F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.functions and torch.is_autocast_enabled("cpu"):
            args = (utils.convert_to_fp32(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class Need:
    """What a process holds during an optimizer step: at each moment a constant and a part for each
    sample of its batch, in bytes."""

    def __init__(self, sizes, timelines):
        """`timelines`: the sums of bytes at the moments of a step, of each of two batch sizes.
        Raise RuntimeError if they have different moments."""
        low, high = timelines
        if len(low) != len(high):
            found = f"{len(low)} operations with {sizes[0]} samples, {len(high)} with {sizes[1]}"
            raise RuntimeError(f"the step is not the same for each batch size: {found}")
        self.moments = set()
        for before, after in zip(low, high, strict=True):
            each = (after - before) / (sizes[1] - sizes[0])
            self.moments.add((before - each * sizes[0], each))

    def bytes(self, batch):
        return max(constant + each * batch for constant, each in self.moments)

    def per_sample(self):
        """Return what one more sample costs in a large batch."""
        return max(each for _, each in self.moments)

    def largest_batch(self, available):
        """Return the largest batch for which so many bytes suffice, or 0."""
        if self.bytes(0) > available:
            return 0
        limits = [(available - constant) / each for constant, each in self.moments if each > 0]
        return math.floor(min(limits))


# ------------------------------------------------------------------- what stands for the processes
class FakeAccelerator:
    """What `load_data`, `shard` and `train_step` use of the Accelerator, for one of N processes."""

    device = torch.device("cpu")
    process_index = 0
    local_process_index = 0
    is_main_process = True
    is_local_main_process = True
    optimizer_step_was_skipped = False
    scaler = None
    cpu_group = None

    def __init__(self, processes=1, microbatches=1):
        self.num_processes = processes
        self.gradient_accumulation_steps = microbatches
        self.sync_gradients = True
        self.begun = 0

    @contextmanager
    def accumulate(self, model):
        self.begun += 1
        self.sync_gradients = self.begun % self.gradient_accumulation_steps == 0
        yield

    def main_process_first(self):
        return nullcontext()

    local_main_process_first = main_process_first

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    def reduce(self, tensor):
        return tensor.clone()

    def clip_grad_norm_(self, parameters, norm):
        return nn.utils.clip_grad_norm_(parameters, norm)

    def print(self, *_):
        pass


@contextmanager
def fake_group(processes):
    """A default process group of so many processes, of which only this one, rank 0, is there."""
    distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Buckets:
    """DDP's buckets, into which it copies each gradient as soon as it is there, and which then is a
    view of them (gradient_as_bucket_view); not before the last of the accumulated microbatches."""

    def __init__(self, model, is_last):
        self.is_last = is_last
        self.views = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.views[parameter] = torch.empty_like(parameter, requires_grad=False)
                parameter.register_post_accumulate_grad_hook(self.copy)

    def copy(self, parameter):
        if self.is_last():
            view = self.views[parameter]
            view.copy_(parameter.grad)
            parameter.grad = view


class Replicate(torch.autograd.Function):
    """The parameters of DataParallel's replica on the first GPU. Backward, all gradients are there
    until they have been added to those of the other GPUs, in new tensors."""

    @staticmethod
    def forward(ctx, *parameters):
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(gradient.clone() for gradient in gradients)


class FirstReplica(nn.Module):
    """What nn.DataParallel on several GPUs does on the first of them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        parameters = dict(self.module.named_parameters())
        replica = dict(zip(parameters, Replicate.apply(*parameters.values()), strict=True))
        return torch.func.functional_call(self.module, replica, args, kwargs)


# ---------------------------------------------------------------------------------- the techniques
def technique_of(recipe):
    """Return which technique a recipe, or a copy of one, has."""
    if hasattr(recipe, "shard"):
        return "sharded"
    if hasattr(recipe, "Pipeline"):
        return "pipeline"
    if hasattr(recipe, "choose_precision"):
        return "amp"
    return "data_parallel" if "nn.DataParallel(" in inspect.getsource(recipe.main) else "ddp"


class Training:
    """An optimizer step of a recipe on fake tensors, by one of N processes.

    `batch_size` is that of a replica of the model: of a process, of a pipeline's two processes, of
    one of DataParallel's GPUs.
    """

    def __init__(self, recipe, args, processes, example, on_cuda=True):
        """`example`: a batch of `load_data`, real. `on_cuda`: as CUDA does it, where the CPU, with
        which tests compare, does it in another way."""
        self.recipe = recipe
        self.args = args
        self.processes = processes
        self.example = example
        self.on_cuda = on_cuda
        self.technique = technique_of(recipe)
        self.in_16_bits = getattr(args, "precision", "fp32") != "fp32"  # amp's default: bf16
        self.stages = range(2 if self.technique == "pipeline" else 1)
        self.multiple = args.microbatches if self.technique == "pipeline" else 1
        self.replicas = processes // len(self.stages)
        self.state_bytes = 0  # of the optimizer, after `needs`

    def needs(self):
        """Return the Need of each process that differs from the others: the pipeline's stages."""
        sizes = 2 * self.multiple, 4 * self.multiple  # BatchNorm needs two samples
        timelines = [[self.timeline(size, stage) for size in sizes] for stage in self.stages]
        return [Need(sizes, both) for both in timelines]

    def timeline(self, batch_size, stage=0):
        """Return the bytes alive after each operation of an optimizer step."""
        accumulates = (self.args.global_batch_size or 0) > self.args.batch_size * self.replicas
        accelerator = FakeAccelerator(self.processes, 2 if accumulates else 1)
        args = SimpleNamespace(**vars(self.args))
        args.batch_size = batch_size
        args.global_batch_size = batch_size * self.replicas
        gc.collect()
        with ExitStack() as stack:
            stack.enter_context(fake_group(self.processes))
            model = self.stage(stage)
            boundary = self.technique == "pipeline" and self.boundary(batch_size)
            if self.technique == "sharded":
                mesh = self.recipe.make_mesh(accelerator, args)
                self.recipe.shard(model, args, mesh)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            counter = stack.enter_context(LiveBytes())
            if self.on_cuda:
                stack.enter_context(CudaCasts())
            model.to_empty(device="cpu")
            return self.run_steps(counter, accelerator, model, args, stage, boundary)

    def run_steps(self, counter, accelerator, model, args, stage, boundary):
        optimizer, scheduler = self.recipe.make_optimizer(model, args, 10)
        for group in optimizer.param_groups:
            if self.on_cuda and not group.get("fused") and group.get("foreach", 1) is None:
                group["foreach"] = True  # CUDA's default
        buckets = None
        if self.technique == "pipeline":
            buckets = self.replicas > 1 and Buckets(model, lambda: self.is_last_part)
        elif self.technique == "sharded":
            if not args.sync_each_batch:
                model.register_forward_pre_hook(
                    lambda *_: model.set_requires_gradient_sync(accelerator.sync_gradients)
                )
        elif self.technique == "data_parallel":
            model = FirstReplica(model) if self.processes > 1 else model
        else:
            buckets = self.processes > 1 and Buckets(model, lambda: accelerator.sync_gradients)
            if self.in_16_bits:
                model.forward = self.in_autocast(model.forward)
        ahead = self.batch(args.batch_size)  # Accelerate's loader is one batch ahead
        gc.collect()
        gc.disable()
        try:
            # The second is like all later ones. DTensor works out the sharding of an operation in
            # the first step that has it, on tensors that would be counted: then the third.
            for _ in range(3 if self.technique == "sharded" else 2):
                counter.timeline.clear()
                batches = [self.batch(args.batch_size)] * accelerator.gradient_accumulation_steps
                if not boundary:
                    common = accelerator, model, optimizer, scheduler, batches, (0, 1)
                    self.recipe.train_step(*common, getattr(args, "clip_norm", None))
                else:
                    for batch in batches:
                        self.pass_stage(model, stage, batch, boundary)
                    optimizer.step()
                    optimizer.zero_grad()
            states = [x for state in optimizer.state.values() for x in state.values()]
            local = [x.to_local() if isinstance(x, DTensor) else x for x in states]
            self.state_bytes = max(
                self.state_bytes, sum(x.nbytes for x in local if torch.is_tensor(x))
            )
            return list(counter.timeline)
        finally:
            gc.enable()
            del ahead, buckets

    def stage(self, stage):
        """Return the model, or a stage of it, without memory."""
        try:
            with torch.device("meta"):
                model = self.recipe.build_model(self.args)
        except Exception:  # it reads values, such as pretrained weights: on the CPU first
            model = self.recipe.build_model(self.args)
        model = model.to("meta")
        if self.technique != "pipeline":
            return model
        blocks = self.recipe.cut(self.recipe.model_blocks(model), self.args)
        return self.recipe.Stage(blocks[stage], self.autocast)

    def batch(self, size):
        """Return the example with so many samples, fake."""
        samples = len(next(x for x in tree_leaves(self.example) if torch.is_tensor(x)))

        def resized(x):
            if not torch.is_tensor(x) or x.dim() == 0 or len(x) != samples:
                return x
            channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
            layout = torch.channels_last if channels_last else torch.contiguous_format
            return torch.empty((size, *x.shape[1:]), dtype=x.dtype, memory_format=layout)

        return tree_map(resized, self.example)

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.in_16_bits)

    def in_autocast(self, forward):
        """Return a model's forward pass as Accelerate wraps it."""

        def wrapped(*args, **kwargs):
            with self.autocast():
                outputs = forward(*args, **kwargs)
            return utils.convert_to_fp32(outputs)

        return wrapped

    # ------------------------------------------------------------------------------- the pipeline
    def boundary(self, batch_size):
        """Return (shape, dtype) of what the first stage sends for a microbatch."""
        stage = self.stage(0)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            stage.to_empty(device="cpu")
            inputs, _ = self.batch(batch_size // self.args.microbatches)
            sent = stage(inputs)
        return sent.shape, sent.dtype

    def pass_stage(self, model, stage, batch, boundary):
        """Take a batch forward and backward through one stage, as torch's schedules do: received
        tensors are allocated as they are needed; GPipe waits for what it has sent at its end."""
        count = self.args.microbatches
        gpipe = self.args.schedule == "gpipe"
        last = stage == len(self.stages) - 1
        inputs, targets = (torch.tensor_split(part, count) for part in batch)
        shape, dtype = boundary
        held = {}
        losses = []  # kept, with what their graphs refer to, until the end
        sent = []

        def forward(index):
            received = inputs[index]
            if last:
                received = torch.empty(shape, dtype=dtype).requires_grad_()
            output = model(received)
            held[index] = received, output
            if last:
                losses.append(self.recipe.part_of_loss(output, targets[index], (count, 1), []))

        def backward(index):
            if gpipe and not last:  # what was sent is freed, except for its place in the graph
                for key, (kept, sent_on) in held.items():
                    if torch.is_tensor(sent_on):
                        held[key] = kept, torch.autograd.graph.get_gradient_edge(sent_on)
                del sent_on
            received, output = held.pop(index)
            self.is_last_part = index == count - 1
            if last:
                losses[index].backward()
                if not gpipe:
                    sent.clear()
                sent.append(received.grad)
                received.grad = None
            else:
                torch.autograd.backward(output, torch.empty(shape, dtype=dtype))

        in_flight = count if gpipe else min(count, len(self.stages) - stage)
        for index in range(in_flight):
            forward(index)
        for index in range(count):
            backward(index)
            if index + in_flight < count:
                forward(index + in_flight)


# -------------------------------------------------------------------------------------- the table
HEAD = ["model", "recipe", "GPUs", "parameters", "gradients", "optimizer", "gathered"]
HEAD += ["MiB per sample", "GiB", *(f"{card} GB" for card in CARDS)]
SHORT = ["MiB per sample", "16 GB", "24 GB", "80 GB"]  # what the short table has of each model
NOTES = """- computed, not measured on a GPU; samples per GPU that fit, on 8 GPUs.
- In the long table all is per GPU. parameters, gradients, optimizer, in GiB: between the backward
  pass and the update. gathered: the two largest neighbouring units of a sharded model, whole.
  pipeline: of the stage that needs more of it. data_parallel: of the first GPU.
- MiB per sample: what one more sample costs in a large batch, mostly saved activations. GiB: all of
  it with `--batch-size` (here 32) samples. 16 GB, ...: the most samples for a GPU of so many 10^9
  bytes, less 2 GiB for CUDA's context, workspaces and fragmentation; 0: none.
- The pipeline's `--batch-size` is that of two GPUs, in 8 microbatches; data_parallel's of all."""


def load(path):
    """Import a recipe, or a copy of one, from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def parsed(recipe, flags):
    """Return a recipe's arguments; of cifar10 and synthetic data, synthetic unless they say which.
    Exit with the recipe's error if a flag is wrong, with another for what cannot be computed."""
    words = sys.argv[1:]
    hook = sys.excepthook
    sys.argv[1:] = flags
    args = recipe.parse_args(recipe.add_flags)
    sys.argv[1:] = words
    sys.excepthook = hook  # which the recipe replaces
    if getattr(args, "data", None) == "cifar10" and "--data" not in flags:
        args.data = "synthetic"
    if getattr(args, "cpu_offload", False):
        sys.exit("bench: argument --cpu-offload: what it needs is not computed")
    return args


def example_batch(recipe, args):
    """Return a batch of the training data."""
    loader, _ = recipe.load_data(args, FakeAccelerator())
    return next(iter(loader))


def counts(recipe, args):
    """Return the numbers of GPUs, together where they need the same on each GPU."""
    technique = technique_of(recipe)
    if technique == "pipeline":
        return [(2,), (4, 8)]
    if technique == "sharded":
        return [(n,) for n in COUNTS if n % args.replicas == 0]
    return [(1,), (2, 4, 8)]


def held_bytes(training):
    """Return the bytes per process of parameters, gradients, optimizer state, gathered units."""
    recipe = training.recipe
    args = training.args
    models = [training.stage(stage) for stage in training.stages]
    gathered = 0
    shards = 1
    if training.technique == "sharded":
        shards = training.processes // args.replicas
        units = [sum(p.numel() for p in unit) for unit in recipe.parameters_of_units(models[0])]
        largest = max(map(sum, pairwise([*units, 0])))
        gathered = largest * (2 if args.precision == "bf16" else 4)
    weights = max(sum(p.nbytes for p in model.parameters()) for model in models) / shards
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    gradients = max(sum(p.nbytes for p in part) for part in trained) / shards
    return weights, gradients, training.state_bytes, gathered


def row(name, label, gpus, training, batch):
    """Return a row of the table, as HEAD says, and print it."""
    needs = training.needs()
    factor = len(training.stages)  # GPUs of a replica, whose batch they share

    def largest(gigabytes):
        each = min(need.largest_batch(gigabytes * 10**9 - MARGIN) for need in needs)
        return each // training.multiple * training.multiple // factor

    cells = [name, label, ", ".join(map(str, gpus))]
    cells += [f"{size / GIB:.2f}" for size in held_bytes(training)]
    cells.append(f"{max(need.per_sample() for need in needs) * factor / MIB:.1f}")
    cells.append(f"{max(need.bytes(batch * factor) for need in needs) / GIB:.2f}")
    cells += [f"{largest(card):,}" for card in CARDS]
    print(as_row(cells), flush=True)
    return cells


def as_row(cells):
    return f"| {' | '.join(cells)} |"


def as_table(head, rows):
    rule = ["---" if name in ("model", "recipe") else "---:" for name in head]
    return "\n".join(as_row(cells) for cells in (head, rule, *rows))


class Patches(nn.Module):
    """(B, 3, 224, 224) in, 196 tokens of 16 x 16 pixels with a class token out: (B, 197, 1024)."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 1024, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, 1024))
        self.positions = nn.Parameter(torch.zeros(1, 197, 1024))

    def forward(self, images):
        tokens = self.convolution(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(tokens), -1, -1)
        return torch.cat([token, tokens], dim=1) + self.positions


class Head(nn.Module):
    """(B, 197, 1024) in, (B, 1000) out, from the class token."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(1024, eps=1e-6)
        self.linear = nn.Linear(1024, 1000)

    def forward(self, tokens):
        return self.linear(self.norm(tokens)[:, 0])


def vit_l_16(args):
    """Return torchvision's vit_l_16 as an nn.Sequential, which can be cut and sharded: 304 million
    parameters."""
    norm = partial(nn.LayerNorm, eps=1e-6)
    blocks = [EncoderBlock(16, 1024, 4096, 0.0, 0.0, norm) for _ in range(24)]
    return nn.Sequential(Patches(), *blocks, Head())


def rows_of(path, flags, model=None, batch=None):
    """Return a table's rows for a recipe: with `model`, (name, build_model, a batch), for that."""
    recipe = load(path)
    args = parsed(recipe, flags)
    name = getattr(args, "model", "own").replace("resnet50", "ResNet-50")
    if model:
        name, recipe.build_model, example = model
    else:
        example = example_batch(recipe, args)
    label = " ".join([Path(path).stem.removesuffix("_cifar"), *flags])
    rows = []
    for gpus in counts(recipe, args):
        training = Training(recipe, args, gpus[-1], example)
        rows.append(row(name, label, gpus, training, batch or args.batch_size))
    return rows


def main(words):
    """Print the table for a recipe and its flags, or write that of all recipes."""
    if words and not words[0].startswith("-"):
        print(as_table(HEAD, []))
        rows_of(words[0], words[1:])
        print(NOTES)
        return
    parser = argparse.ArgumentParser(prog="bench.py --memory", description=__doc__)
    parser.add_argument("--output-dir", default="benchmarks/results", type=Path)
    args = parser.parse_args(words)
    images = torch.zeros(2, 3, 224, 224)
    labels = torch.zeros(2, dtype=torch.int64)
    large = "ViT-L/16", vit_l_16, (images, labels)
    rows = []
    print(as_table(HEAD, []))
    for model in (None, large):
        for recipe, flags in VARIANTS:
            path = ROOT / f"recipes/{recipe}.py"
            rows += rows_of(path, flags.split(), model, batch=32)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "memory.md").write_text(page(rows))


def page(rows):
    """Return the text of memory.md: the short table, of 8 GPUs with a row per recipe, then all."""
    models = list(dict.fromkeys(cells[0] for cells in rows))
    chosen = [HEAD.index(name) for name in SHORT]
    head = ["recipe", *(f"{model}: {name}" for model in models for name in SHORT)]
    short = {}
    for cells in rows:
        if cells[2].endswith("8"):
            short.setdefault(cells[1], [cells[1]]).extend(cells[index] for index in chosen)
    command = "`python benchmarks/bench.py --memory`"
    parts = [as_table(head, short.values()), command, NOTES, as_table(HEAD, rows)]
    return "\n\n".join(parts) + "\n"
