"""What every recipe promises: it runs alone, on what pyproject.toml names, with a reader's own data and model."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, outputs, run

# The processes that a recipe is launched with.
RECIPES = {"ddp_cifar": 2, "data_parallel_cifar": 1, "amp_cifar": 2, "pipeline_cifar": 2}
SCRIPTS = [*RECIPES, "plain_ddp_cifar"]


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_imports_only_what_pyproject_names(recipe):
    (named,) = re.findall(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
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
def load_data(args, accelerator):
    def loader(samples):
        images = torch.rand(samples, 1, 20, 24)
        labels = (images.mean((1, 2, 3)) > 0.5).long()
        return DataLoader(torch.utils.data.TensorDataset(images, labels), args.batch_size, shuffle=samples > 50)

    return loader(96), loader(37)


def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(480, 30), nn.ReLU(), nn.Linear(30, 2))


if __name__ == "__main__":"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_a_readers_own_data_and_model_from_an_empty_directory(recipe, tmp_path):
    """Only `load_data` and `build_model` are replaced: other images, classes and numbers, an ordinary Dataset."""
    source = (ROOT / f"recipes/{recipe}.py").read_text()
    assert source.count('\nif __name__ == "__main__":') == 1
    Path(tmp_path, "mine.py").write_text(source.replace('\nif __name__ == "__main__":', MINE))
    launch(RECIPES[recipe], "mine.py", "--cpu", "--epochs", 2, "--batch-size", 16, cwd=tmp_path)
    summary = json.loads(Path(tmp_path, f"runs/{recipe}/summary.json").read_text())
    assert summary["samples"] == 37 and summary["steps"] == 2 * 96 // summary["global_batch_size"]


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_trains_when_copied_alone_into_an_empty_directory(recipe, tmp_path):
    Path(tmp_path, f"{recipe}.py").write_text((ROOT / f"recipes/{recipe}.py").read_text())
    flags = ["--data", "synthetic", "--cpu", "--max-steps", 2, "--batch-size", 16, "--stem", "imagenet"]
    if recipe in RECIPES:
        launch(RECIPES[recipe], f"{recipe}.py", *flags, cwd=tmp_path)
    else:
        run([sys.executable, f"{recipe}.py", *flags, "--world_size", 2, "--workers", 1], cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) in ([f"{recipe}.py", "runs"], ["__pycache__", f"{recipe}.py", "runs"])
    summary = json.loads(Path(tmp_path, f"runs/{recipe}/summary.json").read_text())
    assert (summary["recipe"], summary["model"], summary["steps"]) == (recipe, "resnet50", 2)
    assert 0 <= summary["test_accuracy"] <= 1 and summary["peak_memory_bytes"] > 2**20 and summary["seconds"] > 0
    assert {"stem", "data", "device", "precision", "world_size", "global_batch_size", "epochs"} <= summary.keys()
    assert {"seed", "train_loss", "images_per_second", "versions"} <= summary.keys()
    if recipe in RECIPES:
        result = outputs(tmp_path / f"runs/{recipe}")
        reference = {"event", "epoch", "step", "loss", "accuracy", "learning_rate", "images_per_second"}
        own = {"loss_scale", "skipped_steps"} if recipe == "amp_cifar" else set()
        assert result["train"] and all(line.keys() == reference | own for line in result["train"])
        written = {path.name for path in Path(tmp_path, f"runs/{recipe}").iterdir()}
        assert written == {"metrics.jsonl", "summary.json", "model.safetensors", "step-00000002.pt"}
