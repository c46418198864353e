"""The README says what the recipes do: flags, differences between them, make targets."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torchvision
from conftest import ROOT, forked, load, run
from results import RESULTS, curve, epoch_table, filled, launch_line
from safetensors.torch import load_file, save_file
from test_recipes import RECIPES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

README = (ROOT / "README.md").read_text()
COMMANDS = set(re.findall(r"(?:^|`)((?:accelerate launch|python|sbatch) .*?recipes/[^`\n]*)", README, re.MULTILINE))


def table_rows(header):
    """The rows of the table under a header line, as lists of cells without backticks."""
    rows = README.partition(f"{header}\n")[2].splitlines()[1:]
    rows = rows[: next((index for index, row in enumerate(rows) if not row.startswith("|")), len(rows))]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def documented_flags(recipe):
    """{flag: default} of a recipe, as the README has them."""
    flags = {flag: default for flag, default, _ in table_rows("| flag | default | meaning |")}
    if recipe == "pipeline_cifar":
        del flags["--accumulation-steps"]
    for flag, recipes, default, _ in table_rows("| flag | recipe | default | meaning |"):
        if recipe.removesuffix("_cifar") in recipes.split(", "):
            flags[flag] = default
    return flags | {"--output-dir": f"runs/{recipe}"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_flags_are_those_of_help(recipe):
    text = run([sys.executable, ROOT / f"recipes/{recipe}.py", "--help"], COLUMNS="1000").stdout
    text = re.sub(r"\n {24}", " ", text)  # below a long flag its help begins on a line of its own
    shown = dict(re.findall(r"^  (--[a-z-]+)(.*)$", text, re.MULTILINE))
    documented = documented_flags(recipe)
    assert shown.keys() == documented.keys()
    for flag, default in documented.items():
        (actual,) = re.findall(r"\(default: ([^)]+)\)$", shown[flag]) or [""]
        assert actual == default or default in ("balanced", "all") or "config's" in default, flag


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "ddp_cifar"])
def test_the_differences_shown_are_real(recipe):
    section = README.partition(f"## recipes/{recipe}.py\n")[2].partition("\n## ")[0]
    (shown,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    files = [str(ROOT / f"recipes/{name}.py") for name in ("ddp_cifar", recipe)]
    difference = subprocess.run(["diff", "--unified=2000", *files], capture_output=True, text=True).stdout.splitlines()
    for line in shown.splitlines():
        assert line in difference, f"no longer a difference: {line}"


def test_the_result_tables_are_those_of_the_result_files():
    assert filled(README) == README, "run make results"
    assert (RESULTS / "epoch.md").read_text() == epoch_table(RESULTS / "epoch")
    assert (RESULTS / "long.svg").read_text() == curve(RESULTS / "long")
    assert f"`{launch_line(json.loads((RESULTS / 'long/summary.json').read_text()))}`" in README
    assert README.count("<!-- end -->") == len(re.findall("<!-- bench_results/", README)) >= 3


def test_mean_and_deviation_over_the_seeds(tmp_path):
    summary = json.loads(next((RESULTS / "epoch").glob("*.json")).read_text())
    for seed, accuracy in enumerate((0.3, 0.4, 0.5)):
        content = json.dumps({**summary, "seed": seed, "test_accuracy": accuracy})
        (tmp_path / f"{seed}.json").write_text(content)
    assert " | 0, 1, 2 | 40.0% | 10.0 | 30.0-50.0 | " in epoch_table(tmp_path)


def test_every_launch_line_trains(tmp_path):
    """Each with its own processes and flags, on less data; without the launcher, which test_configs.py has, with the
    lines that have no flags."""
    runs = []
    for command in sorted(COMMANDS):
        pattern = r"accelerate launch --config_file accelerate_configs/(\d)gpu.yaml (recipes/\w+_cifar.py)(.*)"
        found = re.fullmatch(pattern, command)
        if not found or not found[3] or command.endswith("GPUs"):
            continue
        processes, script, flags = int(found[1]), str(ROOT / found[2]), found[3].split()
        flags += ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "1"]
        directory = tmp_path / str(len(runs))
        directory.mkdir()
        runs.append({"processes": processes, "script": script, "flags": flags, "directory": directory})
    assert len(runs) >= 10
    for described, (codes, output) in zip(runs, forked(runs, tmp_path), strict=True):
        assert codes == [0] * described["processes"], output


def test_every_other_command_is_one_that_is_run_elsewhere(monkeypatch):
    """By test_bench.py, test_slurm.py, test_hosts.py and test_recipes.py, with these flags or others."""
    bench, count = load("recipes/bench.py"), 0
    for command in COMMANDS:
        program = re.search(r"recipes/(\w+\.\w+)", command)[1]
        if program == "bench.py":
            monkeypatch.setattr(sys, "argv", shlex.split(command.partition("recipes/")[2]))
            assert bench.parse_args(), command
            count += 1
        elif program not in ("plain_ddp_cifar.py", "submit_job.sh"):
            assert re.search(r"accelerate_configs/(\dgpu|nodes).yaml ", command), command
    assert count >= 5


def test_the_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"bench", "demo", "test", "train"} <= named <= targets


def test_the_schedule_is_the_documented_one():
    assert "rises linearly over the first fifth" in README
    recipe = load("recipes/ddp_cifar.py")
    assert [recipe.learning_rate_factor(step, 10) for step in (0, 1, 9, 10)] == [0.5, 1.0, 0.125, 0.0]


def test_the_loop_before_and_after(tmp_path, monkeypatch):
    """Both sides of the README's diff train, and end with the same model."""
    section = README.partition("## From your own loop to Accelerate\n")[2]
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
    assert torch.equal(torch.load("model.pt")["weight"], load_file("weights/model.safetensors")["weight"])


def test_the_weights_load_in_plain_torchvision(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "runs/ddp_cifar/model.safetensors"
    weights.parent.mkdir(parents=True)
    save_file(torchvision.models.resnet50(num_classes=10).state_dict(), weights)
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(snippet, {})
    assert 0 <= int(capsys.readouterr().out) < 10
