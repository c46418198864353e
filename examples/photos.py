# Parts of a copy, not a program: make new COPY=../mine.py WITH=photos
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-18 on photos in folders: photos/train/CLASS/*.png and photos/test/CLASS/*.png.

    python tools/toy.py photos
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --photos toy/photos \\
        --batch-size 16 --epochs 4

The toy photos are stripes. For your own photos, name the folders of classes as you like, .jpg is
read as well, and choose --size and the random transforms. A dataset, too: --photos
AI-Lab-Makerere/beans:train --test AI-Lab-Makerere/beans:validation --label labels. To begin from
pretrained weights, save them once, and name the file by --weights:
torch.save(torchvision.models.resnet18(weights="DEFAULT").state_dict(), "resnet18.pt").

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.images import is_image, is_of_a_program, log_left_out, read_image
from lib.rows import class_name, class_names, located, read_rows


def add_photo_flags(parser):
    add = parser.add_argument
    add("--photos", default="photos", help="a folder of train/CLASS and test/CLASS, or rows")
    add("--test", help="rows for the test, if --photos are rows")
    add("--image", default="image", help="the column of images in rows (image)")
    add("--label", default="label", help="the column of labels in rows (label)")


def add_flags(parser):
    add_photo_flags(parser)
    parser.add_argument("--size", type=int, default=64, help="height and width of an input (64)")


class Photos(torchvision.datasets.ImageFolder):
    """Images in folders of classes, as (image, label)."""

    def __init__(self, folder, transform):
        def is_photo(path):
            return is_image(path) and not is_of_a_program(path, folder)

        super().__init__(folder, transform, loader=read_image, is_valid_file=is_photo)

    def find_classes(self, folder):
        names = folders_of_classes(folder)
        return names, {name: index for index, name in enumerate(names)}


class PhotoRows(Dataset):
    """(image, number of its class), as an ImageFolder, of the rows of a source."""

    def __init__(self, source, classes, transform, args):
        rows = photo_rows(source, args)
        if unknown := {str(label) for _, label in rows} - {*classes}:
            exit_with_error(f"{source}: no photo of {args.photos} has the label {min(unknown)}")
        self.images = [image for image, _ in rows]
        self.classes = classes
        self.targets = [classes.index(str(label)) for _, label in rows]
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(read_image(self.images[index])), self.targets[index]


def photo_rows(source, args):
    """Return [(image, label)] of the rows of a source."""
    return read_rows(source, (args.image, located(Path(source).parent)), (args.label, class_name))


def photo_classes(args):
    """Return the names of the classes, in order."""
    if args.test:
        return class_names(args.photos, [label for _, label in photo_rows(args.photos, args)])
    return folders_of_classes(f"{args.photos}/train")


def folders_of_classes(folder):
    """Return the names of the folders of classes in a folder, in order."""
    names, _ = torchvision.datasets.folder.find_classes(folder)
    return [name for name in names if not is_of_a_program(f"{folder}/{name}", folder)]


def photo_folders(args):
    """Return the datasets of (image, label), for training and test. The random transforms draw from
    torch's global generator, which the recipe seeds for each sample."""
    augment = [v2.RandomResizedCrop(args.size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()]
    resize = [v2.Resize(args.size), v2.CenterCrop(args.size)]
    statistics = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # those of torchvision's weights
    normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*statistics)]
    transform = v2.Compose([v2.ToImage(), *augment, *normalize])
    test_transform = v2.Compose([v2.ToImage(), *resize, *normalize])
    if args.test:
        classes = photo_classes(args)
        train_set = PhotoRows(args.photos, classes, transform, args)
        return train_set, PhotoRows(args.test, classes, test_transform, args)
    if not Path(args.photos).is_dir():
        exit_with_error(f"--photos {args.photos}: no such folder. If they are rows, set --test")
    train_set = Photos(f"{args.photos}/train", transform)
    test_set = Photos(f"{args.photos}/test", test_transform)
    if train_set.classes != test_set.classes:  # the same label would be another class
        exit_with_error(f"--photos {args.photos}: train/ and test/ have other folders")
    log_left_out(args.photos, [path for path, _ in (*train_set.samples, *test_set.samples)])
    return train_set, test_set


def load_data(args, accelerator):
    train_set, test_set = photo_folders(args)
    # Pinned memory: the copies to the GPU overlap the computation.
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    model = torchvision.models.resnet18(num_classes=len(photo_classes(args)))
    return model.to(memory_format=torch.channels_last)  # the fastest for convolutions
