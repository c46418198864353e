"""The baseline: one process, torch.nn.DataParallel over the GPUs. ddp_cifar.py replaces it.

    accelerate launch --config_file accelerate_configs/1gpu.yaml recipes/data_parallel_cifar.py
    accelerate launch --config_file accelerate_configs/1gpu.yaml recipes/data_parallel_cifar.py --gpus 0,1

One Python process copies the whole model to every GPU in every step, cuts the batch among them, and adds their
gradients up on the first. DDP keeps the copies, overlaps the exchange with the backward pass, has one interpreter per
GPU and goes beyond one machine. Keep this one for comparison, or where only one process can be started.

What to expect: the same losses as ddp_cifar.py in one process at the same --batch-size, which is the global batch here.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import zipfile
from itertools import islice
from pathlib import Path

import accelerate
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, skip_first_batches
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env, send_to_device
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RECIPE = "data_parallel_cifar"


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
def evaluate(accelerator, model, loader, interruption):
    """Loss and accuracy over the whole test set, each sample counted exactly once; None when interrupted."""
    model.eval()
    totals, samples = torch.zeros(2, device=accelerator.device), 0
    for images, labels in loader:
        if interruption.agreed():
            return None
        logits = model(images)
        outcome = torch.stack((F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels), dim=1)
        outcome = accelerator.gather_for_metrics(outcome)  # without the samples that fill up the last batches
        totals += outcome.sum(0)
        samples += len(outcome)
    loss, correct = totals.tolist()
    return {"test_loss": loss / samples, "test_accuracy": correct / samples, "samples": samples}


# --------------------------------------------------------------------------------------------------- checkpoints
class Checkpoints:
    """step-N.pt in the output directory: the whole state after N optimizer steps, in one file that is there whole or
    not at all.

    `states` holds state dicts by name, in one dictionary per pipeline stage (so in one, but for pipeline_cifar.py);
    `part` is what each process has for itself. Another number of processes may go on at the same global batch.
    """

    format = 1
    pattern = f"step-{'[0-9]' * 8}.pt"
    # What may differ between a checkpoint and the run that goes on from it; all else must be equal.
    free = (
        "data_dir output_dir cpu gpus device log_every checkpoint_every keep resume world_size batch_size "
        "accumulation_steps microbatches schedule bubble pipelines replicas precision_chosen compile tracker profile "
        "eval_only versions"
    ).split()

    def __init__(self, accelerator, args, run):
        self.accelerator, self.args, self.run = accelerator, args, json.loads(json.dumps(run))
        self.directory = Path(args.output_dir)

    def save(self, report, step, states, part):
        """Write step-N.pt, then delete all but the newest `--keep`. Where it cannot be written the run ends, and the
        earlier ones are untouched."""
        part = {**part, "rng": torch.get_rng_state()}
        if self.accelerator.device.type == "cuda":
            part["cuda_rng"] = torch.cuda.get_rng_state()
        parts, error = gather_object([send_to_device(part, "cpu")]), None
        if self.accelerator.is_main_process:
            content = {"format": self.format, "run": self.run, "step": step, "states": send_to_device(states, "cpu")}
            unfinished, path = self.directory / "checkpoint.tmp", self.directory / f"step-{step:08}.pt"
            try:
                metrics = (self.directory / "metrics.jsonl").read_text()
                with open(unfinished, "wb") as file:
                    torch.save({**content, "parts": parts, "metrics": metrics}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
                directory = os.open(self.directory, os.O_RDONLY)
                os.fsync(directory)  # or a power failure could undo the rename
                os.close(directory)
                written = sorted(old for old in self.directory.glob(self.pattern) if old <= path)
                for old in written[: -self.args.keep]:
                    old.unlink()
            except (OSError, RuntimeError) as problem:
                problem = problem.__context__ or problem  # on a full disk torch.save raises a RuntimeError on top
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                error = f"error: cannot write {path} ({problem}), earlier ones are untouched: make room and --resume"
        (error,) = broadcast_object_list([error])
        if error:
            report.leave(1, error.replace("\n", " "))

    def load(self):
        """Return the checkpoint that `--resume` asks for, the same on all processes, or None to start afresh."""
        found = [None, None]
        if self.accelerator.is_main_process and self.args.resume:
            try:
                found = [self.find(), None]
            except ValueError as problem:
                found = [None, f"argument --resume: {problem}"]
        checkpoint, problem = broadcast_object_list(found)
        if problem:
            refuse(problem)
        return checkpoint

    def find(self):
        if self.args.resume != "auto":
            return self.compare(self.args.resume, self.read(self.args.resume))
        paths = sorted(self.directory.glob(self.pattern), reverse=True)
        for path in paths:
            try:
                checkpoint = self.read(path)
            except ValueError as problem:
                print(f"{RECIPE}: passed over: {problem}", file=sys.stderr, flush=True)
            else:
                return self.compare(path, checkpoint)
        if paths:
            raise ValueError(f"no intact checkpoint in {self.directory}, choose another --output-dir to start afresh")
        if self.args.eval_only:
            raise ValueError(f"no checkpoint in {self.directory} to evaluate, choose its --output-dir or give its path")
        print(f"{RECIPE}: no checkpoint in {self.directory} yet, starting afresh", flush=True)
        return None

    def read(self, path):
        """Return a checkpoint's content, none of which is executed. Raises ValueError where it is not intact."""
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not look at the checksums
            content = torch.load(path, map_location="cpu", weights_only=True)
            version = content["format"]
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}), choose a file step-N.pt or auto") from error
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} holds code instead of data and was not loaded, choose another") from error
        except Exception as error:  # whatever a torn file makes the readers of zip, pickle and tensors stumble over
            damaged = error
        if damaged:
            raise ValueError(f"{path} is not a complete checkpoint ({damaged}), choose another or auto")
        if version != self.format:
            raise ValueError(f"{path} has format {version}, this recipe reads {self.format}: use the one that wrote it")
        return content

    def compare(self, path, checkpoint):
        """Return the checkpoint if this run can go on from it. Raises ValueError that names what differs."""
        ours, theirs = self.run, checkpoint["run"]
        samples, now = theirs["global_batch_size"], ours["global_batch_size"]
        if ours["recipe"] == theirs["recipe"] and samples != now:
            remedies = [
                f"--{name.replace('_', '-')} {ours[name] * samples // now}"
                for name in ("batch_size", "accumulation_steps")
                if name in ours and ours[name] * samples % now == 0
            ]
            keep = " or ".join(remedies) or "another number of processes"
            raise ValueError(f"the global batch is {samples} in {path} and {now} here, keep it with {keep}")
        names = [name for name in ours | theirs if name not in self.free]
        differences = [
            f"{name} is {theirs.get(name)} there, {ours.get(name)} here"
            for name in names
            if theirs.get(name) != ours.get(name)
        ]
        if differences:
            raise ValueError(f"{path} is of another run: {'; '.join(differences)}. Match it or choose another")
        return checkpoint

    def restore(self, checkpoint, objects, stage=0):
        """Put a checkpoint's states into `objects`, by name, and return this process's part."""
        problem, rank, parts = None, self.accelerator.process_index, checkpoint["parts"]
        try:
            for name, thing in objects.items():
                thing.load_state_dict(checkpoint["states"][stage][name])
        except (KeyError, RuntimeError, ValueError) as error:
            problem = f"stage {stage} of the checkpoint does not fit this model ({error})".replace("\n", " ")
        for misfit in filter(None, gather_object([problem])):
            refuse(f"argument --resume: {misfit}, choose another checkpoint")
        if rank < len(parts):
            torch.set_rng_state(parts[rank]["rng"])
            if "cuda_rng" in parts[rank] and self.accelerator.device.type == "cuda":
                torch.cuda.set_rng_state(parts[rank]["cuda_rng"])
        if len(parts) == self.accelerator.num_processes:
            return parts[rank]
        # Another number of processes: the sums over all of them go on in the first.
        totals = torch.stack([part["totals"] for part in parts]).sum(0)
        return {"totals": totals if rank == 0 else torch.zeros_like(totals)}


