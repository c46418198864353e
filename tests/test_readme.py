"""The README says what the recipes do: flags, differences, commands, functions, make targets."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from conftest import ROOT, load, train_forked
from make_results import (
    LONG,
    PAGES,
    RESULTS,
    SCREEN,
    accuracy_table,
    curve,
    filled,
    launch_line,
    screen,
    short,
)
from safetensors.torch import load_file, save_file
from test_recipes import RECIPES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

README, MEASUREMENTS = (page.read_text() for page in PAGES)
ADAPTING = (ROOT / "recipes/README.md").read_text()
COMMAND = r"(?:^|`)((?:accelerate launch|python|sbatch|torchrun) .*?(?:recipes|benchmarks)/[^`\n]*)"
COMMANDS = {page: set(re.findall(COMMAND, page, re.MULTILINE)) for page in (README, MEASUREMENTS)}


def table_rows(header):
    """The rows of the table under a header line, as lists of cells without backticks."""
    rows = README.partition(f"{header}\n")[2].splitlines()[1:]
    rows = rows[
        : next((index for index, row in enumerate(rows) if not row.startswith("|")), len(rows))
    ]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def documented_flags(recipe):
    """{flag: default} of a recipe, as the README has them."""
    rows = table_rows("| flag | only in | default | meaning |")
    name = recipe.removesuffix("_cifar")
    flags = {
        flag: default
        for flag, recipes, default, _ in rows
        if not recipes or name in recipes.split(", ")
    }
    return flags | {"--output-dir": f"runs/{recipe}"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_flags_are_those_of_help(recipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [recipe, "--help"])
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        load(f"recipes/{recipe}.py").main()
    text = capsys.readouterr().out
    text = re.sub(r"\n {24}", " ", text)  # below a long flag its help begins on a line of its own
    shown = dict(re.findall(r"^  (--[a-z-]+)(.*)$", text, re.MULTILINE))
    documented = documented_flags(recipe)
    assert shown.keys() == documented.keys()
    for flag, default in documented.items():
        (actual,) = re.findall(r"\(default: ([^)]+)\)$", shown[flag]) or [""]
        assert actual == default or "config's" in default, flag


def test_the_differences_shown_are_real():
    section = ADAPTING.partition("## What each recipe changes\n")[2]
    (shown,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    _, *parts = re.split(r"^diff (?=recipes)", shown, flags=re.MULTILINE)
    assert len(parts) == len(RECIPES) - 1
    for part in parts:
        files, *lines = part.splitlines()
        command = ["diff", "--unified=2000", *files.split()]
        difference = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True
        ).stdout.splitlines()
        assert files.startswith("recipes/ddp_cifar.py ") and len(lines) >= 2
        for line in lines:
            assert line in difference, f"no longer a difference: {line}"


def test_the_functions_named_are_there_above_the_machinery():
    story, machinery, _ = (ROOT / "recipes/ddp_cifar.py").read_text().partition("= machinery")
    named = {
        name for names, _ in table_rows("| function | what it does |") for name in names.split(", ")
    }
    assert machinery and named == set(re.findall(r"^def (\w+)", story, re.MULTILINE))


def test_the_result_tables_are_those_of_the_result_files():
    for page, tables in ((README, 2), (MEASUREMENTS, 3)):
        assert filled(page) == page, "run make results"
        assert (
            page.count("<!-- end -->")
            == len(re.findall("<!-- benchmarks/results/", page))
            == tables
        )
    assert (table := (RESULTS / "accuracy.md").read_text()) == accuracy_table(RESULTS / "accuracy")
    shown = re.findall(r"^\| [\d.%, ]+ \| [\d, ]+ \| `accelerate launch .*$", README, re.MULTILINE)
    assert shown and set(shown) <= set(table.splitlines())
    assert (RESULTS / "long.svg").read_text() == curve(LONG, LONG.with_suffix(".jsonl"))
    drawn = screen(SCREEN, SCREEN.with_name("metrics.jsonl"))
    assert (RESULTS / "screen.svg").read_text() == drawn
    assert f"`{launch_line(json.loads(LONG.read_text()))}`" in MEASUREMENTS


def test_a_short_table_has_the_measured_rows():
    table = "| recipe | N |\n| --- | --- |\n| ddp | 1 | 5 | 4-6 |\n| ddp | 2 | 9 | computed | - |"
    content = f"{table}\n\n`python bench.py`\n\n- 2 cores; today.\n- N: processes."
    assert short(content) == table.rpartition("\n")[0] + "\n\n`python bench.py`: 2 cores; today."


def test_a_row_for_each_command_with_all_seeds(tmp_path):
    summary = json.loads(next((RESULTS / "accuracy").glob("*.json")).read_text())
    for seed, accuracy in enumerate((0.3, 0.4, 0.5)):
        content = json.dumps({**summary, "seed": seed, "test_accuracy": accuracy})
        (tmp_path / f"{seed}.json").write_text(content)
    assert "\n| 30.0%, 40.0%, 50.0% | 0, 1, 2 | " in accuracy_table(tmp_path)


@pytest.mark.slow
def test_every_launch_line_trains(tmp_path):
    """Those of the README and at the top of the recipes, each with its own processes and flags, on
    less data; of those with the same flags one, and without the launcher, which test_configs.py
    has."""
    runs, commands = {}, set(COMMANDS[README])
    for path in (ROOT / "recipes").glob("*_cifar.py"):
        commands |= set(re.findall(r"^    (accelerate launch .*)", path.read_text(), re.MULTILINE))
    for command in sorted(commands):
        launchers = (
            r"(?:accelerate launch --config_file accelerate_configs/|torchrun --nproc_per_node )"
        )
        pattern = launchers + r"(\d).*?"
        found = re.fullmatch(pattern + r"(recipes/\w+_cifar.py)(.*)", command)
        # A GPU is needed for fp16, and ResNet-50, which test_pipeline.py cuts, for that cut.
        if not found or "fp16" in command or "--split" in command:
            continue
        processes, recipe, flags = int(found[1]), Path(found[2]).stem, found[3].split()
        given = tuple(
            flag for flag in flags if flag.startswith("--") and flag not in ("--epochs", "--lr")
        )
        flags += ["--data", "synthetic", "--max-steps", "1", "--batch-size", "16"]
        runs.setdefault((processes, recipe, given), (processes, recipe, flags))
    assert len(runs) >= 6
    for (processes, recipe, _), result in zip(
        runs, train_forked(tmp_path, *runs.values()), strict=True
    ):
        assert (result.summary["world_size"], result.summary["recipe"]) == (processes, recipe)


def test_every_other_command_is_one_that_is_run_elsewhere(monkeypatch):
    """By test_bench.py, test_slurm.py, test_hosts.py and test_recipes.py, with these flags or
    others."""
    bench, count = load("benchmarks/bench.py"), 0
    for command in COMMANDS[README] | COMMANDS[MEASUREMENTS]:
        program = re.search(r"(?:recipes|benchmarks)/(\w+\.\w+)", command)[1]
        if program == "bench.py":
            monkeypatch.setattr(sys, "argv", shlex.split(command.partition("benchmarks/")[2]))
            assert bench.parse_args(), command
            count += 1
        elif program not in ("plain_ddp_cifar.py", "submit_job.sh") and not command.startswith(
            "torchrun"
        ):
            assert re.search(r"accelerate_configs/(\dgpu|nodes).yaml ", command), command
    assert count >= 5


def test_the_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (README, MEASUREMENTS, (ROOT / "CONTRIBUTING.md").read_text()):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page, re.MULTILINE))
        assert named and named <= targets
    assert {"bench", "demo", "train"} <= set(
        re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)
    )


def test_the_schedule_is_the_documented_one():
    assert "rises linearly over the first fifth" in README
    recipe = load("recipes/ddp_cifar.py")
    assert [recipe.lr_lambda(step, 10) for step in (0, 1, 9, 10)] == [0.5, 1.0, 0.125, 0.0]


def test_the_loop_before_and_after(tmp_path, monkeypatch):
    """Both sides of the README's diff train, and end with the same model."""
    section = ADAPTING.partition("## From plain PyTorch\n")[2]
    lines = re.search(r"```\n(.*?)```", section, re.DOTALL)[1].splitlines()
    monkeypatch.chdir(tmp_path)
    weights = []
    for sign in "-+":
        torch.manual_seed(0)
        samples = TensorDataset(torch.randn(24, 5), torch.randint(3, (24,)))
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {
            "torch": torch,
            "device": "cpu",
            "epochs": 2,
            "criterion": nn.CrossEntropyLoss(),
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "train_loader": DataLoader(samples, 4),
            "test_loader": DataLoader(samples, 10),
        }
        exec("\n".join(line[1:] for line in lines if line[0] in (" ", sign)), names)
        weights.append(model.weight)
    assert torch.equal(*weights)
    assert torch.equal(
        torch.load("model.pt")["weight"], load_file("weights/model.safetensors")["weight"]
    )


def test_the_weights_load_in_plain_torchvision(tmp_path):
    """As the README says of model.safetensors, with the stem that torchvision has."""
    assert "they load in a plain torchvision model" in README
    recipe = load("recipes/ddp_cifar.py")
    model = recipe.build_model(SimpleNamespace(model="resnet50", stem="imagenet"))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    torchvision.models.resnet50(num_classes=10).load_state_dict(
        load_file(tmp_path / "model.safetensors")
    )


def test_the_readme_is_short():
    assert README.count("\n") <= 300


def test_every_test_file_is_in_the_table_of_behaviours():
    table = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)`", table))
    assert named == {path.name for path in (ROOT / "tests").glob("test_*.py")}
    linked = set(re.findall(r"\[(test_\w+\.py)\]\(tests/\1\)", README))
    assert linked and linked <= named
