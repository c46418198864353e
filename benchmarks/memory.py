# SPDX-License-Identifier: Apache-2.0
"""How large a batch fits into a GPU with each recipe, computed without a GPU.

    python benchmarks/memory.py
    python benchmarks/memory.py mine.py --model large  # a copy of a recipe, and its flags
    python benchmarks/memory.py --chat  # which chat models fit, with the example sft
    python benchmarks/memory.py --cuts mine.py --batch-size 256  # where to cut a pipeline

An optimizer step runs on fake tensors, which have shapes but no memory, while torch's MemTracker
adds up the bytes that are alive; FSDP and pipelines run over a process group without peers. Two
batch sizes give the memory as a line over the batch size. --cuts times each block of a pipeline on
this device; on CPU on half of the cores, as in one of two processes.
"""

import argparse
import gc
import inspect
import sys
import time
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from bench import CORES, ROOT, load
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

MARGIN = 2**31  # for CUDA, NCCL, cuDNN, cuBLAS, fragmentation, a data set on the GPU
CARDS = (16, 24, 80)  # in GB of 10^9 bytes
GPUS = 8
SIZES = (256, 1024)  # samples per GPU
VARIANTS = [
    ("data_parallel", ""),
    ("ddp", ""),
    ("amp", "--precision bf16"),
    ("pipeline", ""),
    ("pipeline", "--precision bf16 --schedule 1f1b"),
    ("sharded", ""),
    ("sharded", "--precision bf16 --activation-checkpointing"),
]
OF_VARIANT = {"precision", "schedule", "activation_checkpointing", "compile"}  # not of the copy
LLAMAS = {  # the shapes of Llama 3.2 1B and 3B, of 3.1 8B, and one with a longer vocabulary
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64},
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336},
    "4B, 248k": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "head_dim": 128,
        "vocab_size": 248320,
    },
}
TOKENS = 1024  # of a chat
NUMBERS = (1, 8)  # of chats that each GPU has in a microbatch
CHATS = [  # recipe and flags, type of the base's weights, and whether lora is added
    ("ddp", "", "float32", False),
    ("ddp", "", "float32", True),
    ("ddp", "", "bfloat16", True),
    ("amp", "--precision bf16", "bfloat16", True),
    ("sharded", "--precision bf16 --activation-checkpointing", "float32", False),
    ("sharded", "--precision bf16 --activation-checkpointing", "float32", True),
    ("sharded", "--precision bf16 --activation-checkpointing", "bfloat16", True),
]
NOTES_OF_CHAT = f"""
- Computed. {GPUS} GPUs, each with {NUMBERS[0]} / {NUMBERS[1]} chats of {TOKENS:,} tokens. All are
  targets.
- GiB: the most bytes alive at once in a step. A card of 24 GB has 22.4, of which CUDA, NCCL and
  fragmentation take some 2: bold fits."""
NOTES = f"""
- Computed. {GPUS} GPUs. MiB: per sample, in a large batch.
- 16 GB, ...: samples per GPU that fit into so many 10^9 bytes less 2 GiB, to two significant
  figures; 0: none. pipeline: the stage that needs more. data_parallel: the first GPU."""


