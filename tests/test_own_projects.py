"""Recipes copied into projects of another shape: only what stands above the line "machinery" is
replaced. What the README promises for CIFAR-10 holds there, too. What a copier may get wrong is in
test_own_mistakes.py."""

import json
import math
import re

import pytest
import torch
import torchvision
from conftest import LITTLE_DATA, ROOT, SMALL, copy, forked, load, outputs
from safetensors.torch import load_file

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
    return torchvision.models.resnet18(num_classes=3)
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

PROJECTS = {"images": IMAGES, "tokens": TOKENS, "regression": REGRESSION}
SGD = "torch.optim.SGD(model.parameters(), lr=peak, **options)"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=numpy.float64(1e-3))"
DESCRIBED = "    config = describe(args"
SECOND = """    second = torch.optim.AdamW([*model.parameters()][1::2], lr=1e-3)
    states["second"] = second
    optimizer.optimizer.register_step_post_hook(lambda *_: second.step() or second.zero_grad())
"""
TWO_OPTIMIZERS = [  # one for each half of the parameters
    (SGD, SGD.replace("model.parameters()", "[*model.parameters()][::2]")),
    (DESCRIBED, SECOND + DESCRIBED),
]
LAYOUTS = ("amp_cifar", 2), ("ddp_cifar", 2), ("ddp_cifar", 1)
CASES = [
    *[(project, *layout) for project in PROJECTS for layout in LAYOUTS],  # the slowest first
    ("regression", "pipeline_cifar", 4),
    ("regression", "data_parallel_cifar", 1),
    ("regression", "sharded_cifar", 2),
]


def described(project, recipe, processes, directory):
    """The uninterrupted run, and one that resumes in the middle of its second epoch."""
    name = f"{project}-{recipe}-{processes}"
    source = PROJECTS[project]
    if recipe == "sharded_cifar":  # unlike DDP, it trains a parameter that no gradient reaches
        begin = "super().__init__()\n"
        unused = "        self.unused = nn.Parameter(torch.zeros(4))\n"
        unused += '        self.register_buffer("turn", torch.tensor([1j]))\n'
        source = source.replace(begin, begin + unused)
    replacements = [(SGD, ADAMW)] if project == "tokens" else []
    if project == "regression" and recipe in ("ddp_cifar", "amp_cifar"):
        replacements = TWO_OPTIMIZERS
    script = copy(recipe, directory / f"{name}.py", *replacements, project=source)
    batch = 4 if recipe == "pipeline_cifar" else 8
    flags = ["--cpu", "--epochs", 2, "--global-batch-size", 8, "--batch-size", batch]
    flags += ["--log-every", 1]
    flags += ["--microbatches", 2] if recipe == "pipeline_cifar" else []
    whole = [*flags, "--checkpoint-every", 3, "--keep", 9, "--output-dir", f"{name}-whole"]
    checkpoint = f"{name}-whole/step-00000009{'' if recipe == 'sharded_cifar' else '.pt'}"
    resumed = [*flags, "--output-dir", f"{name}-resumed", "--resume", checkpoint]
    common = {"processes": processes, "script": str(script), "directory": directory}
    return [{**common, "flags": whole}, {**common, "flags": resumed}]


def write_images(directory):
    for index in range(48):
        path = directory / f"images/class{index % 3}/{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = torch.randint(256, (3, 40, 48), generator=torch.Generator().manual_seed(index))
        torchvision.transforms.functional.to_pil_image(image.byte()).save(path)


@pytest.fixture(scope="module")
def projects(tmp_path_factory, request):
    """{case: [exit codes and output of both runs]}, of the cases that were selected."""
    directory = tmp_path_factory.mktemp("projects")
    write_images(directory)
    items = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params.get("case") for item in items if hasattr(item, "callspec")}
    cases = [case for case in CASES if case in selected]
    wholes, resumed = zip(*(described(*case, directory) for case in cases), strict=True)
    answers = [forked(runs, directory, together=2) for runs in (wholes, resumed)]
    return directory, dict(zip(cases, zip(*answers, strict=True), strict=True))


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
    measured = {"time", "samples_per_second", "data_wait", "slowest_data_wait"}
    measured |= {"slowest_data_rank", "peak_memory_gib"}
    metrics = {key for key in whole["train"][0] if key not in measured}
    for mine, theirs in zip(resumed["train"], whole["train"], strict=True):
        assert {key: mine[key] for key in metrics} == {key: theirs[key] for key in metrics}
    tests = [[line["test_loss"] for line in run["evaluations"]] for run in (resumed, whole)]
    assert tests[0] == tests[1] and len(tests[0]) == 2, "also those that draw random numbers"
    assert whole["summary"]["samples"] == (45 if case[0] == "images" else 48)
    assert whole["train"][0]["loss"] != whole["train"][-1]["loss"]


