"""What recipes/README.md says to paste into a copy, taken from that page: on two processes, stopped
in mid-training and continued by the same command, it is the uninterrupted run."""

import inspect
import io
import json
import math
import random
import re
import tarfile

import numpy
import pytest
import torch
from conftest import ROOT, SMALL, copy, forked, load, outputs
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow

PAGE = (ROOT / "recipes/README.md").read_text()


def blocks(title, language):
    """The blocks of code of a section of the page."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{title}: no {language}"
    return found


def code(title, number=0):
    return "\n\n" + blocks(title, "python")[number]


def changes(title):
    """The (old, new) lines of a section's diffs."""
    pairs = []
    for block in blocks(title, "diff"):
        lines = [line if line.strip() else " \n" for line in block.splitlines(keepends=True)]
        old, new = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
        pairs.append((old, new))
    return pairs


NOISY_LINE = '''
def make_sets():
    """Few samples and much noise: soon the training learns only the noise."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(99, 12, generator=generator)
    targets = inputs[:, 0] + 0.5 * torch.randn(99, generator=generator)
    whole = torch.utils.data.TensorDataset(inputs, targets)
    return [torch.utils.data.Subset(whole, part) for part in (range(24), range(24, 69))]


def load_data(args, accelerator):
    train_set, test_set = make_sets()
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)


def build_model(args):
    return nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))


def compute_loss(model, batch):
    inputs, targets = batch
    return {"loss": (model(inputs).squeeze(1) - targets) ** 2}
'''
THREE_LOADERS = """
two_loaders = load_data


def load_data(args, accelerator):
    train_loader, validation_loader = two_loaders(args, accelerator)
    test_set = torch.utils.data.Subset(train_loader.dataset.dataset, range(69, 98))
    return train_loader, validation_loader, DataLoader(test_set, args.batch_size)
"""
STOPPING = changes("Early stopping")
ON_VALIDATION = [
    tuple(
        text.replace('"evaluation", test', '"validation", validation').replace(
            'test["test_loss"]', 'validation["validation_loss"]'
        )
        for text in pair
    )
    for pair in STOPPING
]
# The lines of the page, on less data.
LITTLE = ("synthetic_images(5120", "synthetic_images(64"), ("images(1024", "images(21")

IMBALANCED = """
class Augmented(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + torch.rand(()) * numpy.random.rand(), label


def load_data(args, accelerator):
    labels = (torch.arange(96) % 8 == 0).long()
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3)) + labels[:, None]
    test_set = torch.utils.data.TensorDataset(inputs, labels)
    train_set = Balanced(Augmented(inputs, labels), labels, args.seed)
    workers = {"num_workers": 2, "persistent_workers": True}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **workers)
    return train_loader, DataLoader(test_set, args.batch_size)


def build_model(args):
    return nn.Linear(6, 2)


def compute_loss(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    class_weights = torch.tensor([1.0, 3.0])
    loss = F.cross_entropy(logits, labels, class_weights.to(labels.device), reduction="none")
    return {"loss": loss, "rare": labels == 1, "sum": inputs.sum(1)}
"""

FILES = """
import io
import tarfile


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "num_workers": 2}
    shuffled = {"shuffle": True, "drop_last": True, "persistent_workers": True}
    train_loader = DataLoader(OnDisk("images.npy", "labels.npy"), **shuffled, **options)
    return train_loader, DataLoader(TarSamples(["0.tar", "1.tar"]), **options)


def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
"""

