"""For copies in test_hangs.py: one rank stalls, or is slow."""

import os
import re
import signal
import sys
import time
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


def run_ahead():
    time.sleep(1000)


def step_of_a_device(run, model, optimizer, scheduler, microbatches):
    """Of a GPU, whose host runs ahead into the next step until a queue is full."""
    if here(9):
        stall()
    if run.step == 10:
        run_ahead()
    return [{"loss": torch.zeros(len(batch[1]))} for batch in microbatches], None


def choice_that_stalls(args):
    if here(1):
        time.sleep(2 * LONGER)
        os._exit(7)
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


def slow_evaluation(model, batch, args):
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
