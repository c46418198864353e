"""Recipes copied into projects of another shape: only what stands above the line "machinery" is
replaced. What is promised for CIFAR-10 holds there, too. What a copier may get wrong is in
test_own_mistakes.py."""

import re
import shutil

import pytest
import torch
import torchvision
from conftest import (
    IN_FLOAT64,
    LITTLE_DATA,
    ROUNDING,
    SMALL,
    copy,
    forked,
    load,
    outputs,
    train_forked,
)
from safetensors.torch import load_file
from test_resume import untimed

pytestmark = pytest.mark.slow

IMAGES = '''
from torchvision import transforms


def load_data(args, accelerator):
    """A folder of JPEG files by class, cropped at random in two worker processes."""
    to_tensor = transforms.ToTensor()
    crop = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), to_tensor]
    resize = transforms.Compose([transforms.Resize((32, 32)), to_tensor])
    train_set = torchvision.datasets.ImageFolder("images", transforms.Compose(crop))
    test_set = torchvision.datasets.ImageFolder("images", resize)
    options = {"batch_size": args.batch_size, "num_workers": 2}
    shuffled = {"shuffle": True, "drop_last": True, "persistent_workers": True}
    loader = DataLoader(train_set, **shuffled, **options)
    return loader, DataLoader(torch.utils.data.Subset(test_set, range(0, 45)), **options)


def build_model(args):
    return torchvision.models.shufflenet_v2_x0_5(num_classes=3)
'''

TOKENS = """
class Sequences(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (3 + index % 6,), generator=generator)
        return tokens if torch.rand(()) < 0.5 else tokens.flip(0)


def collate(sequences):
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    targets = torch.where(tokens == 0, -100, tokens).roll(-1, 1)
    targets[:, -1] = -100
    return {"tokens": tokens, "targets": targets}


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": 2}
    train_loader = DataLoader(Sequences(), shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(Sequences(), **options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        encoded = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return {"logits": self.head(encoded)}


def build_model(args):
    return Model()


def compute_loss(model, batch):
    logits = model(batch["tokens"])["logits"].transpose(1, 2)
    targets = batch["targets"]
    counted = (targets != -100).sum(1)
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return {"loss": losses.sum(1) / counted, "weight": counted}
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
    train_loader = DataLoader(subset, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(dataset, args.batch_size)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        # Training reads it, and each rank changes it in its own way.
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean


def build_model(args):
    frozen = nn.Dropout(0.1).eval()  # not to be woken up by an evaluation
    fixed = nn.Linear(16, 16).requires_grad_(False)
    layers = nn.Linear(6, 16), fixed, nn.Dropout(0.1), nn.ReLU(), frozen
    return nn.Sequential(Centred(), *layers, nn.Linear(16, 2))


def compute_loss(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    first, second = F.mse_loss(outputs, targets, reduction="none").unbind(1)
    noise = 1 + 0.1 * torch.rand_like(first)
    return {"loss": (first + 0.5 * second) * noise, "first": first, "second": second}
"""

SGD = "torch.optim.SGD(model.parameters(), lr=peak, **options)"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
CASES = {  # (recipe, processes, its functions, its lines)
    "images": ("ddp_cifar", 2, IMAGES, []),
    "tokens": ("amp_cifar", 2, TOKENS, [(SGD, ADAMW)]),
    "regression": ("ddp_cifar", 2, REGRESSION, []),
}


def write_images(directory):
    for index in range(48):
        path = directory / f"images/class{index % 3}/{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = torch.randint(256, (3, 40, 48), generator=torch.Generator().manual_seed(index))
        torchvision.transforms.functional.to_pil_image(image.byte()).save(path)


