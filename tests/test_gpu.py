"""The recipes on one or two GPUs, launched by torchrun. On a machine without a GPU only the last
test runs, which then counts the values that a step reads from its tensors."""

import re
import shutil
import sys

import pytest
from conftest import GPUS, ROOT, SMALL, VISIBLE, answers, outputs, run, train_forked

PROCESSES = min(2, GPUS)
SYNTHETIC = SMALL[:-1]  # without --cpu
TRAINING = ["--global-batch-size", 64, "--max-steps", 12, "--lr", 0.4, "--log-every", 1]


def needs(gpus):
    reason = f"needs {gpus} GPU(s), this machine has {GPUS}"
    return pytest.mark.skipif(gpus > GPUS, reason=reason)


def on_gpus(recipe, directory, *flags):
    """Train on one or two GPUs, by torchrun, without a warning of torch or Accelerate."""
    processes = 1 if recipe == "data_parallel_cifar" else PROCESSES
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", processes, ROOT / f"recipes/{recipe}.py", *SYNTHETIC]
    process = run([*command, *flags, "--output-dir", directory], **VISIBLE)
    assert not re.search(r"warn|\[W", process.stderr, re.IGNORECASE), process.stderr
    result = outputs(directory)
    assert result.summary["device"] != "cpu"
    return result


def losses(result):
    return [line["loss"] for line in result.train]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The training of one process on CPU, which has learned something."""
    run = (1, ROOT / "recipes/ddp_cifar.py", [*SMALL, *TRAINING, "--batch-size", 64])
    (result,) = train_forked(tmp_path_factory.mktemp("cpu"), run)
    assert losses(result)[0] - losses(result)[-1] > 0.05, "equal losses would prove nothing"
    return result


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        pytest.param("ddp_cifar", TRAINING, marks=needs(1)),
        pytest.param("ddp_cifar", [*TRAINING, "--batch-size", 16], marks=needs(1)),
        pytest.param("amp_cifar", [*TRAINING, "--precision", "bf16"], marks=needs(1)),
        pytest.param("amp_cifar", [*TRAINING, "--precision", "fp16"], marks=needs(1)),
        pytest.param("sharded_cifar", TRAINING, marks=needs(1)),
        pytest.param("pipeline_cifar", TRAINING, marks=needs(2)),
        pytest.param("data_parallel_cifar", ["--batch-size", 64, *TRAINING[2:]], marks=needs(1)),
    ],
)
def test_training_on_gpus_follows_the_training_on_cpu(on_cpu, recipe, flags, tmp_path):
    result = on_gpus(recipe, tmp_path, *flags)
    assert losses(result) == pytest.approx(losses(on_cpu), abs=0.03)  # TF32, bf16 or fp16
    assert result.summary["test_loss"] == pytest.approx(on_cpu.summary["test_loss"], abs=0.03)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        pytest.param("ddp_cifar", [], marks=needs(1)),
        pytest.param("amp_cifar", ["--precision", "fp16"], marks=needs(1)),
        pytest.param("sharded_cifar", [], marks=needs(1)),
    ],
)
def test_a_run_on_gpus_resumes_where_it_was(recipe, flags, tmp_path):
    """Up to rounding: some of cuDNN's algorithms add up in any order."""
    flags = [*TRAINING, *flags, "--checkpoint-every", 6, "--keep", 99]
    whole = on_gpus(recipe, tmp_path, *flags)
    for newest in tmp_path.glob("step-00000012*"):  # a file or, sharded, a folder
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    resumed = on_gpus(recipe, tmp_path, *flags)
    assert resumed.summary["resumed_from"] == 6
    assert losses(resumed)[:6] == losses(whole)[:6]
    assert losses(resumed) == pytest.approx(losses(whole), abs=0.01)
    if "fp16" in flags:
        scales = [[line["loss_scale"] for line in run.train] for run in (resumed, whole)]
        assert scales[0] == scales[1] and scales[0][0] > 1


@needs(1)
def test_a_compiled_model_trains_and_evaluates_the_same_on_gpus(tmp_path):
    flags = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 32, "--max-steps", 6]
    flags += ["--log-every", 1, "--lr", 0.01]
    eager = on_gpus("ddp_cifar", tmp_path / "eager", *flags)
    compiled = on_gpus("ddp_cifar", tmp_path / "compiled", *flags, "--compile")
    assert losses(compiled) == pytest.approx(losses(eager), abs=0.03)
    assert compiled.summary["test_loss"] == pytest.approx(eager.summary["test_loss"], abs=0.03)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs(1))])
def test_the_host_waits_for_the_device_in_no_step_but_for_the_scale_in_fp16(device, tmp_path):
    processes, visible = (2, {}) if device == "cpu" else (PROCESSES, VISIBLE)
    waits = {"fp32": 0, "fp16": 1} if device == "cpu" else {"fp32": 0, "bf16": 0, "fp16": 1}
    cases = {precision: (processes, device, precision) for precision in waits}
    assert answers("host_waits", tmp_path, cases, **visible) == {
        precision: {"three steps": 3 * waits[precision], "a line": 1} for precision in waits
    }
