"""For copies to which something happens, with BatchNorm and dropout. DISTURB in the environment is
JSON, {rank: [step, what]}; "1.2" is rank 1 after two restarts by the launcher. Each rank notes its
batches, and what it has put on the disk, in order."""

import ctypes
import hashlib
import json
import os
import re
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

from torch import nn

from ddp_cifar import RANK, main, train_step

plain_step, plain_main, plain_fsync = train_step, main, os.fsync
RESTARTS = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
NAME = f"{RANK}.{RESTARTS}".removesuffix(".0")
WHEN, WHAT = json.loads(os.environ.get("DISTURB", "{}")).get(NAME, (0, None))
disk = []
synced = set()


def build_model(args):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.InstanceNorm2d(32, 1e-5, 0.1, True, True)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def train_step(run, model, optimizer, scheduler, microbatches):
    assert all(module.training for module in model.modules()), "after an evaluation, too"
    microbatches = list(microbatches)
    with open(run.directory / f"batches.{RANK}", "a") as file:
        for images, labels in microbatches:
            content = images.numpy().tobytes() + labels.numpy().tobytes()
            file.write(hashlib.sha256(content).hexdigest() + "\n")
    if run.step == WHEN:
        disturb(run)
    return plain_step(run, model, optimizer, scheduler, microbatches)


def disturb(run):
    if isinstance(WHAT, int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (WHAT, WHAT))
    elif WHAT == "read-only":
        run.directory.chmod(0o555)
        # Root may write everywhere, but not without its capabilities.
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
    elif WHAT == "stall":
        time.sleep(1000)
    elif WHAT.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[WHAT])
        while not run.watcher.received:  # by a thread, which may have to wait for a core
            time.sleep(0.01)
    else:
        sys.addaudithook(partial(kill_at, WHAT))


def kill_at(moment, event, arguments):
    if arguments and isinstance(arguments[0], str | Path):
        if re.fullmatch(moment, f"{event} {Path(arguments[0]).name}"):
            os.kill(os.getpid(), signal.SIGKILL)


def fsync(descriptor):
    if os.fstat(descriptor).st_size:  # a small one may still be in Python's buffer
        disk.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
    plain_fsync(descriptor)
    synced.add(descriptor)


def note(event, arguments):
    if event in ("os.rename", "os.remove"):
        disk.append(f"{event[3:]} {Path(arguments[0]).name}")


def main():
    if RANK == 0 and RESTARTS != "0":
        time.sleep(3)  # so that the others find what the dead ranks left in the launcher's store
    sys.addaudithook(note)
    os.fsync = fsync
    plain_main()
    directory = Path(sys.argv[sys.argv.index("--output-dir") + 1]).absolute()
    assert directory not in [Path(f"/proc/self/fd/{x}").resolve() for x in synced]
    Path(directory, f"disk.{RANK}").write_text(" ".join(disk))
