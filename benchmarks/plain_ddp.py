# SPDX-License-Identifier: Apache-2.0
"""The "before": ResNet-50 on CIFAR-10 in plain torch.distributed, as tutorials write it.

    python benchmarks/plain_ddp.py --processes 2
    python benchmarks/plain_ddp.py --data synthetic --model simple_cnn --max-steps 20
    python benchmarks/plain_ddp.py --tuned

Read it beside recipes/ddp_cifar.py: bench.py compares the recipes with it. It keeps the habits of
tutorials: per-sample transforms in worker processes, an unchanged ResNet-50 in fp32, a constant
learning rate that ignores the number of processes, a loss that is read back in every step and is
that of rank 0 only. Unlike most tutorials with `mp.spawn`, it divides the CPU cores among its
processes: `--threads` shows the cost of not doing so.

`--tuned` is the second baseline: plain PyTorch without these habits, and without Accelerate. Its
images are in memory, in the recipes' ImageTensors. It has channels_last, torch.compile, bf16
autocast, a fused optimizer, and a loss that is read only for a line. It saves nothing.
"""

import argparse
import os
import resource
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
import torchvision.transforms as T
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Synthetic(Dataset):
    """The recipes' synthetic images, one by one, as torchvision's CIFAR10 returns them. `length` is
    the length of an epoch, in which images repeat."""

    def __init__(self, images, seed, length, transform):
        patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (images,), generator=generator)
        noise = torch.randn(images, 32, 32, 3, generator=generator) * 48
        self.images = (noise + 128 + 32 * patterns[labels]).clamp(0, 255).byte().numpy()
        self.labels = labels.tolist()
        self.length = length
        self.transform = transform

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        index %= len(self.labels)
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def make_datasets(args):
    normalize = [T.ToTensor(), T.Normalize(MEAN, STD)]
    augment = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), *normalize])
    test = T.Compose(normalize)
    if args.data == "synthetic":
        return Synthetic(5120, 1, args.samples, augment), Synthetic(1024, 2, 1024, test)
    train_set = torchvision.datasets.CIFAR10(args.data_dir, train=True, transform=augment)
    test_set = torchvision.datasets.CIFAR10(args.data_dir, train=False, transform=test)
    return train_set, test_set


def make_model(args):
    if args.model == "simple_cnn":
        return nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )
    model = torchvision.models.resnet50(num_classes=10)
    if args.stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def start(rank, args, port):
    """Join the process group. Return the device."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    cuda = torch.cuda.is_available() and not args.cpu
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=args.processes)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    return device


def train(rank, args, port):
    device = start(rank, args, port)
    cuda = device.type == "cuda"
    train_set, test_set = make_datasets(args)
    sampler = DistributedSampler(train_set, args.processes, rank)
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": cuda}
    loader = DataLoader(train_set, sampler=sampler, **options)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model, device_ids=[rank] if cuda else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running_loss = correct = total = 0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

            running_loss += loss.item() * len(labels)
            correct += (outputs.argmax(1) == labels).sum().item()
            total += len(labels)
            step += 1
            if rank == 0 and step % args.log_every == 0:
                means = f"loss {running_loss / total:.3f} accuracy {correct / total:.1%}"
                seen = step * args.batch_size * args.processes
                print(f"step {step} samples {seen} {means}", flush=True)
            if step == args.max_steps:
                break
        if step == args.max_steps:
            break

    finish(rank, args, model.module, DataLoader(test_set, **options), device)


def datasets_in_memory(args, device):
    """Return the recipes' datasets. The synthetic one is repeated to the length of an epoch."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
    from ddp_cifar import ImageTensors, synthetic_images

    if args.data == "synthetic":
        train_images, test_images = synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)
    else:
        cifar10 = torchvision.datasets.CIFAR10
        parts = [cifar10(args.data_dir, train=is_train) for is_train in (True, False)]
        train_images, test_images = [
            (torch.from_numpy(x.data), torch.tensor(x.targets)) for x in parts
        ]
    train_set = ImageTensors(*train_images, device, augmentation_seed=args.seed)
    return train_set, ImageTensors(*test_images, device)


