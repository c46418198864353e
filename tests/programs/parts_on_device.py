"""Parts of a training on CPU or GPU, the functions below: parts_on_device.py ANSWER.json PART
DEVICE PRECISION

Run by test_gpu.py, as a process of forked.py.
"""

import copy
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from conftest import both_stages, ddp_on_one_rank, load
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

path, part, device, precision = sys.argv[1:]
cuda = device == "cuda"
model, batch_size = ("resnet50", 16) if cuda else ("simple_cnn", 2)
args = SimpleNamespace(
    data="synthetic", model=model, stem="imagenet", batch_size=batch_size, split=None
)
vars(args).update(cpu=not cuda, log_every=1, seed=0, tracker=None, output_dir=".", threads=None)
vars(args).update(lr=0.01, epochs=1, max_steps=None, global_batch_size=batch_size)
torch.manual_seed(0)


class Reads(TorchDispatchMode):
    """Counts what would make a GPU's host wait: values that are read. On CPU, where torch does not
    say."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return function(*arguments, **(options or {}))


def synchronisations():
    """In three steps of training with data, loss and signals, and in one that reads its loss."""
    recipe = load("recipes/amp_cifar.py")
    args.precision = "fp32" if precision == "no" else precision
    args.hang_timeout = 600.0
    ddp_on_one_rank()
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = recipe.make_accelerator(args, args.precision, ddp)
    if precision == "fp16" and not cuda:
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    loaders = accelerator.prepare(*recipe.reproducible(recipe.load_data(args, accelerator), 0))
    model = recipe.build_model(args)
    optimizer, scheduler = recipe.make_optimizer(model, args, 100)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    recipe.skip_batchnorm_broadcasts(model)
    stop = recipe.StopSignal(accelerator)
    steps = recipe.Steps(loaders[0], 1, args)
    metrics = SimpleNamespace(names=[], sums=0, display=SimpleNamespace(advance=lambda: None))
    batches = steps.timed(loaders[0])

    def step():
        values, _ = recipe.train_step(
            accelerator, model, optimizer, scheduler, [next(batches)], (0, 0), None
        )
        recipe.Metrics.add(metrics, 1, values)
        stop.requested()

    def count(*functions):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for function in functions:
                function()
        torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)

    def count_reads(*functions):
        with Reads() as reads:
            for function in functions:
                function()
        return reads.count

    count = count if cuda else count_reads
    for _ in range(4):
        step()
    answer = {
        "in three steps": count(step, step, step),
        "when read": count(lambda: metrics.sums.sum().item()),
    }
    accelerator.free_memory()
    accelerator.end_training()
    return answer


def chained_stages():
    """Both stages of the pipeline, one after the other, against the whole model: how far logits and
    gradients are from its, relative to their norms; and whether what the stages hand on, and back,
    is contiguous."""
    recipe = load("recipes/pipeline_cifar.py")
    accelerator = Accelerator(cpu=not cuda, mixed_precision=precision)
    dtype = torch.float64 if precision == "no" else torch.float32
    whole = recipe.build_model(args).to(dtype)
    stages = both_stages(recipe, copy.deepcopy(whole), args, accelerator.autocast)
    first, last = (stage.to(device) for stage in stages)
    images, labels = recipe.synthetic_images(batch_size, seed=4)
    images, labels = (
        images.to(device).permute(0, 3, 1, 2).to(dtype).sub(128).div(64),
        labels.to(device),
    )
    whole.to(device)
    with accelerator.autocast():
        expected = whole(images)
    F.cross_entropy(expected.to(dtype), labels).backward()

    handed, back = first(images), []
    inner = handed.detach().requires_grad_()
    logits = recipe.utils.convert_to_fp32(last(inner)) if precision == "bf16" else last(inner)
    inner.register_hook(back.append)
    F.cross_entropy(logits, labels).backward()
    handed.backward(back[0])
    pairs = [(logits, expected)]
    parameters = dict(whole.named_parameters())
    for name, value in [*first.named_parameters(), *last.named_parameters()]:
        pairs.append((value.grad, parameters.pop(name.replace("/", ".")).grad))
    one, other = (
        torch.cat([tensor.flatten().to(dtype) for tensor in side])
        for side in zip(*pairs[1:], strict=True)
    )
    return {
        "logits": ((logits - expected).norm() / expected.norm()).item(),
        "gradients": ((one - other).norm() / other.norm()).item(),
        "left out": list(parameters),
        "contiguous": [handed.is_contiguous(), back[0].is_contiguous()],
        "types": [str(handed.dtype), str(back[0].dtype), str(logits.dtype)],
    }


def replicas():
    """DataParallel on all GPUs: its gradients, those of one device, and on which devices a
    convolution ran, with the weight and with the output in channels_last."""
    recipe, layouts = load("recipes/data_parallel_cifar.py"), []
    args.model = "simple_cnn"
    single = recipe.build_model(args).to(device)
    parallel = nn.DataParallel(copy.deepcopy(single))

    def look(convolution, _, output):
        tensors = convolution.weight, output
        layouts.append(
            [
                str(output.device),
                *(x.is_contiguous(memory_format=torch.channels_last) for x in tensors),
            ]
        )

    parallel.module[1][0].register_forward_hook(look)
    images, labels = (
        torch.randn(64, 3, 32, 32, device=device),
        torch.randint(10, (64,), device=device),
    )
    batch = images.contiguous(memory_format=torch.channels_last), labels
    for model in (single, parallel):
        recipe.mean_loss(recipe.compute_loss(model, batch)).backward()
    pairs = list(zip(parallel.parameters(), single.parameters(), strict=True))
    deviation = max((value.grad - expected.grad).abs().max().item() for value, expected in pairs)
    largest = max(expected.grad.abs().max().item() for _, expected in pairs)
    return {"deviation": deviation, "largest": largest, "layouts": layouts}


Path(path).write_text(json.dumps(globals()[part]()))
