"""Mixed precision: what was asked for is what happens, and a gradient that overflows harms nothing."""

import pytest
import torch
from conftest import (
    ACCELERATE,
    CONFIGS,
    REAL_DATA,
    ROOT,
    answer,
    needs_real_data,
    run,
    the_error_line,
    train,
    train_forked,
)
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/amp_cifar.py"
FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "2", "--log-every", "1"]


def config_with(precision, tmp_path):
    path = tmp_path / f"{precision}.yaml"
    path.write_text(CONFIGS[1].read_text().replace("mixed_precision: 'no'", f"mixed_precision: '{precision}'"))
    return path


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return answer("overflow", 1, tmp_path_factory.mktemp("scaled"))


def test_an_overflow_skips_one_step_halves_the_scale_and_leaves_weights_and_schedule_alone(scaled):
    first, second, overflow, fourth = scaled["steps"]
    assert [step["skipped"] for step in (first, second, overflow, fourth)] == [False, False, True, False]
    assert (first["scale"], second["scale"], overflow["scale"], fourth["scale"]) == (1024, 1024, 512, 512)
    assert first["moved"] > 0 and second["moved"] > 0 and fourth["moved"] > 0
    assert overflow["moved"] == 0
    rates = [step["learning_rate"] for step in (first, second, overflow, fourth)]
    assert rates == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 4])


def test_clipping_acts_on_the_unscaled_norm(scaled):
    norms = scaled["norms"]
    # The learning rate is 1, so the update's norm is the gradient's; scaled it would be 1024 times as much.
    assert 0.1 < norms["None"] < 10
    assert norms["0.01"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_precision_asked_for_is_the_one_used(precision, tmp_path):
    amp = (1, "amp_cifar", ["--precision", precision, "--max-steps", 5])
    result, reference = train_forked(tmp_path, amp, (1, "ddp_cifar", ["--max-steps", 5]))
    losses, expected = ([line["loss"] for line in run.train] for run in (result, reference))
    assert result.summary["precision"] == precision
    assert (losses == expected) == (precision == "fp32")
    assert losses == pytest.approx(expected, abs=0.01)
    assert result.summary["loss_scale"] == 1 and result.summary["skipped_steps"] == 0
    assert all(value.dtype == torch.float32 for value in load_file(result.weights).values())


def test_the_command_line_wins_over_the_config_and_the_panel_says_so(tmp_path):
    launch = [ACCELERATE, "launch", "--config_file", config_with("fp16", tmp_path), RECIPE, *FLAGS]
    process = run([*launch, "--precision", "bf16"], cwd=tmp_path)
    assert "precision: bf16\n" in process.stdout
    assert "precision_chosen: by --precision, over the config's fp16\n" in process.stdout


def test_the_config_wins_over_the_default(tmp_path):
    launch = [ACCELERATE, "launch", "--config_file", config_with("bf16", tmp_path), RECIPE, *FLAGS]
    assert "precision_chosen: by the config\n" in run(launch, cwd=tmp_path).stdout


@pytest.mark.parametrize("flags", [["--precision", "fp16"], []])
def test_fp16_without_a_gpu_is_refused(flags, tmp_path):
    launch = [ACCELERATE, "launch", "--config_file", config_with("no" if flags else "fp16", tmp_path), RECIPE, *FLAGS]
    line = the_error_line(run([*launch, *flags], cwd=tmp_path, check=False))
    assert line == "amp_cifar: error: fp16 needs a GPU, on CPU choose --precision bf16"


@needs_real_data
def test_bf16_follows_fp32_over_a_hundred_steps_of_cifar10(tmp_path):
    flags = ["--data", "cifar10", "--data-dir", REAL_DATA, "--max-steps", 100, "--batch-size", 64, "--lr", 0.2]
    bf16, fp32 = (
        train(2, tmp_path / precision, *flags, "--precision", precision, recipe="amp_cifar")
        for precision in ("bf16", "fp32")
    )
    losses, expected = ([line["loss"] for line in run.train] for run in (bf16, fp32))
    assert len(losses) == 100 and expected[-1] < expected[0] - 0.2
    assert losses == pytest.approx(expected, abs=0.02)
