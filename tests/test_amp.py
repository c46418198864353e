"""Mixed precision: what was asked for is what happens, and a gradient that overflows harms nothing."""

import json

import pytest
import torch
from conftest import ACCELERATE, CONFIGS, ROOT, answers, forked, run, the_error_line, train_forked
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/amp_cifar.py"
FLAGS = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "2", "--log-every", "1"]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return answers("overflow", [1], tmp_path_factory.mktemp("scaled"))[1]


def test_an_overflow_skips_one_step_halves_the_scale_and_leaves_weights_and_schedule_alone(scaled):
    first, second, overflow, fourth = scaled["steps"]
    assert [step["skipped"] for step in (first, second, overflow, fourth)] == [False, False, True, False]
    assert (first["scale"], second["scale"], overflow["scale"], fourth["scale"]) == (1024, 1024, 512, 512)
    assert first["moved"] > 0 and second["moved"] > 0 and fourth["moved"] > 0
    assert overflow["moved"] == 0
    rates = [step["learning_rate"] for step in (first, second, overflow, fourth)]
    assert rates == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 4])
    for step, scale, skipped in ((first, 1024, 0), (second, 1024, 0), (overflow, 512, 1), (fourth, 512, 1)):
        assert step["told"] == {"loss_scale": scale, "skipped_steps": skipped}


def test_clipping_acts_on_the_unscaled_norm(scaled):
    norms = scaled["norms"]
    # The learning rate is 1, so the update's norm is the gradient's; scaled it would be 1024 times as much.
    assert 0.1 < norms["None"] < 10
    assert norms["0.01"] == pytest.approx(0.01, rel=1e-3)


def test_the_precision_asked_for_is_the_one_used(tmp_path):
    flags = ["--max-steps", 5]
    runs = [(1, "amp_cifar", [*flags, "--precision", precision]) for precision in ("fp32", "bf16")]
    fp32, bf16, reference = train_forked(tmp_path, *runs, (1, "ddp_cifar", flags))
    for precision, result in (("fp32", fp32), ("bf16", bf16)):
        losses, expected = ([line["loss"] for line in run.train] for run in (result, reference))
        assert result.summary["precision"] == precision
        assert (losses == expected) == (precision == "fp32")
        assert losses == pytest.approx(expected, abs=0.01)
        assert result.summary["loss_scale"] == 1 and result.summary["skipped_steps"] == 0
        assert all(value.dtype == torch.float32 for value in load_file(result.weights).values())


@pytest.mark.slow
def test_the_config_wins_over_the_default(tmp_path):
    """Not bf16, which is the default here: the config's fp16 cannot be had on CPU, and the launcher passes it on."""
    path = tmp_path / "fp16.yaml"
    path.write_text(CONFIGS[1].read_text().replace("mixed_precision: 'no'", "mixed_precision: 'fp16'"))
    launch = [ACCELERATE, "launch", "--config_file", path, RECIPE, *FLAGS]
    line = the_error_line(run(launch, cwd=tmp_path, check=False))
    assert line == "amp_cifar: error: fp16 needs a GPU, on CPU choose --precision bf16"


CHOICES = {  # what the launcher says by ACCELERATE_MIXED_PRECISION, the flags, what is told
    "config": ("bf16", [], "by the config"),
    "default": ("no", [], "by default"),
    "flag": ("no", ["--precision", "bf16"], "by --precision"),
    "flag over config": ("fp16", ["--precision", "bf16"], "by --precision, over the config's fp16"),
    "fp16 without a GPU": ("no", ["--precision", "fp16"], "error: fp16 needs a GPU, on CPU choose --precision bf16\n"),
    "fp8": ("fp8", [], "error: mixed_precision fp8 in the config: choose --precision bf16 or fp16\n"),
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    directory, runs = tmp_path_factory.mktemp("chosen"), []
    for case, (config, flags, _) in CHOICES.items():
        flags = [*FLAGS, "--output-dir", case, *flags]
        run = {"processes": 1, "script": RECIPE, "directory": directory, "flags": flags}
        runs.append({**run, "env": {"ACCELERATE_MIXED_PRECISION": config}})
    answers = dict(zip(CHOICES, forked(runs, directory, together=2), strict=True))
    return {case: (directory / case, *answer) for case, answer in answers.items()}


@pytest.mark.parametrize("case", CHOICES)
def test_who_chose_the_precision_is_told(chosen, case):
    directory, codes, output = chosen[case]
    told = CHOICES[case][2]
    assert codes == [2 if told.startswith("error") else 0], output
    if told.startswith("error"):
        assert output == f"amp_cifar: {told}"
    else:
        assert output.count("  precision: bf16\n") == output.count(f"  precision_chosen: {told}\n") == 1
        assert json.loads((directory / "summary.json").read_text())["precision_chosen"] == told
