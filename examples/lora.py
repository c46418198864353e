# SPDX-License-Identifier: Apache-2.0
"""LoRA: each linear layer and convolution gets two small matrices (peft). Only these are trained.

Needs `pip install peft`. Checkpoints and model.safetensors hold the trained parameters and the
buffers alone. At the end peft's `PeftModel.from_pretrained(model, "runs/mine")` loads the matrices
as an adapter. If the model is from a `from_pretrained` of transformers, adapter_config.json names
its source, and `from_pretrained("runs/mine")` loads both. --weights names weights of the whole
model, to begin with: then adapter_config.json names no source. nn.MultiheadAttention, such as in
vit, is not adapted. A new head with random weights, such as that of text_classification, would be
frozen and not saved: train it without lora. To train other layers, or to make the matrices larger,
edit `lora_config`.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

from pathlib import Path

from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

ADAPTED = nn.Linear | nn.Conv2d


def lora_config(layers):
    """Return how to adapt the layers with these names."""
    return LoraConfig(r=8, lora_alpha=16, target_modules=layers)


def with_lora(model):
    """Return the model with frozen weights and, in its layers, the trained matrices, in fp32. Its
    class and its methods stay the same."""
    kept = {x.weight for x in model.modules() if isinstance(x, nn.Embedding)}  # also a tied head's
    attention = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    kept |= {x.out_proj.weight for x in attention}  # which it reads: a matrix would have no effect
    modules = model.named_modules()
    layers = [name for name, x in modules if isinstance(x, ADAPTED) and x.weight not in kept]
    model = inject_adapter_in_model(lora_config(layers), model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives it the type of the layer's weight
            parameter.data = parameter.data.float()
    return model


def leave_out_frozen(model):
    """Leave the frozen parameters out of the model's state dict, and load one without them."""

    def drop(module, state, prefix, _):
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                state.pop(prefix + name)

    for module in model.modules():
        module.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())


def save_adapter(accelerator, model, args):
    """Write what model.safetensors has of the matrices in the form that peft reads."""
    if not accelerator.is_main_process:
        return
    weights = load_file(Path(args.output_dir, "model.safetensors"))
    matrices = {name: x for name, x in weights.items() if ".lora_" in name}
    layers = sorted({name.partition(".lora_")[0] for name in matrices})
    names = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in matrices}
    path = Path(args.output_dir, "adapter_model.safetensors")
    save_file({names[name]: x for name, x in matrices.items()}, path)
    config = lora_config(layers)
    if not args.weights:  # they are not those of the name
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.save_pretrained(args.output_dir)