class Interruption:
    """SIGTERM, SIGINT or SIGUSR1 to any process, or the launcher's death: all processes stop after the same step.

    They agree by votes among the hosts, which overlap the step, so that no device waits.
    """

    def __init__(self, accelerator):
        self.received = self.signal = 0
        self.group = distributed.new_group(backend="gloo") if accelerator.use_distributed else None
        self.vote, self.ballot = None, torch.zeros(1, dtype=torch.int64)
        # Under accelerate launch, which does not pass every signal on before it dies.
        self.launcher = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if not self.received:
            self.received, self.since = number, time.monotonic()
        # A second Ctrl-C stops at once. The launcher turns it into SIGTERM, and passes on what has come directly, too.
        elif signal.SIGINT in (self.received, number) and time.monotonic() - self.since > 0.5:
            Console().show_cursor()
            os._exit(128 + number)

    def agreed(self):
        """Return the signal on which all processes stop now, or 0: the outcome of the votes cast one call ago."""
        if self.launcher and os.getppid() != self.launcher:
            self.received = self.received or signal.SIGTERM
        if self.group is None:
            self.signal = self.received
            return self.signal
        if self.vote:
            self.vote.wait()
            self.signal = self.ballot.item()
        self.ballot.fill_(self.received)
        self.vote = distributed.all_reduce(self.ballot, distributed.ReduceOp.MAX, group=self.group, async_op=True)
        return self.signal


