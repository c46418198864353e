"""For copies in test_sharded.py, with BatchNorm and dropout. The environment variable DISTURB says
in JSON which rank is disturbed, in which step, and how. Each rank writes what it has counted."""

import json
import math
import os
import re
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from torch import distributed, nn

from sharded_cifar import RANK, main, train_step

plain_train_step, plain_main = train_step, main
SCATTER = "reduce_scatter_single"
if not hasattr(distributed, SCATTER):  # before torch 2.15
    SCATTER = "reduce_scatter_tensor"
plain_scatter, plain_fsync = getattr(distributed, SCATTER), os.fsync
reduced, computed, passes, disk = [], set(), [], []


def fsync(descriptor):
    disk.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
    plain_fsync(descriptor)


def note_rename(event, arguments):
    if event == "os.rename":
        disk.append(f"rename {Path(arguments[0]).name}")


def build_model(args):
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(16, 8, 3), nn.InstanceNorm2d(8, 1e-5, 0.1, True, True)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.InstanceNorm2d):
            module.register_forward_pre_hook(watch)
    return model


def watch(module, *_):
    computed.add(f"{type(module).__name__.removeprefix('FSDP')} {module.weight.dtype}")
    passes.append(module.training)


def reduce_scatter(*arguments, **options):
    reduced.append(str(options["input"].dtype))
    return plain_scatter(*arguments, **options)


def train_step(run, model, optimizer, scheduler, microbatches):
    rank, step, what = json.loads(os.environ.get("DISTURB", "[0, 0, 0]"))
    microbatches = list(microbatches)
    if (RANK, run.step) == (rank, step):
        if what == "nan":
            microbatches[0][0].fill_(math.nan)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        else:
            sys.addaudithook(partial(kill_at, what))
    return plain_train_step(run, model, optimizer, scheduler, microbatches)


def kill_at(moment, event, arguments):
    if arguments and isinstance(arguments[0], str | Path):
        if re.fullmatch(moment, f"{event} {Path(arguments[0]).name}"):
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    setattr(distributed, SCATTER, reduce_scatter)
    sys.addaudithook(note_rename)
    os.fsync = fsync
    plain_main()
    counted = {"reduced": reduced, "computed": sorted(computed), "passes": sum(passes)}
    counted["disk"] = " ".join(disk)
    directory = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    Path(directory, f"counted.{os.environ['RANK']}").write_text(json.dumps(counted))
