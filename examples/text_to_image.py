# Parts of a copy, not a program: make new COPY=../mine.py WITH="text_to_image lora"
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune Stable Diffusion on images with captions; with lora, an adapter for diffusers.

    python tools/toy.py painter
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/painter \\
        --images toy/captions --size 32 --prompt "a red ellipse on blue" --epochs 3 \\
        --batch-size 16 --lr 1e-3

With a model of the Hub and your own folder of images:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base stable-diffusion-v1-5/stable-diffusion-v1-5

The toy model has random weights: --lr is higher for it; with lora 1e-4 is usual. Each line of
metadata.jsonl has a "file_name" and a "text", as in an image folder of datasets. --images can be a
dataset, too, with the columns "image" and --caption. Every tenth row is in the test set. Images are
scaled and cropped to --size, and encoded before the first step, by the main process: their latents
and the embeddings of the captions are in a file in --output-dir, 370 KB for each image of 512
pixels. Noise and times are a function of (seed, epoch, image), the same on any number of processes,
and in each evaluation. Each evaluation makes samples-STEP.png, four images of --prompt.

With lora, `StableDiffusionPipeline.from_pretrained(base).load_lora_weights("runs/mine")` loads the
adapter. Without it all of the U-Net is trained, and `from_pretrained(base, unet=
UNet2DConditionModel.from_pretrained("runs/mine/unet"))` is the pipeline.

Group: vision. Recipes: ddp, amp, sharded.
"""

import shutil
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Subset

from diffusion import make_optimizer
from lib.latents import Noisy, encoded_once, load_scheduler, save_samples
from lib.rows import located, nonempty_text, read_rows


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--images", default="images", help="a folder with metadata.jsonl, or a dataset (images)")
    add("--caption", default="text", help="the column of captions (text)")
    add("--size", type=int, default=512, help="pixels of a side (512)")
    add("--prompt", default="", help="of the samples that each evaluation makes")
    parser.set_defaults(lr=1e-5, batch_size=4, epochs=3)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of what `Noisy` returns."""
    path = Path(args.images, "metadata.jsonl")
    source, image = (path, "file_name") if path.exists() else (args.images, "image")
    rows = read_rows(source, (image, located(args.images)), (args.caption, nonempty_text))
    samples = Noisy(encoded_once(rows, args, accelerator), load_scheduler(args.base))
    train_set = Subset(samples, [index for index in range(len(rows)) if index % 10])
    test_set = Subset(samples, range(0, len(rows), 10))
    options = {"batch_size": args.batch_size, "pin_memory": torch.cuda.is_available()}
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    if torch.empty(0).is_meta:
        config = UNet2DConditionModel.load_config(args.base, subfolder="unet")
        return UNet2DConditionModel.from_config(config)
    options = {"subfolder": "unet", "dtype": torch.float32}
    return UNet2DConditionModel.from_pretrained(args.base, **options).train()


def compute_loss(model, batch, args):
    """Return the squared error of the prediction, one value per image."""
    noisy, times, texts, target = batch
    predicted = model(noisy, times, texts, return_dict=False)[0]
    return {"loss": (predicted.float() - target).square().mean((1, 2, 3))}


def save_for_diffusers(accelerator, model, args):
    """Write the adapter as `load_lora_weights(output_dir)` of a pipeline reads it or, without lora,
    the folder unet, of which `UNet2DConditionModel.from_pretrained` makes a pipeline's `unet`."""
    if not accelerator.is_main_process:
        return
    saved = Path(args.output_dir, "model.safetensors")
    modules = getattr(model, "module", model).named_modules()
    scales = {name: x.scaling["default"] for name, x in modules if hasattr(x, "lora_A")}
    adapter = {}
    for name, x in load_file(saved).items() if scales else ():
        layer, _, matrix = name.partition(".lora_")
        if matrix:  # readers take the scale to be 1
            x = x * scales[layer] if matrix.startswith("B") else x
            adapter[name.replace(".default.", ".")] = x
    if adapter:
        StableDiffusionPipeline.save_lora_weights(args.output_dir, unet_lora_layers=adapter)
        return
    folder = Path(args.output_dir, "unet")
    with torch.device("meta"):
        build_model(args).save_config(folder)
    shutil.copyfile(saved, folder / "diffusion_pytorch_model.safetensors")
