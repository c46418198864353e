"""Train ResNet-50 on CIFAR-10 with Hugging Face Accelerate: one process per GPU, DistributedDataParallel.

    accelerate launch --config_file accelerate_configs/1gpu.yaml recipes/ddp_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml recipes/ddp_cifar.py --epochs 100
    accelerate launch --config_file accelerate_configs/2gpu.yaml recipes/ddp_cifar.py --data synthetic

Every process holds the whole model, reads its own share of each global batch, and averages its gradients with the
others' during the backward pass. On a machine without GPUs the same commands run the same processes over gloo.

To make this file yours, replace `load_data` and `build_model`; nothing else knows about CIFAR-10 or ResNet-50.
What to expect: a panel with the run's arithmetic, a progress display (plain lines through a pipe), and in the output
directory metrics.jsonl, summary.json and model.safetensors.
"""

import argparse
import gc
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import accelerate
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import get_int_from_env
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RECIPE = "ddp_cifar"


# ---------------------------------------------------------------------------------------------------------- data
def load_data(args, accelerator):
    """Return the DataLoaders of (images, labels) batches for training and test. Replace this with your own data.

    A batch is one process's: `args.batch_size` samples. Shuffle by `shuffle=True`: the sampler that Accelerate puts
    in its place is seeded, the same for every number of processes.
    """
    # The main process downloads while the others wait; then one process per node, for disks that are not shared.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        if args.data == "synthetic":
            train_set, test_set = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
        else:
            train_set, test_set = cifar10(args.data_dir, train=True), cifar10(args.data_dir, train=False)

    def loader(dataset, **kwargs):
        # `__getitems__` makes the whole batch, so there is nothing to collate. The loader has its own generator
        # because it would otherwise draw from the global one at every epoch.
        return DataLoader(dataset, args.batch_size, collate_fn=tuple, generator=torch.Generator(), **kwargs)

    train_set = ImageTensors(*train_set, accelerator.device, augmentation_seed=args.seed)
    test_set = ImageTensors(*test_set, accelerator.device)
    return loader(train_set, shuffle=True, drop_last=True), loader(test_set)


def build_model(args):
    """Return the model, on the CPU: (B, 3, H, W) images in, (B, classes) logits out. Replace this with your own."""
    if args.model == "simple_cnn":
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    model = torchvision.models.resnet50(num_classes=10)
    if args.stem == "cifar":  # 32 x 32 images are small already: do not shrink them fourfold before the first block
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


class ImageTensors(Dataset):
    """A data set as one tensor on the device; one indexing operation selects, crops and flips a whole batch.

    `images` is (N, H, W, 3) uint8 and `labels` (N,) int64. A batch is (B, 3, H, W) float32, normalised, with
    channels_last strides, and (B,) int64. With `augmentation_seed`, training augmentation: zero padding by 4 and a
    random crop back to H x W, then a horizontal flip with probability 1/2.
    """

    padding = 4
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, images, labels, device, augmentation_seed=None):
        self.labels, self.seed, self.size = labels.to(device), augmentation_seed, images.shape[1:3]
        self.statistics = torch.tensor([self.mean, self.std], device=device)
        if augmentation_seed is not None:
            images = F.pad(images, (0, 0) + 4 * (self.padding,))
        self.images = images.contiguous().to(device)

    def __len__(self):
        return len(self.labels)

    def set_epoch(self, epoch):
        """Draw crop and flip of every sample, from (seed, epoch, index) alone: whichever process holds a sample, and
        whether the run was resumed in between, its pixels in this epoch are the same."""
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed}/{epoch}").getrandbits(32))
        offsets = torch.randint(2 * self.padding + 1, (2, len(self)), generator=generator)
        flips = torch.randint(2, (1, len(self)), generator=generator)
        self.augmentation = torch.cat((offsets, flips)).to(self.labels.device)

    def __getitems__(self, indices):
        index = torch.tensor(indices).to(self.labels.device, non_blocking=True)
        if self.seed is None:
            images = self.images[index]
        else:
            top, left, flip = self.augmentation[:, index, None]
            rows, columns = (torch.arange(size, device=index.device) for size in self.size)
            columns = torch.where(flip == 1, columns.flip(0), columns)
            images = self.images[index[:, None, None], (top + rows)[:, :, None], (left + columns)[:, None, :]]
        mean, std = self.statistics
        images = images.float().div_(255).sub_(mean).div_(std)
        return images.permute(0, 3, 1, 2), self.labels[index]