# ----------------------------------------------------------------------------------------------------- reporting
def describe_replicas(model, batch_size):
    """Say how DataParallel divides a batch among its replicas."""
    if not model.device_ids:
        return "none, without GPUs DataParallel only passes the batch through to the model"
    shares = [len(share) for share in torch.arange(batch_size).chunk(len(model.device_ids))]
    return f"{len(shares)} GPUs with {' + '.join(map(str, shares))} samples of each batch"


class Report:
    """The main process's voice: live on a terminal, plain lines elsewhere, metrics.jsonl in any case.

    It also measures throughput, over all processes. The first line of metrics is warm-up and left out.
    """

    def __init__(self, accelerator, run, start, metrics):
        self.accelerator, main = accelerator, accelerator.is_main_process
        output_dir, total_steps = run["output_dir"], run["steps"]
        if run["profile"] and total_steps - start < 9:
            refuse("argument --profile: the trace is of the seventh to ninth step, let it run as long")
        self.console = Console(quiet=not main, highlight=False, soft_wrap=True)
        quiet = run["eval_only"] or not main
        self.file = open(os.devnull if quiet else Path(output_dir, "metrics.jsonl"), "w", buffering=1)
        self.file.write(metrics)
        trained = [line for line in map(json.loads, metrics.splitlines()) if line["event"] == "train"]
        self.loss = trained[-1]["loss"] if trained else None
        self.live = main and self.console.is_terminal and not self.console.is_dumb_terminal
        self.started, self.start, self.total_steps = time.perf_counter(), start, total_steps
        self.warm, self.images, self.seconds = False, 0, 0.0
        self.waited = self.data_seconds = 0.0
        self.first_step_at = None
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        columns = BarColumn(8), MofNCompleteColumn(), TimeRemainingColumn(), text
        # By itself it would show on the screen what goes to a redirected stderr.
        self.progress = Progress(
            *columns, console=self.console, expand=True, disable=not self.live, redirect_stderr=sys.stderr.isatty()
        )
        self.task = self.progress.add_task("first steps", total=total_steps, completed=start)
        if not run["eval_only"]:
            settings = {name: value for name, value in run.items() if isinstance(value, int | float | str)}
            accelerator.init_trackers(RECIPE, settings)
        self.profiler = None
        if run["profile"]:
            path = Path(output_dir, f"trace-rank-{accelerator.process_index}.json")
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            )
            self.profiler.start()
        self.table("run", run)

    def table(self, title, values):
        """Show a dictionary, without what is not set: in a box on a terminal, as plain lines elsewhere."""
        rows = []
        for name, value in values.items():
            if value is None or value is False:
                continue
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
        self.loss = loss / images
        rate = images / seconds if self.warm else None
        if self.warm:
            self.images, self.seconds = self.images + int(images), self.seconds + seconds
            self.data_seconds += self.waited
        self.warm, self.waited = True, 0.0
        metrics = {"epoch": epoch, "step": step, "loss": self.loss, "accuracy": correct / images}
        self.write("train", {**metrics, "learning_rate": learning_rate, "images_per_second": rate, **own})
        text = (
            f"epoch {epoch} loss {self.loss:.3f} accuracy {correct / images:.1%} "
            f"images/s {'-' if rate is None else format(rate, ',.0f')} lr {learning_rate:.2g}"
        ) + "".join(f" {name} {value:g}" for name, value in own.items())
        left = (time.perf_counter() - self.started) / (step - self.start) * (self.total_steps - step)
        self.progress.update(self.task, description=text)
        if not self.live:
            self.console.print(f"step {step}/{self.total_steps} {text} left {left:.0f}s")

    def advance(self):
        self.first_step_at = self.first_step_at or time.time()
        self.progress.advance(self.task)
        if self.profiler:
            self.profiler.step()

    def timed(self, batches):
        """Pass batches on, and count the seconds that the loop waits for them."""
        before = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - before
            yield batch
            before = time.perf_counter()

    def throughput(self):
        """Return what the steps after the warm-up took; None where all were warm-up. `first_step_at` is Unix time."""
        return {
            "images_per_second": self.images / self.seconds if self.images else None,
            "measured_images": self.images,
            "measured_seconds": self.seconds,
            "data_wait_share": self.data_seconds / self.seconds if self.images else None,
            "first_step_at": self.first_step_at,
        }

    def evaluation(self, epoch, step, test):
        self.write("evaluation", {"epoch": epoch, "step": step, **test})
        self.console.print(
            f"epoch {epoch} step {step} test loss {test['test_loss']:.3f} "
            f"test accuracy {test['test_accuracy']:.2%} of {test['samples']:,} samples"
        )

    def write(self, event, values):
        self.file.write(json.dumps({"event": event, **values}) + "\n")
        shown = {f"{event}/{name}": value for name, value in values.items() if value is not None and name != "step"}
        self.accelerator.log(shown, step=values["step"])

    def leave(self, status, message):
        """End this process before the training is complete, when all others have come here, too."""
        self.progress.stop()
        if self.accelerator.is_main_process:
            print(f"{RECIPE}: {message}", file=sys.stderr, flush=True)
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        os._exit(status)

    def sums(self, totals, parameters, scheduler, step):
        """Return the sums over all processes of losses, correct answers and samples since the last report, of which
        `totals` (4,) has this process's, and the number of steps since one had a loss that was not finite. End all
        processes if there is one, or a weight that is not finite. This waits for the device."""
        finite = torch.nn.utils.get_total_norm(parameters).isfinite().float()
        ranks = self.accelerator.gather(torch.cat((totals, finite[None]))[None]).tolist()
        broken = int(max(steps for *_, steps, _ in ranks))
        which = [rank for rank, (*_, steps, finite) in enumerate(ranks) if (steps == broken if broken else not finite)]
        if which:
            first = step - max(broken - 1, 0)
            rate = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch - 1 - (step - first))
            message = f"error: the {'loss' if broken else 'gradient'} of step {first} is not finite on rank "
            message += f"{', '.join(map(str, which))} at learning rate {rate:.3g}"
            if broken and len(which) == len(ranks):
                message += f" (or the gradient of step {first - 1} was not)"
            self.leave(1, message + ": not saved; start again with a lower --lr, or look for bad samples")
        return [sum(column) for column in zip(*ranks, strict=True)][:3]


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
    sys.stdout.flush()
    os._exit(2)  # without the tear-down, in which gloo may abort


