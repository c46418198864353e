# SPDX-License-Identifier: Apache-2.0
"""Images and captions as a latent diffusion model sees them: encoded once, and with noise."""

from pathlib import Path

import diffusers
import torch
import torchvision
import transformers
from diffusers import DDPMScheduler, StableDiffusionPipeline
from torch.utils.data import Dataset
from torchvision.transforms import v2

from ddp_cifar import exit_with_error
from lib.images import exit_if_missing, read_image
from lib.once import kept
from lib.progress import with_progress
from lib.rows import source_key


class Noisy(Dataset):
    """What `with_noise` makes of each image that is encoded. All is a function of (seed, epoch,
    index)."""

    def __init__(self, encoded, scheduler):
        self.encoded = encoded
        self.scheduler = scheduler

    def __len__(self):
        return len(self.encoded[0])

    def __getitem__(self, index):
        encoded = [x[index][None] for x in self.encoded]
        drawn = [x[None] for x in draw(self.scheduler, encoded[0].shape[1:])]
        return [x[0] for x in with_noise(self.scheduler, encoded, drawn)]


def draw(scheduler, shape):
    """Return an image's random numbers: of its latents and its noise, (C, H, W) float32, which is
    `shape`, and its time, () int64."""
    steps = scheduler.config.num_train_timesteps
    return torch.randn(shape), torch.randn(shape), torch.randint(steps, ())


def with_noise(scheduler, encoded, drawn):
    """Return latents of B images with noise, (B, C, H, W) float32, the times, (B,) int64, their
    captions' embeddings, (B, T, D) float32, and the target of the model: the noise or, for
    v-prediction (Salimans and Ho 2022, arXiv:2202.00512), the velocity. `encoded` is what
    `encode_batch` returns, and `drawn` has what `draw` does."""
    mean, deviation, texts = encoded
    of_latents, noise, times = drawn
    given = mean + deviation * of_latents, noise, times
    is_velocity = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(*given) if is_velocity else noise
    return scheduler.add_noise(*given), times, texts, target


def load_scheduler(base):
    """Return the scheduler of --base, which adds noise."""
    scheduler = DDPMScheduler.from_pretrained(base, subfolder="scheduler")
    kind = scheduler.config.prediction_type
    if kind not in ("epsilon", "v_prediction"):
        exit_with_error(f"--base: prediction_type {kind} is not epsilon or v_prediction")
    return scheduler


def load_pipeline(base, device, unet=None):
    """Return the pipeline of --base with this model, or with none."""
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    options = {"safety_checker": None, "requires_safety_checker": False, "dtype": torch.float32}
    pipeline = StableDiffusionPipeline.from_pretrained(base, unet=unet, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def to_pixels(size):
    """Return the transform of an image into pixels, (3, size, size) float32 in [-1, 1]."""
    if size % 8:
        exit_with_error("argument --size: choose a multiple of 8")
    normalize = v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)
    return v2.Compose([v2.ToImage(), v2.Resize(size), v2.CenterCrop(size), *normalize])


@torch.no_grad()
def encode_batch(pipeline, pixels, captions):
    """Return the means and the standard deviations of the images' latents, (B, C, H, W), and the
    embeddings of their captions, (B, T, D). All are float32."""
    scale = pipeline.vae.config.scaling_factor
    latents = pipeline.vae.encode(pixels).latent_dist
    texts, _ = pipeline.encode_prompt(list(captions), pixels.device, 1, False)
    return latents.mean * scale, latents.std * scale, texts


def encode(rows, args, device):
    """Return what `encode_batch` does for all images and captions, on the CPU."""
    pipeline = load_pipeline(args.base, device)
    transform = to_pixels(args.size)
    encoded = []
    batches = [rows[i : i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
    for batch in with_progress(batches, len(rows), f"latents of {args.images}", len):
        images, captions = zip(*batch, strict=True)
        pixels = torch.stack([transform(read_image(image)) for image in images]).to(device)
        encoded.append([x.cpu() for x in encode_batch(pipeline, pixels, captions)])
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
    pipeline = load_pipeline(args.base, run.accelerator.device, plain)
    generator = torch.Generator().manual_seed(args.seed)
    size = {"height": args.size, "width": args.size, "num_images_per_prompt": 4}
    images = pipeline(args.prompt, generator=generator, output_type="pt", **size).images
    if run.accelerator.is_main_process:
        path = Path(args.output_dir, f"samples-{run.step:08d}.png")
        torchvision.utils.save_image(images, path)
