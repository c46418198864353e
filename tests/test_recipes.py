"""What every recipe promises: it runs alone, on what pyproject.toml names, with a reader's own data
and model."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, forked, outputs

# The processes that a recipe is run with.
RECIPES = {
    "ddp_cifar": 2,
    "data_parallel_cifar": 1,
    "amp_cifar": 2,
    "pipeline_cifar": 2,
    "sharded_cifar": 2,
}
SCRIPTS = [*RECIPES, "plain_ddp_cifar"]


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_imports_only_what_pyproject_names(recipe):
    (named,) = re.findall(
        r"^dependencies = \[(.*?)\]",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    allowed = set(re.findall(r'"(\w+)', named)) | set(sys.stdlib_module_names) | {"PIL"}
    imported = set()
    for node in ast.walk(ast.parse((ROOT / f"recipes/{recipe}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert "torch" in imported and imported <= allowed - ({"PIL"} if recipe in RECIPES else set())


MINE = """
class Noisy(Dataset):
    def __init__(self, samples):
        self.inputs = torch.linspace(-1, 1, 12 * samples).view(12, samples).T.sin()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(12) * numpy.random.rand() + random.random()
        return self.inputs[index] + 0.1 * noise, self.inputs[index].cumsum(0)[::4]


def load_data(args, accelerator):
    options = {"batch_size": args.batch_size, "num_workers": int(os.environ["WORKERS"])}
    train_loader = DataLoader(Noisy(100), shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(Noisy(37), **options)


def build_model(args):
    return nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 3))


def compute_loss(model, batch):
    inputs, targets = batch
    error = model(inputs) - targets
    below = error.mean(1) < 0
    return {"loss": error.square().mean(1), "largest": error.abs().amax(1), "below": below}


