"""Each example trains: composed by `make new`, with additions, it passes `make check` on the data
that the commands in its docstring make. What it computes is compared with references."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import bench
import check
import new
import pytest
import torch
from conftest import LITTLE_DATA
from test_check import execute
from torch.nn import functional as F
from torch.utils.data import DataLoader

import auroc
import ema
import gan
import order

pytestmark = pytest.mark.slow

TEXTS = {name: "\n\n".join(new.description(name)[0]) for name in new.EXAMPLES}
RECIPES = {name: new.description(name)[1] for name in new.EXAMPLES}
TASKS = [name for name, text in TEXTS.items() if new.TRAIN in text]
# What each task is composed with, where the recipe can have it.
ADDED = {
    "photos": ["ema", "best_weights", "auroc"],
    "language_model": ["second_optimizer", "ema"],
    "fine_tune": ["lora"],
    "segmentation": ["lora", "trace", "best_weights"],
    "distillation": ["second_optimizer"],
}
NOT_ON_CPU = {"sync_batchnorm"}
COPIES = [(task, recipe) for task in TASKS for recipe in RECIPES[task]]
FLAGS = "--cpu --max-steps 5 --epochs 4".split()
RESNET = "torchvision.models.resnet18(num_classes="
OURS = "(lambda classes: nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), "
OURS += "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)))("
# Before Python 3.11.10, a worker's fork can deadlock: docs/failures.md.
WITHOUT_WORKERS = [(', "persistent_workers": True', ""), ('"num_workers": 2', '"num_workers": 0')]
LLAMA = [('size": 128, "', 'size": 32, "'), ('layers": 4', 'layers": 1')]
SMALLER = {
    **dict.fromkeys(("language_model", "by_length", "mixture"), LLAMA),
    **{task: [(RESNET, OURS)] for task in ("photos", "balanced", "tar_shards")},
    "contrastive": [("(64, 128, 256)", "(8, 16, 32)"), ("256 * 16, 256", "32 * 16, 256")],
    "diffusion": [("width=64", "width=16"), ("steps=50", "steps=5")],
    "gan": [("width=32", "width=8")],
    "segmentation": [("[3, 32, 64, 128]", "[3, 32, 32, 32]")],
}
# At these rates rounding is amplified little: no accuracy changes by a sample.
OF_PHOTOS = ["--lr", "1e-3", "--size", "32"]
FLAGS_OF = {
    "photos": OF_PHOTOS,
    "balanced": OF_PHOTOS,
    "tar_shards": ["--lr", "1e-3"],
    "segmentation": ["--lr", "1e-4", "--size", "16"],
    "language_model": ["--length", "32"],
    "by_length": ["--length", "32"],
    "fine_tune": ["--length", "32"],
    "mixture": ["--length", "32"],
}
IMPORTS = ["transformers.models.llama.modeling_llama", "peft", "pyarrow.parquet", "torch.profiler"]


def added(task, recipe):
    return [name for name in ADDED.get(task, []) if recipe in RECIPES[name]]


def commands(task):
    """The lines that make a task's data, and the flags of its training."""
    data, _, flags = TEXTS[task].partition(f"    {new.TRAIN} ")
    lines = [line for line in data.splitlines() if line.startswith("    ")]
    flags = re.sub(r"--batch-size \d+", "", flags.splitlines()[0])  # check's own is smaller
    return textwrap.dedent("\n".join(lines)), shlex.split(flags)


