"""What a copier gets wrong is told in one line, before the first epoch is over: what was found, and
what to write instead. No traceback, and nothing twice."""

import socket

import pytest
from conftest import LITTLE_DATA, SMALL, copy, forked

pytestmark = pytest.mark.slow

BUILT = "    return model.to(memory_format=torch.channels_last)"
TRAINED = "DataLoader(train_set, shuffle=True, drop_last=True, **options)"
TESTED = "DataLoader(test_set, **options)"
LOADERS = "    return train_loader, DataLoader(test_set, **options)\n"
LOSS = '    loss = F.cross_entropy(logits, labels, reduction="none")\n'
RETURNED = '    return {"loss": loss, "accuracy": logits.argmax(1) == labels}\n'
GATHERED = "accelerator.gather_for_metrics(sample_rows(metrics))"
DESCRIBED = "    config = describe(args"
LAMBDA = "torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"


def mistake(name, said, *replacements, recipe="ddp_cifar", code=2, **how):
    """A copy with lines replaced, on two processes; its error has to say `said`."""
    how = {"processes": 2, **how}
    return pytest.param(said, code, id=name, marks=pytest.mark.copied(recipe, *replacements, **how))


def check(outcome, said, code):
    lines = [line for line in outcome.output.splitlines() if "error" in line]
    assert len(lines) == 1, outcome.output
    assert lines[0].startswith("mine: ") and "error: " in lines[0] and said in lines[0]
    assert "Traceback" not in outcome.output
    assert outcome.codes[0] == code and set(outcome.codes) <= {code, -15}, outcome.output
    assert "test_loss" not in outcome.output, "an epoch was trained first"
    assert "_cifar" not in outcome.output, "the name of another file"


INSTEAD = 'return {"loss": loss}, with one value per sample (reduction="none")'
TOKENS = 'for tokens, each sequence\'s mean and their number as "weight"'
ONLY_IN_TRAINING = """    if not model.training:
        return {"accuracy": logits.argmax(1) == labels}
"""
TWICE = """
per_sample = compute_loss


def compute_loss(model, batch):
    return {name: value.repeat(2) for name, value in per_sample(model, batch).items()}
"""


# By all batches of an epoch, or of an evaluation; the others before the first step.
ONLY_SEEN_LATER = {"other metrics in each batch", "samples left out of an evaluation"}


def returned(value):
    return RETURNED, f"    return {value}\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        mistake(
            "the scalar of model(...).loss",
            f"compute_loss returned Tensor: {INSTEAD}, also in evaluations; {TOKENS}",
            returned("loss.mean()"),
        ),
        mistake(
            "a tuple",
            f"compute_loss returned tuple: {INSTEAD}",
            returned("loss, logits.argmax(1) == labels"),
        ),
        mistake(
            "losses of a detector",
            f"compute_loss returned ['loss_box_reg', 'loss_classifier']: {INSTEAD}",
            returned('{"loss_classifier": loss, "loss_box_reg": loss}'),
        ),
        mistake(
            "no loss in eval mode",
            f"compute_loss returned ['accuracy']: {INSTEAD}, also in evaluations",
            (LOSS, ONLY_IN_TRAINING + LOSS),
        ),
        mistake(
            "a mean",
            f'compute_loss: "loss" is () and not (B,): {INSTEAD}, also in evaluations; {TOKENS}',
            returned('{"loss": loss.mean()}'),
        ),
        mistake(
            "a row per sample",
            'compute_loss: "loss" is (64, 1) and not (B,)',
            returned('{"loss": loss[:, None]}'),
            processes=1,
        ),
        mistake(
            "a metric of each pixel",
            'compute_loss: "iou" is (128, 10) and not (B,)',
            returned('{"loss": loss, "iou": logits}'),
        ),
        mistake(
            "a metric that is a number",
            'compute_loss: "iou" is float and not (B,)',
            returned('{"loss": loss, "iou": 0.5}'),
        ),
        mistake(
            "a loss that is a number, after a metric",
            'compute_loss: "loss" is float and not (B,)',
            returned('{"accuracy": logits.argmax(1) == labels, "loss": loss.mean().item()}'),
        ),
        mistake(
            "a metric that is a mean",
            'compute_loss: "accuracy" is () and not (B,)',
            returned('{"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}'),
        ),
        mistake(
            "other metrics in each batch",
            "compute_loss: return the same keys for every batch",
            returned('{"loss": loss, f"{time.perf_counter()}": loss}'),
            processes=1,
        ),
        mistake(
            "two values per sample",
            "compute_loss: 32 values for a batch of 16 samples",
            project=TWICE,
            flags=["--batch-size", 16],
        ),
        mistake(
            "samples left out of an evaluation",
            "evaluate: 63 of 64 samples counted",
            (GATHERED, f"{GATHERED}[1:]"),
            processes=1,
        ),
    ],
)
def test_what_compute_loss_returns(outcome, said, code, request):
    check(outcome, said, code)
    if request.node.callspec.id not in ONLY_SEEN_LATER:
        assert "step 1/" not in outcome.output


