# Parts of a copy, not a program: make new COPY=../mine.py WITH="clip streaming"
# SPDX-License-Identifier: Apache-2.0
"""Images and their captions in Parquet files."""

from functools import partial

from torchvision.transforms import InterpolationMode, v2
from transformers import CLIPConfig

from lib.captions import Captioned, pad_captions, tokenizer_of
from lib.row_groups import file_in, stream
from lib.rows import nonempty_text


def load_data(args, accelerator):
    """Return the DataLoaders of (pixels, tokens), for training and test."""
    config = CLIPConfig.from_pretrained(args.base)
    size, bicubic = config.vision_config.image_size, InterpolationMode.BICUBIC
    tokenize = tokenizer_of(args, config.text_config)
    crop = v2.RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=bicubic)
    whole = v2.Resize(size, bicubic), v2.CenterCrop(size)

    def sample(transforms, row):
        pair = file_in(row[args.image]), nonempty_text(row[args.caption])
        return Captioned([pair], tokenize, *transforms)[0]

    makes = partial(sample, [crop]), partial(sample, whole)
    return stream(args, args.captions, [args.image, args.caption], *makes, pad_captions)