@pytest.mark.parametrize("project", CASES)
def test_resumed_in_mid_epoch_a_project_ends_like_its_uninterrupted_run(project, tmp_path):
    """Twelve steps, which are two epochs; the ninth is where it resumes."""
    recipe, processes, functions, lines = CASES[project]
    if project == "images":
        write_images(tmp_path)
    script = copy(recipe, tmp_path / "mine.py", *lines, project=functions)
    flags = ["--cpu", "--epochs", 2, "--global-batch-size", 8, "--log-every", 1]
    flags += ["--batch-size", 8, "--checkpoint-every", 3]
    run = {"processes": processes, "script": script, "directory": tmp_path}
    whole, resumed = (
        {**run, "flags": [*flags, "--keep", 9, "--output-dir", name]} for name in ("whole", "again")
    )
    ((codes, output),) = forked([whole], tmp_path)
    assert set(codes) == {0}, output
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "whole/step-00000009.pt", tmp_path / "again")
    ((codes, output),) = forked([resumed], tmp_path)
    assert set(codes) == {0}, output
    whole, again = (outputs(tmp_path / name) for name in ("whole", "again"))
    assert again["summary"]["resumed_from"] == 9 and whole["summary"]["steps"] == 12
    weights, expected = load_file(again["weights"]), load_file(whole["weights"])
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "again")]
    assert untimed(texts[0]) == untimed(texts[1]), "also where evaluations draw random numbers"
    assert len(whole["evaluations"]) == 2
    assert whole["train"][0]["loss"] != whole["train"][-1]["loss"]


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


def pixels_run(directory, name, processes=1, workers=0, seed=0):
    project = PIXELS.replace("WORKERS", str(workers))
    script = copy("ddp_cifar", directory / f"{name}.py", project=project)
    flags = ["--cpu", "--epochs", 2, "--global-batch-size", 8, "--seed", seed]
    flags += ["--output-dir", f"run-{name}"]
    return {"processes": processes, "script": script, "flags": flags, "directory": directory}


def recorded(run, rank="*"):
    """What PIXELS recorded in a run, on one rank or on all."""
    paths = sorted(run["directory"].glob(f"{run['flags'][-1]}.{rank}"))
    return "".join(path.read_text() for path in paths)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pixels")
    runs = {
        "one process": pixels_run(directory, "one"),
        "two with two workers each": pixels_run(directory, "two", processes=2, workers=2),
        "another seed": pixels_run(directory, "another", workers=2, seed=1),
    }
    for codes, output in forked(list(runs.values()), directory):
        assert set(codes) == {0}, output
    return runs


def test_random_transforms_depend_on_seed_epoch_and_sample_alone(pixels):
    seen = {name: set(re.findall(r"sample (\d+) (.*)", recorded(pixels[name]))) for name in pixels}
    assert [len(samples) for samples in seen.values()] == [80] * 3, "every epoch draws anew"
    one, two, another = seen.values()
    assert one == two
    assert not one & another, "another seed, other numbers"


def test_dropouts_masks_differ_between_ranks(pixels):
    run = pixels["two with two workers each"]
    first, second = (re.findall("mask (.*)", recorded(run, rank)) for rank in (0, 1))
    assert len(first) == 10 and not any(a == b for a, b in zip(first, second, strict=True))


def test_the_second_epoch_is_not_the_first_one_of_the_next_seed(pixels):
    runs = pixels["one process"], pixels["another seed"]
    orders = [re.findall(r"sample (\d+)", recorded(run)) for run in runs]
    epochs = [tuple(order[start : start + 40]) for order in orders for start in (0, 40)]
    assert len(set(epochs)) == 4 and [len(epoch) for epoch in epochs] == [40] * 4


