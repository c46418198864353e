"""For copies in test_checkpoints.py and test_sharded.py, with BatchNorm and dropout. DISTURB in the
environment says in JSON which rank is disturbed, in which step, and how. Each rank writes what it
has put on the disk, in order."""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from torch import nn

from ddp_cifar import RANK, main, train_step

plain_step, plain_main, plain_fsync = train_step, main, os.fsync
disk = []


def build_model(args):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.InstanceNorm2d(32, 1e-5, 0.1, True, True)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def train_step(run, model, optimizer, scheduler, microbatches):
    rank, step, what = json.loads(os.environ.get("DISTURB", "[0, 0, 0]"))
    microbatches = list(microbatches)
    if (RANK, run.step) == (rank, step):
        if isinstance(what, int):
            resource.setrlimit(resource.RLIMIT_FSIZE, (what, what))
        elif what == "read-only":
            run.directory.chmod(0o555)
            # Root may write everywhere, but not without its capabilities.
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
        else:
            sys.addaudithook(partial(kill_at, what))
    return plain_step(run, model, optimizer, scheduler, microbatches)


def kill_at(moment, event, arguments):
    if arguments and isinstance(arguments[0], str | Path):
        if re.fullmatch(moment, f"{event} {Path(arguments[0]).name}"):
            os.kill(os.getpid(), signal.SIGKILL)


def fsync(descriptor):
    disk.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
    plain_fsync(descriptor)


def note(event, arguments):
    if event in ("os.rename", "os.remove"):
        disk.append(f"{event[3:]} {Path(arguments[0]).name}")


def main():
    sys.addaudithook(note)
    os.fsync = fsync
    plain_main()
    directory = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    Path(directory, f"disk.{RANK}").write_text(" ".join(disk))
