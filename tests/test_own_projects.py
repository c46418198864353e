"""Recipes copied into projects of another shape: only what stands above the line "machinery" is replaced.

What the README promises for CIFAR-10 holds there, too, or is an error at the start."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import ROOT, forked, load, outputs
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

IMAGES = '''
from torchvision import transforms


def load_data(args, accelerator):
    """A folder of JPEG files by class, cropped at random in two worker processes."""
    crop = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    train_set = torchvision.datasets.ImageFolder("images", transforms.Compose(crop))
    test_set = torchvision.datasets.ImageFolder("images", transforms.Compose([transforms.Resize((32, 32)), crop[-1]]))
    options = {"batch_size": args.batch_size, "num_workers": 2}
    loader = DataLoader(train_set, shuffle=True, drop_last=True, persistent_workers=True, **options)
    return loader, DataLoader(torch.utils.data.Subset(test_set, range(0, 45)), **options)


def build_model(args):
    return torchvision.models.resnet18(num_classes=3)
'''

TOKENS = """
class Sequences(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = torch.randint(1, 20, (3 + index % 6,), generator=torch.Generator().manual_seed(index))
        return tokens if torch.rand(()) < 0.5 else tokens.flip(0)


def collate(sequences):
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    targets = torch.where(tokens == 0, -100, tokens).roll(-1, 1)
    targets[:, -1] = -100
    return {"tokens": tokens, "targets": targets}


def load_data(args, accelerator):
    loaders = (
        DataLoader(Sequences(), args.batch_size, shuffle=train, drop_last=train, collate_fn=collate, num_workers=2)
        for train in (True, False)
    )
    return tuple(loaders)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return {"logits": self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))}


def build_model(args):
    return Model()


def compute_loss(model, batch):
    logits, targets = model(batch["tokens"])["logits"].transpose(1, 2), batch["targets"]
    counted = (targets != -100).sum(1)
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none").sum(1) / counted
    return {"loss": losses, "weight": counted}


def lr_lambda(step, total_steps):
    return min((step + 1) / 3, 0.5 * (1 + math.cos(math.pi * step / total_steps)))
"""

REGRESSION = """
class Noisy(torch.utils.data.TensorDataset):
    def set_epoch(self, epoch):
        self.noise = torch.randn(len(self), generator=torch.Generator().manual_seed(epoch))

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + self.noise[index], targets


def load_data(args, accelerator):
    inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    dataset = Noisy(inputs, torch.stack((inputs.sum(1), inputs.prod(1)), dim=1))
    subset = torch.utils.data.Subset(dataset, range(48))
    return DataLoader(subset, args.batch_size, shuffle=True, drop_last=True), DataLoader(dataset, args.batch_size)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))  # which training reads, and each rank changes in its own way

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean


def build_model(args):
    frozen = nn.Dropout(0.1).eval()  # not to be woken up by an evaluation
    layers = nn.Linear(6, 16), nn.Linear(16, 16).requires_grad_(False), nn.Dropout(0.1), nn.ReLU(), frozen
    return nn.Sequential(Centred(), *layers, nn.Linear(16, 2))


