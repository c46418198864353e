# SPDX-License-Identifier: Apache-2.0
"""The loss of completions that a model has drawn, by their rewards."""

from functools import lru_cache

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


def log_probabilities(model, prompts, completions, temperature):
    """Return those of the tokens of completions, which may be padded, under the distribution that
    they are drawn from: (B, N) and (B, T) int64 in, (B, T) float32 out, with 0 at -100."""
    tokens = torch.cat((prompts, completions), dim=1)
    mask = (tokens != -100).long()
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    inputs |= {"use_cache": False, "logits_to_keep": completions.shape[1] + 1}
    logits = model(tokens.clamp(min=0), **inputs).logits[:, :-1].float() / temperature
    return -F.cross_entropy(logits.mT, completions, reduction="none")


@lru_cache
def base_model(base, device):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model.requires_grad_(False).to(device)


@torch.no_grad()
def base_log_probabilities(model, *inputs, base):
    """Return the same of the base: of the model without its adapter or, without lora, of a second
    model."""
    if not any(hasattr(module, "lora_A") for module in model.modules()):
        return log_probabilities(base_model(base, inputs[0].device), *inputs)
    from peft.helpers import rescale_adapter_scale  # here: a copy without lora needs no peft

    with rescale_adapter_scale(model, 0):
        return log_probabilities(model, *inputs)


def group_loss(model, prompts, completions, rewards, args):
    """Return the loss of each group of completions: (B * group, N) and (B * group, T) int64,
    and (B * group,) float32 in, (B,) float32 out; and the metrics."""
    rewards = rewards.view(-1, args.group)
    deviation = rewards.std(1, keepdim=True)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)
    inputs = prompts, completions, args.temperature
    found = log_probabilities(model, *inputs)
    # The gradient of the paper's ratio is that of the logarithm: the policy has not changed yet.
    losses = -advantage.view(-1, 1) * found
    counted = (completions != -100).sum(1)
    values = {"reward": rewards.mean(1), "length": counted.view_as(rewards).float().mean(1)}
    values["equal_rewards"] = deviation[:, 0] == 0
    if args.beta:
        ratio = base_log_probabilities(model, *inputs, base=args.base) - found
        divergence = ratio.exp() - ratio - 1
        losses = losses + args.beta * divergence
        divergence = (divergence.sum(1) / counted).detach()
        values["kl"] = divergence.view_as(rewards).mean(1)
    losses = losses.sum(1)
    if args.mean_over == "completions":
        return {"loss": (losses / counted).view_as(rewards).mean(1), **values}
    weight = counted.view_as(rewards).sum(1)
    return {"loss": losses.view_as(rewards).sum(1) / weight, "weight": weight, **values}
