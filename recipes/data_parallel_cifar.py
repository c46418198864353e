# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "torchvision>=0.26", "accelerate>=1.10", "numpy>=2"]
# ///
"""The baseline: ResNet-50 on CIFAR-10 with torch.nn.DataParallel, one process for all GPUs.

    accelerate launch --config_file accelerate_configs/1gpu.yaml recipes/data_parallel_cifar.py
    CUDA_VISIBLE_DEVICES=0,1 python recipes/data_parallel_cifar.py --batch-size 256

Read this first: it is a whole training on Accelerate. Copy ddp_cifar.py instead, which has one
process per GPU. DataParallel has these pitfalls:
- It copies the model to every GPU in every step, and adds up the gradients on the first GPU.
- The first GPU also holds the batch, the outputs and the optimizer: it is full before the others.
- One interpreter launches the kernels of all GPUs, and its lock lets one thread run at a time.
- `--batch-size` is that of all GPUs together. BatchNorm normalises the share of each GPU.
- The names of the weights begin with "module.", unless the model is unwrapped.
There are no checkpoints: a run that is interrupted starts again.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import numpy
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, utils
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RECIPE = Path(__file__).stem


def add_flags(parser):
    """Add the flags of the data and the model."""
    add = parser.add_argument
    add("--data", choices=("cifar10", "synthetic"), default="cifar10", help="default: cifar10")
    add("--data-dir", default="data", help="CIFAR-10 directory (downloaded if missing)")
    add("--model", choices=("resnet50", "simple_cnn"), default="resnet50", help="default: resnet50")
    add("--stem", choices=("cifar", "imagenet"), default="cifar", help="cifar (default): 3x3")


def load_data(args, accelerator):
    """Return the DataLoaders of (images, labels) for training and test. The training set needs a
    method `set_epoch`, for other crops and flips in each epoch."""
    if args.data == "synthetic":
        train_images, test_images = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
    else:
        train_images, test_images = cifar10(args.data_dir, accelerator)
    train_set = ImageTensors(*train_images, accelerator.device, augmentation_seed=args.seed)
    test_set = ImageTensors(*test_images, accelerator.device)
    options = {"batch_size": args.batch_size, "collate_fn": tuple}  # ImageTensors makes batches
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) in, (B, classes) logits out."""
    if args.model == "simple_cnn":
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    else:
        model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True)
        if args.stem == "cifar":
            model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # keeps small images large
            model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)  # fastest for convolutions


def compute_loss(model, batch, args):
    """Return {"loss": (B,) float, "accuracy": (B,) bool}. The mean of "loss" is minimised."""
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}


def make_optimizer(model, args, total_steps):
    """Return the optimizer, and the schedule of its learning rate."""
    peak = args.lr * args.global_batch_size / 128  # --lr is for 128 samples
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, **options)
    # Warm-up (Goyal et al. 2017, arXiv:1706.02677), then decay, to about zero after the last step.
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps + 1, anneal_strategy="linear", cycle_momentum=False
    )
    return optimizer, schedule


def parse_args():
    """Return the parsed flags."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.error = exit_with_error
    add_flags(parser)
    add = parser.add_argument
    add("--epochs", type=int, default=30, help="default: 30")
    add("--max-steps", type=int, default=2**31, help="stop after this many optimizer steps")
    add("--batch-size", type=int, default=128, help="samples per step, on all GPUs (128)")
    add("--lr", type=float, default=0.1, help="peak, per 128 samples of a step (0.1)")
    add("--seed", type=int, default=0, help="for weights, order and augmentation (0)")
    add("--cpu", action="store_true", help="train on CPU, even if GPUs are present")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (all cores)")
    add("--log-every", type=int, default=10, help="steps between lines (10)")
    add("--output-dir", default=f"runs/{RECIPE}", help="for results (%(default)s)")
    args = parser.parse_args()
    args.global_batch_size = args.batch_size  # for `make_optimizer`
    for name in ("epochs", "max_steps", "batch_size", "lr", "threads", "log_every"):
        if not getattr(args, name) > 0:
            exit_with_error(f"argument --{name.replace('_', '-')}: it is not above 0")
    return args


def exit_with_error(message):
    """Print an error in one line and exit with status 2."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"{RECIPE}: error: {message}", file=sys.stderr)
    sys.exit(2)


