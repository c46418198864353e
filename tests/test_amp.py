"""Mixed precision: what was asked for is what happens, and a gradient that overflows harms
nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ACCELERATE,
    CONFIGS,
    ROOT,
    answers,
    forked,
    load,
    run,
    the_error_line,
    train_forked,
)
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/amp_cifar.py"
recipe = load(RECIPE)
FLAGS = [
    "--data",
    "synthetic",
    "--model",
    "simple_cnn",
    "--cpu",
    "--max-steps",
    "2",
    "--log-every",
    "1",
]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return answers("overflow", [1], tmp_path_factory.mktemp("scaled"))[1]


def test_an_overflow_skips_one_step_halves_the_scale_and_leaves_weights_and_schedule_alone(scaled):
    first, second, overflow, fourth = scaled["steps"]
    assert [step["skipped"] for step in (first, second, overflow, fourth)] == [
        False,
        False,
        True,
        False,
    ]
    assert (first["scale"], second["scale"], overflow["scale"], fourth["scale"]) == (
        1024,
        1024,
        512,
        512,
    )
    assert first["moved"] > 0 and second["moved"] > 0 and fourth["moved"] > 0
    assert overflow["moved"] == 0
    rates = [step["learning_rate"] for step in (first, second, overflow, fourth)]
    assert rates == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 4])
    for step, scale, skipped in (
        (first, 1024, 0),
        (second, 1024, 0),
        (overflow, 512, 1),
        (fourth, 512, 1),
    ):
        assert step["told"] == {"loss_scale": scale, "skipped_steps": skipped}


def test_clipping_acts_on_the_unscaled_norm(scaled):
    norms = scaled["norms"]
    # The learning rate is 1, so the update's norm is the gradient's; scaled it would be 1024 times
    # as much.
    assert 0.1 < norms["None"] < 10
    assert norms["0.01"] == pytest.approx(0.01, rel=1e-3)
    assert norms["told"] == pytest.approx(norms["None"], rel=1e-3), "the norm before clipping"


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
    """Not bf16, which is the default here: the config's fp16 cannot be had on CPU, and the launcher
    passes it on."""
    path = tmp_path / "fp16.yaml"
    path.write_text(
        CONFIGS[1].read_text().replace("mixed_precision: 'no'", "mixed_precision: 'fp16'")
    )
    launch = [ACCELERATE, "launch", "--config_file", path, RECIPE, *FLAGS]
    line = the_error_line(run(launch, cwd=tmp_path, check=False))
    assert line == "amp_cifar: error: fp16 needs a GPU, on CPU choose --precision bf16"


NO_GPU = "error: fp16 needs a GPU, on CPU choose --precision bf16"
FP8 = "error: mixed_precision fp8 in the config: choose --precision bf16 or fp16"
EMULATED = "because this CPU has no bf16 instructions, and would emulate it slowly"
HAS_BF16 = recipe.has_bf16(on_gpu=False)
BY_DEFAULT = ("bf16", "by default") if HAS_BF16 else ("fp32", EMULATED)
CHOICES = {  # what the launcher says by ACCELERATE_MIXED_PRECISION, the flags, what is told
    "config": ("bf16", [], ("bf16", "by the config")),
    "default": ("no", [], BY_DEFAULT),
    "flag": ("no", ["--precision", "bf16"], ("bf16", "by --precision")),
    "flag over config": (
        "fp16",
        ["--precision", "bf16"],
        ("bf16", "by --precision, over the config's fp16"),
    ),
    "fp16 without a GPU": ("no", ["--precision", "fp16"], NO_GPU),
    "fp8": ("fp8", [], FP8),
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
    if isinstance(told, str):
        assert (codes, output) == ([2], f"amp_cifar: {told}\n")
        return
    assert codes == [0], output
    precision, chosen_by = told
    assert output.count(f"  precision: {precision}\n") == 1
    assert output.count(f"  precision_chosen: {chosen_by}\n") == 1
    emulated = precision == "bf16" and not HAS_BF16
    assert output.count("warning: this CPU has no bf16 instructions") == emulated
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["precision"], summary["precision_chosen"]) == told


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "avx2"])
def test_a_cpu_without_bf16_instructions_trains_in_fp32_by_default(capability, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: True})
    args = SimpleNamespace(precision=None, cpu=True)
    expected = ("fp32", EMULATED) if capability == "avx2" else ("bf16", "by default")
    assert recipe.choose_precision(args) == expected


def test_weights_in_16_bits_are_an_error_at_the_start(tmp_path):
    """As those of pretrained models often are: torch would fail at the first fp16 step only."""
    end = '\nif __name__ == "__main__":'
    bf16 = "fp32 = build_model\n\n\ndef build_model(args):\n    return fp32(args).bfloat16()\n"
    script = tmp_path / "mine.py"
    script.write_text(RECIPE.read_text().replace(end, f"\n{bf16}\n{end}"))
    common = {"processes": 1, "script": script, "directory": tmp_path}
    flags = [*FLAGS, "--precision", "bf16"]
    ((codes, output),) = forked([{**common, "flags": flags}], tmp_path)
    assert codes == [2] and "step 1/" not in output
    assert "error: build_model: weights are torch.bfloat16, mixed precision needs fp32" in output
