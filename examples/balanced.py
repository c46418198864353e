# Parts of a copy, not a program: make new COPY=../mine.py WITH=balanced
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-18 on photos in folders, of which some classes are rare.

    python tools/toy.py rare
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --photos toy/rare \\
        --batch-size 16 --epochs 4

One of the two toy classes is rare. `--balance drawing` draws a class as often as any other: in an
epoch a rare photo comes several times, in other crops. `--balance loss` draws each photo once, and
multiplies its loss by N / (classes * photos of its class). In the test, loss and balanced_accuracy
are means over classes, accuracy is that over all photos. --photos and --test can be rows of a
dataset, as in the example photos.

Group: vision. Recipes: ddp, amp, sharded.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lib.order import Ordered, balanced
from photos import add_photo_flags, build_model, photo_folders


class Weighted(Dataset):
    """The samples of an ImageFolder, (image, label, weight), whose weights have the mean 1, and the
    same sum in each class."""

    def __init__(self, folder):
        self.folder = folder
        self.labels = torch.tensor(folder.targets)
        counts = self.labels.bincount()
        self.class_weights = len(self.labels) / (len(counts) * counts)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image, label = self.folder[index]
        return image, label, self.class_weights[label]


def add_flags(parser):
    add = parser.add_argument
    add_photo_flags(parser)
    add("--size", type=int, default=64, help="height and width of an input (64)")
    add("--balance", choices=("drawing", "loss"), default="drawing", help="default: drawing")


def load_data(args, accelerator):
    train_set, test_set = (Weighted(folder) for folder in photo_folders(args))
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    if args.balance == "drawing":
        labels = train_set.labels
        train_set.class_weights = torch.ones_like(train_set.class_weights)
        train_set = Ordered(train_set, args.seed, balanced, labels)
    shuffle = args.balance == "loss"
    train_loader = DataLoader(train_set, shuffle=shuffle, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def compute_loss(model, batch, args):
    images, labels, weights = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none") * weights
    accuracy = logits.argmax(1) == labels
    return {"loss": loss, "accuracy": accuracy, "balanced_accuracy": accuracy * weights}
