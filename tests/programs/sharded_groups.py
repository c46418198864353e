"""Run by test_sharded.py, as four processes of forked.py: sharded_groups.py ANSWER.json

Writes the timeouts of all process groups, in seconds; how many groups of parameters ResNet-50 has
in bf16, and when norms are in groups of their own, as before torch 2.15; how many then a model has
in which a norm is a unit; how far apart the losses and gradients of both ways are, in a small model
with BatchNorm; whether all get what was built of an odd model; and whether shards are written by
the loader that needs pinned memory, where there seem to be GPUs.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import utils
from conftest import load
from disturbed_training import build_model
from torch import distributed, nn
from torch.distributed import distributed_c10d, fsdp
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import MixedPrecisionPolicy

recipe = load("recipes/sharded_cifar.py")
path = Path(sys.argv[1])
args = SimpleNamespace(
    model="resnet50",
    stem="imagenet",
    weights=None,
    precision="bf16",
    replicas=1,
    activation_checkpointing=False,
    cpu_offload=False,
    sync_each_batch=False,
    cpu=True,
    seed=0,
    threads=1,
    hang_timeout=600.0,
    log_every=1,
    tracker=None,
    output_dir=str(path.parent),
)
accelerator = recipe.make_accelerator(args, "bf16")

recipe.make_mesh(accelerator, args)
recipe.make_mesh(accelerator, SimpleNamespace(**{**vars(args), "replicas": 2}))
# There is no NCCL here: gloo for all that --cpu-offload asks for.
make_groups = distributed.new_subgroups_by_enumeration
distributed.new_subgroups_by_enumeration = lambda ranks, timeout, _: make_groups(ranks, timeout)
recipe.make_mesh(accelerator, SimpleNamespace(**{**vars(args), "cpu_offload": True}))
groups = [group for group in distributed_c10d._world.pg_map if group is not None]
backends = [group._get_backend(torch.device("cpu")) for group in groups]
timeouts = [backend.options._timeout.total_seconds() for backend in backends]


def groups_of_parameters(model):
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return len({id(module._get_fsdp_state()) for module in modules})


def one_pass():
    recipe.seed_rng(0)
    recipe.build_model = build_model
    model = recipe.build_sharded_model(args, accelerator)
    images, labels = recipe.synthetic_images(16, seed=4)
    images = images.permute(0, 3, 1, 2).float().sub(128).div(64)
    recipe.seed_rng(1, accelerator.process_index)
    loss = recipe.mean_loss(recipe.compute_loss(model, (images, labels)))
    loss.backward()
    gradients = [p.grad.full_tensor().flatten() for p in model.parameters()]
    return model, torch.cat([loss.detach()[None], *gradients])


def norms_apart(model):
    options = plain_options(model)
    del options["param_dtype_override_fn"]
    return options


plain_options = recipe.bf16_options
with torch.device("meta"):
    resnets = [recipe.build_model(args) for _ in range(2)]
mesh = recipe.make_mesh(accelerator, args)
recipe.shard(resnets[0], args, mesh)
model, one = one_pass()
if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
    recipe.bf16_options = norms_apart
recipe.shard(resnets[1], args, mesh)
with torch.device("meta"):
    flat = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(7200, 10))
recipe.shard(flat, args, mesh)
_, other = one_pass()


class Masked(nn.Linear):
    def __init__(self, mask):
        super().__init__(8, 8)
        self.register_buffer("mask", mask)


class Odd(nn.Module):
    """Two modules share a buffer, and as a condition it is false."""

    def __init__(self):
        super().__init__()
        mask = torch.rand(8)
        self.layers = nn.Sequential(Masked(mask), Masked(mask))

    def __len__(self):
        return 0


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))


recipe.build_model = lambda args: Odd()
torch.manual_seed(5)
built = tensors(Odd())
torch.manual_seed(5)
odd = tensors(recipe.build_sharded_model(args, accelerator))
got = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in odd.items()}


class SeemsToHaveGpus:
    cuda = SimpleNamespace(is_available=lambda: True)

    def __getattr__(self, name):
        return getattr(torch, name)


def overlapping_loader(*_, **__):
    raise OSError("the overlapping loader was made")


filesystem.torch = SeemsToHaveGpus()
filesystem._OverlappingCpuLoader = overlapping_loader
states = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
checkpoints = recipe.ShardedCheckpoints(accelerator, vars(args), states)
problem = None
try:
    checkpoints.save_shards(path.parent / "shards")
except OSError as error:
    problem = str(error)

answer = {
    "timeouts": timeouts,
    "groups": [groups_of_parameters(model) for model in (*resnets, flat)],
    "largest": other.abs().max().item(),
    "deviation": (one - other).abs().max().item(),
    "saving": problem,
    "odd": [name for name, value in built.items() if not torch.equal(got[name], value)],
}
answers = utils.gather_object([answer])
if accelerator.is_main_process:
    path.write_text(json.dumps(answers))
model = states = checkpoints = None
accelerator.free_memory()
accelerator.end_training()
