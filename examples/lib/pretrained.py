# SPDX-License-Identifier: Apache-2.0
"""Models of transformers: from pretrained weights, to files that its pipelines load."""

from contextlib import suppress

import torch
from transformers import GenerationConfig


def load_pretrained(auto, args, config):
    """Return the model of --base by a class such as AutoModelForMaskedLM, in float32 and on the
    CPU. A head that the base does not have, or has in another shape, gets random weights. For
    sharded_cifar.py also on the meta device, which has shapes and no weights."""
    if torch.empty(0).is_meta:
        model = auto.from_config(config, dtype=torch.float32)
        if how := generation_config(args, model):
            model.generation_config = how
        return model
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True}
    return auto.from_pretrained(args.base, config=config, **options).train()


def generation_config(args, model, **changes):
    """Return how the base generates, with changes, or None if it has no such file, or cannot."""
    with suppress(OSError):
        if model.can_generate():
            return GenerationConfig.from_pretrained(args.base, **changes)


def save_beside_weights(accelerator, args, auto, config, processor, **generation):
    """Save what `transformers.pipeline` needs beside model.safetensors: the configuration, with the
    name of the model's class, the tokenizer or processor, and how the base generates, with changes.
    """
    if not accelerator.is_main_process:
        return
    with torch.device("meta"):
        model = auto.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(args.output_dir)
    processor.save_pretrained(args.output_dir)
    if how := generation_config(args, model, **generation):
        how.save_pretrained(args.output_dir)
