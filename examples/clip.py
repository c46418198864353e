# Parts of a copy, not a program: make new COPY=../mine.py WITH=clip
# SPDX-License-Identifier: Apache-2.0
"""Train CLIP to match images and captions (Radford et al. 2021, arXiv:2103.00020).

    python tools/toy.py captions
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/clip \\
        --captions toy/captions/captions.jsonl --epochs 9 --batch-size 32 --lr 1e-3

With a model of the Hub and your own captions.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base openai/clip-vit-base-patch32

The toy model has random weights: --lr is higher for it. An image's path is relative to the folder
of --captions; a dataset has the image itself. Every tenth line, but at most 5,000 of them, is in
the test set. A training image is cropped at random, to nine tenths of its area or more, and never
mirrored: a caption may say "left".

The negatives of a pair are all others of the global batch, on all processes and in all
microbatches. Set its size by --global-batch-size: then any number of processes and any --batch-size
train the same. Each pair goes through the model twice for this. Equal captions of two images are
negatives, too. "recall_at_1" is the share of the images whose caption is the nearest, of the global
batch or of the whole test set. The loss grows with their size: do not compare that of a test with
that of a step.

model.safetensors of a run, in a directory with the other files of --base, is loaded by
`CLIPModel.from_pretrained`: the weights keep their names. FSDP refuses one of these, `logit_scale`,
since it has no dimension.

Group: vision. Recipes: ddp, amp.
"""

import math
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode, v2
from transformers import CLIPConfig, CLIPModel

from lib.captions import Captioned, pad_captions, tokenizer_of
from lib.fine_tuning import make_optimizer
from lib.images import exit_if_missing
from lib.negatives import info_nce, loss_among_all, means_among_all, with_cached_gradients
from lib.rows import located, nonempty_text, read_rows


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--captions", default="captions.jsonl", help="a file, or a dataset (captions.jsonl)")
    add("--image", default="image", help="the column of images (image)")
    add("--caption", default="caption", help="the column of captions (caption)")
    add("--length", type=int, default=77, help="tokens of a caption, at most (77)")
    parser.set_defaults(lr=1e-5, epochs=3, clip_norm=1.0)  # usual for pretrained weights


def load_data(args, accelerator):
    """Return the DataLoaders of (pixels, tokens), for training and test."""
    config = CLIPConfig.from_pretrained(args.base)
    size, bicubic = config.vision_config.image_size, InterpolationMode.BICUBIC
    tokenize = tokenizer_of(args, config.text_config)
    columns = (args.image, located(Path(args.captions).parent)), (args.caption, nonempty_text)
    rows = read_rows(args.captions, *columns)
    every = max(10, len(rows) // 5000)  # test images are compared with all test captions
    train = [row for index, row in enumerate(rows) if index % every]
    exit_if_missing([image for image, _ in rows], f"--captions {args.captions}")
    crop = v2.RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=bicubic)
    train_set = Captioned(train, tokenize, crop)
    test_set = Captioned(rows[::every], tokenize, v2.Resize(size, bicubic), v2.CenterCrop(size))
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    options["collate_fn"] = pad_captions
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


class ImageTextModel(CLIPModel):
    """Takes pixels and tokens, and returns (B, 2, D): a product of an image's and a caption's
    embedding is their cosine, divided by the temperature."""

    def forward(self, pixels, tokens):
        # The attention is causal: no token sees the padding, which is behind the end.
        texts = self.get_text_features(tokens.clamp(min=0)).pooler_output
        images = self.get_image_features(pixels).pooler_output
        pairs = torch.stack((images, texts), dim=1).float()
        return F.normalize(pairs, dim=2) * (self.logit_scale / 2).exp()


def build_model(args):
    """Return the model, on the CPU. Its weights have the names of CLIPModel's."""
    return ImageTextModel.from_pretrained(args.base, dtype=torch.float32).train()


def compute_loss(model, batch, args):
    """Return {"loss": (B,), "recall_at_1": (B,)} of the images and captions."""
    return loss_among_all(model, batch, info_nce)


def test_metrics(outputs, args):
    """Return the same of the whole test set, in place of the means over batches."""
    return means_among_all(outputs, info_nce)
