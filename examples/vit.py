# Parts of a copy, not a program: make new COPY=../mine.py WITH=vit
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a ViT on photos in folders: photos/train/CLASS/*.png and photos/test/CLASS/*.png.

    python tools/toy.py photos
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --photos toy/photos \\
        --size 32 --patch 8 --width 64 --batch-size 16 --lr 1e-3

The commands train a small ViT on stripes, from random weights. --photos and --test can be rows of a
dataset, as in the example photos. To fine-tune, save pretrained weights once, and name the file by
--weights, with no other size:
torch.save(torchvision.models.vit_b_16(weights="DEFAULT").state_dict(), "vit_b_16.pt"). One line
then names the head as not loaded: it is for your classes.

Each photo is mixed with a random other one of the training set, by MixUp (Zhang et al. 2018,
arXiv:1710.09412) or CutMix (Yun et al. 2019, arXiv:1905.04899): both are read, so loading takes
about twice as long. --mixed 0 mixes none. Each layer's learning rate is --layer-decay times that of
the next one, and --lr in the head (Clark et al. 2020, arXiv:2003.10555).

Group: vision. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
import torchvision
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_cifar import exit_with_error
from lib.mixed import Mixed
from lib.vit_layers import depth_of, model_blocks
from photos import add_photo_flags, photo_classes, photo_folders


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add_photo_flags(parser)
    add("--size", type=int, default=224, help="height and width of an input (224)")
    add("--patch", type=int, default=16, help="height and width of a patch (16)")
    add("--width", type=int, default=768, help="of the model, 64 for each head (768)")
    add("--layers", type=int, default=12, help="layers of the encoder (12)")
    add("--layer-decay", type=float, default=0.75, help="of the rate, from layer to layer (0.75)")
    add("--mixed", type=float, default=1.0, help="share of mixed photos (1)")
    parser.set_defaults(lr=2e-4)


def load_data(args, accelerator):
    """Return the DataLoaders of (images, targets) for training and test."""
    train_folder, test_folder = photo_folders(args)
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    train_set, test_set = Mixed(train_folder, args.mixed), Mixed(test_folder, 0.0)
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU: torchvision's vit_b_16, unless the flags name other sizes."""
    if args.size % args.patch or args.width % 64:
        exit_with_error("choose a --size of whole patches (--patch), and a --width of 64 n")
    return torchvision.models.VisionTransformer(
        image_size=args.size,
        patch_size=args.patch,
        num_layers=args.layers,
        num_heads=args.width // 64,
        hidden_dim=args.width,
        mlp_dim=4 * args.width,
        num_classes=len(photo_classes(args)),
    )


def compute_loss(model, batch, args):
    images, targets = batch
    logits = model(images)
    smoothing = 0.1 if torch.is_grad_enabled() else 0.0  # not in the test set
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == targets.argmax(1)}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rates: a warm-up, then a cosine. Only
    weights of linear layers and convolutions decay."""
    top = args.layers + 1
    # All groups, also without parameters: both stages of a pipeline have the same ones.
    groups = {
        (x, decay): {"params": [], "lr": args.lr * args.layer_decay ** (top - x)}
        for x in range(top, -1, -1)
        for decay in (0.05, 0.0)
    }
    for name, parameter in model.named_parameters():
        decays = name.endswith("weight") and parameter.dim() > 1
        groups[depth_of(name, args.layers), 0.05 if decays else 0.0]["params"].append(parameter)
    listed = [{**group, "weight_decay": decay} for (_, decay), group in groups.items()]
    optimizer = torch.optim.AdamW(listed, fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps + 1, anneal_strategy="cos", cycle_momentum=False
    )
    return optimizer, schedule