def cifar10(directory, train):
    """CIFAR-10 by torchvision, which downloads it where it is missing and verifies it: (N, 32, 32, 3), (N,)."""
    try:
        dataset = torchvision.datasets.CIFAR10(directory, train=train, download=True)
    except (OSError, RuntimeError) as error:
        refuse(
            f"no intact CIFAR-10 in --data-dir {directory}, and no download: {error}. Point --data-dir at a directory "
            "that holds cifar-10-batches-py, or train on --data synthetic, which needs neither files nor network"
        )
    return torch.from_numpy(dataset.data), torch.tensor(dataset.targets)


def synthetic_images(samples, seed):
    """Ten classes that a network can learn, each a smooth pattern under noise: (N, 32, 32, 3) uint8, (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    noise = torch.randn(samples, 32, 32, 3, generator=generator)
    return (128 + 32 * patterns[labels] + 48 * noise).clamp(0, 255).byte(), labels


# ------------------------------------------------------------------------------------------------- training step
def train_step(accelerator, model, optimizer, scheduler, images, labels):
    """Learn from one microbatch; the optimizer and the schedule move at the last one of an accumulation window.

    Returns the sum of the losses, the number of correct answers and of samples as (3,) float32 on the device: to read
    them here would make the host wait for the device in every step.
    """
    with accelerator.accumulate(model):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        accelerator.backward(loss)
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
    correct = (logits.detach().argmax(1) == labels).sum()
    return torch.stack((loss.detach() * len(labels), correct, torch.full_like(correct, len(labels))))


def learning_rate_factor(step, total_steps):
    """The share of the peak learning rate at optimizer step `step` (from 0): linear warm-up over the first fifth of
    the run, linear decay to zero over the rest. The peak grows linearly with the global batch, and it is the warm-up
    that makes this work (Goyal et al. 2017, arXiv:1706.02677)."""
    warmup = max(1, total_steps // 5)
    return min((step + 1) / warmup, (total_steps - step) / max(1, total_steps - warmup))


# ---------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Loss and accuracy over the whole test set, each sample counted exactly once."""
    model.eval()
    totals, samples = torch.zeros(2, device=accelerator.device), 0
    for images, labels in loader:
        logits = model(images)
        outcome = torch.stack((F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels), dim=1)
        outcome = accelerator.gather_for_metrics(outcome)  # without the samples that fill up the last batches
        totals += outcome.sum(0)
        samples += len(outcome)
    loss, correct = totals.tolist()
    return {"test_loss": loss / samples, "test_accuracy": correct / samples, "samples": samples}