class Counter(MemTracker):
    """MemTracker without its statistics of modules, which fail if a module is called twice."""

    def _pre_fw_hook(self, *_):
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Fake targets have no values: let all of them count."""
        if func is torch.ops.aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        return super().__torch_dispatch__(func, types, args, kwargs)


def uncounted(propagator, operation, infer=ShardingPropagator._propagate_tensor_meta_non_cached):
    """Infer shapes as DTensor does, on fake tensors of whole, unsharded parameters."""
    with _disable_current_modes():
        return infer(propagator, operation)


ShardingPropagator._propagate_tensor_meta_non_cached = uncounted


@dataclass
class Training:
    """The training of a model (on the meta device) by a recipe, in one of `gpus` processes."""

    technique: str
    recipe: ModuleType
    args: SimpleNamespace
    model: nn.Module
    example: object  # a batch
    gpus: int = GPUS

    def peak(self, size, stage=0):
        """Return the most bytes alive at once in an optimizer step with `size` samples per GPU."""
        distributed.init_process_group("fake", None, None, self.gpus, stage, FakeStore())
        gc.collect()
        with ExitStack() as stack:
            stack.callback(distributed.destroy_process_group)
            parts = self.parts()
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for part in parts:
                make_tensors(part)
            return self.count_steps(parts, size * len(parts), stage)

    def parts(self):
        """Return the model, sharded if the recipe does that, or the stages of a pipeline."""
        model = deepcopy(self.model)
        if self.technique == "pipeline":
            blocks = self.recipe.model_blocks(model)
            self.recipe.set_split(self.args, list(blocks))
            stages = self.recipe.cut(blocks, self.args.split)
            return [self.recipe.Stage(blocks, self.autocast) for blocks in stages]
        if self.technique == "sharded":
            accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=self.gpus)
            mesh = self.recipe.make_mesh(accelerator, self.args.replicas)
            self.recipe.shard(model, self.args, mesh)
        return [model]

    def count_steps(self, parts, size, stage):
        batch = self.batch(size)
        ahead = self.batch(size)  # Accelerate's loader is one batch ahead
        if self.technique == "pipeline":
            step = self.pipeline_step(parts, stage, batch)
        else:
            step = partial(self.plain_step, parts[0], batch)
        args = SimpleNamespace(**{**vars(self.args), "global_batch_size": size})
        optimizer, _ = self.recipe.make_optimizer(parts[stage], args, 10)
        microbatches = 2 if self.args.global_batch_size else 1  # more need as much memory
        counter = Counter()
        counter.track_external(parts[stage], batch, ahead)
        with counter:
            if self.technique in ("ddp", "amp", "pipeline") and self.gpus > len(parts):
                self.make_buckets(parts[stage])
            for index in range(2 * microbatches):  # the first step makes the optimizer's state
                self.is_last = index % microbatches == microbatches - 1
                step()
                if self.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        return sum(device["Total"] for device in counter.get_tracker_snapshot("peak").values())

    def make_buckets(self, model):
        """Make DDP's buckets: in a step's last microbatch gradients become views of them."""

        def into_bucket(parameter, bucket):
            if self.is_last:
                parameter.grad = bucket.copy_(parameter.grad)

        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            bucket = torch.empty_like(parameter)
            parameter.register_post_accumulate_grad_hook(partial(into_bucket, bucket=bucket))

    def batch(self, size):
        """Return the example with so many samples."""

        def resized(x):
            layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
            return torch.empty((size, *x.shape[1:]), dtype=x.dtype, memory_format=layout)

        return tree_map_only(torch.Tensor, resized, self.example)

    def autocast(self):
        in_bf16 = self.technique != "sharded" and getattr(self.args, "precision", "") == "bf16"
        return torch.autocast("cpu", torch.bfloat16, enabled=in_bf16)

    def plain_step(self, model, batch):
        """Take a microbatch forward and backward."""

        def forward(*args, **kwargs):
            with self.autocast():
                return convert_to_fp32(model(*args, **kwargs))

        if self.technique == "sharded":  # gradients stay whole until the last microbatch
            model.set_requires_gradient_sync(self.is_last or self.args.sync_each_batch)
        values = self.recipe.compute_loss(forward, batch, self.args)
        (values["loss"] * values.get("weight", 1)).mean().backward()

    def pipeline_step(self, parts, stage, batch):
        """Return what takes a batch through one stage, in torch's schedule."""
        inputs, targets = batch
        count = self.args.chunks
        received = inputs[: len(inputs) // count]
        with torch.no_grad():
            boundary = parts[0](received).requires_grad_()
            output = parts[1](boundary)
        ends = [(received, boundary), (boundary, output)][stage]
        group, _ = distributed.new_subgroups(2)
        own = PipelineStage(parts[stage], stage, 2, torch.device("cpu"), *ends, group=group)
        pipeline = SimpleNamespace(args=self.args, accumulation=1, chunk_values=[])
        loss = partial(self.recipe.Pipeline.loss, pipeline)
        make_schedule = schedules.get_schedule_class(self.args.schedule)
        schedule = make_schedule(own, count, loss, scale_grads=False)
        if stage == 0:
            return lambda: schedule.step(inputs)
        return lambda: schedule.step(target=targets, return_outputs=False)


def make_tensors(model):
    """Replace a model's tensors on the meta device by others. Tied weights stay one tensor."""
    places = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    model.to_empty(device="cpu")
    for first, *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(*first))


