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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

path, device, precision = sys.argv[1:]
cuda = device == "cuda"
recipe = load("recipes/amp_cifar.py")
flags = "--data synthetic --model simple_cnn --batch-size 2 --log-every 99 --precision".split()
sys.argv = [sys.argv[0], *flags, precision, *["--cpu"] * (not cuda)]
args = recipe.parse_args("", recipe.add_technique_flags, recipe.add_flags)
args.output_dir = Path(path).stem  # two runs share the working directory


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        read = function == torch.ops.aten._local_scalar_dense.default
        self.count += read and not arguments[0].is_shared()  # never on a GPU: a dataset's epoch
        return function(*arguments, **(options or {}))


def waits(function):
    with Reads() as reads, warnings.catch_warnings(record=True) as said:
        if cuda:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        function()
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)
    return reads.count


run = recipe.Run(args, precision)
accelerator = run.accelerator
if precision == "fp16" and not cuda:  # as on a GPU
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")
run.prepare_data(recipe.load_data(args, accelerator))
steps = run.steps()
# A CPU without fp16 takes a second for a step of a recipe's model.
model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10))
optimizer, scheduler = recipe.make_optimizer(model, args, 100)
optimizer._step_supports_amp_scaling = False  # as amp does
model, optimizer = accelerator.prepare(model, optimizer)
training = [run, model, optimizer, scheduler]
run.scheduler = scheduler
run.step = 0
run.metrics = metrics = SimpleNamespace(names=[], sums=0, bar=0, timed_next=next)
metrics.progress = SimpleNamespace(advance=lambda bar: None)


def three_steps():
    for _ in range(3):
        values, _ = recipe.train_step(*training, next(steps))
        recipe.Metrics.add(metrics, values)


three_steps()  # the first ones set up much
answer = {"three steps": waits(three_steps), "a line": waits(lambda: metrics.sums.sum().item())}
if accelerator.is_main_process:
    Path(path).write_text(json.dumps(answer))
accelerator.wait_for_everyone()
training.clear()
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
