# SPDX-License-Identifier: Apache-2.0
"""Conversations with images, by the chat template of a pretrained model's processor."""

import json
import sys
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoProcessor

from ddp_cifar import exit_with_error
from lib.chat import TARGETS, Chat, chat_tokenizer, read_chats, tokens_in
from lib.images import read_image, stored_size
from lib.once import Ragged, made_once, tokenizer_key
from lib.rows import Stored, parsed_rows
from lib.turns import answers_in, check_keys

PLACE = "<image>"  # of an image in a text: "images" beside the messages has its name
IMAGE = {"type": "image"}
NUMBER = "number of the row"


def chat_processor(args, accelerator):
    """Return the processor of --base. Save it beside what is trained."""
    processor = chat_tokenizer(args, accelerator, AutoProcessor)
    if not hasattr(processor, "image_token"):
        exit_with_error(f"--base {args.base}: its processor has no token for an image in a text")
    processor.tokenizer.chat_template = processor.chat_template
    return processor


def name_of(image):
    """Return the file of an image in any form that data sets have, or None if it has no name."""
    if isinstance(image, Stored):
        return image
    if isinstance(image, dict):
        keys = ("image", "path", "url", "image_url")
        return name_of(next((image[key] for key in keys if image.get(key)), None))
    return image and image.removeprefix("file://")


