"""For copies in test_embeddings_examples.py: the whole global batch at once, on one process, by
plain autograd and other formulas; the model in float64."""

import torch

from ddp_cifar import build_model, seed_rng, total_norm

float32_model = build_model


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


def of_all(pairs):
    products = (pairs[:, None, 0] * pairs[None, :, 1]).sum(2)
    own = products.diagonal()
    losses = (products.logsumexp(0) + products.logsumexp(1)) / 2 - own
    return {"loss": losses, "recall_at_1": (products <= own[:, None]).all(1)}


def model_in_float64(args):
    return float32_model(args).double()