def test_a_mean_over_tokens_counts_each_token_once():
    """Two batches of padded sequences, against one cross entropy over all of their tokens: the
    losses of samples, and the weights that they are reported by."""
    recipe = load("recipes/ddp_cifar.py")
    space = {"F": torch.nn.functional, "nn": torch.nn, "torch": torch, "math": math}
    space["Dataset"] = torch.utils.data.Dataset
    exec(TOKENS, space)
    logits, targets = torch.randn(5, 7, 20), torch.randint(20, (5, 7))
    for row, length in enumerate((7, 2, 5, 1, 3)):
        targets[row, length:] = -100
    cross_entropy = torch.nn.functional.cross_entropy
    expected = cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100)
    sums = 0
    minimised = 0
    for part in (slice(0, 2), slice(2, 5)):
        batch = {"tokens": None, "targets": targets[part]}
        metrics = space["compute_loss"](lambda tokens, part=part: {"logits": logits[part]}, batch)
        minimised += recipe.mean_loss(metrics) * len(metrics["loss"])
        sums = sums + recipe.sample_rows(metrics).sum(0)
    assert recipe.means(metrics, sums) == ({"loss": pytest.approx(expected.item())}, 5)
    assert sums[-1] == 5 and sums[-2] == 18
    torch.testing.assert_close(minimised / 18, expected)


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
        "four": pixels_run(directory, "four", processes=4),
        "another seed": pixels_run(directory, "another", workers=2, seed=1),
    }
    for codes, output in forked(list(runs.values()), directory):
        assert set(codes) == {0}, output
    return runs


def test_random_transforms_depend_on_seed_epoch_and_sample_alone(pixels):
    seen = {name: set(re.findall(r"sample (\d+) (.*)", recorded(pixels[name]))) for name in pixels}
    assert [len(samples) for samples in seen.values()] == [80] * 4, "every epoch draws anew"
    one, two, four, another = seen.values()
    assert one == two == four
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


def test_persistent_workers_make_the_batches_that_are_made_without(tmp_path):
    options = '"collate_fn": tuple'
    workers = options, f'{options}, "num_workers": 1, "persistent_workers": True'
    runs = []
    for name, replacements in (("without", []), ("with", [workers])):
        script = copy("ddp_cifar", tmp_path / f"{name}.py", LITTLE_DATA, *replacements)
        flags = [*SMALL, "--log-every", 1, "--max-steps", 6, "--epochs", 3, "--output-dir", name]
        runs.append({"processes": 1, "script": script, "flags": flags, "directory": tmp_path})
    for codes, output in forked(runs, tmp_path, together=2):
        assert codes == [0], output
    losses = [
        [line["loss"] for line in outputs(tmp_path / name)["train"]] for name in ("without", "with")
    ]
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


@pytest.mark.copied("ddp_cifar", project=BUFFER, processes=2)
def test_all_ranks_begin_with_the_buffers_of_the_first(outcome):
    assert outcome.codes == [0, 0], outcome.output
    scales = [(outcome.directory / f"scale.{rank}").read_text() for rank in (0, 1)]
    assert scales[0] == scales[1]
    assert not re.search("warn", outcome.output, re.IGNORECASE), outcome.output


PER_STEP = "    scheduler.step()\n"
EVALUATE = "        test = evaluate(accelerator, model, test_loader, hang)\n"
LAMBDA = "torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"


@pytest.mark.copied(
    "ddp_cifar",
    (PER_STEP, ""),
    (EVALUATE, f"        scheduler.step()\n{EVALUATE}", 2),
    (LAMBDA, "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"),
    flags=["--max-steps", 4],
)
def test_a_schedule_per_epoch(outcome):
    assert outcome.codes == [0], outcome.output
    lines = outputs(outcome.directory / "run")["train"]
    assert [line["learning_rate"] for line in lines] == [0.1, 0.1, 0.05, 0.05]


ADDED = "            metrics.add(step, values)\n"
IN_MID_EPOCH = """            evaluate(accelerator, model, test_loader, hang)
            assert model.training and modes[-2:] == [False, True]
"""
MERGING = """
modes = []
plain_model = build_model


def build_model(args):
    model = plain_model(args)
    model[0].train = lambda mode=True: modes.append(mode) or nn.Module.train(model[0], mode)
    return model
"""