DETECTION = '''
from torchvision.models import detection


class Squares(Dataset):
    """A bright square, or a bright bar, on noise."""

    def __init__(self, samples, seed):
        self.samples = samples
        self.seed = seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        image = 0.3 * torch.rand(3, 64, 64, generator=generator)
        boxes = []
        for _ in range(1 + index % 3):
            left, top = torch.randint(0, 40, (2,), generator=generator).tolist()
            width, height = 24, 12 + 12 * (index % 2)
            image[:, top : top + height, left : left + width] += 0.6
            boxes.append([left, top, left + width, top + height])
        labels = torch.full((len(boxes),), 1 + index % 2)
        return image, {"boxes": torch.tensor(boxes).float(), "labels": labels}


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "collate_fn": collate}
    train_loader = DataLoader(Squares(12, 1), shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(Squares(7, 2), **options)


def build_model(args):
    layers = nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 8
    return detection.FasterRCNN(
        backbone,
        min_size=64,
        max_size=64,
        rpn_anchor_generator=detection.rpn.AnchorGenerator(((24,),), ((0.5, 1.0),)),
        rpn_pre_nms_top_n_train=40,
        rpn_post_nms_top_n_train=20,
        box_roi_pool=torchvision.ops.MultiScaleRoIAlign(["0"], 3, 2),
        box_head=detection.faster_rcnn.TwoMLPHead(72, 16),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(16, 3),
        box_score_thresh=0.0,
        box_detections_per_img=5,
    )


def mean_average_precision(predictions, targets):
    """A metric of the whole set: of all boxes in order of their scores, how many come before."""
    scores = torch.cat([one["scores"] for one in predictions])
    best = [
        torchvision.ops.box_iou(one["boxes"], target["boxes"]).amax(1)
        for one, target in zip(predictions, targets, strict=True)
    ]
    hits = torch.cat(best)[scores.argsort(descending=True)]
    return (hits.cumsum(0) / torch.arange(1, 1 + len(hits))).mean().item()
'''
# Torchvision takes a random part of the proposals; with all of them the processes are comparable.
ALL_PROPOSALS = """
sampled = build_model


def build_model(args):
    model = sampled(args)
    for part in (model.rpn, model.roi_heads):
        part.fg_bg_sampler.batch_size_per_image = 10**6
        part.fg_bg_sampler.positive_fraction = 1.0
    return model
"""

PAIRS = """
class Views(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.common = torch.randn(samples, 8, generator=generator)
        self.own = torch.randn(2, samples, 8, generator=generator)

    def __len__(self):
        return len(self.common)

    def __getitem__(self, index):
        return self.common[index] + self.own[:, index]


def load_data(args, accelerator):
    train_loader = DataLoader(Views(32, 1), args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(Views(21, 2), args.batch_size)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        first, second = batch.unbind(1)
        first, second = F.normalize(self.first(first)), F.normalize(self.second(second))
        return first, second, self.log_scale.exp()


def build_model(args):
    torch.manual_seed(0)
    return TwoTowers()
"""

# Rows of the tables, several in one copy each.
CLASSES = """
class Sometimes(nn.Linear):
    def forward(self, x):
        return super().forward(x) if not self.training or torch.rand(()) < 0.5 else x


def load_data(args, accelerator):
    labels = (torch.arange(96) % 3 == 0).long()
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3)) + labels[:, None]
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    train_loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(torch.utils.data.Subset(dataset, range(45)), args.batch_size)


def build_model(args):
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), Sometimes(8, 8), nn.Dropout(0.1), Sometimes(8, 8), nn.Linear(8, 2)
    return nn.Sequential(*layers)


def compute_loss(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "score": logits.softmax(1)[:, 1], "label": labels == 1}


def area_under_curve(rows):
    score, label = rows[:, 1], rows[:, 2] == 1
    return (score[label][:, None] > score[~label]).float().mean()
"""
MIXED = """
not_mixed = compute_loss


def compute_loss(model, batch):
    inputs, labels = batch
    if model.training:
        inputs = torch.lerp(inputs, inputs.roll(1, 0), random.random())
    return not_mixed(model, (inputs, labels))
"""


def said(text):
    """A snippet that is on the page."""
    assert text in PAGE, text
    return text


def in_profile(recipe):
    source = (ROOT / f"recipes/{recipe}.py").read_text()
    pattern = r"^    for epoch in steps.*?(?=^    with hang)"
    (loop,) = re.findall(pattern, source, re.DOTALL | re.MULTILINE)
    around = said('with accelerator.profile(utils.ProfileKwargs(output_trace_dir="trace")):')
    return loop, f"    {around}\n" + re.sub(r"^(?=.)", "    ", loop, flags=re.MULTILINE)


