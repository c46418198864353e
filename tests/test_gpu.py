"""What a GPU could do differently, on one GPU or on two; with small numbers the same programs run
on CPU, too."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import GPUS, PROGRAMS, ROOT, VISIBLE, forked, free_port, outputs, run
from safetensors.torch import load_file
from test_resume import assert_identical, batches, content, untimed

NEEDS = {1: "needs a GPU", 2: "needs two GPUs"}
DEVICES = ["cpu", "cuda"]


def require(device, gpus=1):
    if device == "cuda" and gpus > GPUS:
        pytest.skip(NEEDS[gpus])


def one_rank():
    """The environment of the only rank of a process group: without it Accelerate starts none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (0, 0, 1, 1, "127.0.0.1", free_port())), strict=True))


def environment(device):
    return {
        **PROGRAMS,
        **(VISIBLE if device == "cuda" else {}),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def train_on(device, directory, runs):
    """{name: what is left} of runs {name: (processes, recipe, flags, what training_on_device.py
    takes)}. Left out are those that need more GPUs than there are."""
    described, scripts, program = {}, [], ROOT / "tests/programs/training_on_device.py"
    for name, (processes, recipe, flags, more) in runs.items():
        if device == "cuda" and more.get("gpus", processes) > GPUS:
            continue
        flags = ["--log-every", 1, "--keep", 99, "--lr", 0.2, *flags]
        one = {
            "device": device,
            "recipe": recipe,
            "flags": flags,
            "fewer": 32,
            "directory": str(directory / name),
            **more,
        }
        described[name] = one
        (directory / name).mkdir()
        script = {"processes": processes, "script": program, "directory": directory / name}
        script["env"] = {} if processes > 1 or more.get("alone") else one_rank()
        scripts.append({**script, "flags": [json.dumps(one, default=str)], "patience": 240})
    results = {}
    for name, (codes, output) in zip(
        described, forked(scripts, directory, 2, **environment(device)), strict=True
    ):
        results[name] = SimpleNamespace(codes=codes, output=output, directory=directory / name)
        if set(codes) == {0}:
            results[name].seen = json.loads((directory / name / "seen.0").read_text())
            vars(results[name]).update(outputs(directory / name))
    return results


FP16 = ["--precision", "fp16", "--batch-size", 16, "--checkpoint-every", 7, "--max-steps", 10]
RUNS = {  # of two epochs of 160 samples
    "whole": (
        1,
        "ddp_cifar",
        ["--batch-size", 16, "--checkpoint-every", 4],
        {"deterministic": True},
    ),
    "fast": (1, "ddp_cifar", ["--batch-size", 16, "--checkpoint-every", 4], {}),
    "fp16": (
        1,
        "amp_cifar",
        FP16,
        {"deterministic": True, "fp16": True, "disturbances": {"0": [5, "inf"]}},
    ),
    # 32 test samples in batches of 12: the last has 8.
    "eager": (1, "ddp_cifar", ["--batch-size", 12], {"dropout": 0}),
    "compiled": (1, "ddp_cifar", ["--batch-size", 12, "--compile"], {"dropout": 0}),
    "sharded": (
        1,
        "sharded_cifar",
        ["--batch-size", 16, "--checkpoint-every", 4],
        {"deterministic": True},
    ),
    "step": (1, "ddp_cifar", ["--batch-size", 16], {"disturbances": {"0": [4, "SIGTERM"]}}),
    "compilation": (
        1,
        "ddp_cifar",
        ["--batch-size", 16, "--compile"],
        {"when": ["compilation", "SIGINT"]},
    ),
    "evaluation": (1, "ddp_cifar", ["--batch-size", 16], {"when": ["evaluation", "SIGTERM"]}),
}
AGAIN = {
    "whole": (1, "ddp_cifar", ["--batch-size", 16], {"deterministic": True}, 4),
    "fast": (1, "ddp_cifar", ["--batch-size", 16], {}, 4),
    "fp16": (1, "amp_cifar", FP16, {"deterministic": True, "fp16": True}, 7),
    "sharded": (1, "sharded_cifar", ["--batch-size", 16], {"deterministic": True}, 4),
}


@pytest.fixture(scope="module", params=DEVICES)
def trained(request, tmp_path_factory):
    """(device, {name: run}) of RUNS, and as "NAME resumed" of AGAIN from the step there."""
    device = request.param
    require(device)
    directory = tmp_path_factory.mktemp(device)
    results, again = train_on(device, directory, RUNS), {}
    for name, (*described, more, step) in AGAIN.items():
        processes, recipe, flags = described
        (checkpoint,) = (directory / name).glob(f"step-{step:08}*")  # sharded, it is a folder
        flags = [*flags, "--resume", checkpoint]
        again[f"{name} resumed"] = processes, recipe, flags, more
    results |= train_on(device, directory, again)
    for name, result in results.items():
        assert name in ("step", "compilation", "evaluation") or result.codes == [0], result.output
    return device, results


def test_one_rank_is_a_process_group_on_the_gpu(trained):
    device, runs = trained
    seen = runs["whole"].seen
    expected = ("nccl", True) if device == "cuda" else ("gloo", False)
    assert (seen["backend"], seen["context"]) == expected
    assert seen["ddp"] and runs["compiled"].seen["ddp"]


def test_resumed_with_deterministic_algorithms_is_uninterrupted_bit_for_bit(trained):
    _, runs = trained
    one, other = (
        content(runs[name].directory / "step-00000020.pt") for name in ("whole", "whole resumed")
    )
    assert_identical(one, other)
    one, other = (load_file(runs[name].weights) for name in ("sharded", "sharded resumed"))
    assert_identical(one, other)
    for name in ("whole", "sharded"):
        assert batches(runs[name].directory, 0)[4:] == batches(runs[f"{name} resumed"].directory, 0)
        assert "resumed_from: 4\n" in runs[f"{name} resumed"].output


def test_resumed_is_uninterrupted_but_for_rounding(trained):
    """cuDNN chooses algorithms by trying them, and some add up in any order."""
    device, runs = trained
    one, other = ([line["loss"] for line in runs[name].train] for name in ("fast", "fast resumed"))
    assert len(one) == len(other) == 20
    assert other == pytest.approx(one, rel=0, abs=0.02 if device == "cuda" else 0)
    assert min(one) < one[0] - 0.1, "losses that have not moved prove nothing"


def test_an_overflow_in_fp16_skips_its_step_and_the_scale_is_resumed(trained):
    _, runs = trained
    scales = [line["loss_scale"] for line in runs["fp16"].train]
    assert [scale / scales[0] for scale in scales] == [1] * 4 + [1 / 2] * 6 and scales[0] > 1
    assert [line["skipped_steps"] for line in runs["fp16"].train] == [0] * 4 + [1] * 6
    metrics = [
        untimed((runs[name].directory / "metrics.jsonl").read_text())
        for name in ("fp16", "fp16 resumed")
    ]
    assert metrics[0] == metrics[1]
    one, other = (
        content(runs[name].directory / "step-00000010.pt") for name in ("fp16", "fp16 resumed")
    )
    assert_identical(one, other)
    assert other["states"]["optimizer"]["param_groups"][0]["fused"] is None, (
        "False: a kernel per parameter"
    )


def test_compiled_is_eager_over_switches_between_training_and_evaluation_and_a_ragged_batch(
    trained,
):
    device, runs = trained
    for event, name in (("train", "loss"), ("evaluations", "test_loss")):
        one, other = (
            [line[name] for line in getattr(runs[kind], event)] for kind in ("eager", "compiled")
        )
        assert len(one) == (26 if event == "train" else 2)
        assert other == pytest.approx(one, rel=0, abs=0.01 if device == "cuda" else 1e-4)
    seen = runs["compiled"].seen
    # Training, evaluation, and evaluation of a batch of another size, each once; never again after
    # a switch.
    assert seen["graphs"] == 3 and seen["skipped"] == 0, runs["compiled"].output
    assert runs["eager"].seen["graphs"] == 0 and seen.get("cuda_graphs", True)


@pytest.mark.parametrize(
    ("when", "code", "step"), [("step", 143, 4), ("compilation", 130, 1), ("evaluation", 143, 11)]
)
def test_a_signal_makes_it_save_and_leave(trained, when, code, step):
    """At the end of the step; an evaluation is finished, and one step after it."""
    result = trained[1][when]
    assert result.codes == [code], result.output
    assert [path.name for path in result.directory.glob("step-*")] == [f"step-{step:08}.pt"]
    assert result.output.count(f"stopped after step {step}, which is saved") == 1


BATCH = ["--max-steps", 10, "--batch-size"]
ACCUMULATED = ["--global-batch-size", 32]
# To one rank that accumulates over two microbatches; a pipeline's batch is that of two processes.
EQUAL = {
    "one rank": (1, "ddp_cifar", [*BATCH, 16, *ACCUMULATED], {}),
    "two ranks": (2, "ddp_cifar", [*BATCH, 16], {}),
    "pipeline": (2, "pipeline_cifar", [*BATCH, 32], {}),
    "sharded": (
        1,
        "sharded_cifar",
        [*BATCH, 16, *ACCUMULATED, "--activation-checkpointing"],
        {"alone": True},
    ),
    "sharded over two": (2, "sharded_cifar", [*BATCH, 16], {}),
    "offloaded": (1, "sharded_cifar", [*BATCH, 32, "--cpu-offload"], {"alone": True}),
    "offloaded, two": (2, "sharded_cifar", [*BATCH, 16, "--cpu-offload"], {}),
    "DataParallel": (1, "data_parallel_cifar", [*BATCH, 32], {"alone": True}),
    "cpu": (2, "ddp_cifar", [*BATCH, 16, "--cpu"], {"gpus": 1}),
}


@pytest.fixture(scope="module", params=DEVICES)
def equal(request, tmp_path_factory):
    device = request.param
    require(device)
    runs = {
        name: (*described, {"plain": True, **more}) for name, (*described, more) in EQUAL.items()
    }
    if device == "cpu":
        runs = {name: runs[name] for name in runs if not name.startswith(("offloaded", "cpu"))}
    return device, train_on(device, tmp_path_factory.mktemp(device), runs)


@pytest.mark.parametrize("name", [name for name in EQUAL if name != "one rank"])
def test_losses_are_those_of_one_rank(equal, name):
    device, runs = equal
    if name not in runs:
        pytest.skip("needs a GPU" if device == "cpu" else NEEDS[2])
    assert set(runs[name].codes) == {0}, runs[name].output
    tolerance = 2e-3 if device == "cuda" else 1e-5  # convolutions are in TF32
    for event, key in (("train", "loss"), ("evaluations", "test_loss")):
        one, other = (
            [line[key] for line in getattr(runs[kind], event)] for kind in ("one rank", name)
        )
        assert len(one) == (10 if event == "train" else 2)
        assert other == pytest.approx(one, rel=0, abs=tolerance)
        assert one[0] - one[-1] > 0.01, "losses that have not moved prove nothing"


def test_cpu_processes_leave_no_context_on_the_gpu(equal):
    device, runs = equal
    seen = [
        json.loads(path.read_text())["context"]
        for path in runs["one rank"].directory.glob("seen.*")
    ]
    assert seen == [device == "cuda"], "a context on the GPU is not seen"
    if device == "cpu":
        pytest.skip("needs a GPU")
    seen = [json.loads((runs["cpu"].directory / f"seen.{rank}").read_text()) for rank in (0, 1)]
    assert [(one["context"], one["backend"]) for one in seen] == [(False, "gloo")] * 2


PARTS = [
    *(("synchronisations", precision) for precision in ("no", "bf16", "fp16")),
    *(("chained_stages", precision) for precision in ("no", "bf16")),
    ("replicas", "no"),
]


@pytest.fixture(scope="module", params=DEVICES)
def parts(request, tmp_path_factory):
    """(device, {(part, precision): answer of programs/parts_on_device.py})"""
    device = request.param
    require(device)
    directory, runs, answers = tmp_path_factory.mktemp(device), [], {}
    for index, part in enumerate(PARTS):
        script = {
            "processes": 1,
            "script": ROOT / "tests/programs/parts_on_device.py",
            "directory": directory,
        }
        script["env"] = one_rank() if part[0] == "synchronisations" else {}
        runs.append({**script, "flags": [directory / f"{index}.json", part[0], device, part[1]]})
    for index, (codes, output) in enumerate(forked(runs, directory, 2, **environment(device))):
        assert codes == [0], output
        answers[PARTS[index]] = json.loads((directory / f"{index}.json").read_text())
    return device, answers


@pytest.mark.parametrize(("precision", "per_step"), [("no", 0), ("bf16", 0), ("fp16", 1)])
def test_the_host_waits_for_the_device_in_no_step_but_for_the_scale_in_fp16(
    parts, precision, per_step
):
    counted = parts[1]["synchronisations", precision]
    assert counted == {"in three steps": 3 * per_step, "when read": 1}


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-9), ("bf16", 0.05)])
def test_the_stages_in_a_row_are_the_whole_model(parts, precision, tolerance):
    answer = parts[1]["chained_stages", precision]
    assert (
        answer["logits"] < tolerance
        and answer["gradients"] < tolerance
        and answer["left out"] == []
    )
    assert answer["contiguous"] == [True, True]
    inside, outside = ("float64", "float64") if precision == "no" else ("bfloat16", "float32")
    assert answer["types"] == [f"torch.{inside}", f"torch.{inside}", f"torch.{outside}"]


