# SPDX-License-Identifier: Apache-2.0
"""Prompts, and completions that a model draws."""

from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GenerationConfig, LogitsProcessor

from lib.chat import Chat, generation_of, load_tokenizer
from lib.generation import generate
from lib.turns import check_keys, with_text


@lru_cache
def tokenizer_and_ends(base, chat_template):
    """Return the tokenizer of --base, and the tokens that end a completion: a list."""
    tokenizer = load_tokenizer(base, chat_template)
    config, _ = generation_of(base, tokenizer)
    return tokenizer, [*{*config.eos_token_id, tokenizer.eos_token_id} - {None}]


def prompt_tokens(tokenizer, line, args):
    """Return the tokens of a line's "prompt", a text or messages, up to where an answer begins:
    (N,) int64. Raise ValueError if there are more than --length, or if the chat template leaves out
    one of the messages."""
    check_keys({name: line.get(name) for name in ("system", "functions")}, ())
    messages = line["prompt"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chat = Chat(tokenizer, [with_text(message) for message in messages], line.get("tools"))
    text = chat.text(chat.messages, prompt=True)
    chat.check_messages(text)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(tokens) > args.length:
        raise ValueError(f"{len(tokens)} tokens, more than --length")
    return torch.tensor(tokens)


class Prompts(Dataset):
    """Tokens of a prompt, (N,) int64, its line, and a random number for each token of its
    completions, (group, new tokens) float64: a function of (seed, epoch, index)."""

    def __init__(self, rows, args):
        self.rows = rows
        self.shape = args.group, args.new_tokens

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens, line = self.rows[index]
        return tokens, line, torch.rand(self.shape, dtype=torch.float64)


def collate(batch):
    """Return (B, longest) int64, with -100 before the shorter prompts, B lines, and (B, group, new
    tokens) float64."""
    tokens, lines, numbers = zip(*batch, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(tokens, True, -100, padding_side="left"), lines, torch.stack(numbers)


class Draw(LogitsProcessor):
    """Leave one token of each row: the one that a given random number draws. So a completion does
    not depend on the others of its batch."""

    def __init__(self, numbers, temperature):
        self.numbers = iter(numbers.T[..., None])  # of the next token: (B, 1)
        self.temperature = temperature

    def __call__(self, tokens, scores):
        edges = (scores.double() / self.temperature).softmax(1).cumsum(1)
        chosen = torch.searchsorted(edges, next(self.numbers) * edges[:, -1:])
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0)


def complete(model, prompts, numbers, args):
    """Return the completions of prompts, (B, N) int64 in, (B, T) int64 out, with -100 behind the
    end, and their texts. They are drawn by `numbers`, (B, T), or greedy without them."""
    tokenizer, ends = tokenizer_and_ends(args.base, args.chat_template)
    options = {"max_new_tokens": args.new_tokens, "eos_token_id": ends, "pad_token_id": ends[0]}
    config = GenerationConfig(do_sample=False, num_beams=1, **options)
    # In place of the base's own, from which transformers takes what is not set: a penalty there
    # would change the policy's probabilities.
    getattr(model, "module", model).generation_config = config
    mask = (prompts != -100).long()
    inputs = {"input_ids": prompts.clamp(min=0), "attention_mask": mask}
    drawn = [] if numbers is None else [Draw(numbers, args.temperature)]
    tokens = generate(model, **inputs, generation_config=config, logits_processor=drawn)
    tokens = tokens[:, prompts.shape[1] :]
    ends = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    tokens = tokens.masked_fill(ends.cumsum(1) > ends.long(), -100)
    texts = [tokenizer.decode(x[x != -100], skip_special_tokens=True) for x in tokens.cpu()]
    return tokens, texts