@pytest.mark.copied("ddp_cifar", (ADDED, ADDED + IN_MID_EPOCH), project=MERGING)
def test_an_evaluation_in_mid_epoch_leaves_the_model_in_training(outcome):
    """Also where a module does more in `eval` than to set a flag, such as merging weights."""
    assert outcome.codes == [0] and "step 2/2" in outcome.output, outcome.output


BUILT = "    return model.to(memory_format=torch.channels_last)"
FREEZE = BUILT, f"    model[0].requires_grad_(False)\n{BUILT}"


@pytest.mark.copied("ddp_cifar", FREEZE)
def test_frozen_parameters(outcome):
    assert outcome.codes == [0] and "step 2/2" in outcome.output, outcome.output


@pytest.mark.copied("pipeline_cifar", FREEZE, processes=2)
def test_frozen_parameters_in_a_pipeline(outcome):
    assert outcome.codes == [0, 0] and "step 2/2" in outcome.output, outcome.output


IN_PLACE = """
class Counting(nn.Flatten):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += self.training
        # Two steps of eight microbatches: what comes before the first has to leave no trace.
        assert self.calls <= 2 * 8
        return super().forward(x)


def build_model(args):
    return nn.Sequential(
        Counting(), nn.Linear(3072, 10), nn.ReLU(inplace=True), nn.Linear(10, 10)
    )
"""
LOGITS = "    logits = model(images)\n"
FP32_LOGITS = LOGITS, f"{LOGITS}    assert logits.dtype == torch.float32\n"


@pytest.mark.copied(
    "pipeline_cifar", FP32_LOGITS, project=IN_PLACE, flags=["--precision", "bf16"], processes=2
)
def test_operations_in_place_and_a_buffer_that_counts_calls_in_a_pipeline(outcome):
    assert outcome.codes == [0, 0] and "step 2/2" in outcome.output, outcome.output


TRAINED = "DataLoader(train_set, shuffle=True, drop_last=True, **options)"
TESTED = "DataLoader(test_set, **options)"
HALF = "DataLoader(torch.utils.data.Subset(train_set, range(128)), drop_last=True, **options)"
REST = "DataLoader(torch.utils.data.Subset(train_set, range(128, 228)), **options)"


@pytest.mark.copied("ddp_cifar", (TRAINED, HALF), (TESTED, REST))
def test_subsets_of_the_training_set(outcome):
    assert outcome.codes == [0], outcome.output
    summary = outputs(outcome.directory / "run")["summary"]
    assert (summary["samples"], summary["steps_per_epoch"]) == (100, 1)


MODEL_FLAG = (
    '    add("--model", "what to train", choices=("resnet50", "simple_cnn"), default="resnet50")\n'
)
OWN_FLAGS = """    add("--workers", "x", type=int, default=0)
    add("--where", "x", type=Path, default=Path("somewhere"))
    add("--rate", "x", type=float, default=0.1)
    add("--ignore", "x", type=int, default=-100)
"""
EVALUATED = """        metrics.write("evaluation", test)

    if checkpoints.last_step != metrics.step:  # the loop was left early
"""


@pytest.mark.copied(
    "ddp_cifar",
    (MODEL_FLAG, MODEL_FLAG + OWN_FLAGS),
    (EVALUATED, '        test["confusion"] = [[1, 2], [3, 4]]\n' + EVALUATED),
    flags=["--workers", 0, "--rate", 0],
)
def test_own_flags_also_those_that_are_0_and_own_results_are_shown_and_kept(outcome):
    assert outcome.codes == [0], outcome.output
    shown = "\n  workers: 0\n  where: somewhere\n  rate: 0.0\n  ignore: -100\n"
    assert shown in outcome.output
    results = outputs(outcome.directory / "run")
    assert results["summary"]["confusion"] == [[1, 2], [3, 4]]
    assert results["evaluations"][0]["confusion"] == [[1, 2], [3, 4]]


def test_a_flag_that_was_added_later_does_not_hinder_resuming(tmp_path):
    added = MODEL_FLAG, MODEL_FLAG + '    add("--later", "x", type=int, default=5)\n'
    runs = []
    for name, replacements in (("before", []), ("after", [added])):
        (tmp_path / name).mkdir()
        script = copy("ddp_cifar", tmp_path / name / "mine.py", LITTLE_DATA, *replacements)
        flags = [*SMALL, "--max-steps", 2, "--output-dir", "run"]
        runs.append({"processes": 1, "script": script, "flags": flags, "directory": tmp_path})
    before, after = forked(runs, tmp_path)
    assert before[0] == after[0] == [0], after[1]
    assert "this run is complete: it is only evaluated again" in after[1]


LOSS = 'F.cross_entropy(logits, labels, reduction="none")'
IOU = '    return {"loss": loss, "accuracy": logits.argmax(1) == labels}\n'