STATES = '    states = {"model": plain_model, "optimizer": optimizer, "scheduler": scheduler}\n'
AVERAGED = [
    said(
        "ema = torch.optim.swa_utils.AveragedModel(plain_model, accelerator.device, "
        "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))"
    ),
    said(
        "optimizer.optimizer.register_step_post_hook(lambda *_: ema.update_parameters(plain_model))"
    ),
    said('states["ema"] = ema'),
]
LAMBDA = "torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
COSINE = said("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total_steps))")
TESTED = "test_metrics(metrics, sums, len(loader.dataset))"
AREA = said('return {**test_metrics(...), "auroc": float(...)}')
AREA = AREA.replace("test_metrics(...)", TESTED)
AREA = AREA.replace("float(...)", "float(area_under_curve(torch.cat(collected)))")
COLLECTED = "    sums = 0\n    with", "    sums = 0\n    collected = []\n    with"
AREA = [COLLECTED, (f"return {TESTED}", AREA)]
SUMMED = "            sums += rows.sum(0)\n"
NOT_FUSED = ", " + said('"fused": True') + "}", "}"
FIND_UNUSED = said("find_unused_parameters=True")
ROWS = [
    in_profile("ddp_cifar"),
    (STATES, STATES + "".join(f"    {line}\n" for line in AVERAGED)),
    (
        "test = evaluate(accelerator, model, test_loader, hang)",
        f"test = {said('evaluate(accelerator, ema, test_loader, hang)')}",
        2,
    ),
    ("save_model(model, args.output_dir", said("save_model(ema.module, args.output_dir")),
    ("gradient_as_bucket_view=True)", f"gradient_as_bucket_view=True, {FIND_UNUSED})"),
    NOT_FUSED,
    (LAMBDA, COSINE),
    *AREA,
    (SUMMED, SUMMED + "            collected.append(rows)\n"),
]
PIPELINES = [
    ("gradient_as_bucket_view=True\n", f"gradient_as_bucket_view=True, {FIND_UNUSED}\n"),
    NOT_FUSED,
    (LAMBDA, COSINE),
    *AREA,
    (SUMMED, f"{SUMMED}            collected += {said('utils.gather_object([rows.cpu()])')}\n"),
]
LATE = said("LambdaLR(optimizer, [f, lambda step: f(step) if step >= 1000 else 0.0])")
LATE = LATE.replace("1000", "6").replace("f(", "factor(").replace("[f,", "[factor,")
GROUPS = '[{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=peak'
SECOND = """    second = torch.optim.AdamW(plain_model[1:4].parameters(), lr=1e-2)
    second = accelerator.prepare(second)
    states["second"] = second
"""
# A second optimizer, and a group of the first that begins late.
OPTIMIZERS = [
    ("gradient_as_bucket_view=True)", f"gradient_as_bucket_view=True, {FIND_UNUSED})"),
    NOT_FUSED,
    ("SGD(model.parameters(), lr=peak", f"SGD({GROUPS}"),
    (LAMBDA, f"torch.optim.lr_scheduler.{LATE}"),
    (STATES, STATES + SECOND),
    ("step_key, clip_norm):", "step_key, clip_norm, second):"),
    ("(args.seed, step), clip_norm\n", "(args.seed, step), clip_norm, second\n"),
    ("    optimizer.step()\n", "    optimizer.step()\n    second.step()\n"),
    ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    second.zero_grad()\n"),
]

ADDED = "metrics.add(step, values)"
STOP = """
def stop_at(step):
    if str(step) == os.environ.get("STOP_AT"):
        os.kill(os.getpid(), signal.SIGTERM)
"""
EPOCHS = ["--epochs", 2]
MANY_EPOCHS = ["--epochs", 20, "--patience", 3, "--lr", 0.5]
DETECTOR = code("Object detection") + DETECTION
EACH = DETECTOR + code("Object detection", 1) + ALL_PROPOSALS
CONTRAST = code("A contrastive loss") + PAIRS
# what: (recipe, how it is changed, what is added, flags, the step of SIGTERM)
COPIES = {
    "early": ("ddp_cifar", STOPPING, code("Early stopping") + NOISY_LINE, MANY_EPOCHS, 22),
    "early-pipeline": (
        "pipeline_cifar",
        STOPPING,
        code("Early stopping") + NOISY_LINE,
        [*MANY_EPOCHS, "--microbatches", 2],
        22,
    ),
    "early-validation": (
        "ddp_cifar",
        [*changes("A validation split"), *ON_VALIDATION],
        code("Early stopping") + NOISY_LINE + THREE_LOADERS,
        MANY_EPOCHS,
        22,
    ),
    "validation": (
        "ddp_cifar",
        changes("A validation split"),
        code("A validation split").replace(*LITTLE[0]).replace(*LITTLE[1]),
        [*SMALL, *EPOCHS],
        9,
    ),
    "balanced": ("ddp_cifar", [], code("Balanced classes") + IMBALANCED, EPOCHS, 15),
    "files": (
        "ddp_cifar",
        [],
        code("Data larger than memory") + code("Data larger than memory", 1) + FILES,
        EPOCHS,
        6,
    ),
    "detection": ("ddp_cifar", changes("Object detection"), DETECTOR, EPOCHS, 4),
    "detection-each": ("ddp_cifar", changes("Object detection"), EACH, EPOCHS, None),
    "contrast": ("ddp_cifar", [], CONTRAST, [*EPOCHS, "--lr", 8], 5),
}
COPIES |= {
    "rows": ("ddp_cifar", ROWS, CLASSES + MIXED, EPOCHS, 15),
    "optimizers": ("ddp_cifar", OPTIMIZERS, CLASSES, EPOCHS, 3),
    "pipelines": ("pipeline_cifar", PIPELINES, CLASSES, [*EPOCHS, "--microbatches", 2], 15),
}
PROCESSES = {"pipelines": 4}
GLOBAL_BATCH = {"detection": 4, "detection-each": 4}


