"""For copies in test_embeddings_examples.py: the whole global batch at once, on one process, by
plain autograd and other formulas; models and images in float64."""

import math

import torch

from ddp_cifar import ImageTensors, build_model, main, seed_rng, total_norm

float32_model, plain_main = build_model, main


def whole_step(run, model, optimizer, scheduler, microbatches):
    """The seeds are those of the recipe, for dropout."""
    parts = []
    for index, batch in enumerate(microbatches):
        seed_rng(run.args.seed, run.step, index)
        parts.append(model(*batch))
    values = of_all(torch.cat(parts))
    values["loss"].mean().backward()
    grad_norm = total_norm(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return [{name: x.detach() for name, x in values.items()}], grad_norm


def whole_metrics(outputs, args):
    assert len(outputs) == len({tuple(x.flatten().tolist()) for x in outputs})
    return {name: x.double().mean() for name, x in of_all(torch.stack(outputs)).items()}


def of_texts(pairs):
    products = (pairs[:, None, 0] * pairs[None, :, 1]).sum(2)
    own = products.diagonal()
    losses = (products.logsumexp(0) + products.logsumexp(1)) / 2 - own
    return {"loss": losses, "recall_at_1": (products <= own[:, None]).all(1)}


def of_images(pairs):
    views = pairs.flatten(0, 1)
    products = (views[:, None] * views).sum(2)
    products = products - torch.diag(torch.full((len(views),), math.inf, dtype=products.dtype))
    partner = products[range(len(views)), [index ^ 1 for index in range(len(views))]]
    losses = products.logsumexp(1) - partner
    found = (products <= partner[:, None]).all(1).double()
    return {"loss": losses.view(-1, 2).mean(1), "recall_at_1": found.view(-1, 2).mean(1)}


of_all = of_texts


def model_in_float64(args):
    return float32_model(args).double()


def main_with_images_in_float64():
    float32_items = ImageTensors.__getitems__

    def float64_items(images, indices):
        pixels, labels = float32_items(images, indices)
        return pixels.double(), labels

    ImageTensors.__getitems__ = float64_items
    plain_main()
