# Parts of a copy, not a program: make new COPY=../mine.py WITH=language_model
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on the bytes of a text file.

    python tools/toy.py text
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --text toy/text.txt \\
        --epochs 1 --batch-size 16

The bytes of the file are the tokens, and its last tenth is the test set. Every token counts once,
however a batch is divided: "weight" is the number of a sequence's tokens. At the end, Accelerate
prints "Removed shared tensor": the weights are tied.

Group: language. Recipes: ddp, amp, sharded.
"""

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    parser.add_argument("--text", default="text.txt", help="a file of any kind (text.txt)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (256)")
    parser.set_defaults(lr=3e-3)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, length + 1) int64: the tokens, and -100
    behind the end of the text."""
    tokens = numpy.memmap(args.text, numpy.uint8, "r")  # stays on the disk
    starts = range(0, len(tokens) - 1, args.length)  # a dataset whose samples are positions

    def read(batch):
        sequences = [torch.tensor(tokens[i : i + args.length + 1]).long() for i in batch]
        return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)

    train, test = starts[: len(starts) * 9 // 10], starts[len(starts) * 9 // 10 :]
    options = {"batch_size": args.batch_size, "collate_fn": read}
    return DataLoader(train, shuffle=True, drop_last=True, **options), DataLoader(test, **options)


def build_model(args):
    """Return the model, on the CPU."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, tie_word_embeddings=True, **sizes)
    return AutoModelForCausalLM.from_config(config)


def compute_loss(model, batch, args):
    """Return the mean loss of each sequence's tokens, and their number as its weight."""
    inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits = model(inputs, use_cache=False).logits
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # 0 at -100
    counted = (targets != -100).sum(1)
    return {"loss": losses.sum(1) / counted, "weight": counted}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate, whose peak is `--lr`
    at any batch size."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps + 1, anneal_strategy="linear", cycle_momentum=False
    )
    return optimizer, schedule