@pytest.mark.copied(
    "ddp_cifar", (IOU, IOU.replace("}", ', "iou": logits[:, 0] * math.nan}')), processes=2
)
def test_a_metric_that_is_nan_is_told_once_and_is_null_in_json(outcome):
    assert outcome.codes == [0, 0], outcome.output
    warnings = [line for line in outcome.output.splitlines() if "warning" in line]
    assert warnings == ["mine: warning: iou is nan at step 1"]
    text = (outcome.directory / "run/metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert len(lines) == 4, "two steps, which are two epochs"
    assert [line.get("iou", line.get("test_iou")) for line in lines] == [None] * 4
    assert all("iou" in line or "test_iou" in line for line in lines)
    json.loads((outcome.directory / "run/summary.json").read_text())


ONLY_EVALUATED = IOU.replace("}", ', "iou": logits[:, 0] * (1.0 if model.training else math.nan)}')


@pytest.mark.copied("ddp_cifar", (IOU, ONLY_EVALUATED), flags=["--max-steps", 1])
def test_a_metric_that_is_nan_in_evaluations_only_is_told_too(outcome):
    assert outcome.codes == [0], outcome.output
    warnings = [line for line in outcome.output.splitlines() if "warning" in line]
    assert warnings == ["mine: warning: test_iou is nan at step 1"]


STOP_EARLY = "        if epoch == 1:\n            break\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_leaves_the_loop_early_ends_like_any_other(processes, tmp_path):
    """Early stopping, by the copier's own decision: saved where it stopped, evaluated, summarised.
    The same command again has nothing to add."""
    early = EVALUATED, EVALUATED.replace("\n\n", f"\n{STOP_EARLY}\n")
    script = copy("ddp_cifar", tmp_path / "mine.py", LITTLE_DATA, early)
    flags = [*SMALL, "--epochs", 5, "--global-batch-size", 128, "--output-dir", "run"]
    run = {"processes": processes, "script": script, "flags": flags, "directory": tmp_path}
    ((codes, output),) = forked([run], tmp_path)
    assert set(codes) == {0}, output
    result = outputs(tmp_path / "run")
    assert (result["summary"]["steps"], len(result["evaluations"])) == (10, 2)
    assert result["summary"]["test_loss"] == result["evaluations"][-1]["test_loss"]
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000004.pt"]
    saved = torch.load(tmp_path / "run/step-00000004.pt", weights_only=True)
    weights = load_file(result["weights"])
    assert all(torch.equal(saved["states"]["model"][name], weights[name]) for name in weights)
    assert saved["metrics"] == (tmp_path / "run/metrics.jsonl").read_text()

    ((codes, output),) = forked([run], tmp_path)
    assert set(codes) == {0}, output
    again = outputs(tmp_path / "run")
    assert "\n  resumed_from: 4\n" in output
    assert again["train"] == result["train"]
    assert again["summary"] == result["summary"], "with the throughput, as after a complete run"
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000004.pt"]


STOPPED = "            if stop_signal:\n                message"
END_OF_STEPS = "                exit_together(metrics, 128 + stop_signal, message)\n"


def leave_both_loops(step):
    leave = f"if step == {step}:\n{{0}}    break\n"
    inner = " " * 12
    outer = " " * 8
    return [
        (STOPPED, inner + leave.format(inner) + STOPPED),
        (END_OF_STEPS + EVALUATE, END_OF_STEPS + outer + leave.format(outer) + EVALUATE),
    ]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(1, marks=pytest.mark.copied("ddp_cifar", *leave_both_loops(1))),
        pytest.param(
            3,
            marks=pytest.mark.copied("ddp_cifar", *leave_both_loops(3), flags=["--max-steps", 8]),
        ),
    ],
)
def test_a_run_that_leaves_both_loops_before_an_evaluation_is_saved_and_evaluated(outcome, step):
    """In its first epoch of two steps, and in its second one."""
    assert outcome.codes == [0], outcome.output
    result = outputs(outcome.directory / "run")
    evaluated = [line["step"] for line in result["evaluations"]]
    assert evaluated == ([1] if step == 1 else [2, 3])
    assert result["summary"]["test_loss"] == result["evaluations"][-1]["test_loss"]
    assert (outcome.directory / f"run/step-{step:08}.pt").exists()


