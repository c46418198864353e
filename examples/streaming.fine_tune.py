# Parts of a copy, not a program: make new COPY=../mine.py WITH="fine_tune streaming"
# SPDX-License-Identifier: Apache-2.0
"""Texts in Parquet files."""

import torch
from torch import nn
from transformers import AutoTokenizer

from lib.row_groups import stream


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, at most length + 1) int64: a window of
    the tokens of each text, drawn anew in each epoch, and -100 behind the shorter ones."""
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    end = [tokenizer.eos_token_id]

    def window(row):
        tokens = [*end, *tokenizer(row["text"], add_special_tokens=False)["input_ids"], *end]
        first = int(torch.randint(max(1, len(tokens) - args.length), ()))
        return torch.tensor(tokens[first : first + args.length + 1])

    def pad(batch):
        return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)

    return stream(args, args.text, ["text"], window, window, pad)
