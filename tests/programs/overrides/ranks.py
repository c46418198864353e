"""For copies in test_ranks.py: the second rank has MORE flags, and FEWER samples."""

import os
import sys

from ddp_cifar import main, synthetic_images

plain_images, plain_main = synthetic_images, main


def main():
    if os.environ["RANK"] == "1":
        sys.argv += os.environ["MORE"].split()
    plain_main()


def synthetic_images(samples, seed):
    images, labels = plain_images(samples, seed)
    fewer = os.environ["RANK"] == "1" and int(os.environ["FEWER"])
    return images[fewer:], labels[fewer:]