def make(path, recipe, *examples):
    """A copy, that takes less time."""
    text = new.compose(new.RECIPES[recipe], path.name, recipe, examples)
    for larger, smaller in [LITTLE_DATA, *WITHOUT_WORKERS, *SMALLER.get(examples[0], [])]:
        text = text.replace(larger, smaller)
    path.write_text(text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A function that returns the directory of a task, with its data: those of equal commands are
    made once."""
    made = {}

    def with_data(task):
        lines, _ = commands(task)
        if lines not in made:
            made[lines] = tmp_path_factory.mktemp(task)
            lines = lines.replace("--epochs 1", "--max-steps 2 --cpu --epochs 1")
            make(made[key := commands(task)[0]] / "mine.py", "ddp", task)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = {**os.environ, "PATH": path}
            subprocess.run(["bash", "-ec", lines], cwd=made[key], env=env, check=True)
            for path in made[key].glob("*.txt"):  # a small part is enough here
                path.write_bytes(path.read_bytes()[:20000])
        return made[commands(task)[0]]

    return with_data


@pytest.mark.parametrize(("task", "recipe"), COPIES)
def test_a_copy_with_an_example_passes_make_check(task, recipe, directory, monkeypatch, capsys):
    """On one process and two the same, and killed in mid-epoch and rerun bit for bit. Other recipes
    than ddp, which have its data and its loss: the latter."""
    monkeypatch.chdir(directory(task))
    monkeypatch.setattr(bench, "execute", partial(execute, imports=IMPORTS))
    copy = f"{task}_{recipe}.py"
    make(Path(copy), recipe, task, *added(task, recipe))
    flags = commands(task)[1] + FLAGS + FLAGS_OF.get(task, [])
    flags += ["--processes", *("12" if recipe == "ddp" else "2")]
    monkeypatch.setattr(sys, "argv", ["check.py", copy, *flags])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 0, capsys.readouterr().out


def test_each_addition_is_part_of_a_copy_of_each_recipe_that_it_is_for():
    additions = RECIPES.keys() - set(TASKS) - {"order", "tar_samples"} - NOT_ON_CPU
    for name in additions:
        tried = {recipe for task, recipe in COPIES if name in added(task, recipe)}
        assert tried == {*RECIPES[name]}, name


def test_an_average_of_weights_is_that_of_a_sum_in_float64():
    """Of the trained parameters; and what is saved is the average."""
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = ema.Average(model)
    expected = model.weight.detach().double().clone()
    for step in range(1, 30):
        average.use(False)
        model.weight.data += torch.randn(2, 3)
        decay = min(0.999, (step + 1) / (step + 10))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
        average.update(step)
        average.use()
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-5, atol=1e-5)


def test_auroc_is_the_share_of_pairs_in_the_right_order():
    scores = torch.randint(5, (90,)).float()
    positive = torch.rand(90) < 0.3
    pairs = scores[positive][:, None] - scores[~positive]
    exact = ((pairs > 0).double() + (pairs == 0) / 2).mean().item()
    assert float(auroc.auroc(scores, positive)) == pytest.approx(exact)


def test_both_players_of_the_gan_have_their_own_gradients():
    game, images = gan.Game(), torch.randn(4, 3, 32, 32)
    torch.manual_seed(3)
    gan.compute_loss(game, (images, None))["loss"].mean().backward()
    torch.manual_seed(3)
    made = game.generator(torch.randn(4, gan.LATENT))
    losses = {
        game.generator: F.softplus(-game.critic(made)).mean(),
        game.critic: (F.softplus(-game.critic(images)) + F.softplus(game.critic(made))).mean(),
    }
    for player, loss in losses.items():
        weights = [*player.parameters()]
        exact = torch.autograd.grad(loss, weights, retain_graph=True)
        torch.testing.assert_close([x.grad for x in weights], [*exact])


def in_order(name, *arguments):
    """The indices of five epochs."""
    samples = order.Ordered(range(9999), 0, getattr(order, name), *arguments)
    epochs = []
    for epoch in range(5):
        samples.set_epoch(epoch)
        epochs.append(torch.tensor(list(samples)))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    return epochs


def test_shards_are_read_one_after_the_other_and_shuffled_within_a_buffer():
    shard = torch.arange(5).repeat_interleave(torch.tensor([7, 40, 1, 22, 30]))
    buffers = (in_order("by_shard", shard, size) for size in (16, 1))
    for shuffled, epoch in zip(*buffers, strict=True):
        assert epoch.sort().values.tolist() == list(range(100))
        assert len(shard[epoch].unique_consecutive()) == 5, "one after the other"
        assert (shard[epoch].diff().ne(0) | epoch.diff().eq(1)).all(), "each from its begin"
        for part, plain in zip(shuffled.split(16), epoch.split(16), strict=True):
            assert {*part.tolist()} == {*plain.tolist()} and not torch.equal(part, plain)


def test_a_global_batch_has_similar_lengths_and_each_sample_comes_once():
    lengths = 1 + torch.arange(2005) * 7 % 2005 // 10
    seen = set()
    for epoch in in_order("by_length", lengths, 8):
        assert len(epoch) == len(epoch.unique()) == 2000
        widths = lengths[epoch].view(-1, 8)
        assert lengths[epoch].sum() > 0.95 * 8 * widths.amax(1).sum(), "hardly any padding"
        assert lengths[epoch[:80]].float().mean() == pytest.approx(101, rel=0.5), "in any order"
        seen |= {*epoch.tolist()}
    assert len(seen) == 2005, "each epoch leaves out others"


def test_persistent_workers_see_the_order_of_each_epoch():
    samples = order.Ordered(range(20), 0, order.by_shard, torch.arange(20) // 5, 8)
    loader = DataLoader(samples, 4, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        samples.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == list(samples)


def test_any_window_of_a_mixture_has_the_shares_of_its_weights():
    first, sizes, shares = (0, 50, 450), (50, 400, 1000), (0.5, 0.3, 0.2)
    for epoch in in_order("mixture", sizes, shares, 1000):
        for begin, size, share in zip(first, sizes, shares, strict=True):
            chosen = (begin <= epoch) & (epoch < begin + size)
            passes = epoch[chosen].split(size)
            assert all(len(part.unique()) == len(part) for part in passes), "all before one again"
            counts = chosen.cumsum(0)
            assert counts[-1] == 1000 * share
            for window in (7, 32, 250):
                error = counts[window:] - counts[:-window] - share * window
                assert error.abs().max() <= 1 + share * (len(sizes) - 2) + 1e-9