def parse_args(**own_flags):
    """Return the flags that all recipes have, and a recipe's own: {name: options of add_argument}."""
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, usage="\n" + rest.partition("\n\n")[0])
    parser.error = refuse

    def add(group, name, help, **options):
        default = "" if options.get("default") is None else " (default: %(default)s)"
        group.add_argument(name, help=help + default, **options)

    what = parser.add_argument_group("data and model")
    add(what, "--data", "synthetic needs no files, no network", choices=("cifar10", "synthetic"), default="cifar10")
    add(what, "--data-dir", "where CIFAR-10 is, or is downloaded to", default="data")
    add(what, "--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")
    add(what, "--stem", "of resnet50: 3x3, or stock 7x7", choices=("cifar", "imagenet"), default="cifar")
    how = parser.add_argument_group("training")
    add(how, "--epochs", "passes over the training set", type=int, default=30)
    add(how, "--max-steps", "stop after this many optimizer steps", type=int)
    add(how, "--batch-size", "samples per process and microbatch", type=int, default=128)
    add(how, "--lr", "peak learning rate per 128 samples of global batch", type=float, default=0.02)
    add(how, "--seed", "of weights, order and augmentation", type=int, default=0)
    add(how, "--cpu", "leave the GPUs alone: processes on CPU cores, over gloo", action="store_true")
    own = parser.add_argument_group("this recipe")
    for name, options in own_flags.items():
        add(own, f"--{name.replace('_', '-')}", **options)
    stay = parser.add_argument_group("results and checkpoints")
    add(stay, "--output-dir", "for checkpoints, metrics, summary and weights", default=f"runs/{RECIPE}")
    add(stay, "--checkpoint-every", "optimizer steps between checkpoints, beside those at each epoch's end", type=int)
    add(stay, "--keep", "how many checkpoints to keep", type=int, default=2)
    add(stay, "--resume", "go on from a checkpoint; auto: the newest in the output directory", metavar="{auto,PATH}")
    add(stay, "--eval-only", "with --resume: measure that checkpoint on the test set and leave", action="store_true")
    look = parser.add_argument_group("looking at the run")
    add(look, "--log-every", "optimizer steps between two lines of metrics", type=int, default=10)
    trackers = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    add(look, "--tracker", f"where metrics go, too: {', '.join(trackers)}", choices=trackers, metavar="NAME")
    add(look, "--profile", "write a trace of three steps per rank, for Perfetto or Chrome", action="store_true")
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
    if args.tracker and args.tracker not in [tracker.value for tracker in get_available_trackers()]:
        refuse(f"argument --tracker: its package is missing, pip install {args.tracker}")
    if args.eval_only and not args.resume:
        refuse("argument --eval-only: which checkpoint? Add --resume PATH, or --resume auto for the newest")
    checkpoints = list(Path(args.output_dir).glob(Checkpoints.pattern))
    if checkpoints and get_int_from_env(["TORCHELASTIC_RESTART_COUNT"], 0):  # --max_restarts, after a process died
        args.resume = "auto"
    if checkpoints and not args.resume:
        refuse(
            f"{args.output_dir} holds the checkpoints of a run: go on from the last with --resume auto, or choose "
            "another --output-dir"
        )
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
    if attempt := get_int_from_env(["TORCHELASTIC_RESTART_COUNT"], 0):
        # The launcher's store still has the addresses of the processes that died: keep the new ones from dialling them.
        store, rank, world_size = next(distributed.rendezvous("env://"))
        store = distributed.PrefixStore(f"attempt {attempt}", store)
        distributed.init_process_group("gloo" if cpu else "nccl", store=store, rank=rank, world_size=world_size)
    accelerator = Accelerator(
        cpu=cpu,  # without it, processes on a machine without GPUs would not see each other
        mixed_precision=mixed_precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
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


def choose_gpus(gpus):
    """Hide all GPUs but these, before CUDA looks: the Accelerator's device and DataParallel's first are then one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if torch.cuda.device_count() != len(gpus.split(",")):
        refuse(f"argument --gpus: {gpus} names GPUs that this machine does not have, run nvidia-smi for its list")


# ---------------------------------------------------------------------------------------------------------- main
def main():
    started = time.perf_counter()
    args = parse_args(
        accumulation_steps={"type": int, "default": 1, "help": "microbatches per optimizer step"},
        gpus={"help": "which GPUs to use, for example 0,1 (default: all)"},
    )
    if get_int_from_env(["WORLD_SIZE"], 1) > 1:  # Accelerate would wrap DistributedDataParallel around DataParallel
        refuse(
            "DataParallel is one process over all GPUs: launch it with accelerate_configs/1gpu.yaml, or launch "
            "recipes/ddp_cifar.py, which is one process per GPU"
        )
    if args.gpus:
        choose_gpus(args.gpus)
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
    # DataParallel wants the model on the first GPU, where the prepared DataLoader puts the batches. It is not prepared:
    # there is nothing for Accelerate to add in one process. Everything else about the model (`.fc`, its state dict) is
    # behind `accelerator.unwrap_model`: DataParallel has no such attributes and puts `module.` before every key.
    # Of the replicas' BatchNorm statistics only the first one's are kept, those of its share of the batch.
    model = nn.DataParallel(model.to(accelerator.device))
    optimizer = accelerator.prepare(optimizer)

    run = {
        "recipe": RECIPE,
        **vars(args),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "precision": "fp32",
        "world_size": accelerator.num_processes,
        "global_batch_size": global_batch,
        "steps": total_steps,
        "steps_per_epoch": steps_per_epoch,
        "replicas": describe_replicas(model, args.batch_size),
        "lr_schedule": f"linear warm-up to {peak_lr:.3g} over a fifth of the steps, then linear decay to 0",
        "versions": {package.__name__: package.__version__ for package in (torch, torchvision, accelerate)},
    }
    checkpoints = Checkpoints(accelerator, args, run)
    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
    totals = torch.zeros(4, device=accelerator.device)  # since the last report; see `Report.sums`
    start, metrics = 0, ""
    if checkpoint := checkpoints.load():
        start, metrics = checkpoint["step"], checkpoint["metrics"]
        totals.copy_(checkpoints.restore(checkpoint, state)["totals"])
    del checkpoint
    run["resumed_from"] = start
    interruption = Interruption(accelerator)
    report = Report(accelerator, run, start, metrics)
    if args.eval_only:
        if test := evaluate(accelerator, model, test_loader, interruption):
            report.evaluation(math.ceil(start / steps_per_epoch), start, test)
        report.leave(0 if test else 128 + interruption.signal, "nothing trained and nothing written: --eval-only")

    with report.progress:
        # A checkpoint of an epoch's last step is from before the evaluation: going on from it begins with that.
        for epoch in range(max(start - 1, 0) // steps_per_epoch, math.ceil(total_steps / steps_per_epoch)):
            train_loader.set_epoch(epoch)
            if hasattr(train_loader.dataset, "set_epoch"):  # some prepared loaders do not pass it on
                train_loader.dataset.set_epoch(epoch)
            first = epoch * steps_per_epoch
            last = min(first + steps_per_epoch, total_steps)
            start = max(start, first)
            skipped = (start - first) * window
            batches = report.timed(skip_first_batches(train_loader, skipped) if skipped else train_loader)
            clock = time.perf_counter()
            model.train()
            for step in range(start + 1, last + 1):
                learning_rate = scheduler.get_last_lr()[0]
                for images, labels in islice(batches, window):
                    totals[:3] += train_step(accelerator, model, optimizer, scheduler, images, labels)
                totals[3] += ~totals[0].isfinite()
                report.advance()

                stop = interruption.agreed()
                log = step == last or step % args.log_every == 0
                save = stop or step == last or (args.checkpoint_every and step % args.checkpoint_every == 0)
                if log or save:
                    sums = report.sums(totals, model.parameters(), scheduler, step)
                if log:
                    report.train(epoch + 1, step, learning_rate, sums, time.perf_counter() - clock)
                    totals.zero_()
                    clock = time.perf_counter()
                if save:
                    before = time.perf_counter()
                    states = [{name: thing.state_dict() for name, thing in state.items()}]
                    checkpoints.save(report, step, states, {"totals": totals})
                    clock += time.perf_counter() - before
                if stop:
                    report.leave(128 + stop, f"stopped after step {step}, which is saved: --resume auto goes on")
            test = evaluate(accelerator, model, test_loader, interruption)
            if test is None:
                report.leave(128 + interruption.signal, "stopped in the evaluation: --resume auto goes on from it")
            report.evaluation(epoch + 1, last, test)

    results = {
        "train_loss": report.loss,
        **test,
        **report.throughput(),
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
