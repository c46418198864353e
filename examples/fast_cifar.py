# Parts of a copy, not a program: make new COPY=../mine.py RECIPE=amp WITH=fast_cifar
# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-50 on CIFAR-10 to a high accuracy in few epochs.

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --data-dir data \\
        --epochs 50 --batch-size 500

Label smoothing of 0.1 (Szegedy et al. 2016, arXiv:1512.00567), cutout of 12 pixels (DeVries and
Taylor 2017, arXiv:1708.04552), no weight decay of biases and BatchNorm. The test averages the
logits of each image and of its mirror image: its accuracy is one with test-time augmentation. On
one H200 a copy of amp reached 94.8% in 202 seconds, with `--epochs 50 --batch-size 500
--evaluate-every 500 --compile`.

Group: vision. Recipes: ddp, amp.
"""

import torch
from torch.nn import functional as F


def cutout(images, size):
    """Return (B, C, H, W) images, each with a random square of zeros, which a border may cut. Zero
    is the mean colour of normalised images."""
    count, _, height, width = images.shape
    device = images.device
    top = torch.randint(height, (count, 1, 1), device=device) - size // 2
    left = torch.randint(width, (count, 1, 1), device=device) - size // 2
    rows = torch.arange(height, device=device)[:, None]
    columns = torch.arange(width, device=device)
    inside = (rows >= top) & (rows < top + size) & (columns >= left) & (columns < left + size)
    return images.masked_fill(inside[:, None], 0.0)


def compute_loss(model, batch, args):
    """Return loss and accuracy of each image."""
    images, labels = batch
    if model.training:
        logits = model(cutout(images, 12))
    else:
        # One call: in a second one a replayed CUDA graph would overwrite the first one's logits.
        logits = model(torch.cat((images, images.flip(3)))).unflatten(0, (2, -1)).mean(0)
    smoothing = 0.1 if model.training else 0.0
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}
