# Parts of a copy, not a program: make new COPY=../mine.py WITH=second_optimizer
# SPDX-License-Identifier: Apache-2.0
"""Muon optimizes the matrices of linear layers, AdamW everything else.

Both have the peak rate --lr (1e-3 is a good start) at any batch size, and one schedule: Muon's
updates are scaled to the size of AdamW's. To choose other optimizers or other parameters, edit
`make_two_optimizers`.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
from torch import nn


class TwoOptimizers(torch.optim.Optimizer):
    """Two optimizers as one, for the schedule, the checkpoints, and Accelerate: it has the groups
    of both, in order, and the states of both."""

    def __init__(self, first, second):
        self.both = first, second
        super().__init__([*first.param_groups, *second.param_groups], {})
        for optimizer in self.both:
            self.state.update(optimizer.state)
        self.share()

    def share(self):
        """Make groups and states those of the two optimizers: the same objects."""
        groups = iter(self.param_groups)
        for optimizer in self.both:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def step(self, closure=None):
        for optimizer in self.both:
            optimizer.step()

    def load_state_dict(self, state):
        super().load_state_dict(state)  # makes new groups and states
        self.share()


def make_two_optimizers(model, args, total_steps):
    """Return the optimizers as one, and the schedule of their learning rates, whose peak is
    `--lr` at any batch size.

    Muon (Jordan et al. 2024) orthogonalizes the updates of matrices. Embeddings are AdamW's, and
    so is a head whose weight is theirs. A group may be empty: a stage of a pipeline may have no
    matrix.
    """
    embedded = {x.weight for x in model.modules() if isinstance(x, nn.Embedding)}
    linear = dict.fromkeys(x.weight for x in model.modules() if isinstance(x, nn.Linear))
    matrices = [x for x in linear if x not in embedded]
    others = [x for x in model.parameters() if x not in {*matrices}]
    options = {"lr": args.lr, "weight_decay": 0.1}
    muon = torch.optim.Muon([{"params": matrices}], adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW([{"params": others}], fused=True, **options)
    optimizer = TwoOptimizers(muon, adamw)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps + 1, anneal_strategy="linear", cycle_momentum=False
    )
    return optimizer, schedule
