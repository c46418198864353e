# SPDX-License-Identifier: Apache-2.0
"""Images and captions as a latent diffusion model sees them: encoded once, and with noise."""

from pathlib import Path

import torch
import torchvision
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging
from torch.utils.data import Dataset
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.images import exit_if_missing, read_image
from lib.once import kept
from lib.rows import source_key


class Noisy(Dataset):
    """Latents of images with noise, (C, H, W) float32, the time, () int64, their captions'
    embeddings, (T, D) float32, and the target of the model: the noise or, for v-prediction
    (Salimans and Ho 2022, arXiv:2202.00512), the velocity. All is a function of (seed, epoch,
    index)."""

    def __init__(self, encoded, scheduler):
        self.encoded = encoded
        self.scheduler = scheduler
        kind = scheduler.config.prediction_type
        if kind not in ("epsilon", "v_prediction"):
            exit_with_error(f"--base: prediction_type {kind} is not epsilon or v_prediction")
        self.is_velocity = kind == "v_prediction"

    def __len__(self):
        return len(self.encoded[0])

    def __getitem__(self, index):
        mean, deviation, text = (x[index] for x in self.encoded)
        latents = mean + deviation * torch.randn(mean.shape)
        noise = torch.randn(mean.shape)
        time = torch.randint(self.scheduler.config.num_train_timesteps, ())
        given = latents[None], noise[None], time[None]
        noisy = self.scheduler.add_noise(*given)[0]
        target = self.scheduler.get_velocity(*given)[0] if self.is_velocity else noise
        return noisy, time, text, target


def load_pipeline(args, device, unet=None):
    """Return the pipeline of --base with this model, or with none."""
    logging.disable_progress_bar()
    options = {"safety_checker": None, "requires_safety_checker": False, "dtype": torch.float32}
    pipeline = StableDiffusionPipeline.from_pretrained(args.base, unet=unet, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


@torch.no_grad()
def encode(rows, args, device):
    """Return the means and the standard deviations of the images' latents, (N, C, H, W), and the
    embeddings of their captions, (N, T, D). All are float32."""
    pipeline = load_pipeline(args, device)
    scale = pipeline.vae.config.scaling_factor
    crop = [v2.Resize(args.size), v2.CenterCrop(args.size)]
    normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    transform = v2.Compose([v2.ToImage(), *crop, *normalize])
    encoded = []
    for begin in range(0, len(rows), args.batch_size):
        images, captions = zip(*rows[begin : begin + args.batch_size], strict=True)
        pixels = torch.stack([transform(read_image(image)) for image in images])
        latents = pipeline.vae.encode(pixels.to(device)).latent_dist
        texts, _ = pipeline.encode_prompt(list(captions), device, 1, False)
        encoded.append([x.cpu() for x in (latents.mean * scale, latents.std * scale, texts)])
    return [torch.cat(x) for x in zip(*encoded, strict=True)]


def encoded_once(rows, args, accelerator):
    """Return what `encode` does, `kept` in --output-dir."""
    images = [image for image, _ in rows]
    exit_if_missing(images, f"--images {args.images}")
    key = args.base, args.size, rows, [source_key(getattr(x, "source", x)) for x in images]
    path = Path(args.output_dir, "encoded.pt")
    return kept(path, key, lambda: encode(rows, args, accelerator.device))


@torch.no_grad()
def save_samples(run, model):
    """Write four images of --prompt. All ranks make the same, since a sharded model needs them."""
    args, plain = run.args, getattr(model, "module", model)
    pipeline = load_pipeline(args, run.accelerator.device, plain)
    generator = torch.Generator().manual_seed(args.seed)
    size = {"height": args.size, "width": args.size, "num_images_per_prompt": 4}
    images = pipeline(args.prompt, generator=generator, output_type="pt", **size).images
    if run.accelerator.is_main_process:
        path = Path(args.output_dir, f"samples-{run.step:08d}.png")
        torchvision.utils.save_image(images, path)