if __name__ == "__main__":"""
EXAMPLES_FLAGS = re.compile(r'    add\("--(?:data|data-dir|model|stem)", .*\n')


@pytest.fixture(scope="module")
def regressions(tmp_path_factory):
    """A copy of each recipe, in an empty directory, and another of ddp_cifar.py: one process, no
    workers. {name: (directory, exit codes, output)}"""
    directory = tmp_path_factory.mktemp("mine")
    runs = []
    for name, recipe, workers in [
        ("alone", "ddp_cifar", 0),
        *((recipe, recipe, 2) for recipe in RECIPES),
    ]:
        source = (ROOT / f"recipes/{recipe}.py").read_text()
        assert source.count('\nif __name__ == "__main__":') == 1
        source = source.replace('\nif __name__ == "__main__":', MINE)
        script = directory / name / "mine.py"
        script.parent.mkdir()
        script.write_text(EXAMPLES_FLAGS.sub("", source))
        processes = RECIPES[recipe] if workers else 1
        flags = ["--cpu", "--epochs", 2, "--log-every", 1, "--lr", 0.5, "--global-batch-size", 32]
        flags += ["--precision", "fp32"] if recipe == "amp_cifar" else []
        run = {"processes": processes, "script": script, "directory": script.parent, "flags": flags}
        runs.append({**run, "env": {"WORKERS": str(workers)}})
    answers = forked(runs, directory, together=2, PYTHONPATH="")
    return {
        run["directory"].name: (run["directory"], *answer)
        for run, answer in zip(runs, answers, strict=True)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_a_readers_own_data_model_and_loss_the_same_in_processes_and_workers(
    recipe, regressions
):
    """`load_data`, `build_model` and `compute_loss` are replaced: a regression on an ordinary
    Dataset whose samples are random, made by two workers of each process, against one process
    without workers."""
    directory, codes, output = regressions[recipe]
    assert set(codes) == {0}, output
    result = outputs(directory / "runs/mine")
    alone = outputs(regressions["alone"][0] / "runs/mine")
    assert (result["summary"]["samples"], result["summary"]["steps"]) == (37, 6)
    for event, names in (
        ("train", ("loss", "largest", "below")),
        ("evaluations", ("test_loss", "test_largest")),
    ):
        for name in names:
            values, expected = ([line[name] for line in run[event]] for run in (result, alone))
            assert len(set(values)) > 1 and values == pytest.approx(expected, abs=1e-5), name
    assert alone["train"][-1]["loss"] < alone["train"][0]["loss"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_has_its_own_name_and_not_the_flags_that_its_author_deleted(recipe, regressions):
    directory, codes, output = regressions[recipe]
    assert set(codes) == {0}, output
    assert output.count("  recipe: mine\n") == 1 and "_cifar" not in output
    assert not re.search(r"^  (model|stem|data|data_dir): ", output, re.MULTILINE), output
    summary = json.loads((directory / "runs/mine/summary.json").read_text())
    assert summary["recipe"] == "mine"
    assert not {"model", "stem", "data", "data_dir"} & summary.keys()


# On ResNet-50 where nothing else trains that one.
MODELS = {"amp_cifar": "resnet50"}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Every recipe alone in an empty directory."""
    last = ["plain_ddp_cifar", "amp_cifar"]
    names = sorted(SCRIPTS, key=last.__contains__, reverse=True)  # the longest first
    runs = []
    for recipe in names:
        directory = tmp_path_factory.mktemp(recipe)
        script = directory / f"{recipe}.py"
        script.write_text((ROOT / f"recipes/{recipe}.py").read_text())
        flags = ["--data", "synthetic", "--cpu", "--max-steps", 2, "--batch-size", 16]
        flags += ["--stem", "imagenet", "--model", MODELS.get(recipe, "simple_cnn")]
        flags += [] if recipe in RECIPES else ["--world_size", 2, "--workers", 1]
        run = {"processes": RECIPES.get(recipe, 1), "script": script, "directory": directory}
        runs.append({**run, "flags": flags, "patience": 400})
    answers = forked(runs, directory, together=2, PYTHONPATH="")
    return {
        recipe: (run["directory"], *answer)
        for recipe, run, answer in zip(names, runs, answers, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SCRIPTS)
def test_trains_when_copied_alone_into_an_empty_directory(recipe, copies):
    directory, codes, output = copies[recipe]
    assert set(codes) == {0}, output
    assert set(os.listdir(directory)) - {"__pycache__"} == {f"{recipe}.py", "runs"}
    summary = json.loads(Path(directory, f"runs/{recipe}/summary.json").read_text())
    model = MODELS.get(recipe, "simple_cnn")
    assert (summary["recipe"], summary["model"], summary["steps"]) == (recipe, model, 2)
    assert 0 <= summary["test_accuracy"] <= 1 and summary["seconds"] > 0
    assert summary["peak_memory_bytes"] > 2**20
    where = {"device", "precision", "world_size", "versions"}
    flags = {"stem", "data", "global_batch_size", "epochs", "seed"}
    assert where | flags | {"train_loss", "samples_per_second"} <= summary.keys()
    if recipe in RECIPES:
        result = outputs(directory / f"runs/{recipe}")
        keys = {"event", "epoch", "step", "time", "loss", "accuracy", "learning_rate"}
        keys |= {"samples_per_second", "grad_norm", "peak_memory_gib"}
        keys |= {"data_wait", "slowest_data_wait", "slowest_data_rank"}
        keys |= {"loss_scale", "skipped_steps"} if recipe == "amp_cifar" else set()
        assert result["train"] and all(line.keys() == keys for line in result["train"])
        written = {path.name for path in Path(directory, f"runs/{recipe}").iterdir()}
        # A file, or a folder with one of each process.
        checkpoint = "step-00000002" if recipe == "sharded_cifar" else "step-00000002.pt"
        results = {"metrics.jsonl", "summary.json", "model.safetensors", "run.lock"}
        assert written == results | {checkpoint}
