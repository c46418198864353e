"""Run by test_sharded.py, as processes of forked.py: sharded_killed.py RUN.json, as in
disturbed_training.py, with `"kill": [RANK, MOMENT]`: what this process does to checkpoints on the
disk for the MOMENT-th time is its last. It also says when another process begins to save before the
main process has removed what an earlier save left."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import disturbed_training

run = json.loads(sys.argv[1])
rank, moment = run["kill"]
moments = 0
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def count():
    global moments
    if moments == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    moments += 1


def audit(event, arguments):
    if event in EVENTS and any(
        part in str(arguments[0]) for part in ("checkpoint.tmp", "deleted.tmp", "step-")
    ):
        count()


def counted_fsync(descriptor, fsync=os.fsync):
    count()
    fsync(descriptor)
    count()


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
