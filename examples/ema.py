# Parts of a copy, not a program: make new COPY=../mine.py WITH=ema
# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average (EMA) of the weights is evaluated and saved in place of them.

Checkpoints hold both. In step N the average keeps (N + 1) / (N + 10) of its value, but at most
--ema-decay, 0.999 by default. So a short training does not evaluate its initial weights.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddp_cifar import positive


def add_ema_flags(parser):
    """Add the flag of the average, which a resumed run must repeat."""
    what = "share of the average that a step keeps (%(default)s)"
    parser.add_argument("--ema-decay", type=positive(float), default=0.999, help=what)


class Average:
    """The exponential moving average of a model's trained parameters and floating-point buffers,
    and the newest values of its other buffers, such as counters.

    Outside of training the model holds the average, and this object the trained weights. Both are
    on the device. Of a sharded model, each process averages its own shards.
    """

    def __init__(self, model, decay):
        self.decay = decay
        trained = [x for x in model.parameters() if x.requires_grad]
        floating = [x for x in model.buffers() if x.is_floating_point()]
        others = [x for x in model.buffers() if not x.is_floating_point()]
        self.in_model = trained, floating, others
        self.stored = [[x.detach().clone() for x in group] for group in self.in_model]
        self.in_use = False  # whether the model holds the average

    def update(self, step):
        average = get_ema_multi_avg_fn(min(self.decay, (step + 1) / (step + 10)))
        for stored, group in zip(self.stored[:2], self.in_model[:2], strict=True):
            if group:
                average(stored, group, None)
        for stored, x in zip(self.stored[2], self.in_model[2], strict=True):
            stored.copy_(x)

    @torch.no_grad()
    def use(self, in_use=True):
        """Put the average into the model or, if not `in_use`, the trained weights."""
        if in_use == self.in_use:
            return
        for group, stored in zip(self.in_model, self.stored, strict=True):
            for x, other in zip(group, stored, strict=True):
                before = x.clone()
                x.copy_(other)
                other.copy_(before)
        self.in_use = in_use

    def state_dict(self):
        return {"average": self.stored}  # checkpoints are written while the model trains

    @torch.no_grad()
    def load_state_dict(self, state):
        for stored, saved in zip(self.stored, state["average"], strict=True):
            for x, value in zip(stored, saved, strict=True):
                x.copy_(value)
