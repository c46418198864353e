# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, by the chat template of a pretrained model's tokenizer."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer

from ddp_cifar import RANK, exit_with_error, say
from lib.json_lines import read_lines

# Some templates tell the model today's date, which a resumed run has to repeat.
DATE = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}"


def add_chat_flags(parser):
    """Add the flags of a pretrained model and its chat template."""
    parser.add_argument("--base", required=True, help="a directory, or a model's name on the Hub")
    precisions = {"choices": ("float32", "bfloat16"), "default": "float32"}
    parser.add_argument("--base-dtype", help="bfloat16: with lora (float32)", **precisions)
    parser.add_argument("--chat-template", metavar="PATH", help="(that of --base)")
    parser.add_argument("--length", type=int, default=1024, help="most tokens of a chat (1024)")


def chat_tokenizer(args, accelerator):
    """Return the tokenizer of --base, with its chat template. Save it beside what is trained."""
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text("utf-8")
    if not tokenizer.chat_template:
        exit_with_error(f"{args.base} has no chat template: name a file of one by --chat-template")
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        AutoConfig.from_pretrained(args.base).save_pretrained(args.output_dir)
    return tokenizer


def read_chats(path, args, form, make_sample):
    """Return `make_sample` of each line of JSON, without those for which it is None. Exit with an
    error if a line has not this form, or if the chat template does not take it."""
    samples = read_lines(path, path, form, make_sample)
    kept = [sample for sample in samples if sample is not None]
    found = f"{path}: {len(kept)} of {len(samples)} lines have an answer within --length"
    if len(kept) * 9 // 10 < args.global_batch_size:
        exit_with_error(f"{found}: the training set does not fill one batch")
    if len(kept) < len(samples) and RANK == 0:
        say(f"{found}, the others are left out")
    return kept


def tokenized(tokenizer, messages, args, tools=None, first=0):
    """Return (N, 2) int32: each token of a conversation, and its target, which is the next token if
    that is of an answer (of message `first` or later) and of what ends it, or else -100. None if
    there are no targets.

    Few templates mark the answers. So the text of an answer is found by rendering the conversation
    up to it, as for generation, and with it: both must be what the whole begins with."""

    template = DATE + tokenizer.get_chat_template(tools=tools)

    def rendered(end, **options):
        options |= {"tools": tools, "chat_template": template, "tokenize": False}
        return tokenizer.apply_chat_template(messages[:end], **options)

    whole = rendered(None)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    tokens = torch.tensor(encoded["input_ids"])
    begins = torch.tensor(encoded["offset_mapping"])[:, 0]
    targets = torch.full_like(tokens, -100)
    for index, message in enumerate(messages):
        if index < first or message["role"] != "assistant":
            continue
        if index == 0:
            raise ValueError("nothing comes before the answer")
        prompt, answer = rendered(index, add_generation_prompt=True), rendered(index + 1)
        if not (whole.startswith(answer) and answer.startswith(prompt)):
            remedy = "name a file of one that keeps them by --chat-template"
            raise ValueError(f"the chat template changes earlier turns: {remedy}")
        own = (len(prompt) <= begins) & (begins < len(answer))
        targets[own] = tokens[own]
    sample = torch.stack([tokens[:-1], targets[1:]], dim=1)[: args.length].int()
    return sample if (sample[:, 1] != -100).any() else None


def padded(samples):
    """Return (B, longest, 2) int64, with -100 behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100).long()


def token_losses(model, samples):
    """Return the loss of each target in float32: (B, N, 2) in, (B, N) out, with 0 at -100."""
    tokens, targets = samples.unbind(-1)
    logits = model(tokens.clamp(min=0), use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)
