"""Run by test_gpu.py on each rank: how often does the host wait for the device in a training step?

    host_waits.py ANSWER.json DEVICE PRECISION

On a GPU torch says where it synchronises. On CPU, where nothing waits, this counts the values that
are read. Writes both for three steps, and for one line of metrics, which has to read some.
"""

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import load
from torch.utils._python_dispatch import TorchDispatchMode

path, device, precision = sys.argv[1:]
cuda = device == "cuda"
recipe = load("recipes/amp_cifar.py")
args = SimpleNamespace(data="synthetic", model="simple_cnn", batch_size=2, global_batch_size=4)
vars(args).update(cpu=not cuda, threads=None, tracker=None, hang_timeout=600, log_every=1)
vars(args).update(seed=0, lr=0.1, epochs=1, max_steps=None, output_dir=".", precision=precision)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function in READS
        return function(*arguments, **(options or {}))


def count_on_cpu(function):
    with Reads() as reads:
        function()
    return reads.count


def count_on_gpu(function):
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)


accelerator = recipe.make_accelerator(args, precision)
if precision == "fp16" and not cuda:  # as on a GPU
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")
loaders = recipe.reproducible(recipe.load_data(args, accelerator), 0)
train_loader, _ = accelerator.prepare(*loaders)
steps = recipe.Steps(train_loader, 1, args)
model = recipe.build_model(args)
optimizer, scheduler = recipe.make_optimizer(model, args, 100)
model, optimizer = accelerator.prepare(model, optimizer)
recipe.skip_batchnorm_broadcasts(model)
metrics = SimpleNamespace(names=[], sums=0, bar=0)
metrics.progress = SimpleNamespace(advance=lambda bar: None)
batches = steps.left_in(0)


def three_steps():
    for _ in range(3):
        step, microbatches = next(batches)
        values, _ = recipe.train_step(
            accelerator, model, optimizer, scheduler, microbatches, (0, step), None
        )
        recipe.Metrics.add(metrics, step, values)


count = count_on_gpu if cuda else count_on_cpu
three_steps()  # the first ones set up much
answer = {"three steps": count(three_steps), "a line": count(lambda: metrics.sums.sum().item())}
if accelerator.is_main_process:
    Path(path).write_text(json.dumps(answer))
accelerator.wait_for_everyone()
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
