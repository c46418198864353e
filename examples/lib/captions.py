# SPDX-License-Identifier: Apache-2.0
"""Images and their captions, as CLIP reads them."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2
from transformers import AutoTokenizer

from ddp_cifar import exit_with_error
from lib.images import read_image

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def tokenizer_of(args, config):
    """Return the tokenizer of captions. Exit with an error if their last token is not the one where
    CLIP reads an embedding: it would read it at the first token of any caption."""
    if args.length > (most := config.max_position_embeddings):
        exit_with_error(f"argument --length: {args.base} has positions for {most} tokens")
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokens = tokenizer("a")["input_ids"]
    end = config.eos_token_id
    # transformers takes the highest token where an old config.json says 2.
    if tokens[-1] != (max(tokens) if end == 2 else end):
        exit_with_error(f"--base {args.base}: its tokenizer ends no text with eos_token_id, {end}")
    return partial(tokenizer, truncation=True, max_length=args.length)


class Captioned(Dataset):
    """Images, (3, H, W) float32, and the tokens of their captions, (N,) int64. Random ones of the
    transforms draw from torch's global generator, which the recipe seeds for each sample."""

    def __init__(self, rows, tokenize, *transforms):
        self.rows = rows
        self.tokenize = tokenize
        normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose([v2.ToImage(), *transforms, *normalize])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        image, caption = self.rows[index]
        return self.transform(read_image(image)), torch.tensor(self.tokenize(caption)["input_ids"])


def pad_captions(batch):
    """Return (B, 3, H, W) float32, and (B, longest) int64 with -100 behind the shorter captions."""
    pixels, tokens = zip(*batch, strict=True)
    return torch.stack(pixels), nn.utils.rnn.pad_sequence(tokens, True, padding_value=-100)
