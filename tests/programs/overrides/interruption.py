"""For copies in tests of interruptions: signals, workers, gates."""

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from ddp_cifar import WORLD_SIZE, compute_loss, log_line, train_step

plain_loss, plain_step = compute_loss, train_step
GATE = os.environ.get("GATE", "0/0")
CONTEXT = "fork"


def data_of_persistent_workers(args, accelerator):
    data = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
    options = {"batch_size": args.batch_size, "num_workers": 1, "persistent_workers": True}
    options["multiprocessing_context"] = CONTEXT
    return DataLoader(data, shuffle=True, drop_last=True, **options), DataLoader(data, **options)


def loss_that_never_ends(model, batch, args):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGQUIT)
    time.sleep(99)


evaluated = 0


def evaluation_that_is_signalled(model, batch, args):
    global evaluated
    if not model.training:
        evaluated += 1
        log_line(f"evaluates batch {evaluated}")
        if evaluated == 2 and os.environ["RANK"] == os.environ.get("SIGNALLED"):
            os.kill(os.getpid(), signal.SIGTERM)
    return plain_loss(model, batch, args)


def slow_upload(tracker):
    if os.environ["RANK"] == "0":
        time.sleep(12)


def step_under_nohup(run, *arguments):
    if run.step == 2:
        time.sleep(1.5)  # the Watcher looks for a launcher each second
    if run.step in (2, 5):
        os.kill(os.getpid(), signal.SIGHUP if run.step == 2 else signal.SIGTERM)
    while run.step == 5 and not run.watcher.received:  # its thread may have to wait for a core
        time.sleep(0.01)
    return plain_step(run, *arguments)


def slow_step(run, *arguments):
    time.sleep(1.5)
    return plain_step(run, *arguments)


def step_at_a_gate(run, *arguments):
    """With GATE=2/8: in the eighth step of two ranks since their start make a file, and wait for a
    signal, or until there is another file."""
    ranks, step = map(int, GATE.split("/"))
    if (WORLD_SIZE, run.step - run.resumed_from) == (ranks, step):
        Path(run.directory, f"gate-{ranks}").touch()
        while not (run.watcher.received or Path(run.directory, "open").exists()):
            time.sleep(0.05)
    return plain_step(run, *arguments)
