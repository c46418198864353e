"""Run by test_pipeline.py: the pipeline against the unsplit model over the same microbatches.

The recipe's own functions train for one step, whose update is the gradient itself, or for several
with momentum; the unsplit model does the same in one process. In float64: at its start ResNet-50
turns a rounding error of float32 into a hundredth of its gradient within one step, whatever
computes it. Writes to argv[1], for samples without weights ("equal") and with ("weighted"):
{case: [largest deviation of an update, largest update, loss of the last step, the reference's]};
and the "timeouts" of the process groups, in seconds
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from conftest import load, undo_zero_init
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn import functional as F

recipe = load("recipes/pipeline_cifar.py")
accelerator, path = Accelerator(cpu=True), Path(sys.argv[1])
replicas = accelerator.num_processes // 2
answers, weighted_answers, models, references = {}, {}, {}, {}
seen = []  # how many samples `compute_loss` had, in each of its calls in a step


def counted(metrics, checked=recipe.checked):
    seen.append(len(metrics["loss"]))
    return checked(metrics)


recipe.checked = counted


def make_optimizer(parameters, steps):
    optimizer = torch.optim.SGD(
        parameters, lr=1.0 if steps == 1 else 1e-3, momentum=0 if steps == 1 else 0.9
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def unsplit(model, initial, batches, parts, steps):
    """Return how far each parameter moves in these steps, and the last loss."""
    optimizer, _ = make_optimizer(model.parameters(), steps)
    for x, y in batches:
        losses = [
            F.cross_entropy(model(part), target) / parts
            for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True)
        ]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() - initial[name] for name, value in model.named_parameters()}, sum(
        losses
    ).item()


def compare(model_name, schedule_name, microbatches, split=None, steps=1, batch=16):
    args = SimpleNamespace(
        model=model_name,
        stem="imagenet",
        split=split,
        schedule=schedule_name,
        microbatches=microbatches,
    )
    if model_name not in models:
        torch.manual_seed(0)
        models[model_name] = undo_zero_init(recipe.build_model(args).double().train())
    whole, reference = (copy.deepcopy(models[model_name]) for _ in range(2))
    initial = copy.deepcopy(whole.state_dict())
    images, labels = recipe.synthetic_images(steps * batch * replicas, seed=4)
    images = images.permute(0, 3, 1, 2).double().sub(128).div(64)
    if model_name == "simple_cnn":
        images = F.avg_pool2d(images, 4)  # small images save time
    batches = list(zip(images.chunk(steps), labels.chunk(steps), strict=True))

    model, loss = piped(args, whole, batches, steps)
    updated = of_both_stages(model)
    if accelerator.is_main_process:
        key = (
            model_name,
            microbatches,
            steps,
            batch,
        )  # neither the schedule nor the cut is in the unsplit model
        if key not in references:
            references[key] = unsplit(reference, initial, batches, microbatches * replicas, steps)
        moved, expected_loss = references[key]
        case = f"{model_name} {schedule_name} {microbatches} {split} {steps}"
        answers[case] = [*deviation(updated, initial, moved), loss, expected_loss]


def piped(args, whole, batches, steps, accumulation=1, clip_norm=None):
    """Train the model in a pipeline; return it, and the mean loss of the last step. Each process
    sees its pipeline's share of a batch only, in as many parts as there are to accumulate."""
    accelerator.gradient_accumulation_steps = accumulation
    model = recipe.Pipeline(args, accelerator, recipe.model_blocks(whole))
    is_last, share = model.group.rank() == 1, len(batches[0][0]) // replicas
    optimizer, scheduler = make_optimizer(model.parameters(), steps)
    optimizer = accelerator.prepare_optimizer(optimizer)
    model.train()
    model.metric_names = list(
        recipe.compute_loss(lambda inputs: torch.zeros(1, 10), (None, torch.zeros(1).long()))
    )
    mine = slice(share * model.replicas.rank(), share * (model.replicas.rank() + 1))
    for x, y in batches:
        parts = zip(x[mine].chunk(accumulation), y[mine].chunk(accumulation), strict=True)
        seen.clear()
        metrics, norm = recipe.train_step(
            accelerator, model, optimizer, scheduler, parts, (0,), clip_norm
        )
    # Once for each microbatch and never for the whole batch; once more where torch finds shapes.
    parts = accumulation * args.microbatches
    calls = parts if is_last else 0
    assert calls <= len(seen) <= calls + is_last and set(seen) <= {share // parts}
    assert len(metrics) == accumulation and (norm is None) == (clip_norm is None)
    rows = sum(recipe.sample_rows(one).sum(0) for one in metrics)
    loss, _, weight, samples = accelerator.reduce(rows.float()).tolist()
    assert bool(rows[-1]) == is_last and samples == share * replicas
    return model, loss / weight


def of_both_stages(model):
    """Return the state of the whole model on the main process."""
    state = accelerator.unwrap_model(model.stage).state_dict()
    if accelerator.process_index == 1:
        torch.save(state, path.with_suffix(".pt"))  # a socket would take longer
    distributed.barrier()
    other = torch.load(path.with_suffix(".pt")) if accelerator.is_main_process else {}
    distributed.barrier()
    return {
        name.replace("/", "."): value for part in (state, other) for name, value in part.items()
    }


def deviation(updated, initial, moved):
    """Return by how much an update differs from what it should be, and how large that is."""
    differences = [
        (updated[name] - initial[name] - move).abs().max().item() for name, move in moved.items()
    ]
    return max(differences), max(move.abs().max().item() for move in moved.values())


per_sample = recipe.compute_loss
LABELS = 9, 1, 4, 0, 0, 0, 7, 2
HALF_OF_NO_WEIGHT = 9, 1, 4, 7, 0, 0, 0, 0  # on four processes a whole pipeline's share


def weighted_loss(model, batch):
    """The weight of a sample depends on its label only, which both stages' tests know."""
    return {**per_sample(model, batch), "weight": weights_of(batch[1])}


def weights_of(labels):
    """Between 0 and 47, as the tokens of short and of long sequences."""
    return labels * (labels + 1) // 2


def compare_weighted(schedule_name, microbatches, accumulation=1, clip_norm=None, labels=LABELS):
    """The same 8 samples in one step, however they are divided, against their weighted mean."""
    args = SimpleNamespace(
        model="simple_cnn", split=None, schedule=schedule_name, microbatches=microbatches
    )
    torch.manual_seed(0)
    whole = recipe.build_model(args).double().train()
    initial, reference = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole)
    images, _ = recipe.synthetic_images(8, seed=4)
    images = F.avg_pool2d(images.permute(0, 3, 1, 2).double().sub(128).div(64), 4)
    labels = torch.tensor(labels)
    recipe.compute_loss = weighted_loss
    model, loss = piped(args, whole, [(images, labels)], 1, accumulation, clip_norm)
    recipe.compute_loss = per_sample
    updated = of_both_stages(model)
    if accelerator.is_main_process:
        weights = weights_of(labels).double()
        losses = F.cross_entropy(reference(images), labels, reduction="none")
        expected = (losses * weights).sum() / weights.sum()
        expected.backward()
        if clip_norm:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm).item()
            assert norm > 2 * clip_norm, "clipping that changes little would prove nothing"
        moved = {name: -value.grad for name, value in reference.named_parameters()}
        case = f"{schedule_name} {microbatches} {accumulation} {clip_norm} {labels.tolist()}"
        weighted_answers[case] = [*deviation(updated, initial, moved), loss, expected.item()]


