# Parts of a copy, not a program: make new COPY=../mine.py WITH=by_length
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on the lines of a text file, in batches of lines of similar lengths.

    python tools/toy.py text
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --text toy/text.txt \\
        --batch-size 64 --epochs 1

The bytes of a line are its tokens, at most --length + 1 of them. The first tenth of the lines is
the test set. The order puts lines of similar lengths into the same global batch: so little of a
batch is padding, and no process waits for another with longer lines.

Group: language. Recipes: ddp, amp, sharded.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from language_model import add_flags, build_model, compute_loss, make_optimizer
from lib.order import Ordered, by_length


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, longest) int64: the tokens of B lines,
    and -100 behind the shorter ones."""
    lines = Path(args.text).read_bytes().splitlines()
    lines = [torch.tensor(list(x[: args.length + 1])) for x in lines if len(x) > 1]
    first = len(lines) // 10
    lengths = torch.tensor([len(x) for x in lines[first:]])
    train_set = Ordered(lines[first:], args.seed, by_length, lengths, args.global_batch_size)

    def pad(batch):
        return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)

    options = {"batch_size": args.batch_size, "collate_fn": pad}
    test_set = sorted(lines[:first], key=len)  # in an evaluation, the order does not matter
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)