OWN_EXAMPLE = """
def add_flags(add):
    add("--data", "of whom")
    add("--model", "of whom")
    add("--width", "of the model", type=positive_int, default=8)


def load_data(args, accelerator):
    images, labels = synthetic_images(256, seed=1)
    dataset = torch.utils.data.TensorDataset(images.float() / 255, labels)
    options = {"batch_size": args.batch_size}
    train_loader = DataLoader(dataset, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(dataset, **options)


def build_model(args):
    hidden = nn.Linear(3072, args.width)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(args.width, 10))
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.copied(
                f"{name}_cifar",
                project=OWN_EXAMPLE,
                flags=["--width", 6],
                processes=2 if name == "pipeline" else 1,
            ),
        )
        for name in ("ddp", "amp", "data_parallel", "sharded", "pipeline")
    ],
)
def test_all_functions_that_are_to_be_replaced_are(outcome, name):
    """The flags, too: those of the technique are declared elsewhere."""
    assert set(outcome.codes) == {0}, outcome.output
    assert outputs(outcome.directory / "run")["summary"]["width"] == 6


WRAPPED = """
plain_model = build_model


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)


def build_model(args):
    return Wrapped(plain_model(args))
"""


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory):
    """Ten more steps from the weights of a run, the same evaluation on another number of processes
    and batch size, a model with another head, one with tied weights, and one in a wrapper."""
    directory = tmp_path_factory.mktemp("weights")
    recipe = ROOT / "recipes/ddp_cifar.py"
    twelve = "nn.Flatten(), nn.Linear(128, 10)", "nn.Flatten(), nn.Linear(128, 12)"
    head = copy("ddp_cifar", directory / "head.py", twelve)
    tied = copy("ddp_cifar", directory / "tied.py", project=TOKENS)
    wrapped = copy("ddp_cifar", directory / "wrapped.py", project=WRAPPED)
    common = [*SMALL, "--max-steps", 2]
    first = ["--weights", "first/model.safetensors"]
    evaluate = ["--epochs", 0, "--batch-size", 50, "--lr", 1]
    tied_weights = ["--weights", "tied/model.safetensors"]  # in which a tied name is missing
    runs = {
        "first": (1, recipe, []),
        "more": (1, recipe, [*first, "--lr", 0.001]),
        "another": (1, recipe, [*evaluate, "--weights", "more/model.safetensors"]),
        "evaluated": (2, recipe, [*first, *evaluate]),
        "head": (1, head, first),
        "tied": (1, tied, ["--batch-size", 8]),
        "again": (1, tied, ["--batch-size", 8, "--epochs", 0, *tied_weights]),
        "wrapped": (1, wrapped, []),
        "own names": (1, wrapped, ["--epochs", 0, "--weights", "wrapped/model.safetensors"]),
    }
    directories = {"another": "evaluated"}
    answers = forked(
        [
            {
                "processes": processes,
                "script": script,
                # In one directory, one after the other.
                "flags": [*common, *flags, "--output-dir", directories.get(name, name)],
                "directory": directory,
            }
            for name, (processes, script, flags) in runs.items()
        ],
        directory,
    )
    results = {}
    for name, (codes, output) in zip(runs, answers, strict=True):
        assert set(codes) == {0}, output
        path = directory / directories.get(name, name)
        results[name] = json.loads((path / "summary.json").read_text())
        results[name]["output"] = output
    return directory, results


def test_weights_to_train_on(fine_tuned):
    _, results = fine_tuned
    first, more = results["first"]["test_loss"], results["more"]["test_loss"]
    assert more != first and more == pytest.approx(first, abs=0.05)


def test_weights_to_evaluate_on_another_number_of_processes(fine_tuned):
    directory, results = fine_tuned
    first, evaluated = results["first"], results["evaluated"]
    assert evaluated["test_loss"] == pytest.approx(first["test_loss"], abs=1e-5)
    assert evaluated["test_accuracy"] == first["test_accuracy"] and evaluated["steps"] == 0
    # Other weights were evaluated in this directory before.
    assert evaluated["weights"] == "first/model.safetensors"
    assert not list((directory / "evaluated").glob("step-*.pt"))


def test_weights_for_a_model_with_another_head(fine_tuned):
    _, results = fine_tuned
    assert "names that do not fit: 2.1.bias, 2.1.weight\n" in results["head"]["output"]


def test_weights_that_are_tied_are_evaluated_whole(fine_tuned):
    _, results = fine_tuned
    assert results["again"]["test_loss"] == results["tied"]["test_loss"]
    assert "names that do not fit: none\n" in results["again"]["output"]


def test_weights_of_a_model_whose_own_names_look_like_those_of_a_wrapper(fine_tuned):
    _, results = fine_tuned
    assert results["own names"]["test_loss"] == results["wrapped"]["test_loss"]
    assert "names that do not fit: none\n" in results["own names"]["output"]
