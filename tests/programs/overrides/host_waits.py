"""For copies in test_gpu.py: they print how often the host waits for the device in a step. On a GPU
torch says where it synchronises. On CPU, where nothing waits, the values that are read count."""

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_cifar import train_step

uncounted_step = train_step


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        read = function == torch.ops.aten._local_scalar_dense.default
        self.count += read and not arguments[0].is_shared()  # never on a GPU: a dataset's epoch
        return function(*arguments, **(options or {}))


def train_step(run, *arguments):
    cuda = torch.cuda.is_initialized()
    with Reads() as reads, warnings.catch_warnings(record=True) as said:
        if cuda:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        results = uncounted_step(run, *arguments)
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing CUDA operation" in str(warning.message) for warning in said)
    print(f"waits in step {run.step}: {waits if cuda else reads.count}")
    return results
