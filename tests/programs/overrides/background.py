"""For copies in test_background_saves.py. A thread begins to write after the next step, and says in
which step the training is. The environment says which rank is stopped in which step, whose disk is
slow or full, whose write raises an error, and that no memory is left."""

import json
import os
import resource
import signal
import time

from background_saves import available_memory
from ddp_cifar import RANK, main, train_step

plain_step, plain_main, plain_fsync = train_step, main, os.fsync
plain_memory = available_memory
disturbances = json.loads(os.environ.get("DISTURB", "{}"))
runs = []


def is_due(name, step):
    return disturbances.get(name, [])[:2] == [RANK, step]


def train_step(run, *arguments):
    runs[:] = [run]
    if is_due("stopped", run.step):
        os.kill(os.getpid(), signal.SIGTERM)
    if is_due("full", run.step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    return plain_step(run, *arguments)


def late_save(checkpoints, step, metrics):
    (run,) = runs
    ends = time.monotonic() + 1
    while not (run.is_paused and (run.step > step or time.monotonic() > ends)):
        if run.step > step + 1:
            break
        time.sleep(0.01)
    print(f"writes {step} in {run.step}", flush=True)
    if is_due("raises", step):
        raise RuntimeError("no such device")
    return plain_save(checkpoints, step, metrics)


def fsync(descriptor):
    if runs and is_due("slow", runs[0].step):
        time.sleep(disturbances.pop("slow")[2])
    plain_fsync(descriptor)


def available_memory():
    return 1000 if disturbances.get("no memory") == RANK else plain_memory()


def main():
    global plain_save
    plain_save, Checkpoints.save = Checkpoints.save, late_save  # noqa: F821
    os.fsync = fsync
    plain_main()
