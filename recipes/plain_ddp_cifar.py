# SPDX-License-Identifier: Apache-2.0
"""The "before": ResNet-50 on CIFAR-10 as tutorials write it in bare torch.distributed.

    python recipes/plain_ddp_cifar.py --world_size 4

Read it beside ddp_cifar.py: this is the baseline for its speed and its accuracy, so it keeps what
tutorials do: per-sample transforms in worker processes, unchanged ResNet-50 in fp32, a constant
learning rate that knows nothing of the number of processes, a loss that is read back in every step
and printed for one rank only. It shares the cores among its processes, as the recipes do. Most
tutorials forget this with `mp.spawn`: try `--threads`.
"""

import argparse
import json
import os
import resource
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
import torchvision.transforms as T
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def synthetic_images(samples, seed):
    """Ten classes that a network can learn, each a smooth pattern under noise: (N, 32, 32, 3) uint8
    and (N,) int64."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear").permute(0, 2, 3, 1)
    patterns = 128 + 32 * patterns.contiguous()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = torch.randn(samples, 32, 32, 3, generator=generator).mul_(48).add_(patterns[labels])
    return images.clamp_(0, 255).byte(), labels


class Synthetic(Dataset):
    """The recipes' synthetic data, image by image, as torchvision's CIFAR10 gives them."""

    def __init__(self, samples, seed, transform):
        images, labels = synthetic_images(samples, seed)
        self.images, self.labels, self.transform = images.numpy(), labels.tolist(), transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def make_datasets(args):
    normalize = [T.ToTensor(), T.Normalize(MEAN, STD)]
    augment = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), *normalize])
    if args.data == "synthetic":
        return Synthetic(5120, 1, augment), Synthetic(1024, 2, T.Compose(normalize))
    train_set = torchvision.datasets.CIFAR10(args.data_dir, train=True, transform=augment)
    return train_set, torchvision.datasets.CIFAR10(
        args.data_dir, train=False, transform=T.Compose(normalize)
    )


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


class EndlessSampler(DistributedSampler):
    """One epoch that never ends: of a short one, the start of the workers would be measured."""

    def __iter__(self):
        while True:
            yield from super().__iter__()


def train(rank, args, port):
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    cuda = torch.cuda.is_available() and not args.cpu
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=args.world_size)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    train_set, test_set = make_datasets(args)
    sampler = (EndlessSampler if args.measure else DistributedSampler)(
        train_set, args.world_size, rank
    )
    loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=cuda
    )
    model = make_model(args).to(device)
    model = DistributedDataParallel(model, device_ids=[rank] if cuda else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    step = measured_samples = measured_seconds = 0
    done, warmed_up_at, test_accuracy = False, None, None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        epoch_start = clock = time.perf_counter()
        running_loss = correct = total = 0
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            correct += (outputs.argmax(1) == labels).sum().item()
            total += len(labels)
            step += 1
            if step == args.warmup_steps:
                warmed_up_at = time.time()
            if step > args.warmup_steps:
                measured_samples += len(labels) * args.world_size
                measured_seconds += time.perf_counter() - clock
            done = step == args.max_steps
            if args.measure and step % args.warmup_steps == 0:
                measured = torch.tensor([step, measured_seconds], device=device)
                dist.broadcast(measured, 0)
                done = all(
                    value >= least
                    for value, least in zip(measured.tolist(), args.measure, strict=True)
                )
            clock = time.perf_counter()
            if rank == 0 and index % 10 == 9:
                print(
                    f"epoch {epoch + 1} batch {index + 1}/{len(loader)} "
                    f"loss {running_loss / (index + 1):.3f} accuracy {correct / total:.1%}",
                    flush=True,
                )
            if done:
                break
        if rank == 0:
            print(f"epoch {epoch + 1} took {time.perf_counter() - epoch_start:.1f} s", flush=True)
        if done:
            break

    if rank == 0 and not args.measure:
        model.eval()
        hits = 0
        with torch.no_grad():
            for images, labels in DataLoader(test_set, args.batch_size, num_workers=args.workers):
                hits += (
                    (model.module(images.to(device)).argmax(1) == labels.to(device)).sum().item()
                )
        test_accuracy = hits / len(test_set)
        print(f"test accuracy {test_accuracy:.2%} of {len(test_set):,} samples")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    peak = torch.tensor(torch.cuda.max_memory_allocated() if cuda else peak, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)  # the others wait here for the first one's test
    if rank == 0:
        summary = {
            "recipe": "plain_ddp_cifar",
            "model": args.model,
            "stem": args.stem,
            "data": args.data,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "precision": "fp32",
            "world_size": args.world_size,
            "global_batch_size": args.batch_size * args.world_size,
            "epochs": args.epochs,
            "steps": step,
            "seed": args.seed,
            "threads": args.threads,
            "train_loss": running_loss / (index + 1),
            "test_accuracy": test_accuracy,
            "samples_per_second": measured_samples / measured_seconds if measured_samples else None,
            "measured_samples": measured_samples,
            "measured_seconds": measured_seconds,
            "warmed_up_at": warmed_up_at,
            "peak_memory_bytes": peak.item(),
            "seconds": time.perf_counter() - started,
            "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        }
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "summary.json"), "w") as file:
            json.dump(summary, file, indent=2)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = torch.cuda.device_count()
    parser.add_argument("--world_size", type=int, default=gpus or 2, help="processes, one per GPU")
    parser.add_argument(
        "--data", choices=("cifar10", "synthetic"), default="cifar10", help="what to train on"
    )
    parser.add_argument("--data-dir", default="data", help="where CIFAR-10 is, or is downloaded to")
    parser.add_argument(
        "--model", choices=("resnet50", "simple_cnn"), default="resnet50", help="what to train"
    )
    parser.add_argument(
        "--stem",
        choices=("cifar", "imagenet"),
        default="imagenet",
        help="imagenet is torchvision's",
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training set")
    parser.add_argument("--max-steps", type=int, help="stop after this many optimizer steps")
    parser.add_argument(
        "--warmup-steps", type=int, default=10, help="steps that the images/s leave out"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="samples per process")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="DataLoader workers per process; tutorials often use 8",
    )
    parser.add_argument(
        "--threads", type=int, help="per process; None: the cores, shared among them"
    )
    parser.add_argument(
        "--measure",
        nargs=2,
        metavar=("STEPS", "SECONDS"),
        type=float,
        help="for bench.py: an epoch of at least so many steps and measured seconds, and no test",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--output-dir", default="runs/plain_ddp_cifar", help="for summary.json")
    parser.add_argument("--cpu", action="store_true", help="leave the GPUs alone")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.threads = args.threads or max(1, cores // args.world_size)
    if args.data == "cifar10":
        torchvision.datasets.CIFAR10(args.data_dir, download=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, args=(args, port), nprocs=args.world_size)


if __name__ == "__main__":
    main()
