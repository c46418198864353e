# Parts of a copy, not a program: make new COPY=../mine.py WITH="text_to_image streaming"
# SPDX-License-Identifier: Apache-2.0
"""Images and their captions in Parquet files, encoded in each step."""

from functools import cache

import diffusers
from accelerate import PartialState
from torch.utils.data import default_collate

from lib.images import read_image
from lib.latents import draw, encode_batch, load_pipeline, load_scheduler, to_pixels, with_noise
from lib.row_groups import file_in, stream
from lib.rows import nonempty_text


@cache
def frozen(base):
    """Return what encodes images and captions, on the device, and what adds noise."""
    diffusers.utils.logging.set_verbosity_error()  # a caption that is cut would be a line
    return load_pipeline(base, PartialState().device), load_scheduler(base)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of pixels, (B, 3, H, W) float32, B captions,
    and what `draw` returns for each image."""
    pipeline, scheduler = frozen(args.base)
    transform = to_pixels(args.size)
    side = args.size // pipeline.vae_scale_factor
    shape = pipeline.vae.config.latent_channels, side, side

    def sample(row):
        caption = nonempty_text(row[args.caption])
        return transform(read_image(file_in(row["image"]))), caption, *draw(scheduler, shape)

    return stream(args, args.images, ["image", args.caption], sample, sample, default_collate)


def compute_loss(model, batch, args):
    """Return the squared error of the prediction, one value per image."""
    pixels, captions, *drawn = batch
    pipeline, scheduler = frozen(args.base)
    encoded = encode_batch(pipeline, pixels, captions)
    noisy, times, texts, target = with_noise(scheduler, encoded, drawn)
    predicted = model(noisy, times, texts, return_dict=False)[0]
    return {"loss": (predicted.float() - target).square().mean((1, 2, 3))}