if accelerator.num_processes in (2, 4):
    for parts, accumulation in ((1, 1), (2, 1), (4 // replicas, 1), (1, 4), (2, 2)):
        compare_weighted("gpipe", parts, accumulation)
    compare_weighted("1f1b", 2, 2, clip_norm=0.05)
    compare_weighted("gpipe", 2, labels=HALF_OF_NO_WEIGHT)
for microbatches in (1, 2, 4, 8):
    compare("simple_cnn", "gpipe", microbatches)
    if microbatches > 1:
        compare("simple_cnn", "1f1b", microbatches)
if accelerator.num_processes == 2:
    compare("resnet50", "gpipe", 2, steps=3, batch=8)
    compare("resnet50", "1f1b", 4)
    for split in ("bn1", "fc"):
        compare("resnet50", "gpipe", 2, split, batch=8)
if accelerator.num_processes == 4:
    compare("resnet50", "1f1b", 2, steps=2, batch=8)
# Those that the pipelines have made: all but the default one.
_, *groups = [group for group in distributed_c10d._world.pg_map if group is not None]
backends = [group._get_backend(torch.device("cpu")) for group in groups]
timeouts = [backend.options._timeout.total_seconds() for backend in backends]
if accelerator.is_main_process:
    answer = {"equal": answers, "weighted": weighted_answers, "timeouts": timeouts}
    path.write_text(json.dumps(answer))
accelerator.free_memory()
accelerator.end_training()
