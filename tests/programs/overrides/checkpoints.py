"""For copies in test_checkpoints.py: they say which checkpoint they read. The environment variable
FAILS is a rank that cannot, by an ERROR, LATER the default of another flag; with OWN_DISKS each
rank has an output directory of its own."""

import builtins
import os
import sys

from ddp_cifar import RANK, add_flags, log_line, main, read_file

plain_read, plain_flags, plain_main = read_file, add_flags, main


def read_file(path):
    log_line(f"rank {RANK} reads {path}")
    if os.environ["RANK"] == os.environ.get("FAILS"):
        raise vars(builtins)[os.environ["ERROR"]]("Stale file handle")
    return plain_read(path)


def add_flags(parser):
    plain_flags(parser)
    if "LATER" in os.environ:
        parser.add_argument("--later", default=os.environ["LATER"])


def main():
    if "OWN_DISKS" in os.environ:
        sys.argv[-1] += os.environ["RANK"]
    plain_main()