def train_tuned(rank, args, port):
    device = start(rank, args, port)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    train_set, test_set = datasets_in_memory(args, device)
    length = args.samples if args.data == "synthetic" else len(train_set)
    samples = Subset(train_set, [index % len(train_set) for index in range(length)])
    sampler = DistributedSampler(samples, args.processes, rank, drop_last=True)
    options = {"batch_size": args.batch_size, "collate_fn": tuple}  # ImageTensors makes batches
    loader = DataLoader(samples, sampler=sampler, drop_last=True, **options)
    plain = model = make_model(args).to(device, memory_format=torch.channels_last)
    model.compile(mode="reduce-overhead")
    if args.processes > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False  # only the test reads BatchNorm's, on rank 0
    peak = 0.1 * args.batch_size * args.processes / 128
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )
    total = args.max_steps or args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total + 1)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_set.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2, device=device)  # of losses and hits, since the last line
        since = step
        for images, labels in loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.tuned == "bf16"):
                outputs = model(images)
            loss = F.cross_entropy(outputs.float(), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            hits = (outputs.detach().argmax(1) == labels).sum()
            sums += torch.stack((loss.detach() * len(labels), hits))
            step += 1
            if step % args.log_every == 0:
                dist.all_reduce(sums)
                count = (step - since) * args.batch_size * args.processes
                loss, accuracy = (sums / count).tolist()
                sums.zero_()
                since = step
                if rank == 0:
                    seen = step * args.batch_size * args.processes
                    means = f"loss {loss:.3f} accuracy {accuracy:.1%}"
                    print(f"step {step} samples {seen} {means}", flush=True)
            if step == total:
                break
        if step == total:
            break

    finish(rank, args, plain, DataLoader(test_set, **options), device)


def finish(rank, args, model, loader, device):
    if rank == 0:
        if not args.max_steps:
            print(f"test accuracy {test_accuracy(model, loader, device):.2%}", flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak
        print(f"peak memory {peak / 2**30:.2f} GiB", flush=True)
    dist.barrier()  # the others wait for the test of rank 0
    dist.destroy_process_group()


@torch.no_grad()
def test_accuracy(model, loader, device):
    model.eval()
    hits = 0
    for images, labels in loader:
        hits += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    return hits / len(loader.dataset)


def parse_args():
    formatter = argparse.ArgumentDefaultsHelpFormatter
    title = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=title, formatter_class=formatter)
    add = parser.add_argument
    processes = torch.cuda.device_count() or 2
    precisions = {"choices": ("bf16", "fp32"), "nargs": "?", "const": "bf16"}
    add("--tuned", help="the second baseline, in bf16 unless fp32 is said", **precisions)
    add("--processes", type=int, default=processes, help="one per GPU")
    add("--data", choices=("cifar10", "synthetic"), default="cifar10", help="training data")
    add("--data-dir", default="data", help="folder of CIFAR-10, which is downloaded if missing")
    add("--samples", type=int, default=5120, help="synthetic samples per epoch")
    add("--model", choices=("resnet50", "simple_cnn"), default="resnet50", help="model")
    add("--stem", choices=("cifar", "imagenet"), default="imagenet", help="stem of ResNet-50")
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--max-steps", type=int, help="stop after this many steps, without a test")
    add("--log-every", type=int, default=10, help="steps between lines")
    add("--batch-size", type=int, default=128, help="samples per process")
    add("--workers", type=int, default=2, help="DataLoader workers per process")
    add("--threads", type=int, help="CPU threads per process; None: cores / processes")
    add("--seed", type=int, default=0, help="seed of the weights")
    add("--cpu", action="store_true", help="train on CPU even if there are GPUs")
    return parser.parse_args()


def main():
    args = parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.threads = args.threads or max(1, cores // args.processes)
    if args.data == "cifar10":
        torchvision.datasets.CIFAR10(args.data_dir, download=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    function = train_tuned if args.tuned else train
    mp.spawn(function, args=(args, port), nprocs=args.processes)


if __name__ == "__main__":
    main()
