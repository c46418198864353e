# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, by the chat template of a pretrained model's tokenizer."""

import re
import shutil
from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template

from ddp_cifar import RANK, exit_with_error, log_line
from lib.json_lines import read_lines

DATE = datetime(2024, 7, 26)  # for templates that tell the model today's


def add_chat_flags(parser):
    """Add the flags of a pretrained model and its chat template."""
    parser.add_argument("--base", required=True, help="a directory, or a model's name on the Hub")
    precisions = {"choices": ("float32", "bfloat16"), "default": "float32"}
    parser.add_argument("--base-dtype", help="bfloat16: with lora (float32)", **precisions)
    parser.add_argument("--chat-template", metavar="PATH", help="(that of --base)")
    parser.add_argument("--length", type=int, default=1024, help="most tokens of a chat (1024)")
    parser.set_defaults(clip_norm=1.0)


def chat_tokenizer(args, accelerator, kind=AutoTokenizer):
    """Return the tokenizer of --base, or its processor, if that is the `kind`, with its chat
    template. Save it beside what is trained."""
    tokenizer = kind.from_pretrained(args.base)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text("utf-8")
    if not tokenizer.chat_template:
        exit_with_error(f"{args.base} has no chat template: name a file of one by --chat-template")
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        AutoConfig.from_pretrained(args.base).save_pretrained(args.output_dir)
        name = "generation_config.json"  # it may name more tokens that end an answer
        if path := cached_file(args.base, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(path, Path(args.output_dir, name))
    return tokenizer


def read_chats(path, args, form, make_samples):
    """Return `make_samples` of all lines of JSON: a list for training, and one of the last tenth of
    the lines, for the test. Lines without samples are left out. Exit with an error if a line has
    not this form, or if the chat template does not take it."""
    lines = read_lines(path, path, form, make_samples)
    kept = [samples for samples in lines if samples]
    found = f"{path}: {len(kept)} of {len(lines)} lines have an answer within --length"
    train, test = kept[: len(kept) * 9 // 10], kept[len(kept) * 9 // 10 :]
    if len(train) < args.global_batch_size:
        exit_with_error(f"{found}: the training set does not fill one batch")
    if len(kept) < len(lines) and RANK == 0:
        log_line(f"{found}, the others are left out")
    return [[sample for samples in part for sample in samples] for part in (train, test)]


def template_of(tokenizer, tools=None):
    """Return the chat template of a tokenizer. Where it names today's date, in any form, it names a
    fixed one: a resumed run has to have the same tokens."""
    template = tokenizer.get_chat_template(tools=tools)
    call = r"""strftime_now\(\s*(['"])(.*?)\1\s*\)"""
    return re.sub(call, lambda found: repr(DATE.strftime(found[2])), template)


def with_text(message):
    """Return a message whose content is a text: parts are joined. Beside tool calls it may be
    missing. Raise an error for all else: each template would write it in its own way."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {content!r:.80}, which is no text")
    return {**message, "content": content}


def in_common(one, other):
    """Return how many characters two texts have in common, up to their first difference."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class Chat:
    """A conversation, as its chat template writes it."""

    def __init__(self, tokenizer, messages, tools):
        self.tokenizer = tokenizer
        self.messages = [with_text(message) for message in messages]
        self.options = {"chat_template": template_of(tokenizer, tools), "tools": tools}
        self.marks = re.search(r"\{%-?\s*generation\s*-?%\}", self.options["chat_template"])

    def text(self, end=None, prompt=False):
        """Return the text of the messages before `end`, with a `prompt` to go on."""
        options = {**self.options, "tokenize": False, "add_generation_prompt": prompt}
        return self.tokenizer.apply_chat_template(self.messages[:end], **options)

    def answer(self, index):
        """Return the text up to the end of an answer, and where in it the answer begins: where it
        is no longer the prompt's. A prompt may open a thought that the answer has not."""
        before, prompt, text = self.text(index), self.text(index, prompt=True), self.text(index + 1)
        begin = in_common(prompt, text)
        if begin < in_common(before, prompt):
            remedy = "name a file of one that keeps them by --chat-template"
            raise ValueError(f"the chat template changes what comes before an answer: {remedy}")
        return text, begin

    def samples(self, answers):
        """Return the samples with these answers."""
        whole = self.text()
        if self.marks:
            return [self.sample(whole, self.marked_spans(answers[0]))]
        found = [self.answer(index) for index in answers]
        if all(whole.startswith(text) for text, _ in found):
            return [self.sample(whole, [(begin, len(text)) for text, begin in found])]
        return [self.sample(text, [(begin, len(text))]) for text, begin in found]

    def sample(self, text, spans):
        """Return the tokens of a text, and those of these (begin, end) as targets: (N, 2) int32."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        own = tokens_in(encoded["offset_mapping"], spans)
        return shifted(encoded["input_ids"], own)

    def marked_spans(self, first):
        """Return the (begin, end) in the whole text that the template marks, from an answer on."""
        options = {**self.tokenizer.special_tokens_map, **self.options}
        options["return_assistant_tokens_mask"] = True
        _, [marked] = render_jinja_template([self.messages], **options)
        least = in_common(self.text(first, prompt=True), self.text())
        return [(max(begin, least), end) for begin, end in marked if end > least]


def tokens_in(offsets, spans):
    """Return which tokens lie in one of these (begin, end), if only in part: (N,) bool."""
    begins, ends = torch.as_tensor(offsets).T
    inside = [(begins < end) & (begin < ends) for begin, end in spans]
    return torch.stack([begins < 0, *inside]).any(0)


def shifted(tokens, own):
    """Return tokens, and the next one of each if that is its `own`, or else -100: (N, 2) int32."""
    tokens = torch.tensor(tokens)
    return torch.stack([tokens[:-1], tokens.where(own, -100)[1:]], dim=1).int()


def answers_in(messages, first=0):
    """Return the indices of the assistant's messages, from message `first` on."""
    roles = [message["role"] for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant" and i >= first]
    if not answers:
        raise ValueError(f"no message has the role assistant, but {', '.join(roles[first:])}")
    if answers[0] == 0:
        raise ValueError("nothing comes before the answer")
    return answers


def samples_of(tokenizer, messages, args, tools=None, first=0):
    """Return a list of (N, 2) int32: each token of a conversation, and its target, which is the
    next token if that is of an answer (of message `first` or later) or of what ends it, or else
    -100. Samples that have no target within --length are left out.

    A template may mark answers, by {% generation %}. If it does not, and what follows an answer
    changes it, such as where the reasoning of earlier turns is left out, each answer is a sample of
    its own, with the turns before it: as the model is used."""
    chat = Chat(tokenizer, messages, tools)
    cut = [sample[: args.length] for sample in chat.samples(answers_in(messages, first))]
    return [sample for sample in cut if (sample[:, 1] != -100).any()]


def pad_chats(samples):
    """Return (B, longest, 2) int64, with -100 behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100).long()


def token_losses(model, samples):
    """Return the loss of each target in float32: (B, N, 2) in, (B, N) out, with 0 at -100."""
    tokens, targets = samples.unbind(-1)
    return model(tokens.clamp(min=0), targets=targets, use_cache=False)