def test_replicas_have_the_gradients_of_one_device_and_activations_stay_channels_last(parts):
    """The weights of all replicas but the first lose it: torch broadcasts them flattened, in the
    order of NCHW. The convolutions take the layout of their inputs, and convert the weights."""
    device, answers = parts
    require(device, 2 if device == "cuda" else 1)
    answer = answers["replicas", "no"]
    print("device, weight in channels_last, output in channels_last:", *answer["layouts"])
    assert answer["deviation"] < 1e-4 < answer["largest"]
    assert len({where for where, *_ in answer["layouts"]}) == max(
        1, GPUS if device == "cuda" else 1
    )
    assert all(output for *_, output in answer["layouts"])


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_launched_saved_and_resumed_without_a_warning(tmp_path):
    """By torchrun, which makes one process a rank."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        1,
    ]
    flags = [
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--max-steps",
        4,
        "--checkpoint-every",
        2,
    ]
    common = [*launcher, ROOT / "recipes/amp_cifar.py", *flags, "--output-dir"]
    first, second = tmp_path / "first", tmp_path / "second"
    for more in ([first], [second, "--resume", first / "step-00000002.pt"]):
        process = run([*common, *more], cwd=tmp_path, **environment("cuda"))
        assert not re.search(r"warn|\[W", process.stderr, re.IGNORECASE), process.stderr
    assert "resumed_from: 2\n" in process.stdout
    one, other = (outputs(directory) for directory in (first, second))
    assert other["summary"]["resumed_from"] == 2 and other["summary"]["device"] != "cpu"
    assert other["summary"]["test_loss"] == pytest.approx(one["summary"]["test_loss"], abs=0.01)


def test_compiled_under_ddp_no_partition_updates_buffers_that_keep_it_from_cuda_graphs(tmp_path):
    """DDP divides the graph; BatchNorm's statistics have to be static inputs of each partition."""
    script = {"processes": 1, "script": ROOT / "tests/programs/graph_partitions.py"}
    run = {**script, "directory": tmp_path, "flags": [tmp_path / "answer.json"], "env": one_rank()}
    [(codes, output)] = forked([run], tmp_path, **environment("cpu"))
    assert codes == [0], output
    answer = json.loads((tmp_path / "answer.json").read_text())
    forward = [part for part in answer["partitions"] if part["kind"] == "forward"]
    assert len(forward) > 1, "it has to be divided to show anything"
    assert sum(part["mutated"] for part in forward) == answer["changed"] == 12
    assert {part["not static"] for part in answer["partitions"]} == {0}
