# Parts of a copy, not a program: make new COPY=../mine.py WITH=segmentation
# SPDX-License-Identifier: Apache-2.0
"""Train a small encoder and decoder to segment images: images/NAME.jpg and masks images/NAME.png.

    python tools/toy.py masks
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --images toy/masks \\
        --batch-size 8 --epochs 6

A mask has the number of a class, or 255 for a pixel that does not count, as in PASCAL VOC. Every
tenth image is in the test set. All pixels that count are equal: "weight" is their number in an
image. test_miou is the mean IoU of the classes that occur in the test set or in its predictions.

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from language_model import make_optimizer
from lib.images import is_of_a_program, log_left_out, read_image, read_pixels


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    parser.add_argument("--images", default="images", help="a directory (images)")
    parser.add_argument("--classes", type=int, default=4, help="number of classes (4)")
    parser.add_argument("--size", type=int, default=64, help="height and width, of 8 n pixels (64)")
    parser.set_defaults(lr=3e-3)


class Masks(Dataset):
    """Images and their masks: (3, S, S) float32 in [0, 1], (S, S) int64."""

    def __init__(self, paths, classes, *transforms):
        self.paths = paths
        self.classes = classes
        self.transform = v2.Compose(transforms)
        self.palette = read_mask(paths[0]).getpalette()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image, mask = read_image(path), read_mask(path)
        if mask.size != image.size:
            raise OSError(f"{path}: its mask has {mask.size} pixels, not {image.size}")
        highest = highest_class(mask)
        if differ(mask.getpalette(), self.palette):
            raise OSError(f"{path}: its mask has other colours than the first one's: same classes?")
        if highest >= self.classes:
            raise OSError(f"{path}: its mask has class {highest}: set --classes {highest + 1}")
        image, mask = tv_tensors.Image(image), tv_tensors.Mask(mask)
        image, mask = self.transform(image, mask)  # both in the same way
        return image.float() / 255, mask[0].long()


def read_mask(path):
    """Return an image's mask as PIL's: its pixels are numbers of classes."""
    mask = read_pixels(path.with_suffix(".png"))
    if mask.mode not in ("1", "L", "P"):
        raise OSError(f"{path}: its mask has pixels of type {mask.mode}: save one number for each")
    return mask.convert("L").point(lambda x: x // 255) if mask.mode == "1" else mask


def differ(one, other):
    """Return whether a number has two colours in two palettes. Either may be None, or end early."""
    return any(x != y for x, y in zip(one or [], other or [], strict=False))


def highest_class(mask):
    """Return the highest class of the pixels that count."""
    return max((value for _, value in mask.getcolors() if value != 255), default=0)


def load_data(args, accelerator):
    """Return the DataLoaders of (images, masks) for training and test."""
    files = sorted(Path(args.images).glob("*"))
    files = [path for path in files if not is_of_a_program(path, args.images)]
    paths = [path for path in files if path.suffix.lower() in (".jpg", ".jpeg")]
    log_left_out(args.images, [*paths, *(path.with_suffix(".png") for path in paths)])
    if not paths:
        exit_with_error(f"argument --images: {args.images} has no .jpg files")
    if not any(highest_class(read_mask(path)) for path in paths):  # the first one is enough
        remedy = "save the number of its class for each pixel: 255 does not count"
        exit_with_error(f"--images {args.images}: all masks have 0 and 255 alone: {remedy}")
    resize = v2.Resize((args.size, args.size))  # of a mask: the nearest pixel
    train = [path for index, path in enumerate(paths) if index % 10]
    train_set = Masks(train, args.classes, resize, v2.RandomHorizontalFlip())
    test_set = Masks(paths[::10], args.classes, resize)
    options = {"batch_size": args.batch_size, "num_workers": 2}
    options["pin_memory"] = torch.cuda.is_available()
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model: (B, 3, H, W) in, (B, classes, H, W) logits out."""
    widths = [3, 32, 64, 128]
    steps = list(pairwise(widths))
    down = [block(nn.Conv2d(a, b, 3, stride=2, padding=1), b) for a, b in steps]
    up = [block(nn.ConvTranspose2d(b, max(a, 32), 2, 2), max(a, 32)) for a, b in reversed(steps)]
    return nn.Sequential(*down, *up, nn.Conv2d(32, args.classes, 1))


def block(resample, width):
    more = nn.Conv2d(width, width, 3, padding=1, bias=False)
    return nn.Sequential(resample, nn.ReLU(), more, nn.GroupNorm(8, width), nn.ReLU())


def compute_loss(model, batch, args):
    """Return the mean loss over an image's pixels that count, and their number. "outputs" are the
    sizes of intersection and union for each class: (B, 2 classes)."""
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, ignore_index=255, reduction="none").sum((1, 2))
    counts = labels != 255
    classes = torch.arange(logits.shape[1], device=labels.device).view(-1, 1, 1, 1)
    found = (logits.argmax(1) == classes) & counts  # (classes, B, H, W)
    truth = labels == classes
    sizes = torch.cat((found & truth, found | truth)).sum((2, 3)).T
    weight = counts.sum((1, 2))
    return {"loss": loss / weight.clamp(min=1), "weight": weight, "outputs": sizes}


def test_metrics(outputs, args):
    """Return {"miou": the mean over classes of intersection / union, each of all images}."""
    intersections, unions = torch.stack(outputs).sum(0).view(2, -1)
    occurs = unions > 0
    return {"miou": (intersections[occurs] / unions[occurs]).mean().item()}
