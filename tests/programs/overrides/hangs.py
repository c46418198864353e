"""For copies in test_hangs.py: one rank stalls, or is slow."""

import os
import queue
import re
import signal
import sys
import threading
import time
import weakref
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader

from ddp_cifar import choose_device, compute_loss, load_data

STALLING = 0  # the rank
LONGER = 0  # seconds, than the timeout
sleep = partial(time.sleep, 1000)
stop = partial(signal.raise_signal, signal.SIGSTOP)
stall = sleep
plain_choice, plain_load, plain_loss = choose_device, load_data, compute_loss
calls, evaluations = count(1), count(1)


def here(call):
    return int(os.environ.get("RANK", 0)) == STALLING and next(calls) == call


# A function of the copier's own is not taken for waiting or saving, whatever its name is.
def log(call):
    if here(call):
        stall()


def loss_that_stalls(model, batch, args):
    log(17)  # in training, also of nine ranks
    return plain_loss(model, batch, args)


def evaluation_that_stalls(model, batch, args):
    model.training or log(2)
    return plain_loss(model, batch, args)


class Stalling(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        if here(100):
            stall()
        return super().__getitem__(index)


def data_of_a_worker_that_stalls(args, accelerator):
    data = Stalling(torch.randn(320, 3, 8, 8), torch.zeros(320, dtype=torch.int64))
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=1)
    return loader, DataLoader(data, args.batch_size)


group = None


def loss_with_a_collective_of_one_rank(model, batch, args):
    global group
    group = group or distributed.new_group(backend="gloo")
    if here(9):
        distributed.barrier(group)
    return plain_loss(model, batch, args)


# A device that executes all-reduces in order, four in a step, while the host runs ahead into the
# next step: there it waits for its queue in a function of its own.
device = queue.Queue(maxsize=5)
started = threading.Event()


def execute():
    group = distributed.new_group(backend="gloo")
    started.set()
    while True:
        distributed.all_reduce(device.get(), group=group)


def launch(values):
    if not started.is_set():
        threading.Thread(target=execute, daemon=True).start()
        started.wait()
    while device.full():
        time.sleep(0.01)
    device.put(values)


def step_of_a_device(run, model, optimizer, scheduler, microbatches):
    if here(9):
        stall()
    for _ in range(4):
        launch(torch.zeros(1))
    values = [{"loss": torch.zeros(len(batch[1]))} for batch in microbatches]
    return values, None


def choice_that_stalls(args):
    if here(1):
        stall()
    return plain_choice(args)


def slow_data(args, accelerator):
    time.sleep(LONGER)
    sys.addaudithook(slow_disk)
    return plain_load(args, accelerator)


def slow_disk(event, arguments):
    """Take long for the first checkpoint, and for the last file, when the weights are saved and the
    other rank has left: a stall is named half a timeout later."""
    name = Path(arguments[1]).name if event == "os.rename" else ""
    if re.fullmatch("step-0*10.pt|summary.json", name):
        time.sleep(2 * LONGER if name == "summary.json" else LONGER)


held = weakref.ref(set())  # which is gone


def slow_evaluation(model, batch, args):
    global held
    assert held() is None, "the tensors of a function that has returned"
    tensor = torch.empty(1)
    held = weakref.ref(tensor)
    time.sleep(0 if model.training else LONGER / 5)
    return plain_loss(model, batch, args)


def slow_metrics(outputs, args):
    time.sleep(LONGER if next(evaluations) == 1 else 0)
    return {}


def no_compilation(*_, **__):
    pass


def loss_that_compiles(model, batch, args):
    if here(1):
        time.sleep(LONGER)
    return plain_loss(model, batch, args)
