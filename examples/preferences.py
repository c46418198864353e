# Parts of a copy, not a program: make new COPY=../mine.py WITH=preferences
# SPDX-License-Identifier: Apache-2.0
"""Tune a chat model on preferences, pairs of a chosen and a rejected answer: DPO.

    python tools/toy.py preferences
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/llama \\
        --pairs toy/preferences.jsonl --epochs 3 --batch-size 8 --lr 1e-3

With a model of the Hub and your own pairs.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base HuggingFaceTB/SmolLM2-135M-Instruct

The loss is that of Rafailov et al. 2023, arXiv:2305.18290. In each row of --pairs, "chosen" and
"rejected" are texts or lists of messages, which may repeat the prompt or its end. "prompt" is a
text or a list of messages. --prompt, --chosen and --rejected are other names of these columns.
--test names other rows; without it the last tenth is the test set. A log-probability is the sum
over the answers' tokens, without the messages that both begin with.

The reference is the model before its first step; with lora it is --base. A new run first computes
the reference's log-probabilities of all answers, in one pass, and saves them in its checkpoints. So
no second model is in memory, and a resumed run skips the pass. Ctrl-C in this pass saves nothing.
The default --lr is 1e-6; with lora 1e-5 is usual. --base-dtype, and how to chat with the trained
model: see the example sft.

Group: language. Recipes: ddp, amp, sharded.
"""

import json
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lib.chat import TARGETS, add_chat_flags, chat_tokenizer, pad_chats, read_chats, samples_of
from lib.once import made_once, tokenizer_key
from lib.order import Ordered, by_length
from lib.pairs import Pairs, Reference, conversation, log_probabilities
from lib.turns import check_keys
from sft import build_model, make_optimizer


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add_chat_flags(parser)
    parser.add_argument("--pairs", default="pairs.jsonl", help="a file, or a dataset (pairs.jsonl)")
    for name in ("prompt", "chosen", "rejected"):
        parser.add_argument(f"--{name}", default=name, help=f"the column of this name ({name})")
    parser.add_argument("--beta", type=float, default=0.1, help="higher: nearer to --base (0.1)")
    parser.set_defaults(lr=1e-6, batch_size=2, epochs=1)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, 2, longest, 2) int64: the tokens of B
    chosen and rejected conversations, and their targets, or -100; and of (B, 2) float32."""
    tokenizer = chat_tokenizer(args, accelerator)

    def samples(row):
        check_keys(row, (args.prompt, args.chosen, args.rejected, "tools", "messages"))
        answers = row[args.chosen], row[args.rejected]
        both = [conversation(row.get(args.prompt) or [], answer) for answer in answers]
        same = [x == y for x, y in zip(*both, strict=False)]
        first = [*same, False].index(False)
        if first >= min(map(len, both)):  # no answer is another one
            return []
        pair = [samples_of(tokenizer, x, args, row.get("tools"), first) for x in both]
        if max(map(len, pair)) > 1:
            raise ValueError("several answers differ, and the chat template changes earlier ones")
        if not all(pair):
            return []
        return [nn.utils.rnn.pad_sequence([x for [x] in pair], padding_value=-100)]

    def collate(batch):
        pairs, reference = zip(*batch, strict=True)
        return pad_chats(pairs).transpose(1, 2), torch.stack(reference)

    columns = args.prompt, args.chosen, args.rejected
    form = json.dumps(dict.fromkeys(columns, "..."))
    key = tokenizer_key(tokenizer), args.length, columns
    read = partial(made_once, args, form=form, make=samples, key=key, counts=TARGETS)
    train, test = read_chats(args.pairs, args, read)
    train_set = Ordered(Pairs(train), args.seed, by_length, train.lengths, args.global_batch_size)
    options = {"batch_size": args.batch_size, "collate_fn": collate}
    return DataLoader(train_set, drop_last=True, **options), DataLoader(Pairs(test), **options)


def compute_loss(model, batch, args):
    """Return the loss of each pair, and by how much more than the reference the model prefers the
    chosen answer."""
    sequences, reference = batch
    rewards = args.beta * (log_probabilities(model, sequences) - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    return {"loss": -F.logsigmoid(margin), "accuracy": margin > 0, "margin": margin}