ONE_RANK = """    if accelerate.PartialState().process_index == 1:
        return loss
"""


@pytest.mark.copied("ddp_cifar", (RETURNED, ONE_RANK + RETURNED), processes=2, grace=20)
def test_an_error_of_one_rank_is_told_by_that_rank(outcome):
    """The others wait for it, and are ended by the launcher."""
    lines = [line for line in outcome.output.splitlines() if "error" in line]
    assert len(lines) == 1, outcome.output
    assert lines[0].startswith("mine: error: rank 1: compute_loss returned Tensor: ")
    assert outcome.codes[1] == 2 and outcome.codes[0] != 0
    assert "Traceback" not in outcome.output


BARE = "    raise TypeError('a mistake')\n"
BARE_ON_ONE = f"    if accelerate.PartialState().process_index == 1:\n    {BARE}"


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, marks=pytest.mark.copied("ddp_cifar", (LOSS, BARE + LOSS), processes=2)),
        pytest.param(
            1, marks=pytest.mark.copied("ddp_cifar", (LOSS, BARE_ON_ONE + LOSS), processes=2)
        ),
    ],
    ids=["on both ranks", "on one rank"],
)
def test_a_bare_exception_is_printed_once_and_names_its_rank(outcome, rank):
    """Of an exception that all ranks have, the first prints."""
    head, trace = outcome.output.split("Traceback (most recent call last):\n")
    assert head.endswith(f"mine: rank {rank} on {socket.gethostname()}:\n"), outcome.output
    assert " in compute_loss\n" in trace and trace.count("TypeError: a mistake\n") == 1, trace
    assert outcome.output.count("mine: ") == 1, outcome.output
    assert outcome.codes[rank] == 1 and outcome.codes[1 - rank] != 0


DROP_LAST = "load_data: training needs drop_last=True, the test drop_last=False and some samples"
EMPTY = "DataLoader(torch.utils.data.Subset(test_set, []), **options)"
OWN_SAMPLERS = """
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
    test = DataLoader(data, 8)
    train = DataLoader(data, 8, drop_last=True)
    sampler = d.BatchSampler(RandomSubset(range(9)), 8, True)
    return LOADERS
"""
CANNOT_RESUME = {  # what is named: what load_data returns
    "SubsetRandomSampler": "train, DataLoader(data, 8, sampler=d.SubsetRandomSampler(range(20)))",
    "WeightedRandomSampler": "DataLoader(data, 8, sampler=d.WeightedRandomSampler([1.0], 9)), test",
    "DistributedSampler": "DataLoader(data, 8, sampler=d.DistributedSampler(data, 2, 0)), test",
    "Batches": "DataLoader(data, batch_sampler=Batches()), test",
    "RandomSubset": "DataLoader(data, batch_sampler=sampler), test",
    "Stream": "DataLoader(Stream(), 8), test",
}


def loaders(value):
    return LOADERS, LOADERS.replace("train_loader, DataLoader(test_set, **options)", value)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        mistake(
            "one loader",
            "load_data returned DataLoader: return two DataLoaders, training and test",
            loaders("train_loader"),
        ),
        mistake(
            "three loaders",
            "load_data returned DataLoader, DataLoader, DataLoader: return two DataLoaders",
            loaders("train_loader, DataLoader(test_set, **options), train_loader"),
        ),
        mistake(
            "datasets",
            "load_data returned ImageTensors, ImageTensors: return two DataLoaders",
            loaders("train_set, test_set"),
        ),
        mistake(
            "no loaders",
            "load_data returned NoneType: return two DataLoaders",
            loaders("None"),
            processes=1,
        ),
        mistake(
            "a test set without the rest",
            DROP_LAST,
            loaders("train_loader, DataLoader(test_set, drop_last=True, **options)"),
            processes=1,
        ),
        mistake("an empty test set", DROP_LAST, (TESTED, EMPTY), processes=1),
        mistake(
            "training with the rest",
            DROP_LAST,
            (TRAINED, TRAINED.replace("drop_last=True, ", "")),
            processes=1,
        ),
        *[
            mistake(
                name,
                "load_data: cannot resume " + ("Stream" if name == "Stream" else "TensorDataset"),
                project=OWN_SAMPLERS.replace("LOADERS", value),
                processes=1,
            )
            for name, value in CANNOT_RESUME.items()
        ],
    ],
)
def test_what_load_data_returns(outcome, said, code, request):
    check(outcome, said, code)
    name = request.node.callspec.id
    assert name in outcome.output or name not in CANNOT_RESUME


