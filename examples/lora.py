# Parts of a copy, not a program: make new COPY=../mine.py WITH=lora
# SPDX-License-Identifier: Apache-2.0
"""LoRA: each linear layer and convolution gets two small matrices (peft). Only these are trained.

Checkpoints and model.safetensors hold the trained parameters and the buffers alone. At the end
peft's `PeftModel.from_pretrained(model, "runs/mine/adapter")` loads the adapter. If the model is
from a `from_pretrained` of transformers, adapter_config.json names its source, and
`from_pretrained("runs/mine/adapter")` loads both. --weights names weights of the whole model, to
begin with: then adapter_config.json names no source. A head with one of the names in `HEADS` is
trained and saved as a whole: edit it if yours has another name. nn.MultiheadAttention, such as in
vit, is not adapted. To train other layers, or to make the matrices larger, edit `lora_config`.

Group: additions. Recipes: ddp, amp, pipeline, sharded.
"""

from pathlib import Path

from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

ADAPTED = nn.Linear | nn.Conv2d
HEADS = ("classifier", "score")  # new ones of transformers, with random weights


def lora_config(layers):
    """Return how to adapt the layers with these names."""
    return LoraConfig(r=8, lora_alpha=16, target_modules=layers)


def in_head(name):
    return name.partition(".")[0] in HEADS


def with_lora(model):
    """Return the model with frozen weights and, in its layers, the trained matrices, in fp32. Its
    class and its methods stay the same."""
    kept = {x.weight for x in model.modules() if isinstance(x, nn.Embedding)}  # also a tied head's
    attention = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    kept |= {x.out_proj.weight for x in attention}  # which it reads: a matrix would have no effect
    modules = [(k, x) for k, x in model.named_modules() if not in_head(k)]
    layers = [name for name, x in modules if isinstance(x, ADAPTED) and x.weight not in kept]
    model = inject_adapter_in_model(lora_config(layers), model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or in_head(name):
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()  # peft takes the type of the layer's weight
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
    """Write what model.safetensors has of the matrices and of a head as peft reads it."""
    if not accelerator.is_main_process:
        return
    weights = load_file(Path(args.output_dir, "model.safetensors"))
    trained = {k: x for k, x in weights.items() if ".lora_" in k or in_head(k)}
    names = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in trained}
    folder = Path(args.output_dir, "adapter")
    folder.mkdir(exist_ok=True)
    save_file({names[k]: x for k, x in trained.items()}, folder / "adapter_model.safetensors")
    config = lora_config(sorted({k.partition(".lora_")[0] for k in trained if ".lora_" in k}))
    config.modules_to_save = sorted({k.partition(".")[0] for k in trained if in_head(k)}) or None
    if not args.weights:  # they are not those of the name
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.save_pretrained(folder)
    # Beside weights that are not whole, transformers would take others at random.
    Path(args.output_dir, "config.json").unlink(missing_ok=True)
