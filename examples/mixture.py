# Parts of a copy, not a program: make new COPY=../mine.py WITH=mixture
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on several texts, mixed by weights.

    python tools/toy.py text
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --mix toy/text.txt:3 toy/code.txt:1 --batch-size 16 --epochs 1

Here three of four sequences are of text.txt, in any part of an epoch, which has as many as all
texts together: a short text comes several times, and of a long one each epoch takes another part.
The last tenth of each text is test data, which is not weighted.

Group: language. Recipes: ddp, amp, sharded.
"""

import numpy
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from language_model import build_model, compute_loss, make_optimizer
from lib.order import Ordered, mixture


class Sequences(Dataset):
    """A text in sequences of `length` + 1 tokens, (length + 1,) int64. A shorter last one is left
    out. The next one begins with the last token of the one before, which had no target yet."""

    def __init__(self, tokens, length):
        self.tokens = tokens
        self.length = length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        begin = index * self.length
        return torch.tensor(self.tokens[begin : begin + self.length + 1]).long()


def add_flags(parser):
    add = parser.add_argument
    add("--mix", nargs="+", required=True, metavar="PATH:WEIGHT", help="texts, and their weights")
    add("--length", type=int, default=256, help="tokens of a sequence (256)")
    parser.set_defaults(lr=3e-3)


def load_data(args, accelerator):
    train_sets, test_sets, weights = [], [], []
    for path, _, weight in (source.rpartition(":") for source in args.mix):
        weights.append(float(weight))
        tokens = numpy.memmap(path, numpy.uint8, "r")  # its bytes; they stay on the disk
        first = len(tokens) * 9 // 10
        train_sets.append(Sequences(tokens[:first], args.length))
        test_sets.append(Sequences(tokens[first:], args.length))
    sizes = [len(source) for source in train_sets]
    order = mixture, sizes, weights, sum(sizes)
    train_set = Ordered(ConcatDataset(train_sets), args.seed, *order)
    test_set = ConcatDataset(test_sets)
    train_loader = DataLoader(train_set, args.batch_size, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)
