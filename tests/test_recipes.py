"""A recipe is one file that runs alone, on the packages that pyproject.toml names, with a reader's
own data, model and loss."""

import os
import re
import sys

import pytest
from composed import assert_lists_its_packages
from conftest import (
    ACCELERATE,
    CNN,
    CONFIGS,
    NARROW,
    ROUNDING,
    assert_same_training,
    copy,
    project,
)
from processes import ROOT, forked, outputs, run

RECIPES = ["ddp_cifar", "amp_cifar", "pipeline_cifar", "sharded_cifar"]
BASELINE = "data_parallel_cifar"


@pytest.mark.parametrize("recipe", [*RECIPES, BASELINE])
def test_a_recipe_lists_the_packages_that_it_imports(recipe):
    assert_lists_its_packages((ROOT / f"recipes/{recipe}.py").read_text())


def test_own_data_model_and_loss_train_the_same_in_all_recipes_and_in_workers(tmp_path):
    """Copies in empty directories, with two workers, ddp's without workers: a regression on random
    samples, without torchvision and without the section of CIFAR-10."""
    runs = []
    for recipe in RECIPES:
        directory = tmp_path / recipe
        directory.mkdir()
        less = "import torchvision\n", ""
        script = copy(recipe, directory / "mine.py", less, project=project("regression"))
        source, sections = re.subn(r"(?s)# -+ CIFAR-10\n.*?(?=# =====)", "", script.read_text())
        assert sections == 1 and "class ImageTensors" not in source
        script.write_text(source)
        flags = ["--cpu", "--epochs", 2, "--log-every", 1, "--lr", 0.5, "--global-batch-size", 32]
        flags += ["--workers", 0 if recipe == "ddp_cifar" else 2]
        flags += ["--precision", "fp32"] if recipe == "amp_cifar" else []
        run = {"processes": 2, "script": script, "directory": directory}
        runs.append({**run, "flags": flags})
    answers = forked(runs, tmp_path, together=2)
    for recipe, (codes, output) in zip(RECIPES, answers, strict=True):
        assert set(codes) == {0}, output
        assert set(os.listdir(tmp_path / recipe)) - {"__pycache__"} == {"mine.py", "runs"}
        result = outputs(tmp_path / recipe / "runs/mine")
        reference = outputs(tmp_path / "ddp_cifar/runs/mine")
        assert_same_training(result, reference, ROUNDING, {"grad_norm"})  # pipeline's is in float32
        # The copy has its own name and flags, and not those of the example.
        assert "constant 20,000 " in output
        assert output.count('"recipe": "mine"') == 1 and "_cifar" not in output, output
        assert result.summary["precision"] == "fp32"
        assert "workers" in result.summary and "data_dir" not in result.summary
    assert {"loss", "largest", "below"} < reference.train[0].keys()
    assert len(reference.train) == 6 and reference.train[-1]["loss"] < reference.train[0]["loss"]


@pytest.mark.slow
def test_interpreters_of_a_launcher_end_also_with_persistent_workers(tmp_path):
    """A fork would not show an error at the end of an interpreter. Workers block SIGTERM, by which
    multiprocessing would end them."""
    workers = project("interruption", load_data="data_of_persistent_workers")
    script = copy("pipeline_cifar", tmp_path / "mine.py", *NARROW, project=workers)
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[2], script, *CNN]
    command += ["--batch-size", 16, "--epochs", 1, "--output-dir", tmp_path / "run"]
    process = run(command, timeout=120)
    assert "Traceback" not in process.stderr and outputs(tmp_path / "run").train[-1]["step"] == 4


def test_uv_takes_the_list_of_packages(tmp_path):
    """Those of this environment, since it is offline."""
    uv = pytest.importorskip("uv", reason="needs uv").find_uv_bin()
    command = [uv, "run", "--no-project", "--with-requirements", ROOT / "recipes/ddp_cifar.py"]
    command += ["python", "-c", ""]
    run(command, tmp_path, UV_OFFLINE="1", UV_CACHE_DIR=tmp_path / "cache", VIRTUAL_ENV=sys.prefix)
