"""The pages are true: their links, flags, commands, excerpts and figures."""

import argparse
import inspect
import json
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import new
import pytest
import torch
from accelerate import Accelerator
from composed import write_photos
from conftest import CNN, SHORT, assert_same_training, copy, load, project
from processes import ROOT, forked, outputs, run, train_forked, write_programs
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATHS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
PAGES = {path.name: path.read_text() for path in PATHS}
MEASUREMENTS = (ROOT / "benchmarks/README.md").read_text()
README, RUNNING, FAILURES, ADAPTING, PORTING = (
    PAGES[f"{name}.md"] for name in ("README", "running", "failures", "adapting", "porting")
)
EVERYTHING = "\n".join(PAGES.values())
RECIPES = ["ddp", "amp", "pipeline", "sharded", "data_parallel"]


def code(page, title, language=""):
    """Return the lines of the first block of code below a heading."""
    pattern = rf"^#+ {title}\n.*?^```{language}\n(.*?)^```$"
    return re.search(pattern, page, re.DOTALL | re.MULTILINE)[1].splitlines()


def rows(page, header):
    """Return the cells of the table below a line that begins like this, without backticks."""
    _, _, *lines = page[page.index(header) :].partition("\n\n")[0].splitlines()
    return [[cell.strip().replace("`", "") for cell in x.strip("|").split("|")] for x in lines]


def parser_of(path):
    """Return the ArgumentParser of a program, whose `error` raises an AssertionError."""
    parsers = []

    def keep(parser, *_):
        parsers.append(parser)
        sys.exit(0)

    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", keep)
        load(path).main()
    parsers[0].error = pytest.fail
    return parsers[0]


PARSERS = {recipe: parser_of(f"recipes/{recipe}_cifar.py") for recipe in RECIPES}
PROGRAMS = [*PARSERS.values(), *map(parser_of, ("tools/check.py", "tools/new.py"))]


@pytest.mark.parametrize("page", [*PATHS, ROOT / "benchmarks/README.md"], ids=str)
def test_every_link_and_anchor_resolves(page):
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings]
            assert anchor in slugs, link


def test_the_flags_that_a_resumed_run_may_change():
    """But for those that say where a run resumes, or starts."""
    text = re.search(r"These flags may change: (.*?) Any other", FAILURES, re.DOTALL)[1]
    named = {*re.findall(r"--[a-z-]+", text)} - {"--global-batch-size"}
    free = set()
    for recipe in ("ddp", "pipeline", "sharded"):
        module = load(f"recipes/{recipe}_cifar.py")
        own = re.findall(r"run.may_differ = \{(.*)\}", inspect.getsource(module.main))
        free |= {*module.Checkpoints.may_differ.split(), *re.findall(r"\w+", str(own))}
    actions = [action for parser in PROGRAMS for action in parser._actions]
    assert all(x.help for x in actions) and all(x.description for x in PROGRAMS)
    chosen = {"data", "model", "precision", "schedule", "stem"}
    chosen = [action for action in actions if action.dest in chosen]
    others = [x.default for x in chosen if x.default not in x.choices]
    assert others == [None], "amp chooses by the device"
    free &= {action.dest for action in actions}
    free = {"--" + name.replace("_", "-") for name in free}
    assert named == free - {"--output-dir", "--weights"}


def test_every_command_names_files_and_flags_that_are_there():
    text = EVERYTHING.replace("\\\n", " ")
    file = r"(?:recipes|clusters|benchmarks|accelerate_configs)/\w+\.\w+"
    commands = re.findall(r"(?:accelerate launch|torchrun|python|sbatch) [^`\n]*", text)
    parsed = 0
    for command in commands:
        for path in re.findall(file, command):
            assert (ROOT / path).exists(), command
        if found := re.search(r"recipes/(\w+)_cifar\.py(.*)", command):
            PARSERS[found[1]].parse_args(shlex.split(found[2]))
            parsed += 1
    assert parsed >= 12


def test_the_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", EVERYTHING, re.MULTILINE))
    assert {"bench", "demo", "train", "test"} <= named <= targets


def test_the_excerpt_on_the_front_page_is_of_the_file():
    lines = iter((ROOT / "recipes/ddp_cifar.py").read_text().splitlines())
    shown = [x for x in code(README, "A recipe", "python") if x.strip() not in ("", "...")]
    assert len(shown) > 7
    for line in shown:
        assert line in lines, f"not there, or not in this order: {line}"


def test_the_list_of_examples_is_that_of_make_new():
    assert f"```\n{new.titles()}\n```" in ADAPTING


