# Parts of a copy, not a program: make new COPY=../mine.py WITH=background_saves
# SPDX-License-Identifier: Apache-2.0
"""A save stops the training for a copy to host memory; a thread writes the checkpoint.

Files and promises are those of a save in the foreground. One save is in flight at most: the next
one waits for it, and so do the last step, a signal and the end. `save_seconds` says how long the
training stood. A save that fails ends the run by the same line. A process that writes holds a
second copy of its states in host memory; where that does not fit, saves stay in the foreground.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

import sys
import threading
import time
from concurrent import futures
from copy import copy

import torch
from torch import distributed
from torch.distributed.checkpoint import staging
from torch.utils import _pytree as pytree

from ddp_cifar import (
    LOCAL_WORLD_SIZE,
    RANK,
    RANK_AND_HOST,
    TIMEOUT,
    WORLD_SIZE,
    Checkpoints,
    log_line,
)
from lib.memory import available_memory


class BackgroundSaves:
    """The save in flight, and `methods`: those of the recipe, with another `save` and `wait`.

    The thread calls the recipe's own `save`, with copies in place of the states. It has a process
    group of its own: on that of the steps its messages and theirs would be mixed up."""

    def __init__(self, run):
        self.recipes_own = run.methods
        self.methods = {**run.methods, "save": self.save, "wait": self.wait}
        self.group = distributed.new_group(None, TIMEOUT, "gloo") if WORLD_SIZE > 1 else None
        self.all_write = "write" in run.methods  # or else the main process alone
        self.stager = staging.StateDictStager(pin_memory=torch.cuda.is_initialized())
        self.copies = None  # in buffers that the next save fills again
        self.fits = True  # in the memory of each rank
        self.thread = futures.ThreadPoolExecutor(1, "saves")
        self.in_flight = None

    def save(self, checkpoints, step, metrics):
        """Copy the states, and leave the rest to the thread. Return how long that took, in s."""
        began = time.perf_counter()
        self.wait(checkpoints)
        states = checkpoints.collect()
        if self.fits:
            self.copy(states, checkpoints.run.cpu_group)
        run = copy(checkpoints.run)
        run.cpu_group = self.group
        run.methods = {**self.recipes_own, "collect": lambda _: self.copies or states}
        writer = Checkpoints(run, checkpoints.states)
        if not self.fits:
            return writer.save(step, metrics)
        self.in_flight = self.thread.submit(writer.save, step, metrics)
        if step == run.total_steps:
            self.wait(checkpoints)
        return time.perf_counter() - began

    def wait(self, checkpoints):
        """Wait for the save in flight, and raise its error."""
        timeout = checkpoints.run.args.hang_timeout
        while self.in_flight and not futures.wait([self.in_flight], timeout).done:
            (thread,) = [x for x in threading.enumerate() if x.name.startswith("saves")]
            file = sys._current_frames()[thread.ident].f_code.co_filename
            if not file.endswith("distributed_c10d.py"):  # or else it waits for another rank
                log_line(f"{RANK_AND_HOST} has waited {timeout:g} s for the disk, and waits on")
        if self.in_flight:
            self.in_flight.result()
        self.in_flight = None

    def copy(self, states, group):
        """Copy the states, unless the memory of a rank does not suffice."""
        problem = ""
        if self.all_write or RANK == 0:
            try:
                if not self.copies:
                    raise_if_too_large(states, LOCAL_WORLD_SIZE if self.all_write else 1)
                self.copies = self.stager.stage(states, non_blocking=True)
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
            except (MemoryError, RuntimeError) as error:  # torch raises the second one
                problem = f"{error!r:.200} on {RANK_AND_HOST}"
        problems = [problem] * WORLD_SIZE
        if group:
            distributed.all_gather_object(problems, problem, group)
        if problem := next(filter(None, problems), ""):
            self.fits = False
            self.copies = None
            self.stager.close()
            if RANK == 0:
                log_line(
                    f"no memory for a copy of the states: training waits for saves ({problem})"
                )


def raise_if_too_large(states, ranks):
    """Raise MemoryError if twice the states of so many ranks are more than this machine has left:
    the copies, and what it takes to write them."""
    tensors = [x for x in pytree.tree_leaves(states) if torch.is_tensor(x)]
    needed = sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)
    needed *= 2 * ranks
    available = available_memory()
    if needed > available:
        raise MemoryError(f"{needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB")
