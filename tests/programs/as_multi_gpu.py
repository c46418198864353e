"""Runs a script as the one rank of a process group that takes itself for one of GPUs, on CPU:

    as_multi_gpu.py SCRIPT FLAGS...

Accelerate then does what it does on one GPU: it does not wrap the model in DDP. Run by
test_gpu_report.py, as a process of forked.py.
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate import Accelerator, utils
from accelerate.state import PartialState

made = Accelerator.__init__


def init(self, *arguments, **options):
    made(self, *arguments, **options)
    assert self.distributed_type == utils.DistributedType.MULTI_CPU
    for state in (self.state._shared_state, PartialState._shared_state):
        state["distributed_type"] = utils.DistributedType.MULTI_GPU


Accelerator.__init__ = init
os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP takes no index of a GPU for a CPU's model
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
