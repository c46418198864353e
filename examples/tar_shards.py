# Parts of a copy, not a program: make new COPY=../mine.py WITH=tar_shards
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-18 on images in tar files, as webdataset writes them, a few shards side by side.

    python tools/toy.py shards
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --shards toy/shards \\
        --batch-size 16 --lr 0.05 --epochs 4

The toy images are stripes. The files of a sample are neighbours in a shard, with the same name up
to its first dot: here an image, 003.png, and the number of its class, 003.cls. Name other types by
--members, and edit `decode` for more of them. The index of a folder is built once, and again if its
shards change. It is a file in --shards, or in --index if that cannot be written to.

An epoch takes --block samples of each of --lanes shards in turn, so a worker reads the shards of
its own samples. This is for hard disks and shared file systems: on a local disk `shuffle=True` is
as fast.

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

import io
import os
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.images import read_image
from lib.order import ByLane
from lib.tar_samples import TarSamples, tar_index

read_index = partial(torch.load, weights_only=True, mmap=True)


def open_shards(args, part, accelerator, decode):
    """Return the samples of the shards of a part. Their index is a file, which processes map, so
    that they share its memory. Without an index of these shards, one process per machine builds it,
    on the main process first."""
    folder = f"{args.shards}/{part}"
    paths = sorted(Path(folder).glob("*.tar"))
    if not paths:
        exit_with_error(f"--shards: {folder} has no .tar files")
    shards = [[x.name, x.stat().st_size, x.stat().st_mtime_ns] for x in paths]
    shards.append(args.members)
    file = Path(args.index or args.shards, f"{part}.pt")
    file.parent.mkdir(parents=True, exist_ok=True)
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        if not file.exists() or read_index(file)["shards"] != shards:
            if not os.access(file.parent, os.W_OK):
                exit_with_error(f"{file.parent} cannot be written to: name a folder by --index")
            samples = tar_index(paths, args.members)
            torch.save({"shards": shards, "samples": samples}, f"{file}.tmp")
            os.replace(f"{file}.tmp", file)  # at once: no process reads a part of it
    return TarSamples(paths, read_index(file)["samples"], decode)


def decode(args, transform, sample):
    """Return an image, and its class. The random transforms draw from torch's global generator,
    which the recipe seeds for each sample."""
    kind, of_class = args.members
    image = read_image(io.BytesIO(sample[kind]), kind)
    label = int(sample[of_class])
    if not 0 <= label < args.classes:
        raise ValueError(f"class {label} is not below --classes, {args.classes}")
    image = transform(v2.functional.to_image(image))
    return v2.functional.to_dtype(image, torch.float32, scale=True), label


def add_flags(parser):
    parser.add_argument("--shards", default="shards", help="folder with train/*.tar and test/*.tar")
    parser.add_argument("--index", metavar="FOLDER", help="for the index of the shards (--shards)")
    types = {"nargs": 2, "default": ["png", "cls"], "metavar": ("IMAGE", "CLASS")}
    parser.add_argument("--members", help="types of a sample's files (png cls)", **types)
    parser.add_argument("--classes", type=int, default=2, help="number of classes (2)")
    parser.add_argument("--lanes", type=int, default=16, help="shards side by side (16)")
    parser.add_argument("--block", type=int, default=8, help="neighbours of a lane in a batch (8)")


def load_data(args, accelerator):
    augment = v2.Compose([v2.RandomResizedCrop(64, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()])
    resize = v2.Resize((64, 64))
    train_set = open_shards(args, "train", accelerator, partial(decode, args, augment))
    test_set = open_shards(args, "test", accelerator, partial(decode, args, resize))
    shards = train_set.index[:, 0].bincount()  # samples of each
    train_set = ByLane(train_set, args.seed, shards, args.lanes, args.block)
    options = {"batch_size": args.batch_size, "num_workers": 2, "persistent_workers": True}
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


def build_model(args):
    model = torchvision.models.resnet18(num_classes=args.classes)
    return model.to(memory_format=torch.channels_last)  # the fastest for convolutions
