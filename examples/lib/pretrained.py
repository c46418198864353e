# SPDX-License-Identifier: Apache-2.0
"""Models of transformers: from pretrained weights, to files that its pipelines load."""

import shlex
import sys
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig

from ddp_cifar import WORLD_SIZE, replace_file
from lib.rows import hub_name

DATA = "train", "test", "chats", "pairs", "prompts"  # flags that name rows
CARD = """---
{metadata}
---

# {name}

Trained on {processes} processes by `{command}`.
Its results are in [summary.json](summary.json), all steps and evaluations in
[metrics.jsonl](metrics.jsonl). All flags:

```
{flags}
```
"""


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
    name of the model's class, the tokenizer or processor, and how the base generates, with changes;
    and a model card."""
    if not accelerator.is_main_process:
        return
    with torch.device("meta"):
        model = auto.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(args.output_dir)
    processor.save_pretrained(args.output_dir)
    if how := generation_config(args, model, **generation):
        how.save_pretrained(args.output_dir)
    save_card(args)


def save_card(args):
    """Write README.md, a model card for the Hub, unless there is one, which may be its owner's. It
    names the files of the metrics, which are not known before the end."""
    path = Path(args.output_dir, "README.md")
    if path.exists():
        return
    sources = [getattr(args, name, None) for name in DATA]
    data = ModelCardData(
        base_model=None if Path(args.base).exists() else args.base,
        datasets=sorted({name for source in sources if (name := hub_name(source))}) or None,
        library_name="transformers",
    )
    given = {name.replace("_", "-"): x for name, x in vars(args).items() if x is not None}
    text = CARD.format(
        metadata=data.to_yaml(),
        name=path.absolute().parent.name,
        processes=WORLD_SIZE,
        command=shlex.join(["python", *sys.argv]),
        flags="\n".join(f"--{name} {x}" for name, x in given.items()),
    )
    replace_file(path, ModelCard(text).save)
