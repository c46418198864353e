# Parts of a copy, not a program: make new COPY=../mine.py WITH="sft streaming"
# SPDX-License-Identifier: Apache-2.0
"""Chats in Parquet files."""

import torch

from lib.chat import chat_tokenizer, pad_chats, samples_of, token_losses
from lib.row_groups import stream


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, longest, 2) int64: the tokens of B
    chats, and their targets, or -100. A row that makes several samples gives one of them, drawn
    anew in each epoch."""
    tokenizer = chat_tokenizer(args, accelerator)

    def sample(row):
        samples = samples_of(tokenizer, row["messages"], args, row.get("tools"))
        # Without an answer within --length: no target, and so the weight 0.
        samples = samples or [torch.tensor([[0, -100]], dtype=torch.int32)]
        return samples[int(torch.randint(len(samples), ()))]

    columns = "messages", "tools"
    args.columns = args.columns or columns[:1]  # name both if there are "tools"
    return stream(args, args.chats, columns, sample, sample, pad_chats)


def compute_loss(model, batch, args):
    """Return the mean loss of each chat's answers, and the number of their tokens as its weight."""
    counted = (batch[..., 1] != -100).sum(1)
    losses = token_losses(model, batch).sum(1)
    return {"loss": losses / counted.clamp(min=1), "weight": counted}
