# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs whose negatives are the whole global batch: embeddings, contrastive and clip.

The samples of all processes and of all microbatches are compared, by cached gradients (Gao et al.
2021, arXiv:2101.06983). A first pass, without gradients, embeds all microbatches of a step. The
embeddings are gathered. Each process computes the loss of all pairs, which takes little time beside
the model, and its gradient with respect to the embeddings. The second pass is the recipe's own: it
takes this gradient back through the model. It keeps the activations of one microbatch at a time.

A model returns (B, 2, D) for B pairs, more than 2 if they have negatives of their own. A function
`losses(pairs, rows)` returns the values of those with the indices `rows`, (n,), among all pairs,
(N, 2, D): {"loss": (n,), ...}.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ddp_cifar import seed_rng

ROWS = 1024  # pairs that are compared with all others at a time, to save memory


class Cached(NamedTuple):
    """A microbatch, the gradient of its sum of losses, (B, 2, D), and its values."""

    inputs: tuple
    gradient: torch.Tensor
    values: dict


def by_rows(pairs, losses):
    """Yield the values of all pairs, of `ROWS` of them at a time."""
    for rows in torch.arange(len(pairs), device=pairs.device).split(ROWS):
        yield losses(pairs, rows)


@torch.no_grad()
def with_cached_gradients(run, model, microbatches, losses):
    """Return the microbatches of a step as a list of `Cached`, or as they are if one has all."""
    accelerator = run.accelerator
    rank, processes = accelerator.process_index, accelerator.num_processes
    microbatches = list(microbatches)
    if len(microbatches) == processes == 1:
        return microbatches
    own = []
    for index, batch in enumerate(microbatches):
        # As in the second pass: dropout has to be the same.
        seed_rng(run.args.seed, run.step, index * processes + rank)
        own.append(model(*batch))
    by_rank = accelerator.gather(torch.stack(own)).unflatten(0, (processes, -1))
    in_order = by_rank.transpose(0, 1)  # (microbatches, processes, B, 2, D): that of the samples
    pairs = in_order.flatten(0, 2).requires_grad_()
    parts = []
    with torch.enable_grad():
        for part in by_rows(pairs, losses):
            part["loss"].sum().backward()  # frees what the part has computed
            parts.append({name: x.detach() for name, x in part.items()})
    gradients = pairs.grad.view_as(in_order)[:, rank]
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    columns = {name: x.view(in_order.shape[:3])[:, rank] for name, x in columns.items()}
    values = [{name: x[index] for name, x in columns.items()} for index in range(len(own))]
    return [Cached(*x) for x in zip(microbatches, gradients, values, strict=True)]


def loss_among_all(model, batch, losses):
    """Return the values of a microbatch in the global batch, and a loss with the cached gradient.
    Of a batch without one, as in a test, return its values without other batches, and its
    embeddings for `test_metrics`."""
    if not isinstance(batch, Cached):
        pairs = model(*batch)
        values = losses(pairs, torch.arange(len(pairs), device=pairs.device))
        return {**values, "outputs": pairs.detach()}
    surrogate = (model(*batch.inputs) * batch.gradient).flatten(1).sum(1)
    loss = batch.values["loss"] + (surrogate - surrogate.detach())  # adds 0, and the gradient
    return {**batch.values, "loss": loss}


def means_among_all(outputs, losses):
    """Return the mean values of a whole test set, from the embeddings of each pair."""
    parts = list(by_rows(torch.stack(outputs), losses))
    return {name: torch.cat([part[name] for part in parts]).double().mean() for name in parts[0]}


def info_nce(pairs, rows):
    """Return the mean loss of both directions, from an anchor to the positives and all negatives,
    and from a positive to the anchors, and whether the anchor's nearest text is its positive."""
    anchors, positives, *negatives = pairs.unbind(1)
    to_texts = anchors[rows] @ torch.cat([positives, *negatives]).T
    to_anchors = positives[rows] @ anchors.T
    losses = [F.cross_entropy(x, rows, reduction="none") for x in (to_texts, to_anchors)]
    return {"loss": torch.stack(losses).mean(0), "recall_at_1": to_texts.argmax(1) == rows}


def nt_xent(pairs, rows):
    """Return the mean loss of both views of these images, and how many of the two find the other
    one. No view is its own negative."""
    views = torch.cat((pairs[:, 0], pairs[:, 1]))
    own = torch.cat((rows, rows + len(pairs)))
    partners = own.roll(len(rows))
    similarity = (views[own] @ views.T).scatter(1, own[:, None], float("-inf"))
    losses = F.cross_entropy(similarity, partners, reduction="none").view(2, -1)
    found = (similarity.argmax(1) == partners).float().view(2, -1)
    return {"loss": losses.mean(0), "recall_at_1": found.mean(0)}