def test_the_differences_shown_are_real():
    shown = "\n".join(code(ADAPTING, "What each recipe changes", "diff"))
    _, *parts = shown.split("diff recipes/")
    assert len(parts) == len(RECIPES) - 1
    for part in parts:
        files, *lines = part.strip().splitlines()
        command = ["diff", "--unified=2000", *f"recipes/{files}".split()]
        result = run(command, check=False)  # they differ
        assert lines and set(lines) <= set(result.stdout.splitlines()), files


def test_the_loop_before_and_after_trains_the_same_model(tmp_path, monkeypatch):
    lines = code(PORTING, "A loop of your own", "diff")
    monkeypatch.chdir(tmp_path)
    weights = []
    for sign in "-+":
        torch.manual_seed(0)
        samples = TensorDataset(torch.randn(24, 5), torch.randint(3, (24,)))
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"torch": torch, "Accelerator": Accelerator, "device": "cpu", "model": model}
        names |= {"criterion": nn.CrossEntropyLoss(), "optimizer": optimizer}
        names["train_loader"] = DataLoader(samples, 4)
        names["test_loader"] = DataLoader(samples, 10)
        exec("\n".join(line[1:] for line in lines if line[0] in (" ", sign)), names)
        weights.append(model.weight)
    assert torch.equal(*weights)
    saved = load_file("weights/model.safetensors")["weight"]
    assert torch.equal(torch.load("model.pt")["weight"], saved)