# ----------------------------------------------------------------------------------------------------- reporting
class Report:
    """The main process's voice: live on a terminal, plain lines elsewhere, metrics.jsonl in any case.

    It also measures throughput, over all processes. The first line of metrics is warm-up and left out.
    """

    def __init__(self, accelerator, output_dir, total_steps):
        main = accelerator.is_main_process
        self.console = Console(quiet=not main, highlight=False, soft_wrap=True)
        self.file = open(Path(output_dir, "metrics.jsonl") if main else os.devnull, "w", buffering=1)
        self.live = main and self.console.is_terminal
        self.started, self.total_steps = time.perf_counter(), total_steps
        self.warm, self.images, self.seconds = False, 0, 0.0
        columns = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("first steps", total=total_steps)

    def table(self, title, values):
        """Show a dictionary: in a box on a terminal, as plain lines elsewhere."""
        rows = []
        for name, value in values.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {entry}" for key, entry in value.items())
            rows.append((name, f"{value:,.5g}" if isinstance(value, float) else str(value)))
        if self.live:
            grid = Table.grid(padding=(0, 2))
            for row in rows:
                grid.add_row(*row)
            self.console.print(Panel(grid, title=title, expand=False))
        else:
            self.console.print("\n".join([title, *(f"  {name}: {value}" for name, value in rows)]))

    def train(self, epoch, step, learning_rate, totals, seconds, **own):
        """Report `totals` (losses, correct answers, samples: summed over `seconds` of training on all processes)
        and a recipe's own metrics."""
        loss, correct, images = totals
        rate = images / seconds if self.warm else None
        if self.warm:
            self.images, self.seconds = self.images + int(images), self.seconds + seconds
        self.warm = True
        metrics = {"epoch": epoch, "step": step, "loss": loss / images, "accuracy": correct / images}
        self.write("train", {**metrics, "learning_rate": learning_rate, "images_per_second": rate, **own})
        text = (
            f"epoch {epoch} loss {loss / images:.3f} accuracy {correct / images:.1%} lr {learning_rate:.2g} "
            f"images/s {'-' if rate is None else format(rate, ',.0f')}"
        ) + "".join(f" {name} {value:g}" for name, value in own.items())
        left = (time.perf_counter() - self.started) * (self.total_steps / step - 1)
        self.progress.update(self.task, description=text)
        if not self.live:
            self.console.print(f"step {step}/{self.total_steps} {text} left {left:.0f}s")

    def evaluation(self, epoch, step, test):
        self.write("evaluation", {"epoch": epoch, "step": step, **test})
        self.console.print(
            f"epoch {epoch} step {step} test loss {test['test_loss']:.3f} "
            f"test accuracy {test['test_accuracy']:.2%} of {test['samples']:,} samples"
        )

    def write(self, event, values):
        self.file.write(json.dumps({"event": event, **values}) + "\n")


def peak_memory(accelerator):
    """Return every process's peak in bytes: allocated on its GPU, or its resident set where there is none."""
    if accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()


