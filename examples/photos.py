# Parts of a copy, not a program: make new COPY=../mine.py WITH=photos
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-18 on photos in folders: photos/train/CLASS/*.png and photos/test/CLASS/*.png.

    python tools/toy.py photos
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --photos toy/photos \\
        --batch-size 16 --epochs 4

The toy photos are stripes. For your own photos, name the folders of classes as you like, .jpg is
read as well, and choose --size and the random transforms. To begin from pretrained weights, save
them once, and name the file by --weights:
torch.save(torchvision.models.resnet18(weights="DEFAULT").state_dict(), "resnet18.pt").

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.images import is_image, is_of_a_program, log_left_out, read_image


def add_flags(parser):
    parser.add_argument("--photos", default="photos", help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--size", type=int, default=64, help="height and width of an input (64)")


class Photos(torchvision.datasets.ImageFolder):
    """Images in folders of classes, as (image, label)."""

    def __init__(self, folder, transform):
        def is_photo(path):
            return is_image(path) and not is_of_a_program(path, folder)

        super().__init__(folder, transform, loader=read_image, is_valid_file=is_photo)

    def find_classes(self, directory):
        classes = classes_of(directory)
        return classes, {name: index for index, name in enumerate(classes)}


def classes_of(folder):
    """Return the names of the folders of classes in a folder, in their order."""
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
    classes = classes_of(f"{args.photos}/train")
    model = torchvision.models.resnet18(num_classes=len(classes))
    return model.to(memory_format=torch.channels_last)  # the fastest for convolutions