def make_accelerator(args):
    """Return the Accelerator. Exit with an error if the launcher asks for more than one process."""
    if utils.get_int_from_env(["WORLD_SIZE"], 1) > 1:  # Accelerate would wrap the model in DDP
        exit_with_error("DataParallel needs one process, --num_processes 1: or use ddp_cifar.py")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        exit_with_error("the baseline trains in fp32: use amp_cifar.py, or mixed_precision: 'no'")
    if torch.cuda.is_available() and not args.cpu:
        # Shapes rarely change: time the algorithms once. The fastest differs from run to run.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        torch.set_float32_matmul_precision("high")  # TF32, which convolutions use by default
    elif not args.cpu and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):  # NVIDIA, AMD
        remedy = "update the driver, or install torch for this kind of GPU (CUDA or ROCm)"
        exit_with_error(f"torch cannot use the GPUs: {remedy}; or add --cpu")
    torch.set_num_threads(args.threads)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
    loading.data_seed = random.Random(args.seed).getrandbits(31)  # Accelerate adds the epoch
    return Accelerator(cpu=args.cpu, dataloader_config=loading)


def train_step(accelerator, model, optimizer, scheduler, batch, args):
    """Take one optimizer step. Return the values of `compute_loss`, which stay on the device."""
    values = compute_loss(model, batch, args)
    accelerator.backward(values["loss"].mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return values


@torch.no_grad()
def evaluate(model, loader, args):
    """Return {"test_loss": mean, "test_accuracy": mean} over the test set."""
    model.eval()
    sums = {"loss": 0, "accuracy": 0}
    for batch in loader:
        for name, value in compute_loss(model, batch, args).items():
            sums[name] += value.double().sum()
    model.train()
    return {f"test_{name}": total.item() / len(loader.dataset) for name, total in sums.items()}


def main():
    args = parse_args()
    accelerator = make_accelerator(args)
    seed_rng(args.seed)  # for the initial weights
    train_loader, test_loader = accelerator.prepare(*load_data(args, accelerator))
    total_steps = min(args.epochs * len(train_loader), args.max_steps)
    # Accelerate does not know DataParallel: the model is on the first GPU, and not prepared.
    model = build_model(args).to(accelerator.device)
    # Now CUDA is initialised: before, torch counts GPUs that this process cannot use (MIG).
    gpus = torch.cuda.device_count() if accelerator.device.type == "cuda" else 0
    if gpus:
        model = nn.DataParallel(model)
    optimizer, scheduler = make_optimizer(model, args, total_steps)
    optimizer = accelerator.prepare(optimizer)
    config = {"recipe": RECIPE, **vars(args), "precision": "fp32", "steps": total_steps}
    config["device"] = torch.cuda.get_device_name() if gpus else "cpu"
    config["replicas"] = max(1, gpus)
    print(json.dumps(config, indent=2))
    os.makedirs(args.output_dir, exist_ok=True)

    with open(Path(args.output_dir, "metrics.jsonl"), "w", buffering=1) as file:
        step = 0
        newest = {}
        for epoch in range(math.ceil(total_steps / len(train_loader))):
            train_loader.set_epoch(epoch)  # another order
            train_loader.dataset.set_epoch(epoch)  # other crops and flips
            sums = {"loss": 0, "accuracy": 0}
            samples = 0
            clock = time.perf_counter()
            for batch in train_loader:
                step += 1
                seed_rng(args.seed, step, 0)  # as ddp_cifar.py on one process
                learning_rate = scheduler.get_last_lr()[0]
                values = train_step(accelerator, model, optimizer, scheduler, batch, args)
                for name, value in values.items():
                    sums[name] += value.detach().double().sum()  # still on the GPU
                samples += args.batch_size
                ends = step % len(train_loader) == 0 or step == total_steps
                if ends or step % args.log_every == 0:
                    line = {name: total.item() / samples for name, total in sums.items()}
                    line["learning_rate"] = learning_rate
                    line["samples_per_second"] = samples / (time.perf_counter() - clock)
                    newest |= write(file, "train", epoch, step, line)
                    sums = {"loss": 0, "accuracy": 0}
                    samples = 0
                    clock = time.perf_counter()
                if step == total_steps:
                    break
            newest |= write(file, "evaluation", epoch, step, evaluate(model, test_loader, args))

    accelerator.save_model(model, args.output_dir)  # without "module."
    Path(args.output_dir, "summary.json").write_text(json.dumps(config | newest, indent=2) + "\n")
    accelerator.end_training()


def write(file, event, epoch, step, values):
    """Put a line into metrics.jsonl and on the screen; return the values. Exit with an error if the
    loss is not finite."""
    if not math.isfinite(next(iter(values.values()))):
        exit_with_error(f"the loss is not finite at step {step}: lower --lr")
    line = {"event": event, "epoch": epoch + 1, "step": step, "time": time.time(), **values}
    file.write(json.dumps(line) + "\n")
    print(f"{event} step {step}", *[f"{name} {x:,.4g}" for name, x in values.items()], flush=True)
    return values


def seed_rng(*key):
    """Make all that torch, NumPy and Python draw from here on a function of `key` alone."""
    random.seed(repr(key))
    seed = random.getrandbits(32)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


# ----------------------------------------------------------------------------------------- CIFAR-10
class ImageTensors(Dataset):
    """Images (N, H, W, 3) uint8 and labels (N,) int64 on the device. One indexing operation makes a
    batch: (B, 3, H, W) float32, channels_last, normalised, and (B,) int64. With
    `augmentation_seed`: zero padding by 4, a random crop, and a random flip."""

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels = labels.to(device)
        self.seed = augmentation_seed
        self.height, self.width = images.shape[1:3]
        self.mean = torch.tensor((0.4914, 0.4822, 0.4465), device=device)
        self.std = torch.tensor((0.2470, 0.2435, 0.2616), device=device)
        self.padding = pad = 0 if augmentation_seed is None else 4
        padded = F.pad(images, (0, 0, pad, pad, pad, pad))  # pairs for channels, W, H
        self.images = padded.to(device)
        # The rows are top, left and flip, the columns samples.
        self.augmentation = torch.zeros(3, len(labels), dtype=torch.int64, device=device)
        self.augmentation.share_memory_()  # persistent workers read the same numbers

    def __len__(self):
        return len(self.labels)

    def set_epoch(self, epoch):
        """Draw each sample's crop and flip: a function of (seed, epoch, index) alone."""
        if self.seed is None:
            return
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.randint(2 * self.padding + 1, (2, len(self)), generator=generator)
        flips = torch.randint(2, (1, len(self)), generator=generator)
        self.augmentation[:] = torch.cat((offsets, flips))

    def __getitems__(self, indices):
        device = self.labels.device
        index = torch.tensor(indices).to(device, non_blocking=True)
        top, left, flip = self.augmentation[:, index, None]
        rows = top + torch.arange(self.height, device=device)
        columns = torch.arange(self.width, device=device)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)
        images = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = images.float().div_(255).sub_(self.mean).div_(self.std)
        return images.permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, accelerator):
    """Return CIFAR-10's images and labels, for training and test: downloaded, if missing."""
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            train_set = torchvision.datasets.CIFAR10(directory, train=True, download=True)
            test_set = torchvision.datasets.CIFAR10(directory, train=False)
        except (OSError, RuntimeError) as error:
            exit_with_error(f"--data-dir {directory}: {error}: use --data synthetic")
    return [(torch.from_numpy(x.data), torch.tensor(x.targets)) for x in (train_set, test_set)]


def synthetic_images(samples, seed):
    """Return ten classes, smooth patterns with noise: (N, 32, 32, 3) uint8 and (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
    patterns = 128 + 32 * patterns.contiguous()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = torch.randn(samples, 32, 32, 3, generator=generator).mul_(48).add_(patterns[labels])
    return images.clamp_(0, 255).byte(), labels


if __name__ == "__main__":
    main()