# ----------------------------------------------------------------------------------------------------- arguments
def refuse(message):
    """Say in one line, from one process per node, what is wrong and what to do instead; exit with status 2."""
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:
        time.sleep(60)  # the launcher stops everybody once one process has left: let the one that speaks be first
    print(f"{RECIPE}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def parse_args(**own_flags):
    """Return the flags that all recipes have, and a recipe's own: {name: options of add_argument}."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = refuse
    add = parser.add_argument
    add("--data", choices=("cifar10", "synthetic"), default="cifar10", help="synthetic needs no files and no network")
    add("--data-dir", default="data", help="where CIFAR-10 is, or is downloaded to")
    add("--model", choices=("resnet50", "simple_cnn"), default="resnet50", help="what to train")
    add("--stem", choices=("cifar", "imagenet"), default="cifar", help="first layers of resnet50: 3x3, or stock 7x7")
    add("--epochs", type=int, default=30, help="passes over the training set")
    add("--max-steps", type=int, help="stop after this many optimizer steps")
    add("--batch-size", type=int, default=128, help="samples per process and microbatch")
    add("--lr", type=float, default=0.02, help="peak learning rate per 128 samples of global batch")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation")
    add("--log-every", type=int, default=10, help="optimizer steps between two lines of metrics")
    add("--output-dir", default=f"runs/{RECIPE}", help="for metrics.jsonl, summary.json and model.safetensors")
    add("--cpu", action="store_true", help="leave the GPUs alone: processes on CPU cores, over gloo")
    for name, options in own_flags.items():
        add(f"--{name.replace('_', '-')}", **options)
    args = parser.parse_args()
    for name, value in vars(args).items():
        low, high = (-1, 2**32) if name == "seed" else (0, math.inf)
        if type(value) in (int, float) and not low < value < high:
            refuse(f"argument --{name.replace('_', '-')}: {value}, choose a number above {low} and below {high}")
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()
    except OSError as error:
        refuse(f"argument --output-dir: cannot write to {args.output_dir} ({error.strerror}), choose another directory")
    return args


def make_accelerator(args, mixed_precision="no"):
    """Return the Accelerator, on GPUs or, where there are none, on CPU; refuse a launch that cannot work."""
    cpu = args.cpu or not torch.cuda.is_available()
    processes = get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
    if cpu:  # share the cores: the launcher would leave each process one thread
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // processes))
    elif processes > torch.cuda.device_count():
        refuse(
            f"{processes} processes but {torch.cuda.device_count()} GPU(s) on this machine: launch with "
            f"--num_processes {torch.cuda.device_count()} or a smaller config, or train on CPU cores with --cpu"
        )
    accelerator = Accelerator(
        cpu=cpu,  # without it, processes on a machine without GPUs would not see each other
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    launched = get_int_from_env(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"], 1)
    if launched != accelerator.num_processes:
        refuse(
            f"{launched} processes were started but this one sees {accelerator.num_processes}: they would train "
            f"{launched} separate models. Start them with accelerate launch --num_processes {launched}"
        )
    return accelerator


# ---------------------------------------------------------------------------------------------------------- main
def main():
    started = time.perf_counter()
    args = parse_args(
        accumulation_steps={"type": int, "default": 1, "help": "microbatches per optimizer step"},
    )
    accelerator = make_accelerator(args)
    torch.manual_seed(args.seed)

    train_loader, test_loader = accelerator.prepare(*load_data(args, accelerator))
    if len(train_loader) == 0:
        refuse(
            f"{len(train_loader.dataset)} training samples do not fill a batch of {args.batch_size} on each of "
            f"{accelerator.num_processes} processes: lower --batch-size or launch fewer processes"
        )
    # What does not fill a global batch sits out this epoch: so N processes take the very steps that one process takes
    # when it accumulates over N microbatches. A training set below one window still makes a step, weighted right.
    window = accelerator.gradient_accumulation_steps = min(args.accumulation_steps, len(train_loader))
    steps_per_epoch = len(train_loader) // window
    total_steps = min(args.epochs * steps_per_epoch, args.max_steps or math.inf)
    global_batch = args.batch_size * window * accelerator.num_processes
    peak_lr = args.lr * global_batch / 128

    model = build_model(args).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    # Not prepared: Accelerate would advance it once per process in each step.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total_steps))
    model, optimizer = accelerator.prepare(model, optimizer)

    run = {
        "recipe": RECIPE,
        **vars(args),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "precision": "fp32",
        "world_size": accelerator.num_processes,
        "global_batch_size": global_batch,
        "steps": total_steps,
        "steps_per_epoch": steps_per_epoch,
        "lr_schedule": f"linear warm-up to {peak_lr:.3g} over a fifth of the steps, then linear decay to 0",
        "versions": {package.__name__: package.__version__ for package in (torch, torchvision, accelerate)},
    }
    report = Report(accelerator, args.output_dir, total_steps)
    report.table("run", run)

    totals = torch.zeros(3, device=accelerator.device)  # losses, correct answers, samples since the last report
    with report.progress:
        for step in range(1, total_steps + 1):
            epoch, step_in_epoch = divmod(step - 1, steps_per_epoch)
            if step_in_epoch == 0:
                train_loader.set_epoch(epoch)
                if hasattr(train_loader.dataset, "set_epoch"):  # some prepared loaders do not pass it on
                    train_loader.dataset.set_epoch(epoch)
                batches, clock = iter(train_loader), time.perf_counter()
                model.train()

            learning_rate = scheduler.get_last_lr()[0]
            for images, labels in islice(batches, window):
                totals += train_step(accelerator, model, optimizer, scheduler, images, labels)
            report.progress.advance(report.task)

            last_of_epoch = step_in_epoch + 1 == steps_per_epoch or step == total_steps
            if last_of_epoch or step % args.log_every == 0:
                sums = accelerator.reduce(totals).tolist()  # waits for the device, so that the clock is right
                report.train(epoch + 1, step, learning_rate, sums, time.perf_counter() - clock)
                totals.zero_()
                clock = time.perf_counter()
            if last_of_epoch:
                test = evaluate(accelerator, model, test_loader)
                report.evaluation(epoch + 1, step, test)

    results = {
        "train_loss": sums[0] / sums[2],
        **test,
        "images_per_second": report.images / report.seconds if report.images else None,  # None: it was all warm-up
        "measured_images": report.images,
        "measured_seconds": report.seconds,
        "peak_memory_bytes": max(peak_memory(accelerator)),
        "seconds": time.perf_counter() - started,
    }
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        Path(args.output_dir, "summary.json").write_text(json.dumps(run | results, indent=2) + "\n")
    report.table("results", results)
    # Let go of the process group in order: left to the interpreter's exit, gloo aborts one run in three.
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
