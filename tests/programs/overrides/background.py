"""For copies in test_background_saves.py, behind disturbed.py. A thread begins to write after the
next step, and says in which step the training is. SLOW in the environment is a rank, a step and the
seconds that a write waits for its disk, RAISES a rank and a step whose write raises an error,
NO_MEMORY a rank that has none left."""

import json
import os
import time

from ddp_cifar import RANK, main, train_step
from lib.memory import available_memory

disturbed_step, disturbed_main, plain_memory = train_step, main, available_memory
slow = json.loads(os.environ.get("SLOW", "[-1, 0, 0]"))
raises = json.loads(os.environ.get("RAISES", "[-1, 0]"))
runs = []


def train_step(run, *arguments):
    runs[:] = [run]
    return disturbed_step(run, *arguments)


def late_save(checkpoints, step, metrics):
    (run,) = runs
    ends = time.monotonic() + 1
    while not (run.is_paused and (run.step > step or time.monotonic() > ends)):
        if run.step > step + 1:
            break
        time.sleep(0.01)
    print(f"writes {step} in {run.step}", flush=True)
    if raises == [RANK, step]:
        raise RuntimeError("no such device")
    return plain_save(checkpoints, step, metrics)


def fsync(descriptor):
    if runs and slow[:2] == [RANK, runs[0].step]:
        slow[0] = -1
        time.sleep(slow[2])
    plain_fsync(descriptor)  # noqa: F821


def available_memory():
    return 1000 if os.environ.get("NO_MEMORY") == str(RANK) else plain_memory()


def main():
    global plain_save
    plain_save, Checkpoints.save = Checkpoints.save, late_save  # noqa: F821
    disturbed_main()