def row(training):
    """Return MiB per sample, and the largest batch per GPU for each of CARDS."""
    stages = (0, 1) if training.technique == "pipeline" else (0,)
    some, many = (max(training.peak(size, stage) for stage in stages) for size in SIZES)
    each = (many - some) / (SIZES[1] - SIZES[0])
    free = [card * 10**9 - MARGIN - (some - each * SIZES[0]) for card in CARDS]
    values = [each / 2**20, *(max(0, x) // each for x in free)]
    return [f"{float(f'{value:.1e}'):,g}" for value in values]  # two significant figures


def parsed(recipe, flags):
    """Return a recipe's arguments; the recipe exits with its error if a flag is wrong."""
    sys.argv[1:] = flags
    args = recipe.parse_args("", recipe.add_technique_flags, recipe.add_flags)
    if getattr(args, "data", None) == "cifar10" and "--data" not in flags:
        args.data = "synthetic"
    return args


def has_own_optimizer(own):
    """Return whether the `make_optimizer` of a copy is that of no recipe."""
    recipes = [load(path) for path in ROOT.glob("recipes/*_cifar.py")]
    texts = {inspect.getsource(recipe.make_optimizer) for recipe in recipes}
    return inspect.getsource(own.make_optimizer) not in texts


def with_own(technique, variant, own, own_args, own_optimizer):
    """Return the recipe of a technique with what the copy `own` has of its own, and its flags."""
    # On DataParallel's first GPU there is what a process without DDP holds.
    recipe = load(ROOT / f"recipes/{technique.replace('data_parallel', 'ddp')}_cifar.py")
    its_args = vars(parsed(recipe, variant.split()))
    recipe.exit_with_error = sys.exit  # which can be caught
    recipe.compute_loss = own.compute_loss
    if own_optimizer:
        recipe.make_optimizer = own.make_optimizer
    of_variant = {name: its_args[name] for name in OF_VARIANT & its_args.keys()}
    return recipe, SimpleNamespace(**its_args | vars(own_args) | of_variant)


def lines(path, flags):
    """Yield the lines of the table for a recipe or a copy of one, with its flags."""
    own = load(path)
    own_args = parsed(own, flags)
    example = next(iter(own.load_data(own_args, Accelerator(cpu=True))[0]))
    model = own.build_model(own_args).to("meta")
    own_optimizer = has_own_optimizer(own)
    gc.disable()  # it would free tensors at random moments
    yield "| recipe | MiB | 16 GB | 24 GB | 80 GB |\n| --- | ---: | ---: | ---: | ---: |"
    for technique, variant in VARIANTS:
        label = f"{technique} {variant}".strip()
        try:
            recipe, args = with_own(technique, variant, own, own_args, own_optimizer)
            cells = row(Training(technique, recipe, args, model, example))
        except (Exception, SystemExit) as error:
            cells = [f"n/a: {' '.join(str(error).split()):.200}"]
        yield f"| {' | '.join([label, *cells])} |"
    yield NOTES


def lines_of_chat(*_):
    """Yield the lines of the table of chat models, as the examples sft and lora train them."""
    sys.path += [str(ROOT / "examples"), str(ROOT / "recipes")]
    import sft

    gc.disable()  # it would free tensors at random moments
    yield f"| recipe | {' | '.join(LLAMAS)} |\n| --- |{' ---: |' * len(LLAMAS)}"
    for technique, variant, dtype, with_lora in CHATS:
        cells = []
        for name in LLAMAS:
            with torch.device("meta"):
                model = llama(name, dtype, with_lora)
            own = SimpleNamespace(compute_loss=sft.compute_loss, make_optimizer=sft.make_optimizer)
            recipe, args = with_own(technique, variant, own, SimpleNamespace(), True)
            example = torch.zeros(1, TOKENS, 2, dtype=torch.int64)
            training = Training(technique, recipe, args, model, example)
            sizes = [training.peak(number) for number in NUMBERS]
            marks = ["**" * (size < 24 * 10**9 - MARGIN) for size in sizes]
            found = zip(sizes, marks, strict=True)
            cells.append(" / ".join(f"{mark}{size / 2**30:.1f}{mark}" for size, mark in found))
        given = f"{technique} {variant} + lora --base-dtype {dtype}".replace("  ", " ")
        given = given if with_lora else f"{technique} {variant}".strip()
        yield f"| {given.removesuffix(' --base-dtype float32')} | {' | '.join(cells)} |"
    yield NOTES_OF_CHAT


def llama(name, dtype, with_lora):
    """Return one of LLAMAS as the examples sft and lora build it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import lora
    from lib.token_losses import with_token_losses

    shape = {"intermediate_size": 8192, "num_key_value_heads": 8, "vocab_size": 128256}
    config = LlamaConfig(tie_word_embeddings=name != "8B", **shape | LLAMAS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model = with_token_losses(model.train())
    return lora.with_lora(model) if with_lora else model


def time_blocks(blocks, inputs):
    """Return the seconds that each block takes forward and backward."""
    seconds = []
    for block in blocks:
        began = time.perf_counter()
        output = block(inputs.clone())  # it may work in place
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        if output.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        inputs = output.detach().requires_grad_(output.requires_grad)
    return seconds


def lines_of_cuts(path, flags):
    """Yield the lines of the table of a pipeline's fastest cuts, for a copy of that recipe."""
    recipe = load(path)
    if not hasattr(recipe, "model_blocks"):
        sys.exit(f"memory: --cuts takes a copy of pipeline_cifar.py, unlike {path}")
    args = parsed(recipe, flags)
    recipe.exit_with_error = sys.exit  # which can be caught
    example = next(iter(recipe.load_data(args, Accelerator(cpu=True))[0]))
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    torch.set_num_threads(args.threads or max(1, CORES // 2))
    blocks = recipe.model_blocks(recipe.build_model(args).to(device))
    passes = {n: [] for n in (2, 4, 8, 16, 32) if args.batch_size % n == 0}
    for chunks in [*passes] * 5:  # in turn: a drift of the machine's speed affects all alike
        inputs, targets = (x[: args.batch_size // chunks].to(device) for x in example)
        pipeline = SimpleNamespace(args=args, accumulation=1, chunk_values=[])
        loss = partial(recipe.Pipeline.loss, pipeline, targets=targets)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            passes[chunks].append(time_blocks([*blocks.values(), loss], inputs))
    cuts = []
    for chunks, times in passes.items():
        seconds = [chunks * min(x) for x in zip(*times, strict=True)]
        for where, split in enumerate(blocks):
            with suppress(SystemExit):  # a stage has no parameters, or both share some
                recipe.cut(blocks, split)
                stages = sum(seconds[:where]), sum(seconds[where:])
                # The faster stage waits while the other one takes its first and its last chunk.
                cuts.append((max(stages) + min(stages) / chunks, stages, split, chunks))
    yield "| fastest first | stages, s | idle | samples/s | computed GiB |\n|" + " --- |" * 5
    model = recipe.build_model(args).to("meta")
    for step, stages, args.split, args.chunks in sorted(cuts)[:5]:
        training = Training("pipeline", recipe, args, model, example, gpus=2)
        peaks = [training.peak(args.batch_size // 2, stage) / 2**30 for stage in (0, 1)]
        times, memory = ("{:.2f} + {:.2f}".format(*pair) for pair in (stages, peaks))
        rates = f"{1 - sum(stages) / step / 2:.0%} | {args.batch_size / step:,.0f}"
        yield f"| --split {args.split} --chunks {args.chunks} | {times} | {rates} | {memory} |"


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--cuts", action="store_true", help="where to cut a pipeline; mine.py: a copy of pipeline")
    add("--chat", action="store_true", help="which chat models fit, with the examples sft and lora")
    add("recipe", nargs="?", default=ROOT / "recipes/ddp_cifar.py", help="file of a recipe's copy")
    add("flags", nargs=argparse.REMAINDER, help="those of the copy")
    args = parser.parse_args()
    table = lines_of_chat if args.chat else lines_of_cuts if args.cuts else lines
    for line in table(args.recipe, args.flags):
        print(line, flush=True)


if __name__ == "__main__":
    main()