def write_files(directory):
    """Images for training as .npy, those of the test in two tar files."""
    images = numpy.random.default_rng(0).random((40, 3, 8, 8), dtype=numpy.float32)
    labels = numpy.arange(40) % 10
    numpy.save(directory / "images.npy", images)
    numpy.save(directory / "labels.npy", labels)
    for number in (0, 1):
        with tarfile.open(directory / f"{number}.tar", "w") as tar:
            for index in range(number, 21, 2):
                array = io.BytesIO()
                numpy.save(array, images[index])
                content = {"npy": array.getvalue(), "cls": str(labels[index]).encode()}
                for kind, data in content.items():
                    member = tarfile.TarInfo(f"./v1.0/{index:04}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("adapting")


@pytest.fixture(scope="module")
def adapted(directory, request):
    """{(what, which): exit codes and output} of the runs that the selected tests need."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("what") for item in items if hasattr(item, "callspec")}
    write_files(directory)

    def described(what, output, processes=None, flags=(), **env):
        recipe, replacements, project, own_flags, _ = COPIES[what]
        script = directory / f"{what}.py"
        if not script.exists():
            stop = ADDED, f"{ADDED}, stop_at(step)"
            copy(recipe, script, *replacements, stop, project=project + STOP)
        batch = GLOBAL_BATCH.get(what, 8)
        flags = ["--cpu", "--log-every", 1, "--global-batch-size", batch, *own_flags, *flags]
        flags += ["--output-dir", f"{what}-{output}"]
        processes = processes or PROCESSES.get(what, 2)
        run = {"processes": processes, "script": script, "flags": flags, "directory": directory}
        return {**run, "env": env}

    first, second = {}, {}
    for what, (*_, stop_at) in COPIES.items():
        if what not in wanted:
            continue
        first[what, "whole"] = described(what, "whole")
        if stop_at:
            first[what, "stopped"] = described(what, "stopped", STOP_AT=str(stop_at))
            second[what, "continued"] = described(what, "stopped")
        if what.startswith("early"):
            second[what, "again"] = described(what, "whole")
        if what in ("contrast", "detection-each"):
            first[what, "one process"] = described(what, "one", processes=1)
    if "early" in wanted:
        every = ["--checkpoint-every", 3, "--keep", 99]
        first["early", "saved"] = described("early", "saved", flags=every)
        second["early", "saved again"] = described("early", "saved", flags=every)
    if "detection" in wanted:
        weights = ["--weights", "detection-whole/model.safetensors", "--epochs", 0]
        second["detection", "evaluated"] = described("detection", "one", 1, weights)
    answers = {}
    for runs in (first, second):
        found = forked(list(runs.values()), directory, together=2)
        answers |= dict(zip(runs, found, strict=True))
        for what in COPIES:
            for path in directory.glob(f"{what}-*/summary.json"):
                path.with_name(f"{'second' if runs is second else 'first'}.json").write_bytes(
                    path.read_bytes()
                )
    return answers


def succeeded(adapted, what, *which):
    for name in which:
        codes, output = adapted[what, name]
        assert set(codes) == {0}, output


MEASURED = {"time", "samples_per_second", "data_wait", "slowest_data_wait", "slowest_data_rank"}
MEASURED |= {"peak_memory_gib"}


def lines_of(directory):
    """What metrics.jsonl says, without what was measured."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: x for k, x in json.loads(line).items() if k not in MEASURED} for line in lines]


def same_weights(first, second):
    first, second = (load_file(path / "model.safetensors") for path in (first, second))
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


CONTINUED = [what for what, (*_, stop_at) in COPIES.items() if stop_at]


@pytest.mark.parametrize("what", CONTINUED)
def test_stopped_in_mid_training_and_continued_it_is_the_uninterrupted_run(
    adapted, directory, what
):
    succeeded(adapted, what, "whole", "continued")
    codes, output = adapted[what, "stopped"]
    assert set(codes) == {143}, output
    whole, continued = (directory / f"{what}-{which}" for which in ("whole", "stopped"))
    summary = outputs(continued)["summary"]
    assert 0 < summary["resumed_from"] < outputs(whole)["train"][-1]["step"]
    assert summary["resumed_from"] % summary["steps_per_epoch"], "in mid-epoch"
    assert lines_of(continued) == lines_of(whole)
    assert same_weights(continued, whole)
    tests = [
        {k: x for k, x in outputs(run)["summary"].items() if k.startswith("test_")}
        for run in (continued, whole)
    ]
    assert tests[0] and tests[0] == tests[1]


STOPPED = ["early", "early-pipeline", "early-validation"]


@pytest.mark.parametrize("what", STOPPED)
def test_early_stopping_ends_with_the_best_weights(adapted, directory, what):
    succeeded(adapted, what, "whole")
    whole = outputs(directory / f"{what}-whole")
    event = "validation" if what == "early-validation" else "evaluation"
    name = {"validation": "validation_loss", "evaluation": "test_loss"}[event]
    lines = lines_of(directory / f"{what}-whole")
    losses = [line[name] for line in lines if line["event"] == event]
    if event == "evaluation":
        assert whole["summary"]["test_loss"] == min(losses)
    else:
        assert whole["summary"]["samples"] == 29 and lines[-1]["event"] == "evaluation"
    best = losses.index(min(losses))
    assert 1 < best and len(losses) == best + 1 + 3 < 20, "with a patience of 3"
    space = {"torch": torch, "DataLoader": torch.utils.data.DataLoader, "nn": nn}
    exec(NOISY_LINE, space)
    model = space["build_model"](None).eval()
    model.load_state_dict(load_file(whole["weights"]))
    inputs, targets = map(torch.stack, zip(*space["make_sets"]()[1], strict=True))
    loss = space["compute_loss"](model, (inputs, targets))["loss"].mean().item()
    assert loss == pytest.approx(min(losses), rel=1e-5)
    # The run that SIGTERM stopped had something to remember.
    path = directory / f"{what}-stopped/step-00000023.pt"
    states = torch.load(path, weights_only=True)["states"]
    stopping = (states[0] if what == "early-pipeline" else states)["stopping"]
    assert stopping["best_loss"] == min(losses[:7])
    assert stopping["worse"] == 6 - losses.index(min(losses[:7]))


@pytest.mark.parametrize("what", STOPPED)
def test_the_same_command_does_not_train_on_after_an_early_stop(adapted, directory, what):
    pairs = [("whole", "again")] + [("saved", "saved again")] * (what == "early")
    for first, again in pairs:
        succeeded(adapted, what, first, again)
        path = directory / f"{what}-{first}"
        before, after = (json.loads((path / f"{x}.json").read_text()) for x in ("first", "second"))
        steps = outputs(path)["train"][-1]["step"]
        assert before == after and steps < after["steps"]
        text = adapted[what, again][1]
        assert f"\n  resumed_from: {steps}\n" in text
        assert f"\n  test_loss: {before['test_loss']}\n" in text
        assert not re.search(r"^step \d+/.* loss", text, re.MULTILINE) or first == "saved"
        assert [line["step"] for line in outputs(path)["train"]] == [*range(1, steps + 1)]


@pytest.mark.parametrize("what", ["early"])
def test_early_stopping_is_the_same_where_each_epoch_is_saved(what, adapted, directory):
    """Then a checkpoint is older than the evaluation of its epoch, which a resumed run repeats."""
    succeeded(adapted, "early", "whole", "saved", "saved again")
    assert lines_of(directory / "early-saved") == lines_of(directory / "early-whole")
    assert same_weights(directory / "early-saved", directory / "early-whole")


@pytest.mark.parametrize("what", ["validation"])
def test_the_test_set_is_evaluated_once_beside_the_validation_split(what, adapted, directory):
    succeeded(adapted, "validation", "whole")
    lines = lines_of(directory / "validation-whole")
    events = [line["event"] for line in lines if line["event"] != "train"]
    assert events == ["validation", "validation", "evaluation"]
    assert [line["samples"] for line in lines if "samples" in line] == [6, 6, 21]
    summary = outputs(directory / "validation-whole")["summary"]
    assert summary["test_loss"] == lines[-1]["test_loss"] != lines[-2]["validation_loss"]
    assert summary["steps_per_epoch"] == 58 // 8


@pytest.mark.parametrize("what", ["balanced"])
def test_each_class_is_drawn_as_often_as_any_other(what, adapted, directory):
    succeeded(adapted, "balanced", "whole")
    run = outputs(directory / "balanced-whole")
    rare = [line["rare"] for line in run["train"]]
    assert run["summary"]["test_rare"] == 12 / 96, "the test set stays, class weights or not"
    assert said("class_weights.to(labels.device), reduction=") in IMBALANCED
    epochs = [sum(part) / 12 for part in (rare[:12], rare[12:])]
    assert epochs == pytest.approx([0.5, 0.5], abs=0.15)
    sums = [line["sum"] for line in run["train"]]
    assert len(rare) == 24 and sorted(sums[:12]) != sorted(sums[12:]), "each epoch draws anew"


def test_a_sample_that_is_drawn_twice_is_transformed_in_two_ways():
    recipe = load("recipes/ddp_cifar.py")
    space = {"SeededSamples": recipe.SeededSamples, "seed_rng": recipe.seed_rng}
    space |= {"torch": torch, "random": random}
    exec(code("Balanced classes"), space)

    class Random(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return index, torch.rand(()).item()

    dataset = space["Balanced"](Random(), torch.tensor([0] * 19 + [1]), seed=7)
    dataset.set_epoch(3)
    samples = [dataset[index] for index in range(20)]
    assert samples == [dataset[index] for index in range(20)]
    rare = [value for index, value in samples if index == 19]
    assert 4 <= len(rare) <= 16 and len(set(rare)) == len(rare)


@pytest.mark.parametrize("what", ["files"])
def test_samples_are_those_of_the_files(what, adapted, directory):
    succeeded(adapted, "files", "whole")
    run = outputs(directory / "files-whole")
    assert (run["summary"]["samples"], run["summary"]["steps_per_epoch"]) == (21, 5)
    weights = load_file(run["weights"])
    images = torch.from_numpy(numpy.load(directory / "images.npy")[:21])
    logits = F.linear(images.flatten(1), weights["1.weight"], weights["1.bias"])
    expected = F.cross_entropy(logits, torch.arange(21) % 10).item()
    assert run["summary"]["test_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("what", ["detection"])
def test_a_metric_of_the_whole_test_set_does_not_depend_on_the_processes(what, adapted, directory):
    succeeded(adapted, "detection", "whole", "evaluated")
    two, one = (outputs(directory / f"detection-{which}")["summary"] for which in ("whole", "one"))
    assert two["samples"] == one["samples"] == 7 and (one["world_size"], one["steps"]) == (1, 0)
    assert 0.05 < two["test_map"] < 1 and two["test_map"] == pytest.approx(one["test_map"])
    line = outputs(directory / "detection-whole")["train"][0]
    parts = ["loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"]
    assert line["loss"] == pytest.approx(sum(line[name] for name in parts), rel=1e-5)


def update(directory, which, initial):
    weights = load_file(directory / which / "model.safetensors")
    return torch.cat([(weights[name].double() - initial[name]).flatten() for name in initial])


@pytest.mark.parametrize("what", ["detection-each"])
def test_losses_of_one_image_at_a_time_do_not_depend_on_the_processes(what, adapted, directory):
    succeeded(adapted, "detection-each", "whole", "one process")
    two, one = (outputs(directory / f"detection-each-{which}") for which in ("whole", "one"))
    losses = [[line["loss"] for line in run["train"]] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("what", ["contrast"])
def test_a_contrastive_loss_is_that_of_one_process_with_the_whole_batch(what, adapted, directory):
    succeeded(adapted, "contrast", "whole", "one process")
    space = {"torch": torch, "nn": nn, "Dataset": torch.utils.data.Dataset}
    exec(PAIRS, space)
    initial = space["build_model"](None).state_dict()
    two, one = (update(directory, f"contrast-{which}", initial) for which in ("whole", "one"))
    assert one.norm() > 1, "1e-6 of it would be less than a rounding error"
    assert (two - one).norm() / one.norm() < 1e-6
    two, one = (outputs(directory / f"contrast-{which}") for which in ("whole", "one"))
    assert two["summary"]["accumulation"] == one["summary"]["accumulation"] == 1
    losses = [[line["loss"] for line in run["train"]] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert two["summary"]["samples"] == one["summary"]["samples"] == 21
    # Of each pair against 21, not against those of a batch.
    assert two["summary"]["test_loss"] == pytest.approx(one["summary"]["test_loss"], rel=1e-6)
    assert math.log(8) < two["summary"]["test_loss"]


@pytest.mark.parametrize("what", ["rows"])
def test_the_average_of_the_weights_is_evaluated_and_saved(what, adapted, directory):
    succeeded(adapted, what, "whole")
    run = outputs(directory / "rows-whole")
    weights = load_file(run["weights"])
    saved = torch.load(directory / "rows-whole/step-00000024.pt", weights_only=True)["states"]
    averages = {k.removeprefix("module."): x for k, x in saved["ema"].items()}
    assert all(torch.equal(weights[name], averages[name]) for name in weights)
    assert not all(torch.equal(weights[name], saved["model"][name]) for name in weights)
    recipe = load("recipes/ddp_cifar.py")
    space = {**vars(recipe), "args": None}
    exec(CLASSES, space)
    model = space["build_model"](None).eval()
    model.load_state_dict(weights)
    dataset = space["load_data"](recipe.argparse.Namespace(batch_size=45), None)[1].dataset
    metrics = space["compute_loss"](model, torch.utils.data.default_collate([*dataset]))
    area = space["area_under_curve"](recipe.sample_rows(metrics)).item()
    assert run["summary"]["auroc"] == pytest.approx(area, abs=1e-3) and area != 0.5
    assert run["summary"]["test_loss"] == pytest.approx(metrics["loss"].mean().item(), rel=1e-5)
    assert "traceEvents" in json.loads((directory / "trace/profile_0.json").read_text())


@pytest.mark.parametrize("what", ["pipelines"])
def test_a_metric_of_the_whole_test_set_in_pipelines(what, adapted, directory):
    succeeded(adapted, what, "whole")
    run = outputs(directory / "pipelines-whole")
    recipe = load("recipes/ddp_cifar.py")
    space = {**vars(recipe), "args": None}
    exec(CLASSES, space)
    model = space["build_model"](None).eval()
    model.load_state_dict(load_file(run["weights"]))
    dataset = space["load_data"](recipe.argparse.Namespace(batch_size=45), None)[1].dataset
    metrics = space["compute_loss"](model, torch.utils.data.default_collate([*dataset]))
    area = space["area_under_curve"](recipe.sample_rows(metrics)).item()
    assert run["summary"]["pipelines"] == 2 and run["summary"]["samples"] == 45
    assert run["summary"]["auroc"] == pytest.approx(area, abs=1e-3) and area != 0.5


@pytest.mark.parametrize("what", ["optimizers"])
def test_a_group_of_parameters_begins_late_and_a_second_optimizer_early(what, adapted, directory):
    succeeded(adapted, what, "whole")
    space = {**vars(load("recipes/ddp_cifar.py"))}
    exec(CLASSES, space)
    initial = space["build_model"](None).state_dict()
    early = torch.load(directory / "optimizers-stopped/step-00000004.pt", weights_only=True)
    final = load_file(directory / "optimizers-whole/model.safetensors")
    changed = {
        name
        for name, value in early["states"]["model"].items()
        if not torch.equal(value, initial[name])
    }
    assert changed == {f"{i}.{kind}" for i in (0, 1, 3) for kind in ("weight", "bias")}
    assert not any(torch.equal(value, initial[name]) for name, value in final.items())


def test_weight_is_said_not_to_be_for_class_weights():
    for name in ("ddp", "amp", "data_parallel", "pipeline", "sharded"):
        text = inspect.getdoc(load(f"recipes/{name}_cifar.py").compute_loss)
        assert "For class weights multiply the loss instead." in " ".join(text.split())