def test_a_plain_script_and_the_copy_that_it_becomes_have_the_same_losses(
    tmp_path, monkeypatch, capsys
):
    """In float64, on a small network, without shuffling and flips: these draw other numbers."""
    monkeypatch.chdir(write_photos(tmp_path, 24))
    for kind in ("train", "test"):
        files = sorted(map(str, tmp_path.glob(f"{kind}/*/*.png")))
        rows = [{"file": x, "labels": [i % 2, i // 2 % 2, 0, 1, 1]} for i, x in enumerate(files)]
        Path(f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    network = "nn.Sequential(nn.Conv2d(3, 8, 9, 8), nn.BatchNorm2d(8), nn.Flatten(), "
    network += "nn.Linear(392, 5)).double()"
    changes = [("torchvision.models.resnet18(num_classes=5)", network), ("float32", "float64")]
    changes += [("shuffle=True", "shuffle=False"), ("Flip()", "Flip(0.0)")]
    changes += [("num_workers=4", "num_workers=0"), ('"num_workers": 4', '"num_workers": 0')]
    changes += [(", 64, ", ", 6, "), ("batch_size=64", "batch_size=6"), ("range(10)", "range(2)")]
    changes += [("10 * len", "2 * len"), ("epochs=10", "epochs=2")]
    changes += [("\noptimizer", '\ntorch.save(model.state_dict(), "first.pt")\noptimizer')]
    plain, ours = re.findall(r"^```python\n(.*?)^```$", PORTING, re.M | re.S)
    above, _, _ = plain.partition("\ndevice = ")
    functions = f"{above}\n{ours}"
    for before, after in changes:
        assert before in plain + ours
        plain, functions = (x.replace(before, after) for x in (plain, functions))
    exec(plain, {})
    losses = [float(line) for line in capsys.readouterr().out.splitlines() if "mAP" not in line]
    text = new.compose(new.RECIPES["ddp"], "mine.py", "ddp", ["ema", "best_weights"])
    assert text.count("\ndef main():") == 1
    Path("mine.py").write_text(text.replace("\ndef main():", f"\n{functions}\ndef main():"))
    flags = ["--photos", tmp_path, "--weights", tmp_path / "first.pt", "--cpu"]
    (result,) = train_forked(tmp_path, (1, tmp_path / "mine.py", flags))
    assert len(losses) == 6 and sum(losses[3:]) < sum(losses[:3]), "of the same samples"
    assert [line["loss"] for line in result.train] == pytest.approx(losses, rel=1e-8)
    assert 0 <= result.evaluations[-1]["test_map"] <= 1


@pytest.mark.slow
def test_a_rate_by_the_evaluations_is_resumed_exactly(tmp_path):
    """As the page has it. The run ends in an evaluation, after one that has changed the rate."""
    plateau, rule = re.findall(r"^```python\n(.*?)^```$", ADAPTING, re.M | re.S)
    text = project("resume") + f"\n{plateau}\n\ndef make_optimizer(model, args, total_steps):\n"
    text += "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)\n"
    text += "    return optimizer, Plateau(optimizer)\n"
    evaluation = '            run.metrics.write("evaluation", evaluate(run, model, test_loader))\n'
    lines = *SHORT, (evaluation, evaluation + rule)
    script = copy("ddp_cifar", tmp_path / "mine.py", *lines, project=text)
    flags = [*CNN, "--batch-size", 32, "--lr", 3, "--max-steps", 12, "--evaluate-every", 3]
    flags += ["--log-every", 1, "--checkpoint-every", 2, "--output-dir"]
    one = {"processes": 2, "script": script, "directory": tmp_path}
    broken = {**one, "flags": [*flags, "broken"]}
    runs = [{**one, "flags": [*flags, "whole"]}, {**broken, "env": {"ENDS": "9"}}, broken]
    codes = [{*codes} for codes, _ in forked(runs, tmp_path)]
    assert codes == [{0}, {7}, {0}]
    whole, broken = (outputs(tmp_path / x) for x in ("whole", "broken"))
    assert (whole.summary["resumed_from"], broken.summary["resumed_from"]) == (0, 9)
    rates = [line["learning_rate"] for line in whole.train]
    assert len({*rates[:9]}) > 1 and len({*rates}) > 2, "or it would prove nothing"
    assert_same_training(broken, whole, 0)


@pytest.mark.slow
def test_the_page_names_all_metrics_and_files_of_a_run_and_uses_it(tmp_path, monkeypatch):
    script = copy("ddp_cifar", tmp_path / "mine.py", *SHORT)
    [result] = train_forked(tmp_path, (2, script, [*CNN, "--batch-size", 64, "--epochs", 1]))
    names = {x for row in rows(RUNNING, "| name in") for x in row[0].split(", ")}
    lines = [*result.train, *result.evaluations]
    assert len(lines) == 3 and not set().union(*lines) - names
    files = {row[0] for row in rows(RUNNING, "| file |")}
    numbered = {"step-00000002.pt", "mine.from-00000000.py"}
    assert {x.name for x in result.directory.iterdir()} - files == numbered
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    program = "\n".join(code(RUNNING, "Use a trained copy", "python"))
    assert "runs/mine" in program
    exec(program.replace("runs/mine", str(result.directory)), {})
    assert Path("model.pt2").exists()


RESULTS = ROOT / "benchmarks/results"


def test_the_figures_on_the_front_page_are_those_of_the_results():
    """Those of the demo are in the summary.json that `make demo` has written."""
    fast, small, *_ = map(json.loads, (RESULTS / "accuracy.jsonl").read_text().splitlines())
    demo = json.loads((RESULTS / "demo.json").read_text())
    of_h200 = json.loads((RESULTS / "nvidia-h200-x1.json").read_text())["configurations"]
    speeds = {x["recipe"]: f"{x['samples_per_second']:,.0f}" for x in of_h200}
    seconds = int(re.search(r"From launch to exit it took (\d+) seconds", MEASUREMENTS)[1])
    figures = [
        f"{speeds['amp_cifar --compile']} images/s, and {speeds['plain_ddp --tuned']} (one H200",
        f"trained it to {100 * fast['test_accuracy']:.1f}%, ",
        f" in {seconds / 60:.1f} minutes on one H200",
        f" cost {seconds / 3600 * 400:.0f} cents at 4 dollars an hour",
        f" reached {100 * small['test_accuracy']:.1f}% in",
        f" in {small['seconds'] / 60:.0f} minutes on two busy cores",
        f" to a test accuracy of {demo['test_accuracy']:.3g}, ",
    ]
    front_page = " ".join(README.split())
    assert [x for x in figures if x not in front_page] == []
    command = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    flags = dict(re.findall(r"--([a-z-]+) (\w\S*)", command.partition(".py")[2]))
    assert flags and flags == {name: str(demo[name.replace("-", "_")]) for name in flags}


def test_the_oldest_versions_are_tested():
    listed = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2]
    bounds = re.findall(r'"(torch\w*|accelerate) >= (.*)"', listed.partition("]")[0])
    pins = (ROOT / "constraints-oldest.txt").read_text()
    assert len(bounds) == 3 and all(f"\n{name}=={bound}.0\n" in pins for name, bound in bounds)


@pytest.mark.parametrize(("gpus", "how"), [(0, "1gpu.yaml"), (3, "2gpu.yaml --num_processes 3")])
def test_make_train_starts_one_process_per_gpu(gpus, how, tmp_path):
    """The launcher is a stand-in."""
    path = write_programs(tmp_path, ready="", sleep="", python=f"echo {gpus}", accelerate="")
    command = ["make", "train", f"BIN={tmp_path}", f"RUN={tmp_path / 'ready'}", "ARGS=--keep 1"]
    process = run(command, PATH=path)
    assert process.stderr.strip().endswith(f"{how} recipes/amp_cifar.py --keep 1")