OWN_STATE = """    from types import SimpleNamespace
    states["own"] = SimpleNamespace(state_dict=lambda: {"path": Path("x")})
"""


@pytest.mark.parametrize(
    ("said", "code"),
    [
        mistake(
            "a model in eval mode",
            "build_model: the model is in eval mode, as from_pretrained returns it: "
            "return model.train()",
            (BUILT, f"    model.eval()\n{BUILT}"),
        ),
        mistake(
            "a state that cannot be read again",
            "error: cannot write step-00000002.pt (UnpicklingError(",
            (DESCRIBED, OWN_STATE + DESCRIBED),
            flags=["--batch-size", 64],
            code=1,
        ),
        mistake(
            "OneCycle that is not finite",
            "error: loss or weights are not finite on ranks [0, 1], since a step between",
            (LAMBDA, "torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e30, 9)"),
            flags=["--max-steps", 6, "--batch-size", 16],
            code=1,
        ),
    ],
)
def test_the_model_its_state_and_its_schedule(outcome, said, code):
    check(outcome, said, code)


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
SUBCLASS = """
class Residual(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


def build_model(args):
    return Residual(nn.Flatten(), nn.Linear(3072, 10))
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
NO_PARAMETERS = """
def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.ReLU(), nn.Dropout(0.1))
"""
SIDES = '"collate_fn": tuple', '"collate_fn": lambda batch: {"x": 1, "y": 2}'
THREE = '"collate_fn": tuple', '"collate_fn": lambda batch: (*batch, batch[1])'
OTHER = TESTED, 'DataLoader(test_set, **options | {"batch_size": 16})'


def pipeline(name, said, *replacements, **how):
    return mistake(name, said, *replacements, recipe="pipeline_cifar", **how)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        pipeline("own forward", "cannot cut Residual", project=OWN_FORWARD),
        pipeline("own Sequential", "cannot cut Residual", project=SUBCLASS),
        pipeline("a parameter in both", "the two stages share a parameter", project=TIED),
        pipeline(
            "a stage without parameters",
            "argument --split: cut before 2, the second stage would have no parameters",
            project=NO_PARAMETERS,
        ),
        pipeline(
            "other shapes in the test set",
            "[(128, 3, 32, 32), (128,)], and not [(16, 3, 32, 32), (16,)]",
            OTHER,
        ),
        pipeline("a dictionary", "a batch has to be two tensors", SIDES),
        pipeline("three tensors", "a batch has to be two tensors", THREE),
    ],
)
def test_what_a_pipeline_cannot_train(outcome, said, code):
    check(outcome, said, code)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        mistake(
            "tied with the root",
            "shard_units: blocks.0.weight is in more than one unit, or in one and the root",
            recipe="sharded_cifar",
            project=TIED_ROOT,
        ),
        mistake(
            "tied with another unit",
            "shard_units: 1.weight is in more than one unit, or in one and the root",
            recipe="sharded_cifar",
            project=TIED,
        ),
    ],
)
def test_what_cannot_be_sharded(outcome, said, code):
    check(outcome, said, code)


def test_weights_that_are_not_finite_on_one_rank_name_it(tmp_path):
    """Its gradient spoils the others' weights in the same step, but not their loss."""
    spoil = (
        "    images, labels = batch\n",
        (
            "    images, labels = batch\n"
            "    if accelerate.PartialState().process_index == 1 and model.training:\n"
            "        images = images * math.nan\n"
        ),
    )
    script = copy("ddp_cifar", tmp_path / "mine.py", LITTLE_DATA, spoil)
    flags = [*SMALL, "--max-steps", 2, "--log-every", 1, "--output-dir", "run"]
    run = {"processes": 2, "script": script, "flags": flags, "directory": tmp_path}
    ((codes, output),) = forked([run], tmp_path)
    assert codes == [1, 1]
    expected = (
        "mine: error: loss or weights are not finite on ranks [1], since a step between 1 and 1"
    )
    assert output.count(expected) == 1 and "Traceback" not in output, output
    assert not list((tmp_path / "run").glob("step-*"))