def compute_loss(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    first, second = F.mse_loss(outputs, targets, reduction="none").unbind(1)
    return {"loss": (first + 0.5 * second) * (1 + 0.1 * torch.rand_like(first)), "first": first, "second": second}
"""

PROJECTS = {"images": IMAGES, "tokens": TOKENS, "regression": REGRESSION}
SGD = "torch.optim.SGD(model.parameters(), lr=peak_lr, **options)"
SECOND = [  # for half of the parameters, another optimizer
    (SGD, SGD.replace("model.parameters()", "[*model.parameters()][::2]")),
    (
        "    run = Run(",
        """    second = state["second"] = torch.optim.AdamW([*model.parameters()][1::2], lr=1e-3)
    optimizer.optimizer.register_step_post_hook(lambda *_: second.step() or second.zero_grad())
    run = Run(""",
    ),
]
LAYOUTS = ("amp_cifar", 2), ("ddp_cifar", 2), ("ddp_cifar", 1)
CASES = [
    *[(project, *layout) for project in PROJECTS for layout in LAYOUTS],  # the slowest first
    ("regression", "pipeline_cifar", 4),
    ("regression", "data_parallel_cifar", 1),
    ("regression", "sharded_cifar", 2),
]


def copy(recipe, project, path, *replacements):
    """Write a copy of the recipe with a project's functions behind its own."""
    source, end = (ROOT / f"recipes/{recipe}.py").read_text(), '\nif __name__ == "__main__":'
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    assert source.count(end) == 1
    path.write_text(source.replace(end, f"{project}\n{end}"))
    return path


def described(project, recipe, processes, directory):
    """The uninterrupted run, and one that resumes in the middle of its second epoch."""
    name = f"{project}-{recipe}-{processes}"
    tokens, source, begin = project == "tokens", PROJECTS[project], "super().__init__()\n"
    if recipe == "sharded_cifar":  # unlike DDP, it trains a model with a parameter that no gradient reaches
        unused = "self.unused = nn.Parameter(torch.zeros(4))", 'self.register_buffer("turn", torch.tensor([1j]))'
        source = source.replace(begin, f"{begin}        {'; '.join(unused)}\n")
    script = copy(
        recipe,
        source,
        directory / f"{name}.py",
        *([(SGD, "torch.optim.AdamW(model.parameters(), lr=numpy.float64(1e-3))")] if tokens else []),
        *(SECOND if (project, recipe) in (("regression", "ddp_cifar"), ("regression", "amp_cifar")) else []),
    )
    batch = 4 if recipe == "pipeline_cifar" else 8 // processes
    flags = ["--cpu", "--epochs", 2, "--batch-size", batch, "--log-every", 1]
    flags += ["--microbatches", 2] if recipe == "pipeline_cifar" else []
    whole = [*flags, "--checkpoint-every", 3, "--keep", 9, "--output-dir", f"{name}-whole"]
    checkpoint = f"{name}-whole/step-00000009{'' if recipe == 'sharded_cifar' else '.pt'}"
    resumed = [*flags, "--output-dir", f"{name}-resumed", "--resume", checkpoint]
    common = {"processes": processes, "script": str(script), "directory": directory}
    return [{**common, "flags": whole}, {**common, "flags": resumed}]


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    directory = tmp_path_factory.mktemp("projects")
    for index in range(48):
        path = directory / f"images/class{index % 3}/{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = torch.randint(256, (3, 40, 48), generator=torch.Generator().manual_seed(index))
        torchvision.io.write_jpeg(image.byte(), str(path))
    wholes, resumed = zip(*(described(*case, directory) for case in CASES), strict=True)
    answers = [forked(runs, directory, together=2) for runs in (wholes, resumed)]
    return directory, dict(zip(CASES, zip(*answers, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_resumed_in_mid_epoch_it_is_the_uninterrupted_run(projects, case):
    directory, answers = projects
    for codes, output in answers[case]:
        assert set(codes) == {0}, output
    name = "-".join(map(str, case))
    whole, resumed = (outputs(directory / f"{name}-{which}") for which in ("whole", "resumed"))
    assert resumed["summary"]["resumed_from"] == 9 and whole["summary"]["steps"] == 12
    weights, expected = load_file(resumed["weights"]), load_file(whole["weights"])
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    metrics = {key for key in whole["train"][0] if key not in ("time", "samples_per_second")}
    for mine, theirs in zip(resumed["train"], whole["train"], strict=True):
        assert {key: mine[key] for key in metrics} == {key: theirs[key] for key in metrics}
    tests = [[line["test_loss"] for line in run["evaluations"]] for run in (resumed, whole)]
    assert tests[0] == tests[1] and len(tests[0]) == 2, "also those that draw random numbers"
    assert whole["summary"]["samples"] == (45 if case[0] == "images" else 48)
    assert whole["train"][0]["loss"] != whole["train"][-1]["loss"]


def test_a_mean_over_tokens_counts_each_token_once():
    """Two batches of padded sequences, against one cross entropy over all of their tokens."""
    recipe, space = load("recipes/ddp_cifar.py"), {"F": torch.nn.functional, "nn": torch.nn}
    space |= {"Dataset": torch.utils.data.Dataset, "torch": torch, "math": math}
    exec(TOKENS, space)
    logits, targets = torch.randn(5, 7, 20), torch.randint(20, (5, 7))
    for row, length in enumerate((7, 2, 5, 1, 3)):
        targets[row, length:] = -100
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100)
    sums = 0
    for part in (slice(0, 2), slice(2, 5)):
        batch = {"tokens": None, "targets": targets[part]}
        metrics = space["compute_loss"](lambda tokens, part=part: {"logits": logits[part]}, batch)
        within = torch.nn.functional.cross_entropy(logits[part].transpose(1, 2), targets[part], ignore_index=-100)
        torch.testing.assert_close(recipe.mean_loss(metrics), within)
        sums = sums + recipe.sample_rows(metrics).sum(0)
    assert recipe.means(metrics, sums.tolist()) == {"loss": pytest.approx(expected.item())}
    assert sums[-1] == 5 and sums[-2] == 18


PIXELS = '''
class Noisy(Dataset):
    """Every generator that a transform may draw from; the label is the sample's index."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), numpy.random.rand(), random.random()]), index


def load_data(args, accelerator):
    options = {"num_workers": WORKERS, "persistent_workers": WORKERS > 0}
    loader = DataLoader(Noisy(), args.batch_size, shuffle=True, drop_last=True, **options)
    return loader, DataLoader(Noisy(), args.batch_size)


def build_model(args):
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 40))


forward = nn.Dropout.forward


def record(*what):
    with open(f"{sys.argv[-1]}.{os.environ.get('RANK', 0)}", "a") as file:
        print(*what, file=file)


def dropped(self, x):
    y = forward(self, x)
    if self.training:
        record("mask", (y == 0).int().tolist())
    return y


nn.Dropout.forward = dropped
original = compute_loss


def compute_loss(model, batch):
    if model.training:
        for values, index in zip(batch[0].tolist(), batch[1].tolist()):
            record("sample", index, values)
    return original(model, batch)
'''


def test_random_transforms_depend_on_seed_epoch_and_sample_alone(tmp_path):
    """With and without workers, on 1, 2 and 4 processes; and dropout's masks differ between ranks."""
    runs, layouts = [], [(1, 0, 0), (2, 2, 0), (4, 0, 0), (1, 2, 1)]
    for processes, workers, seed in layouts:
        path = tmp_path / f"{processes}-{workers}-{seed}.py"
        copy("ddp_cifar", PIXELS.replace("WORKERS", str(workers)), path)
        flags = [
            "--cpu",
            "--epochs",
            2,
            "--batch-size",
            8 // processes,
            "--seed",
            seed,
            "--output-dir",
            f"run-{path.stem}",
        ]
        runs.append({"processes": processes, "script": str(path), "flags": list(map(str, flags))})
    answers = forked([{**one, "directory": tmp_path} for one in runs], tmp_path)
    assert all(set(codes) == {0} for codes, _ in answers), answers
    seen = []
    for one in runs:
        samples = set(re.findall(r"sample (\d+) (.*)", recorded(tmp_path, one)))
        assert len(samples) == 80, "every epoch draws anew"
        seen.append(samples)
    assert seen[0] == seen[1] == seen[2]
    assert not seen[0] & seen[3], "another seed, other numbers"
    first, second = (re.findall("mask (.*)", recorded(tmp_path, runs[1], rank)) for rank in (0, 1))
    assert len(first) == 10 and not any(one == other for one, other in zip(first, second, strict=True))


def recorded(directory, one, rank=None):
    """What PIXELS recorded in a run, on one rank or on all."""
    name = f"{one['flags'][-1]}.{'*' if rank is None else rank}"
    return "".join(path.read_text() for path in sorted(directory.glob(name)))


LOADERS = {
    "SubsetRandomSampler": "train, DataLoader(data, 8, sampler=d.SubsetRandomSampler(range(20)))",
    "WeightedRandomSampler": "DataLoader(data, 8, sampler=d.WeightedRandomSampler([1.0] * 24, 9)), DataLoader(data, 8)",
    "DistributedSampler": "DataLoader(data, 8, sampler=d.DistributedSampler(data, 2, 0)), DataLoader(data, 8)",
    "Batches": "DataLoader(data, batch_sampler=Batches()), DataLoader(data, 8)",
    "RandomSubset": "DataLoader(data, batch_sampler=d.BatchSampler(RandomSubset(range(9)), 8, True)), None",
    "Stream": "DataLoader(Stream(), 8), DataLoader(data, 8)",
}
LOADER = """
from torch.utils import data as d


class Batches:
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


class RandomSubset(d.SubsetRandomSampler):
    pass


class Stream(d.IterableDataset):
    def __iter__(self):
        return iter([])


def load_data(args, accelerator):
    data = d.TensorDataset(torch.zeros(24, 3, 8, 8), torch.zeros(24).long())
    train = DataLoader(data, 8, drop_last=True)
    return LOADERS
"""
OWN_FORWARD = """
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 10)

    def forward(self, x):
        return self.second((x + self.first(x)).mean((2, 3)))


def build_model(args):
    return Residual()
"""
TIED = """
def build_model(args):
    first, second, third = nn.Flatten(), nn.Linear(3072, 3072), nn.Linear(3072, 3072)
    third.weight = second.weight
    return nn.Sequential(first, second, nn.ReLU(), third, nn.Linear(3072, 10))
"""
TIED_ROOT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(nn.Linear(32, 10), nn.ReLU()), nn.Linear(32, 10)
        self.head.weight = self.blocks[0].weight


def build_model(args):
    return Model()
"""
SUBCLASS = """
class Residual(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


def build_model(args):
    return Residual(nn.Flatten(), nn.Linear(3072, 10))
"""
IN_PLACE = """
class Counting(nn.Flatten):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += self.training
        assert self.calls <= 2 * 8, "two steps of eight microbatches: what comes before the first has to leave no trace"
        return super().forward(x)


def build_model(args):
    return nn.Sequential(Counting(), nn.Linear(3072, 10), nn.ReLU(inplace=True), nn.Linear(10, 10))
"""
NO_PARAMETERS = """
def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.ReLU(), nn.Dropout(0.1))
"""
PIXELWISE = """
per_sample = compute_loss


def compute_loss(model, batch):
    return {name: value.repeat(2) for name, value in per_sample(model, batch).items()}
"""
SMALL = ["--cpu", "--model", "simple_cnn", "--data", "synthetic", "--max-steps", "2", "--log-every", "1"]
LAMBDA = "LambdaLR(optimizer, lambda step: lr_lambda(step, max(1, total_steps)))"
CLIP, STEP = 'help": "clip the gradient to this norm"},\n', "            run.finish_step(step, learning_rate)"
TEST, LAYOUT = "        test = evaluate(", "    return model.to(memory_format"
MERGING = "    model[0].train = lambda mode=True: modes.append(mode) or nn.Module.train(model[0], mode)\n"
LOSS, EVALUATED = 'F.cross_entropy(logits, labels, reduction="none")', '        run.write("evaluation", test)'
ROWS, TRAINED = "sample_rows(metrics))", "DataLoader(train_set, shuffle=True, drop_last=True, **options)"
TESTED, EMPTY = "DataLoader(test_set, **options)", "DataLoader(torch.utils.data.Subset(test_set, []), **options)"
FEWER = "synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)"
FEWER = FEWER, FEWER.replace("5120", "256").replace("1024", "64")
PART = "DataLoader(torch.utils.data.Subset(train_set, range(256)), drop_last=True, **options)"
REST = "DataLoader(torch.utils.data.Subset(train_set, range(100)), **options)"
DROP_LAST = "load_data: training needs drop_last=True, the test drop_last=False and some samples"
LOGITS = "    logits = model(images)\n"
FP32 = LOGITS, f"{LOGITS}    assert logits.dtype == torch.float32\n"
NAMESPACE = "from pathlib import Path\n", "from pathlib import Path\nfrom types import SimpleNamespace\n"
FROZEN = [(LAYOUT, f"    model[0].requires_grad_(False)\n{LAYOUT}")]
SIDES = '"collate_fn": tuple', '"collate_fn": lambda batch: {"x": 1, "y": 2}'
THREE = '"collate_fn": tuple', '"collate_fn": lambda batch: (*batch, batch[1])'
OTHER = TESTED, 'DataLoader(test_set, **options | {"batch_size": 16})'
PAIRS = {  # name: (recipe, project, what is replaced, the error), on two processes
    "own_pipeline": ("pipeline_cifar", OWN_FORWARD, [], "cannot cut Residual"),
    "no_parameters": ("pipeline_cifar", NO_PARAMETERS, [], "the two stages share a parameter, or one has none"),
    "tied_stages": ("pipeline_cifar", TIED, [], "the two stages share a parameter"),
    "own_sequential": ("pipeline_cifar", SUBCLASS, [], "cannot cut Residual"),
    "tied_root": ("sharded_cifar", TIED_ROOT, [], "shard_units: a unit shares a parameter"),
    "tied_units": ("sharded_cifar", TIED, [], "shard_units: a unit shares a parameter"),
    "another_shape": ("pipeline_cifar", "", [OTHER], "[(128, 3, 32, 32), (128,)], and not [(16, 3, 32, 32), (16,)]"),
    "dictionaries": ("pipeline_cifar", "", [SIDES], "a batch has to be two tensors"),
    "three_tensors": ("pipeline_cifar", "", [THREE], "a batch has to be two tensors"),
    "pixelwise": ("ddp_cifar", PIXELWISE, [], "512 values for 256 samples: compute_loss has"),
}
OUTCOMES = {  # name: (what is replaced, flags, exit code, what is said); the last one resumes the first
    "a run": ([], [], 0, "resumed_from: 0"),
    "a flag that is 0": (
        [
            (CLIP, f'{CLIP}        workers={{"type": int, "default": 0, "help": "x"}},\n        **MORE,\n'),
            (EVALUATED, f'        test["confusion"] = [[1, 2], [3, 4]]\n{EVALUATED}'),
            (
                'RECIPE = "ddp_cifar"',
                'RECIPE, MORE = "ddp_cifar", {"where": {"type": Path, "default": Path("somewhere"), "help": "x"}}\n'
                'MORE["dropout"] = {"type": float, "default": 0.1, "help": "x"}\n'
                'MORE["ignore"] = {"type": int, "default": -100, "help": "x"}',
            ),
        ],
        ["--workers", "0", "--dropout", "0"],
        0,
        "workers: 0\n  where: somewhere\n  dropout: 0.0\n  ignore: -100\n",
    ),
    "a metric that is not finite": ([(LOSS, f'{LOSS}, "iou": logits[:, 0] * math.nan')], [], 0, "iou nan"),
    "a metric that is no tensor": ([(LOSS, f'{LOSS}, "x": 0.5')], [], 2, 'compute_loss: "x" is float'),
    "a schedule per epoch": (
        [
            ("            scheduler.step()\n", "            pass\n"),
            (TEST, f"        scheduler.step()\n{TEST}"),
            (LAMBDA, "CosineAnnealingLR(optimizer, 30)"),
        ],
        [],
        0,
        "step 2/2",
    ),
    "OneCycle that is not finite": (
        [(LAMBDA, "OneCycleLR(optimizer, 1e30, 9)")],
        ["--max-steps", "6"],
        1,
        "loss or weights are not finite since a step between",
    ),
    "evaluated in mid-epoch": (
        [
            ('RECIPE = "ddp_cifar"', 'RECIPE, modes = "ddp_cifar", []'),
            (LAYOUT, f"{MERGING}{LAYOUT}"),
            (STEP, f"            evaluate(accelerator, model, test_loader)\n{STEP}"),
            (STEP, f"            assert model.training and modes[-2:] == [False, True]\n{STEP}"),
        ],
        [],
        0,
        "step 2/2",
    ),
    "a model in eval mode": (
        [(LAYOUT, f"    model.eval()\n{LAYOUT}")],
        [],
        2,
        "build_model: the model is in eval mode",
    ),
    "an extra state": (
        [(LAYOUT, f"    nn.Sequential.get_extra_state = lambda self: 1\n{LAYOUT}")],
        [],
        2,
        "build_model: get_extra_state has to return a tensor",
    ),
    "other metrics in each batch": (
        [(LOSS, f'{LOSS}, f"{{time.perf_counter()}}": logits[:, 0]')],
        [],
        2,
        "compute_loss: return the same keys for every batch",
    ),
    "a state that cannot be read again": (
        [
            ("    run = Run(", '    state["x"] = SimpleNamespace(state_dict=lambda: {"x": Path("x")})\n    run = Run('),
            NAMESPACE,
        ],
        [],
        1,
        "error: cannot write step-00000002.pt (UnpicklingError(",
    ),
    "frozen parameters": (FROZEN, [], 0, "step 2/2"),
    "not a row per sample": ([(LOSS, f"{LOSS}[:, None]")], [], 2, 'compute_loss: "loss" is (128, 1)'),
    "a mean": ([(LOSS, f"{LOSS}.mean()")], [], 2, 'compute_loss: "loss" is ()'),
    "a test set in part": ([(ROWS, f"{ROWS}[1:]")], [], 2, "evaluate: 63 of 64 samples counted"),
    "a test set without the rest": ([(TESTED, "DataLoader(test_set, drop_last=True, **options)")], [], 2, DROP_LAST),
    "an empty test set": ([(TESTED, EMPTY)], [], 2, DROP_LAST),
    "training with the rest": ([("drop_last=True, **options", "**options")], [], 2, DROP_LAST),
    "subsets of it": ([(TRAINED, PART), (TESTED, REST)], [], 0, "samples 100\n"),
    "a flag added later": (
        [(CLIP, f'{CLIP}        later={{"type": int, "default": 5, "help": "x"}},\n')],
        ["--resume", "auto", "--output-dir", "a run"],
        0,
        "resumed_from: 2",
    ),
}


def test_other_loaders_are_errors_that_name_them_and_small_changes_work(tmp_path):
    runs, expected = [], []
    for index, (name, (replacements, flags, code, said)) in enumerate(OUTCOMES.items()):
        script = copy("ddp_cifar", "", tmp_path / f"{index}.py", FEWER, *replacements)
        runs.append({"script": str(script), "flags": [*SMALL, "--output-dir", name, *flags]})
        expected.append((code, said))
    for name, loaders in LOADERS.items():
        script = copy("ddp_cifar", LOADER.replace("LOADERS", loaders), tmp_path / f"{name}.py")
        runs.append({"script": str(script), "flags": [*SMALL, "--output-dir", name]})
        expected.append((2, f"load_data: cannot resume {'Stream' if name == 'Stream' else ''}"))
    pipelines = ("frozen_pipeline", "", FROZEN, []), ("in_place", IN_PLACE, [FP32], ["--precision", "bf16"])
    for name, project, replacements, flags in pipelines:
        script = copy("pipeline_cifar", project, tmp_path / f"{name}.py", FEWER, *replacements)
        runs.append({"script": str(script), "flags": [*SMALL, *flags, "--output-dir", name], "processes": 2})
        expected.append((0, "step 2/2"))
    for name, (recipe, project, replacements, said) in PAIRS.items():
        script = copy(recipe, project, tmp_path / f"{name}.py", FEWER, *replacements)
        runs.append({"script": str(script), "flags": [*SMALL, "--output-dir", name], "processes": 2})
        expected.append((2, said))
    runs = [{"processes": 1, "grace": 0.5, "terminate": True, **one, "directory": tmp_path} for one in runs]
    answers = forked(runs, tmp_path, together=2)
    wrong = []
    for one, (codes, output), (code, said) in zip(runs, answers, expected, strict=True):
        name = Path(one["script"]).stem
        # Where one of two has said it, the other waits to be ended.
        right = codes[0] == code and set(codes) <= {code, -15} and said in output
        wrong += [] if right and (name not in LOADERS or name in output) else [(name, said, codes, output)]
    assert not wrong, "\n".join(map(str, wrong))


def test_persistent_workers_make_the_batches_that_are_made_without(tmp_path):
    workers = '"collate_fn": tuple}', '"collate_fn": tuple, "num_workers": 1, "persistent_workers": True}'
    runs = []
    for name, replacements in (("without", [FEWER]), ("with", [FEWER, workers])):
        script = copy("ddp_cifar", "", tmp_path / f"{name}.py", *replacements)
        flags = [*SMALL, "--max-steps", "6", "--epochs", "3", "--output-dir", name]
        runs.append({"processes": 1, "script": str(script), "flags": flags, "directory": tmp_path})
    for codes, output in forked(runs, tmp_path, together=2):
        assert codes == [0], output
    losses = [[line["loss"] for line in outputs(tmp_path / name)["train"]] for name in ("without", "with")]
    assert losses[0] == losses[1] and len(set(losses[0])) == 6


BUFFER = """
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(3, 10)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x):
        if self.training:
            Path(f"scale.{os.environ['RANK']}").write_text(str(self.scale.item()))
        return super().forward(x.mean((2, 3))) * self.scale


def build_model(args):
    torch.manual_seed(int(os.environ["RANK"]))
    return Scaled()
"""


def test_all_ranks_begin_with_the_buffers_of_the_first(tmp_path):
    script = copy("ddp_cifar", BUFFER, tmp_path / "buffer.py")
    run = {"processes": 2, "script": str(script), "flags": [*SMALL, "--output-dir", "run"], "directory": tmp_path}
    ((codes, output),) = forked([run], tmp_path)
    assert codes == [0, 0], output
    assert (tmp_path / "scale.0").read_text() == (tmp_path / "scale.1").read_text()
    assert not re.search("warn", output, re.IGNORECASE), output


def test_the_second_epoch_is_not_the_first_one_of_the_next_seed(tmp_path):
    project = PIXELS.replace("WORKERS", "0")
    runs = []
    for seed in (0, 1):
        script = copy("ddp_cifar", project, tmp_path / f"{seed}.py")
        flags = ["--cpu", "--epochs", "2", "--batch-size", "8", "--seed", str(seed), "--output-dir", f"run{seed}"]
        runs.append({"processes": 1, "script": str(script), "flags": flags, "directory": tmp_path})
    forked(runs, tmp_path)
    orders = [re.findall(r"sample (\d+)", recorded(tmp_path, one)) for one in runs]
    epochs = [tuple(order[start : start + 40]) for order in orders for start in (0, 40)]
    assert len(set(epochs)) == 4 and len(epochs[0]) == 40


TIED = ["--epochs", "0", "--weights", "tied/model.safetensors"]  # in which a tied name is missing


def test_weights_to_fine_tune_to_train_on_and_to_evaluate(tmp_path):
    """Ten more steps from the weights of a run, the same evaluation on another number of processes and batch size, and
    a model with another head."""
    recipe, head, tied = str(ROOT / "recipes/ddp_cifar.py"), tmp_path / "head.py", tmp_path / "tied.py"
    copy("ddp_cifar", TOKENS, tied)
    copy("ddp_cifar", "", head, ("nn.Flatten(), nn.Linear(128, 10)", "nn.Flatten(), nn.Linear(128, 12)"))
    weights = ["--weights", "first/model.safetensors"]
    runs = [
        (1, recipe, ["--output-dir", "first"]),
        (1, recipe, [*weights, "--output-dir", "more", "--lr", "0.001"]),
        (2, recipe, [*weights, "--output-dir", "evaluated", "--epochs", "0", "--batch-size", "50", "--lr", "1"]),
        (1, str(head), [*weights, "--output-dir", "head"]),
        (1, str(tied), ["--batch-size", "8", "--output-dir", "tied"]),
        (1, str(tied), ["--batch-size", "8", "--output-dir", "again", *TIED]),
    ]
    answers = forked(
        [
            {"processes": n, "script": script, "flags": [*SMALL, *flags], "directory": tmp_path}
            for n, script, flags in runs
        ],
        tmp_path,
    )
    for codes, output in answers:
        assert set(codes) == {0}, output
    names = "first", "more", "evaluated", "tied", "again"
    first, more, evaluated, tied, again = (json.loads((tmp_path / name / "summary.json").read_text()) for name in names)
    assert again["test_loss"] == tied["test_loss"] and "names that do not fit: nothing" in answers[5][1]
    assert evaluated["test_loss"] == pytest.approx(first["test_loss"], abs=1e-5) and evaluated["steps"] == 0
    assert evaluated["test_accuracy"] == first["test_accuracy"]
    assert more["test_loss"] != first["test_loss"] and more["test_loss"] == pytest.approx(first["test_loss"], abs=0.05)
    assert "names that do not fit: 2.1.bias, 2.1.weight" in answers[3][1]
    assert not list((tmp_path / "evaluated").glob("step-*.pt"))