def test_persistent_workers_see_the_crops_of_each_epoch():
    recipe = load("recipes/ddp_cifar.py")
    data = recipe.ImageTensors(*recipe.synthetic_images(8, 1), "cpu", augmentation_seed=0)
    options = {"collate_fn": tuple, "num_workers": 1, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(data, 8, **options)
    batches = []
    for epoch in (1, 2):
        data.set_epoch(epoch)
        batches += [batch[0] for batch in loader]
        assert torch.equal(batches[-1], data.__getitems__(range(8))[0])
    assert not torch.equal(*batches)


BUILT = "    return model.to(memory_format=torch.channels_last)"
FREEZE = BUILT, f"    model[0].requires_grad_(False)\n{BUILT}"


@pytest.mark.copied("pipeline_cifar", FREEZE, processes=2)
def test_frozen_parameters_in_a_pipeline(outcome):
    assert outcome.codes == [0, 0] and "step 2/2" in outcome.output, outcome.output


LATER = """
plain_flags = add_flags


def add_flags(parser):
    plain_flags(parser)
    parser.add_argument("--later", type=int, default=0)
"""


def test_a_flag_that_was_added_later_does_not_hinder_resuming(tmp_path):
    runs = []
    for name, project in {"before": "", "after": LATER}.items():
        (tmp_path / name).mkdir()
        script = copy("ddp_cifar", tmp_path / name / "mine.py", LITTLE_DATA, project=project)
        flags = [*SMALL, "--max-steps", 2, "--output-dir", "run"]
        runs.append({"processes": 1, "script": script, "flags": flags, "directory": tmp_path})
    answers = forked(runs, tmp_path)
    assert [codes for codes, _ in answers] == [[0], [0]], answers
    assert "resuming from run/step-00000002.pt" in answers[1][1]


NAN = '"accuracy": logits.argmax(1) == labels}', '"iou": logits[:, 0] * math.nan}'


@pytest.mark.copied("ddp_cifar", NAN, processes=2)
def test_a_metric_that_is_nan_does_not_end_the_run_and_is_null_in_json(outcome):
    assert outcome.codes == [0, 0], outcome.output
    text = (outcome.directory / "run/metrics.jsonl").read_text()
    assert [text.count(f'"{name}": null') for name in ("iou", "test_iou")] == [2, 2]
    assert "NaN" not in text + (outcome.directory / "run/summary.json").read_text()


BATCHES = """
plain_step = train_step


def build_model(args):
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    model.register_buffer("OTHER", None)
    return model


def train_step(accelerator, model, *more):
    norm = accelerator.unwrap_model(model)[0]
    norm.num_batches_tracked.fill_(10 * accelerator.process_index)
    result = plain_step(accelerator, model, *more)
    print(f"rank {accelerator.process_index} has counted to {norm.num_batches_tracked}")
    return result
"""
TWO = {"processes": 2, "flags": ["--batch-size", 64]}  # both steps in one epoch
ONLY_BATCHNORM = pytest.mark.copied("ddp_cifar", project=BATCHES, **TWO)
MORE = BATCHES.replace('"OTHER", None', '"other", torch.zeros(1)')
OTHER_BUFFERS = pytest.mark.copied("ddp_cifar", project=MORE, **TWO)


@pytest.mark.parametrize(
    "count", [pytest.param(11, marks=ONLY_BATCHNORM), pytest.param(1, marks=OTHER_BUFFERS)]
)
def test_no_buffer_is_broadcast_in_a_forward_pass_if_all_are_batchnorms(outcome, count):
    """A broadcast costs time, and gives rank 1 the count of rank 0. Training may read others."""
    assert outcome.codes == [0, 0], outcome.output
    for rank, expected in ((0, 1), (1, count)):
        assert outcome.output.count(f"rank {rank} has counted to {expected}\n") == 2


def test_weights_are_trained_on_and_evaluated_on_another_number_of_processes(tmp_path):
    recipe = copy("ddp_cifar", tmp_path / "ddp.py", LITTLE_DATA, project=IN_FLOAT64)
    flags = [*SMALL, "--max-steps", 2]
    own = [*flags, "--weights", tmp_path / "0/model.safetensors"]
    runs = [
        (1, recipe, flags),
        (1, recipe, [*own, "--lr", 0.001]),
        (2, recipe, [*own, "--epochs", 0, "--batch-size", 50]),
    ]
    trained = train_forked(tmp_path, *runs, together=1)
    first, more, evaluated = (run.summary for run in trained)
    assert more["test_loss"] != first["test_loss"]
    assert more["test_loss"] == pytest.approx(first["test_loss"], abs=0.05)
    assert evaluated["test_loss"] == pytest.approx(first["test_loss"], abs=ROUNDING)
    assert evaluated["test_accuracy"] == first["test_accuracy"] and evaluated["steps"] == 0
    assert not list(tmp_path.glob("2/*.pt"))
