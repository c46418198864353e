"""For a copy in test_data_parallel.py: a process group of one process. Accelerate makes it under
torchrun and on a GPU."""

from torch import distributed

from data_parallel_cifar import main

plain_main = main


def main():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    plain_main()
    print("open at the end:", distributed.is_initialized())
