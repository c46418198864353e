# SPDX-License-Identifier: Apache-2.0
"""Generation by a model that a recipe has wrapped."""

import torch
from torch import distributed


@torch.no_grad()
def generate(model, **options):
    """Return what `.generate` of a model of transformers returns, (B, N) int64, inside of
    `compute_loss`. DDP hides that method. A sharded model gathers its parameters in each step: so
    all ranks take as many steps as the one that needs most. If it has an encoder, call `model(...)`
    before: that gathers the encoder's parameters."""
    plain = getattr(model, "module", model)
    together = hasattr(plain, "reshard") and distributed.get_world_size() > 1
    return plain.generate(synced_gpus=together, **options)
