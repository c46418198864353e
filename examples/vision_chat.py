# Parts of a copy, not a program: make new COPY=../mine.py WITH=vision_chat
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a vision-language model on conversations with images, with loss on the answers alone.

    python tools/toy.py image_chats
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/qwen \\
        --chats toy/image_chats/chats.jsonl --train-vision --epochs 15 --batch-size 16 --lr 3e-3

With a model of the Hub and your own chats.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base Qwen/Qwen2.5-VL-3B-Instruct

The toy model has random weights: --lr is higher for it,
and --train-vision trains the vision encoder, too, which is frozen otherwise.
Each row of --chats has "messages", and may have "images" and "tools". A content is a text, or a
list of {"type": "text", "text": ...} and {"type": "image", "path": ...}. Images without a path
there, and each <image> in a text, are those of the list "images", in their order. Its images
without any place are before the first message of the user. A path is relative to the folder of its
file. --test names other rows; without it the last tenth is the test set.

The processor makes the tokens: how many depends on an image's size, and there are many for a photo.
A chat that is longer than --length is an error, not cut: scale large images down before. Batches
have chats of similar lengths. A token counts as in the example sft.

A run also saves the processor and config.json, so that
`transformers.pipeline("image-text-to-text", "runs/mine")(text=messages)` answers. With lora it is
`pipeline("image-text-to-text", "runs/mine/adapter", processor="runs/mine")`. Then
--base-dtype bfloat16 keeps the frozen weights in 16 bits.

Group: vision. Recipes: ddp, amp, sharded.
"""

from functools import partial

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForImageTextToText

from lib.chat import add_chat_flags
from lib.fine_tuning import make_optimizer
from lib.image_chat import chat_processor, pad_image_chats, read_image_chats
from lib.order import Ordered, by_length
from lib.token_losses import with_token_losses


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add_chat_flags(parser)
    add = parser.add_argument
    add("--chats", default="chats.jsonl", help="a file, or a dataset (chats.jsonl)")
    add("--length", type=int, default=4096, help="most tokens of a chat with its images (4096)")
    add("--train-vision", action="store_true", help="train the vision encoder, too")
    parser.set_defaults(lr=1e-5, batch_size=4, epochs=3)  # usual for pretrained weights


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of dictionaries: what the processor makes of B
    chats, and "targets", (B, longest) int64, with -100 for what is no answer."""
    processor = chat_processor(args, accelerator)
    train, test = read_image_chats(processor, args)
    train_set = Ordered(train, args.seed, by_length, train.lengths, args.global_batch_size)
    test_set = test.chosen(test.lengths.argsort(stable=True))
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    options["collate_fn"] = partial(pad_image_chats, processor)
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    dtype = getattr(torch, args.base_dtype)
    if torch.empty(0).is_meta:
        config = AutoConfig.from_pretrained(args.base)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    else:
        model = AutoModelForImageTextToText.from_pretrained(args.base, dtype=dtype).train()
    if not args.train_vision:
        model.get_encoder("image").requires_grad_(False)
    return with_token_losses(model)


def compute_loss(model, batch, args):
    """Return the mean loss of each chat's answers, and the number of their tokens as its weight."""
    losses = model(**batch, use_cache=False)
    counted = (batch["targets"] != -100).sum(1)
    return {"loss": losses.sum(1) / counted, "weight": counted}
