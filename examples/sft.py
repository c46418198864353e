# Parts of a copy, not a program: make new COPY=../mine.py WITH=sft
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a chat model on conversations: instruction tuning, with loss on the answers alone.

    python tools/toy.py chats
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/llama \\
        --chats toy/chats.jsonl --epochs 9 --batch-size 16 --lr 3e-3

With a model of the Hub and your own chats.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base HuggingFaceTB/SmolLM2-135M-Instruct

The toy model has random weights: --lr is higher for it. Each row of --chats has "messages", and may
have "tools". --test names other rows; without it the last tenth is the test set. Batches have chats
of similar lengths, and every token of an answer counts once. Chats are cut at --length tokens. If
the template marks answers, by {% generation %}, these are trained. If it writes the last answer
otherwise than earlier ones, such as with its reasoning, each answer is a sample of its own, with
the turns before it. It is an error if the tokens that count, decoded, are not the answer, whole,
and what ends it. A key of a message, or of a row, that nothing reads is one, too.

For a pretrained model --lr 1e-5, the default, is usual; with lora set --lr 2e-4. A run also saves
the tokenizer, config.json and generation_config.json, so that
`transformers.pipeline("text-generation", "runs/mine")([{"role": "user", "content": "3 + 4"}])`
answers. With lora it is `pipeline("text-generation", "runs/mine/adapter", tokenizer="runs/mine")`,
which loads --base and the adapter. With lora, --base-dtype bfloat16 keeps the frozen weights in 16
bits and the trained ones in 32: less memory. Without lora it is an error, because small updates
would be rounded away. A template that names today's date gets a fixed one, so that a resumed run
has the same tokens.

Group: language. Recipes: ddp, amp, sharded.
"""

from functools import partial

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lib.chat import TARGETS, add_chat_flags, chat_tokenizer, pad_chats, read_chats, samples_of
from lib.fine_tuning import make_optimizer
from lib.once import made_once, tokenizer_key
from lib.order import Ordered, by_length
from lib.token_losses import token_losses, with_token_losses
from lib.turns import check_keys


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add_chat_flags(parser)
    parser.add_argument("--chats", default="chats.jsonl", help="a file, or a dataset (chats.jsonl)")
    parser.set_defaults(lr=1e-5, batch_size=4, epochs=3)  # usual for pretrained weights


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, longest, 2) int64: the tokens of B
    chats, and their targets, or -100."""
    tokenizer = chat_tokenizer(args, accelerator)

    def samples(row):
        check_keys(row, ("messages", "tools"))
        return samples_of(tokenizer, row["messages"], args, row.get("tools"))

    form = '{"messages": [{"role": ..., "content": ...}, ...]}'
    key = tokenizer_key(tokenizer), args.length
    read = partial(made_once, args, form=form, make=samples, key=key, counts=TARGETS)
    train, test = read_chats(args.chats, args, read)
    train_set = Ordered(train, args.seed, by_length, train.lengths, args.global_batch_size)
    options = {"batch_size": args.batch_size, "collate_fn": pad_chats}
    # In an evaluation, the order does not matter.
    test_set = test.chosen(test.lengths.argsort(stable=True))
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    dtype = getattr(torch, args.base_dtype)
    if torch.empty(0).is_meta:
        config = AutoConfig.from_pretrained(args.base)
        return with_token_losses(AutoModelForCausalLM.from_config(config, dtype=dtype))
    return with_token_losses(AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype).train())


def compute_loss(model, batch, args):
    """Return the mean loss of each chat's answers, and the number of their tokens as its weight."""
    counted = (batch[..., 1] != -100).sum(1)
    return {"loss": token_losses(model, batch).sum(1) / counted, "weight": counted}
