# SPDX-License-Identifier: Apache-2.0
"""The losses of a language model's targets, without the logits of all positions at once."""

from dataclasses import replace
from functools import wraps
from types import MethodType
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGITS = 2**27  # at most in a chunk: 0.5 GiB in float32


def with_token_losses(model):
    """Return a model of transformers whose forward pass takes `targets`, too: (B, N) int64, or
    -100. With them it returns their losses, (B, N) float32, with 0 at -100. Without them it is what
    it was.

    Logits are computed for the counted targets alone, in chunks. The backward pass computes those
    of all chunks but the last one again, which are never in memory at the same time."""
    logits_of = type(model).forward

    @wraps(logits_of)  # generation reads which arguments it has
    def forward(self, *inputs, targets=None, **options):
        if targets is None:
            return logits_of(self, *inputs, **options)
        decoder = getattr(self.base_model, "decoder", self.base_model)  # OPT's is in its model
        outputs = decoder(*inputs, **options)

        def losses(hidden, targets):
            """What follows the decoder differs among models, such as a scale: so the whole forward
            pass is called, with a decoder that only returns a chunk of its outputs."""
            chunk = replace(outputs, last_hidden_state=hidden[None])
            with patch.object(decoder, "forward", lambda *_, **__: chunk):
                logits = logits_of(self, *inputs, **options).logits[0]
            return F.cross_entropy(logits.float(), targets, reduction="none")

        size = max(1, LOGITS // self.get_input_embeddings().num_embeddings)
        return in_chunks(losses, outputs.last_hidden_state, targets, size)

    model.forward = MethodType(forward, model)
    return model


@torch.compiler.disable  # a number of targets is no constant
def in_chunks(losses, hidden, targets, size):
    """Return `losses` of the counted targets, `size` of them at a time."""
    counted = (targets != -100).nonzero(as_tuple=True)
    chunks = zip(hidden[counted].split(size), targets[counted].split(size), strict=True)
    *others, last = chunks
    found = [checkpoint(losses, *chunk, use_reentrant=False) for chunk in others]
    found = torch.cat([*found, losses(*last)])  # the backward pass begins with the last one
    return found.new_zeros(targets.shape).index_put(counted, found)


def token_losses(model, samples):
    """Return the loss of each target in float32: (B, N, 2) in, (B, N) out, with 0 at -100."""
    tokens, targets = samples.unbind(-1)
    return model(tokens.clamp(min=0), targets=targets, use_cache=False)
