"""The recipes on one, two and four GPUs, launched by torchrun. Where there are fewer, ranks share
one: see benchmarks/one_gpu. On a machine without a GPU only the last two tests run; the first of
them then counts the values that a step reads from its tensors."""

import json
import re
import shutil
import sys

import pytest
from conftest import CNN, GPUS, VISIBLE, copy, project
from processes import ROOT, outputs, run, train_forked

ONE_GPU = {"PYTHONPATH": str(ROOT / "benchmarks/one_gpu")}

SYNTHETIC = CNN[:-1]  # without --cpu
SCALER = {"Run.describe": "describe_as_fp16", "make_accelerator": "accelerator_with_scaler"}
TRAINING = ["--global-batch-size", 64, "--max-steps", 30, "--lr", 0.4, "--log-every", 1]


def needs(gpus):
    reason = f"needs {gpus} GPU(s), this machine has {GPUS}"
    return pytest.mark.skipif(gpus > GPUS, reason=reason)


def case(recipe, gpus, *flags, name=""):
    """A parameter of a test. One process of DataParallel takes all GPUs, ranks may share one."""
    least = gpus if recipe == "data_parallel_cifar" else 1
    return pytest.param(recipe, gpus, flags, marks=needs(least), id=f"{recipe}-{gpus}{name}")


def on_gpus(recipe, gpus, directory, *flags):
    """Train a recipe by torchrun, without a warning of torch or Accelerate."""
    processes = 1 if recipe == "data_parallel_cifar" else gpus
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", processes, ROOT / f"recipes/{recipe}.py"]
    shared = ONE_GPU if processes > GPUS else {}
    process = run([*command, *SYNTHETIC, *flags, "--output-dir", directory], **VISIBLE, **shared)
    assert not re.search(r"warn|\[W", process.stderr, re.IGNORECASE), process.stderr
    result = outputs(directory)
    assert result.summary["device"] != "cpu"
    return result


def losses(result):
    return [line["loss"] for line in result.train]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The training of one process on CPU, which has learned something."""
    run = (1, ROOT / "recipes/ddp_cifar.py", [*CNN, *TRAINING, "--batch-size", 64])
    (result,) = train_forked(tmp_path_factory.mktemp("cpu"), run)
    assert losses(result)[0] - losses(result)[-1] > 0.5, "equal losses would prove nothing"
    return result


@pytest.mark.parametrize(
    ("recipe", "gpus", "flags"),
    [
        case("ddp_cifar", 1),
        case("ddp_cifar", 2),
        case("ddp_cifar", 2, "--batch-size", 16, name="-accumulation"),
        case("ddp_cifar", 2, "--compile", name="-cuda_graphs"),
        case("ddp_cifar", 2, "--batch-size", 16, "--compile", name="-compile"),
        case("amp_cifar", 1, "--precision", "bf16", name="-bf16"),
        case("amp_cifar", 1, "--precision", "fp16", name="-fp16"),
        case("amp_cifar", 2, "--precision", "fp16", "--compile", name="-fp16-compile"),
        case("sharded_cifar", 1),
        case("sharded_cifar", 2),
        # A bound that no gradient reaches: all are multiplied by 1.
        case("sharded_cifar", 2, "--clip-norm", 1000, name="-clipped"),
        case("sharded_cifar", 2, "--compile", name="-compile"),
        case("sharded_cifar", 4, "--replicas", 2, name="-replicas"),
        # The second stage's state travels as objects, by gloo.
        case("pipeline_cifar", 2),
        case("pipeline_cifar", 4, name="-ddp_in_a_stage"),
    ],
)
def test_a_training_on_gpus_follows_that_on_cpu_and_resumes(on_cpu, recipe, gpus, flags, tmp_path):
    """Up to rounding: TF32, bf16 or fp16; and some of cuDNN's algorithms add up in any order."""
    flags = [*TRAINING, *flags, "--checkpoint-every", 15, "--keep", 99]
    whole = on_gpus(recipe, gpus, tmp_path, *flags)
    assert losses(whole) == pytest.approx(losses(on_cpu), abs=0.03)
    assert whole.summary["test_loss"] == pytest.approx(on_cpu.summary["test_loss"], abs=0.03)
    for newest in tmp_path.glob("step-00000030*"):  # a file or, sharded, a folder
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    resumed = on_gpus(recipe, gpus, tmp_path, *flags)
    assert resumed.summary["resumed_from"] == 15
    assert losses(resumed)[:15] == losses(whole)[:15]
    assert losses(resumed) == pytest.approx(losses(whole), abs=0.01)
    if "fp16" in flags:
        scales = [[line["loss_scale"] for line in run.train] for run in (resumed, whole)]
        assert scales[0] == scales[1] and scales[0][0] > 1


@pytest.mark.parametrize(
    ("recipe", "gpus", "flags"), [case("data_parallel_cifar", gpus) for gpus in (1, 2)]
)
def test_the_baseline_on_gpus_follows_the_training_on_cpu(on_cpu, recipe, gpus, flags, tmp_path):
    result = on_gpus(recipe, gpus, tmp_path, "--batch-size", 64, *TRAINING[2:])
    assert losses(result) == pytest.approx(losses(on_cpu), abs=0.03)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs(1))])
def test_the_host_waits_for_the_device_in_no_step_but_for_the_scale_in_fp16(device, tmp_path):
    """A CPU without fp16 has a scaler, as a GPU has."""
    on_cpu = device == "cpu"
    flags = ["--batch-size", 1, "--epochs", 1, "--log-every", 9, "--evaluate-every", 9]
    flags += ["--checkpoint-every", 9]
    runs = []
    for precision in ("fp32", "fp16"):
        chosen = SCALER if on_cpu and precision == "fp16" else {}
        text = project("tokens", LENGTHS=[5] * 8, **chosen) + project("host_waits")
        script = copy("amp_cifar", tmp_path / f"{precision}.py", project=text)
        own = ["--cpu", "--precision", "fp32"] if on_cpu else ["--precision", precision]
        runs.append((2 if on_cpu else min(2, GPUS), script, [*flags, *own]))
    for waits, result in enumerate(train_forked(tmp_path, *runs, **({} if on_cpu else VISIBLE))):
        found = re.findall("waits in step [23]: (.*)", result.output)  # the first step sets up much
        assert {*found} == {str(waits)}, result.output


def test_each_rank_that_shares_a_gpu_takes_it_for_its_own():
    """NCCL tells hosts apart by NCCL_HOSTID, unless it is told to take ranks of one host."""
    program = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_MAX_CTAS": "4"}
    for enabled, host in (("0", "host-3"), ("1", None)):
        found = json.loads(
            run(program, **ONE_GPU, **ranks, NCCL_MULTI_RANK_GPU_ENABLE=enabled).stdout
        )
        assert [found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]] == ["0", "1"]
        assert found.get("NCCL_HOSTID") == host and found["NCCL_MAX_CTAS"] == "4"
    assert "NCCL_HOSTID" not in run(program, **ONE_GPU).stdout, "it is the launcher"
