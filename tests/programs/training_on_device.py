"""A whole training on CPU or GPU. Run by test_gpu.py, as a process of forked.py:
training_on_device.py RUN.json

RUN.json is as in disturbed_training.py, and besides: `deterministic` algorithms; `fp16` on CPU,
with the scaler of a GPU; `when` it gets a signal, with all that it has started: in its first
"compilation", or "evaluation". Writes what it saw at its end to DIRECTORY/seen.RANK.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import disturbed_training
import torch
from conftest import ddp_on_one_rank
from torch import distributed, nn

run = json.loads(sys.argv[1])
ddp_was_made = False


class DDP(nn.parallel.DistributedDataParallel):
    """Notes that it was made."""

    def __init__(self, *arguments, **options):
        global ddp_was_made
        super().__init__(*arguments, **options)
        ddp_was_made = True


def has_cuda_context():
    """Whether CUDA's driver has a context in this process; asking makes none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    flags, active, devices = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGetCount(
        ctypes.byref(devices)
    ):  # an error: it was never initialised, or sees no device
        return False
    for device in range(devices.value):
        assert (
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            == 0
        )
        if active.value:
            return True
    return False


def observe():
    from torch._dynamo.utils import counters

    seen = {
        "ddp": ddp_was_made,
        "context": has_cuda_context(),
        "backend": distributed.is_initialized() and distributed.get_backend(),
        "graphs": counters["stats"]["unique_graphs"],
        "skipped": counters["inductor"]["cudagraph_skips"],
    }
    if seen["graphs"] and run["device"] == "cuda":
        from torch._inductor.cudagraph_trees import get_manager

        seen["cuda_graphs"] = (
            get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None
        )
    Path(run["directory"], f"seen.{os.environ.get('RANK', 0)}").write_text(json.dumps(seen))


def interrupt(name):
    os.setpgid(0, 0)  # not pytest's group; what this process starts from now on is in it

    def once(*_):
        nonlocal name
        if name:
            signum, name = signal.Signals[name], None
            os.killpg(0, signum)

    return once


def prepare(recipe):
    make_accelerator = recipe.make_accelerator
    finish = recipe.Metrics.finish
    when, name = run.get("when", (None, None))
    if when == "compilation":
        from torch._dynamo.callback import on_compile_start

        train_step = recipe.train_step

        def watched(*arguments):  # what compiled before, for an evaluation, is not meant
            recipe.train_step = train_step
            on_compile_start(interrupt(name))
            return train_step(*arguments)

        recipe.train_step = watched
    if when == "evaluation":
        once, evaluate = interrupt(name), recipe.evaluate
        recipe.evaluate = lambda *arguments: (once(), evaluate(*arguments))[1]

    def prepared_accelerator(*arguments):
        accelerator = make_accelerator(*arguments)
        if run.get("deterministic"):
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        if run.get("fp16") and run["device"] == "cpu":
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
        return accelerator

    def observed_finish(*arguments, **more):
        observe()
        finish(*arguments, **more)

    recipe.make_accelerator = prepared_accelerator
    recipe.Metrics.finish = observed_finish
    ddp_on_one_rank()
    torch.nn.parallel.DistributedDataParallel = DDP
    if run["device"] == "cpu":
        if run.get("fp16"):
            recipe.choose_precision = lambda args: ("fp16", "by the test")
        # What comes before the compiler proper, which takes half a minute on CPU.
        nn.Module.compile = lambda module, mode, own=nn.Module.compile: own(
            module, backend="aot_eager"
        )


disturbed_training.train(run, prepare)
