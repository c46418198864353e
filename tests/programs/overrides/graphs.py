"""For copies whose --compile is tested: they print how many graphs were compiled."""

import torch

from ddp_cifar import main

plain_main = main


def main():
    plain_main()
    print("graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
