"""Flags and files that are wrong: one line that says so, and status 2. Most are told by a function
that is called here with an `exit_with_error` that raises an exception; the others by processes."""

import pickle
import sys
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from conftest import ACCELERATE, CNN, CONFIGS, Exit, load
from processes import ROOT, forked, launch
from safetensors.torch import save_file

RECIPE = ROOT / "recipes/ddp_cifar.py"
recipe = load(RECIPE, exits=True)

FLAGS = {
    "a flag that does not exist": ("--bath-size 4", "unrecognized arguments: --bath-size 4"),
    "a timeout that never comes": ("--hang-timeout inf", "--hang-timeout: inf is not above 0"),
    "a learning rate that is not a number": ("--lr nan", "argument --lr: nan is not above 0"),
    "negative epochs": ("--epochs -1", "argument --epochs: -1 is below 0"),
    "no global batch": ("--global-batch-size 0", "argument --global-batch-size: 0 is not"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_wrong_flag_is_one_line_that_names_it(case, monkeypatch):
    flags, said = FLAGS[case]
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", *flags.split()])
    with pytest.raises(Exit) as error:
        recipe.parse_args("", recipe.add_flags, recipe.add_technique_flags)
    assert said in str(error.value).replace("'", "")


def test_a_copys_own_defaults_and_flags_win(monkeypatch, capsys):
    def add_flags(parser):
        parser.set_defaults(epochs=3)
        parser.add_argument("--lr", type=float, default=3e-4, help="peak rate of AdamW")

    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", "--seed", "1"])
    args = recipe.parse_args("", recipe.add_technique_flags, add_flags)
    assert [args.epochs, args.lr, args.seed] == [3, 3e-4, 1]
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", "--help"])
    with pytest.raises(SystemExit):
        recipe.parse_args("", recipe.add_technique_flags, add_flags)
    told = capsys.readouterr().out
    assert (
        "passes (3)" in told and "peak rate of AdamW" in told and "see make_optimizer" not in told
    )


def test_a_launcher_that_is_told_to_use_the_cpu_is_heard_if_it_starts_all_processes(monkeypatch):
    """As `accelerate launch --cpu --num_processes 2` does not: it sets a port, and starts one."""
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py"])
    parse = partial(recipe.parse_args, "", recipe.add_flags, recipe.add_technique_flags)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert parse().cpu
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(Exit, match="give --cpu to the recipe alone"):
        parse()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert not parse().cpu


def test_an_output_directory_that_cannot_be_written_is_one_line(tmp_path):
    one = {"processes": 1, "script": RECIPE, "directory": tmp_path}
    directories = [f"{RECIPE}/runs", "/proc/nowhere"]
    runs = [{**one, "flags": [*CNN, "--output-dir", directory]} for directory in directories]
    for directory, (codes, output) in zip(directories, forked(runs, tmp_path), strict=True):
        (line,) = output.splitlines()
        assert codes == [1] and line.startswith("ddp_cifar: error: ") and directory in line


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")


def test_cifar10_that_is_missing_or_damaged_is_one_line(tmp_path, no_network, monkeypatch):
    accelerator = MagicMock()
    with pytest.raises(Exit, match=f"--data-dir {tmp_path}: .*: use --data synthetic"):
        recipe.cifar10(tmp_path, accelerator)
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        assert first().__enter__.called, "where machines share a directory, and where not"

    def read(*_, **__):
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(recipe.torchvision.datasets, "CIFAR10", read)
    with pytest.raises(Exit, match=r"--data-dir x: File not found or corrupted\.: use --data syn"):
        recipe.cifar10("x", accelerator)


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_weights_of_which_nothing_can_be_loaded_are_an_error_and_run_no_code(tmp_path, capsys):
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(Exit, match=f"argument --weights: cannot load {path}"):
        recipe.load_weights(model(), str(path))
    assert "executed" not in capsys.readouterr().out
    path = tmp_path / "misfit.safetensors"
    save_file({"0.weight": torch.zeros(7, 4), "body": torch.zeros(3, 4)}, path)
    with pytest.raises(Exit, match=f"argument --weights: .*{path} .* it has 0.weight, body"):
        recipe.load_weights(model(), str(path))


def test_weights_of_a_wrapped_model_load_whole_from_a_checkpoint(tmp_path, capsys):
    """As DDP and `torch.compile` name them in their state dicts."""
    saved = model().state_dict()
    states = {"model": {f"_orig_mod.module.{name}": x for name, x in saved.items()}}
    states["optimizer"] = {"state": {0: torch.ones(3)}}
    torch.save({"buffers": {}, "states": states}, tmp_path / "weights.pt")
    loaded = recipe.load_weights(model(), str(tmp_path / "weights.pt")).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    assert "loaded 4 of 4 tensors" in capsys.readouterr().err


def test_weights_with_the_head_of_another_task_load_as_far_as_they_fit(tmp_path, capsys):
    saved = {**model().state_dict(), "1.weight": torch.zeros(7, 3), "1.bias": torch.zeros(7)}
    save_file(saved, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    mine = model()
    head = mine[1].weight.clone()
    recipe.load_weights(mine, str(tmp_path / "weights.safetensors"))
    assert torch.equal(mine[0].weight, saved["0.weight"]) and torch.equal(mine[1].weight, head)
    said = capsys.readouterr().err
    assert "loaded 2 of 4 tensors" in said and "1.weight" in said and "1.bias" in said


@pytest.mark.slow
def test_the_last_lines_on_the_screen_are_the_error():
    """The launcher prints 40 lines after those of the recipe."""
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[2], RECIPE, *CNN, "--lr", 0]
    process = launch(command, check=False)
    lines = process.stderr.strip().splitlines()
    assert process.returncode and "argument --lr: 0.0 is not above 0" in lines[-2], process.stderr
    assert len(lines) > 20 and lines[0] == "ddp_cifar: error: argument --lr: 0.0 is not above 0"
    assert "warning" not in process.stderr.lower() and "error_handler" not in process.stderr


PROCESSES = {"processes": 2, "script": RECIPE, "grace": 0.5, "terminate": True}


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once(tmp_path, no_network):
    """Before and in a process group. As the launcher does, the test ends all of them as soon as one
    has exited: also those that do not know of the error yet."""
    missing = [*CNN, "--data", "cifar10", "--data-dir", "nowhere"]
    said = {"argument --lr: ": [*CNN, "--lr", "fast"], "--data-dir nowhere": missing}
    runs = [{**PROCESSES, "flags": flags, "directory": tmp_path} for flags in said.values()]
    for words, (codes, output) in zip(said, forked(runs, tmp_path, together=2), strict=True):
        assert codes[0] == 2 and codes[1] in (2, -15), output
        assert output.startswith("ddp_cifar: error: ") and words in output
        assert output.count("error: ") == 1 and "Traceback" not in output, output
