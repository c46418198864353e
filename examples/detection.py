# Parts of a copy, not a program: make new COPY=../mine.py WITH=detection
# SPDX-License-Identifier: Apache-2.0
"""Train FCOS to find objects: images of any sizes, and their boxes in COCO's JSON.

    python tools/toy.py boxes
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --train toy/boxes/train toy/boxes/train.json --test toy/boxes/test toy/boxes/test.json \\
        --resnet 18 --norm group --size 96 --epochs 4 --batch-size 4

For COCO: --train train2017 annotations/instances_train2017.json. To begin from pretrained weights,
which is usual, save them once, and name the file by --weights:
torch.save(torchvision.models.detection.fcos_resnet50_fpn(weights="DEFAULT").state_dict(),
"fcos.pt"). With other --classes than 91, only the last layer is not loaded. BatchNorm and the first
blocks are frozen; for random weights, which train slowly, choose --norm group.

An image has the same loss in any batch, since each is padded to a square. Its "weight" is its
number of points in objects. So the loss of a global batch is torchvision's, but an image without
objects counts as one point. test_map is COCO's AP of the whole test set.

Group: vision. Recipes: ddp, amp, sharded.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.coco import Objects, average_precision, images_and_targets, result_rows
from lib.fcos import Detector, Head
from lib.fine_tuning import make_optimizer


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    files = {"nargs": 2, "metavar": ("FOLDER", "JSON")}
    add("--train", default=["train", "train.json"], help="(train train.json)", **files)
    add("--test", default=["test", "test.json"], help="for evaluation (test test.json)", **files)
    add("--classes", type=int, default=91, help="highest id of a category, plus 1 (91)")
    add("--size", type=int, default=800, help="longest side of an image in the model (800)")
    add("--resnet", type=int, choices=(18, 34, 50, 101, 152), default=50, help="layers (50)")
    add("--norm", choices=("batch", "group"), default="batch", help="batch (default): frozen")
    parser.set_defaults(lr=1e-4, batch_size=4, epochs=12, clip_norm=1.0)


def load_data(args, accelerator):
    """Return the DataLoaders of (images, targets), tuples of B, for training and test."""
    train_set = Objects(*args.train, args.classes, v2.RandomHorizontalFlip())
    test_set = Objects(*args.test, args.classes)
    if train_set.names != test_set.names:  # the same number would be another class
        exit_with_error(f"{args.train[1]} and {args.test[1]} have other categories")
    options = {"batch_size": args.batch_size, "num_workers": 2, "collate_fn": images_and_targets}
    options["pin_memory"] = torch.cuda.is_available()
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model. Its weights have the names of torchvision's fcos_resnet50_fpn."""
    group = args.norm == "group"
    norm = partial(nn.GroupNorm, 32) if group else nn.BatchNorm2d
    layers = {"trainable_layers": 5 if group else 3, "returned_layers": [2, 3, 4]}
    layers |= {"norm_layer": norm, "extra_blocks": LastLevelP6P7(256, 256)}
    backbone = resnet_fpn_backbone(backbone_name=f"resnet{args.resnet}", weights=None, **layers)
    # All images are padded to a square of --size: no image depends on others in its batch.
    size = {"min_size": args.size, "max_size": args.size, "size_divisible": args.size}
    head = Head(256, 1, args.classes)
    model = Detector(backbone, args.classes, head=head, score_thresh=0.05, **size)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    return model


def compute_loss(model, batch, args):
    """Return the losses of each image; in evaluations, "outputs" are what is found in it."""
    images, targets = batch
    losses, found = model(images, lambda: targets)  # FSDP would cast tensors to bf16
    values = {"loss": sum(losses[name] for name in losses if name != "weight"), **losses}
    if found:
        values["outputs"] = [result_rows(*x) for x in zip(found, targets, strict=True)]
    return values


def test_metrics(outputs, args):
    """Return {"map": ..., "map50": ...}, of all test images by COCO's rules."""
    return average_precision(torch.cat(outputs), args.test[1], args.classes)
