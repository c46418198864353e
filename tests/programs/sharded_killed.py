"""Run by test_sharded.py, as processes of forked.py: sharded_killed.py RUN.json, as in
disturbed_training.py, with `"kill": [RANK, MOMENT, N]`: the N-th time that this process is about to
do to checkpoints on the disk what MOMENT, a regular expression, says, is its last. It also says
when another process begins to save before the main process has removed what an earlier save left.

A moment is "EVENT FILE", by Python's audit events; "fsync FILE" and "fsynced FILE" are before and
after that, of what was opened or renamed last."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import disturbed_training

run = json.loads(sys.argv[1])
rank, wanted, times = run["kill"]
latest = None
EVENTS = {"open", "os.mkdir", "os.rename", "os.rmdir"}


def pass_moment(event):
    global times
    times -= bool(re.fullmatch(wanted, f"{event} {latest}"))
    if times == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def audit(event, arguments):
    global latest
    if event in EVENTS and any(
        part in str(arguments[0]) for part in ("checkpoint.tmp", "deleted.tmp", "step-")
    ):
        latest = Path(os.fspath(arguments[0])).name
        pass_moment(event)


def counted_fsync(descriptor, fsync=os.fsync):
    pass_moment("fsync")
    fsync(descriptor)
    pass_moment("fsynced")


def watch_order(event, arguments):
    if event == "shutil.rmtree" and os.environ["RANK"] == "0":
        time.sleep(0.05)
    elif (
        event == "os.mkdir"
        and "checkpoint.tmp" in str(arguments[0])
        and os.environ["RANK"] != "0"
        and rank == 0
    ):
        if files := [name for _, _, names in os.walk(arguments[0]) for name in names]:
            print("saved over the remains of another save:", *files)


recipe = disturbed_training.load("recipes/sharded_cifar.py")
checkpoints = recipe.ShardedCheckpoints.__new__(recipe.ShardedCheckpoints)
for path in Path(run["directory"]).glob("step-*"):
    checkpoints.read(path)  # raises an error if it is not whole
sys.addaudithook(watch_order)
if os.environ.get("RANK", "0") == str(rank):
    os.fsync = counted_fsync
    sys.addaudithook(audit)
disturbed_training.train(run)
