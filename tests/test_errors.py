"""What a person gets wrong: one line that says so and what to type instead, and an exit code that is not 0."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT, launch, run, the_error_line

RECIPE = ROOT / "recipes/ddp_cifar.py"
SYNTHETIC = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "1"]

CASES = {
    "no epochs": (["--epochs", "0"], ["--epochs", "0", "above 0"]),
    "negative batch": (["--batch-size", "-4"], ["--batch-size", "-4", "above 0"]),
    "no steps": (["--max-steps", "0"], ["--max-steps", "above 0"]),
    "no accumulation": (["--accumulation-steps", "0"], ["--accumulation-steps", "above 0"]),
    "infinite learning rate": (["--lr", "inf"], ["--lr", "inf"]),
    "learning rate that is no number": (["--lr", "fast"], ["--lr", "fast"]),
    "nan learning rate": (["--lr", "nan"], ["--lr", "nan"]),
    "negative seed": (["--seed", "-1"], ["--seed", "-1"]),
    "endless seed": (["--seed", str(2**70)], ["--seed", "below 4294967296"]),
    "half an epoch": (["--epochs", "0.5"], ["--epochs", "0.5"]),
    "no logging": (["--log-every", "-1"], ["--log-every", "above 0"]),
    "unknown model": (["--model", "resnet51"], ["--model", "resnet51", "resnet50", "simple_cnn"]),
    "unknown data": (["--data", "imagenet"], ["--data", "imagenet", "synthetic"]),
    "unknown stem": (["--stem", "tiny"], ["--stem", "tiny", "cifar", "imagenet"]),
    "unknown flag": (["--bath-size", "4"], ["--bath-size"]),
    "batch above the data": (["--batch-size", "100000"], ["5120 training samples", "--batch-size"]),
    "output under a file": (["--output-dir", f"{RECIPE}/runs"], ["--output-dir", "choose another"]),
    "output in nowhere": (["--output-dir", "/proc/nowhere"], ["--output-dir", "choose another"]),
    "no data": (["--data", "cifar10", "--data-dir", "nowhere"], ["--data-dir nowhere", "--data synthetic"]),
    "data under a file": (["--data", "cifar10", "--data-dir", f"{RECIPE}/x"], ["--data-dir", "--data synthetic"]),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """All cases, two at a time: most of their time is the import of torch."""

    def refused(case):
        # No route to the network: a download must fail here as it does on a machine without one.
        command = [sys.executable, RECIPE, *SYNTHETIC, *CASES[case][0]]
        return run(command, cwd=tmp_path_factory.mktemp("case"), check=False, https_proxy="http://127.0.0.1:9")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(refused, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(refusals, case):
    line = the_error_line(refusals[case])
    assert all(word in line for word in CASES[case][1]), line
    assert "Traceback" not in refusals[case].stderr
    assert refusals[case].returncode == 2


def test_refused_once_by_four_processes(tmp_path):
    process = launch(4, RECIPE, *SYNTHETIC, "--epochs", "0", cwd=tmp_path, check=False)
    assert "--epochs" in the_error_line(process)


def test_missing_data_is_told_once_by_two_processes(tmp_path):
    flags = ["--data", "cifar10", "--data-dir", tmp_path / "nowhere", "--cpu"]
    process = launch(2, RECIPE, *flags, cwd=tmp_path, check=False, https_proxy="http://127.0.0.1:9")
    assert "--data synthetic" in the_error_line(process)


def test_processes_that_do_not_see_each_other_are_refused(tmp_path):
    process = run([sys.executable, RECIPE, *SYNTHETIC], cwd=tmp_path, check=False, SLURM_STEP_NUM_TASKS="4")
    line = the_error_line(process)
    assert "4 processes were started but this one sees 1" in line and "accelerate launch" in line


def test_more_processes_than_gpus_are_refused_before_any_collective(tmp_path):
    """A machine with one GPU, as far as the recipe can tell; a collective would wait for the other rank for ever."""
    fake = tmp_path / "sitecustomize.py"
    fake.write_text(
        "import torch\n"
        "torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1\n"
        "def forbidden(*args, **kwargs):\n    raise AssertionError('a process group was started')\n"
        "torch.distributed.init_process_group = forbidden\n"
    )
    flags = [flag for flag in SYNTHETIC if flag != "--cpu"]
    launched = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    process = run([sys.executable, RECIPE, *flags], cwd=tmp_path, check=False, PYTHONPATH=str(tmp_path), **launched)
    line = the_error_line(process)
    assert "2 processes but 1 GPU" in line and "--num_processes 1" in line and "--cpu" in line
    assert not Path(tmp_path, "runs/ddp_cifar/summary.json").exists()
