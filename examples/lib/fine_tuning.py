# SPDX-License-Identifier: Apache-2.0
"""The optimizer with which pretrained weights are usually trained."""

import torch

from ddp_cifar import exit_with_error


def make_optimizer(model, args, total_steps):
    """Return AdamW, and the schedule of its learning rate, whose peak is `--lr` at any batch size:
    6% of the steps are a warm-up, as in RoBERTa (Liu et al. 2019, arXiv:1907.11692), then it decays
    to about zero. Biases, and the scales of norms, have no weight decay."""
    trained = [x for x in model.parameters() if x.requires_grad]
    if any(x.dtype == torch.bfloat16 for x in trained):
        exit_with_error("--base-dtype bfloat16 would train in 16 bits: add lora to this copy")
    matrices, vectors = ([x for x in trained if (x.dim() > 1) == is_it] for is_it in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.01, fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        peaks,
        total_steps + 1,
        pct_start=0.06,
        anneal_strategy="linear",
        cycle_momentum=False,
    )
    return optimizer, schedule
