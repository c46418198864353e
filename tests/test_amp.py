"""Mixed precision: the precision that was asked for is the one that is used."""

import os
from types import SimpleNamespace

import pytest
import torch
from conftest import CNN, SHORT, Exit, copy, load
from processes import train_forked

recipe = load("recipes/amp_cifar.py", exits=True)


@pytest.mark.parametrize("name", ["amp", "pipeline"])
def test_a_training_in_bf16_follows_that_in_fp32(name, tmp_path):
    script = copy(f"{name}_cifar", tmp_path / "mine.py", *SHORT)
    flags = [*CNN, "--max-steps", 5, "--batch-size", 32, "--precision"]
    fp32, bf16 = train_forked(tmp_path, *((2, script, [*flags, x]) for x in ("fp32", "bf16")))
    assert bf16.summary["test_loss"] == pytest.approx(fp32.summary["test_loss"], abs=0.01)
    for name in ("loss", "grad_norm"):
        values, expected = ([line[name] for line in run.train] for run in (bf16, fp32))
        assert values == pytest.approx(expected, abs=0.01)
        assert values != pytest.approx(expected, abs=1e-5)
    assert [run.summary["precision"] for run in (fp32, bf16)] == ["fp32", "bf16"]
    assert {value.dtype for value in bf16.weights.values()} == {torch.float32}


@pytest.fixture
def choose(monkeypatch):
    """Call `set_precision` for a device that has bf16, or not, with a launch config. The CPU of a
    GPU that has bf16 has none."""

    def call(flag=None, config="no", gpu=False, bf16=True):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", config)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        capabilities = {"avx2": True, "avx512_bf16": bf16 != gpu}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        args = SimpleNamespace(precision=flag, cpu=False)
        recipe.set_precision(args)
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no", "it would refuse the flag's"
        return args.precision

    return call


def test_the_flag_is_taken_before_the_config_and_that_before_what_the_device_has(choose):
    assert choose("fp32", "bf16") == "fp32"
    assert choose(None, "bf16", bf16=False) == "bf16"
    assert choose() == "bf16"
    assert choose(gpu=True) == "bf16"
    assert choose(gpu=True, bf16=False) == "fp16"
    assert choose(gpu=False, bf16=False) == "fp32"
    assert choose(None, "fp16", gpu=True) == "fp16"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"flag": "bf16", "gpu": True, "bf16": False}, "Tesla T4 has no bf16"),
        ({"config": "bf16", "gpu": True, "bf16": False}, "Tesla T4 has no bf16"),
        ({"config": "fp16"}, "this CPU has no fp16"),
        ({"config": "fp8", "gpu": True}, "Tesla T4 has no fp8"),
    ],
)
def test_a_precision_that_cannot_be_had_is_an_error_and_not_another_one(choose, chosen, said):
    with pytest.raises(Exit, match=f"{said}: choose another --precision"):
        choose(**chosen)


def test_cuda_is_not_asked_with_cpu(monkeypatch):
    """Once asked, CUDA sees the GPUs that are hidden afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", pytest.fail)
    recipe.set_precision(SimpleNamespace(precision=None, cpu=True))


def test_weights_in_16_bits_are_no_error_in_fp32_and_where_they_are_frozen():
    model = torch.nn.Linear(2, 2).bfloat16()
    recipe.check_weights_are_fp32(model, "fp32")
    recipe.check_weights_are_fp32(model.requires_grad_(False), "bf16")


@pytest.mark.copied("amp_cifar", flags=["--precision", "fp16"])
def test_a_run_in_fp16_on_a_cpu_is_one_error_line(outcome):
    assert outcome.codes == [2] and "error: this CPU has no fp16: choose" in outcome.output


BF16_WEIGHTS = "return model.to(memory_format=torch.channels_last)", "return model.bfloat16()"


@pytest.mark.copied("amp_cifar", BF16_WEIGHTS, flags=["--precision", "bf16"])
def test_a_run_with_weights_in_16_bits_is_one_error_line(outcome):
    """As those of pretrained models often are: bf16 would round small updates away."""
    assert outcome.codes == [2] and "error: build_model: weights are" in outcome.output
    assert "step 1/" not in outcome.output and "Traceback" not in outcome.output