def parts_of(message, names):
    """Return the content of a message as a list of texts and images, as which each <image> in a
    text counts. Add the file of each image to `names`, or None."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = []
    for part in content:
        if part["type"] == "text":
            first, *others = part["text"].split(PLACE)
            parts.append({"type": "text", "text": first})
            for text in others:
                parts += [IMAGE, {"type": "text", "text": text}]
                names.append(None)
        elif part["type"] in ("image", "image_url"):
            parts.append(IMAGE)
            names.append(name_of(part))
        else:
            raise ValueError(f"a part of a message is of type {part['type']}, not text or image")
    return [part for part in parts if part == IMAGE or part["text"]] or parts


def with_images(line):
    """Return the messages of a line, with contents that are lists of texts and images, and the
    files of these images in their order. They are named in the messages or beside them, by
    "images". If they have no place there, it is before the first message of the user."""
    beside = [name_of(image) for image in line.get("images") or []]
    names = []
    messages = [{**message, "content": parts_of(message, names)} for message in line["messages"]]
    if not names:
        users = (message for message in messages if message["role"] == "user")
        next(users, messages[0])["content"][:0] = [IMAGE] * len(beside)
        names = [None] * len(beside)
    if beside and any(names):
        raise ValueError('images are named in the messages and in "images": name all in one')
    named = [name for name in [*names, *beside] if name]
    if len(named) != len(names):
        raise ValueError(f"{len(named)} images have a name, {len(names)} a place in the messages")
    return messages, named


class ImageChat(Chat):
    """A conversation with images, whose samples are texts and the spans of their answers: its
    processor makes the tokens together with the pixels."""

    def sample_of(self, text, spans, tokens, offsets):
        return text, spans, len(tokens)


def read_image_chats(processor, args):
    """Return the samples of --chats, `ImageChats` for training, and for the test."""

    def numbered(source):
        return ({**row, NUMBER: number} for number, row in enumerate(parsed_rows(source), 1))

    def read(source):
        def make(row):
            samples = samples_with_images(processor, row, source, row.pop(NUMBER), args)
            return [*map(packed, samples)]

        form = '{"messages": [{"role": ..., "content": ...}, ...], "images": ["1.jpg", ...]}'
        key = tokenizer_key(processor.tokenizer), processor.to_json_string(), args.length
        return made_once(args, source, form, make, key, TARGETS, numbered)

    parts = read_chats(args.chats, args, read)
    return [ImageChats(x.values, x.begins, x.ends) for x in parts]


def packed(sample):
    """Return what `samples_with_images` has for a sample as bytes, (N,) uint8: the number of its
    tokens in the first four, then JSON."""
    *values, tokens = sample
    content = tokens.to_bytes(4, sys.byteorder) + json.dumps(values, default=str).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@cache
def tokens_of_image(processor, size):
    """Return the number of tokens for an image of this (width, height)."""
    text, image = processor.image_token, Image.new("RGB", size)
    return len(processor(text=[text], images=[[image]], add_special_tokens=False)["input_ids"][0])


def samples_with_images(processor, row, source, number, args):
    """Return the samples of a row with this number: (text, [(begin, end) of an answer in it], [path
    of an image, or what is `Stored`], the row's name, number of tokens)."""
    check_keys(row, ("messages", "images", "tools"))
    messages, names = with_images(row)
    folder = Path(source).parent
    paths = [name if isinstance(name, Stored) else folder / name for name in names]
    chat = ImageChat(processor.tokenizer, messages, row.get("tools"))
    found = chat.samples(answers_in(messages))
    if (places := chat.text(chat.messages).count(processor.image_token)) != len(paths):
        raise ValueError(f"the chat template writes {places} images, not {len(paths)}")
    try:
        sizes = [stored_size(path) for path in paths]
    except OSError as error:
        raise ValueError(str(error)) from None
    samples = []
    for text, spans, tokens in found:
        own = text.count(processor.image_token)  # it may end before the last images
        tokens += sum(tokens_of_image(processor, size) - 1 for size in sizes[:own])
        if tokens > args.length:
            raise ValueError(f"it has {tokens} tokens, with those of images: more than --length")
        samples.append((text, spans, paths[:own], f"{source}, row {number}", tokens))
    return samples


class ImageChats(Ragged):
    """Texts, the spans of their answers, and their images, of samples that are `packed`."""

    @property
    def lengths(self):
        """The numbers of tokens, (N,) int32."""
        places = self.begins[:, None] + torch.arange(4)
        return self.values[places].view(torch.int32).flatten()

    def __getitem__(self, index):
        text, spans, images, named = json.loads(super().__getitem__(index)[4:].numpy().tobytes())
        try:
            images = [Stored(*x) if isinstance(x, list) else x for x in images]
            return text, spans, [read_image(image) for image in images]
        except OSError as error:
            raise OSError(f"{named}: {error}") from None


def pad_image_chats(processor, samples):
    """Return what the processor makes of B samples, and "targets", (B, longest) int64: of each
    token the next one, if that is of an answer, or else -100.

    Without images there is one more text, of a blank one, which has no targets: on all ranks each
    batch passes the same layers, as DDP and FSDP need."""
    texts, spans, images = (list(values) for values in zip(*samples, strict=True))
    if not any(images):
        texts.append(processor.image_token)
        images.append([Image.new("RGB", (32, 32))])
    options = {"padding": True, "padding_side": "right", "return_offsets_mapping": True}
    # As in the processor's apply_chat_template.
    begin = processor.tokenizer.bos_token
    options["add_special_tokens"] = not (begin and texts[0].startswith(begin))
    options["return_text_replacement_offsets"] = True
    inputs = processor(text=texts, images=images, **options)
    offsets = inputs.pop("offset_mapping")[: len(spans)]
    places = inputs.pop("text_replacement_offsets")[: len(spans)]
    inputs.convert_to_tensors("pt")
    rows = zip(inputs["input_ids"], offsets, spans, places, strict=False)
    return {**inputs, "targets": torch.stack([targets_of(*row) for row in rows])}


def targets_of(tokens, offsets, spans, places):
    """Return the targets of N tokens: (N,) int64. `spans` are of the text before its `places` of
    images were replaced by more text, which moves what is behind them."""

    def moved(index):
        before = [place for place in places if place["span"][1] <= index]
        return index + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)

    own = tokens_in(offsets, [(moved(begin), moved(end)) for begin, end in spans])
    own &= ~tokens_in(offsets, [place["new_span"] for place in places])
    return F.pad(tokens.where(own, -100)[1:], (0, 1), value=-100)
