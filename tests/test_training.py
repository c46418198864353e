"""The training step and the evaluation against independent references, and a run as a whole."""

import re
import time
from types import SimpleNamespace

import accelerate
import pytest
import torch
import torchvision
from conftest import (
    HAS_REAL_DATA,
    LITTLE_DATA,
    REAL_DATA,
    SMALL,
    answers,
    control_characters,
    copy,
    load,
    needs_real_data,
    train_forked,
)
from safetensors.torch import load_file

recipe = load("recipes/ddp_cifar.py")
WHERE_TIME_GOES = ["grad_norm", "data_wait", "slowest_data_wait", "slowest_data_rank"]
WHERE_TIME_GOES += ["peak_memory_gib"]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resnet50_applies_the_mean_gradient_of_all_microbatches_of_all_ranks(processes, tmp_path):
    gradient = answers("ddp_gradient", [processes], tmp_path)[processes]
    assert gradient["largest"] > 0.01
    assert gradient["deviation"] < 1e-10
    told, expected = gradient["norm"]
    assert told == pytest.approx(expected, rel=1e-9)


def test_clipping_is_to_the_norm_of_the_whole_steps_gradient(tmp_path):
    """One step at a learning rate of 1: the update is 1.9 times the clipped gradient (Nesterov
    momentum) and weight decay. What is clipped is the mean over processes, microbatches and stages,
    here of the same 128 samples."""
    flags = ["--max-steps", 1, "--lr", 1, "--global-batch-size", 128, "--batch-size"]
    clipped = ["--clip-norm", 0.01]
    runs = [
        (1, "ddp_cifar", [*flags, 128]),
        (2, "ddp_cifar", [*flags, 32, *clipped]),
        (1, "data_parallel_cifar", [*flags, 64, *clipped]),
        (2, "amp_cifar", [*flags, 64, *clipped, "--precision", "fp32"]),
        (2, "pipeline_cifar", [*flags, 128, *clipped]),
    ]
    torch.manual_seed(0)
    initial = recipe.build_model(SimpleNamespace(model="simple_cnn")).state_dict()
    gradients = []
    norms = []
    for result in train_forked(tmp_path, *runs):
        assert result.summary["global_batch_size"] == 128
        norms.append(result.train[0]["grad_norm"])
        updated = load_file(result.weights)
        parts = [(initial[name] - updated[name]) / 1.9 - 5e-4 * initial[name] for name in initial]
        gradients.append(torch.cat([part.flatten() for part in parts]))
    whole, *clipped = gradients
    assert whole.norm() > 0.1, "clipping to 0.01 would prove nothing"
    for gradient, (_, name, _) in zip(clipped, runs[1:], strict=True):
        assert gradient.norm().item() == pytest.approx(0.01, rel=1e-3), name
        assert torch.nn.functional.cosine_similarity(gradient, whole, dim=0) > 0.9999, name
    assert norms == pytest.approx([whole.norm().item()] * len(runs), rel=1e-3), "before clipping"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_counts_each_sample_once_by_its_weight(processes, tmp_path):
    cases = answers("evaluation", [processes], tmp_path)[processes]
    assert len(cases) == 20
    for size, (told, direct) in cases.items():
        assert told == pytest.approx(direct, abs=1e-6), f"{size} samples"


def test_the_metrics_that_are_reported_are_means_by_weight():
    loss, weight = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 1, 2])
    metrics = {"loss": loss, "weight": weight, "hit": loss > 1}
    sums = recipe.sample_rows(metrics).sum(0)
    assert recipe.means(metrics, sums) == ({"loss": 15 / 4, "hit": 3 / 4}, 3)
    del metrics["weight"]
    sums = recipe.sample_rows(metrics).sum(0)
    assert recipe.means(metrics, sums) == ({"loss": 3, "hit": pytest.approx(2 / 3)}, 3)


@pytest.mark.parametrize("total_steps", [1, 2, 5, 6, 100])
def test_the_schedule_is_defined_everywhere_and_ends_near_zero(total_steps):
    factors = [recipe.lr_lambda(step, total_steps) for step in range(total_steps + 1)]
    assert all(0 < factor <= 1 for factor in factors[:-1])
    assert max(factors) == 1 and factors[-1] == 0
    if total_steps == 100:
        assert factors[19] == 1
        assert factors[:20] == sorted(factors[:20])
        assert factors[19:] == sorted(factors[19:])[::-1]


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory):
    flags = ["--model", "resnet50", "--stem", "imagenet"]
    flags += ["--batch-size", 16, "--max-steps", 6, "--log-every", 2]
    (result,) = train_forked(tmp_path_factory.mktemp("resnet"), (2, "ddp_cifar", flags), together=1)
    return result


def test_weights_load_in_a_plain_torchvision_model(resnet_run):
    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(load_file(resnet_run.weights), strict=True)
    model.eval()
    dataset = recipe.ImageTensors(*recipe.synthetic_images(128, seed=2), torch.device("cpu"))
    with torch.no_grad():
        images, labels = dataset.__getitems__(list(range(128)))
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(resnet_run.summary["test_loss"], rel=1e-4)
    assert (logits.argmax(1) == labels).sum().item() / 128 == pytest.approx(
        resnet_run.summary["test_accuracy"], abs=0.01
    )


def test_summary_and_metrics_hold_what_is_documented(resnet_run):
    summary = resnet_run.summary
    expected = {
        "recipe": "ddp_cifar",
        "model": "resnet50",
        "stem": "imagenet",
        "data": "synthetic",
        "device": "cpu",
        "precision": "fp32",
        "world_size": 2,
        "batch_size": 16,
        "global_batch_size": 32,
        "accumulation": 1,
        "epochs": 2,
        "steps": 6,
        "steps_per_epoch": 20,
        "seed": 0,
        "peak_learning_rate": 0.025,
        "resumed_from": 0,
        "versions": {x.__name__: x.__version__ for x in (torch, torchvision, accelerate)},
        "train_loss": resnet_run.train[-1]["loss"],
    }
    assert {name: summary[name] for name in expected} == expected
    peaks = summary["rank_peak_memory_bytes"]
    assert len(peaks) == 2 and summary["peak_memory_bytes"] == max(peaks)
    assert 100 * 2**20 < max(peaks) < 100 * 2**30
    assert summary["seconds"] > summary["measured_seconds"] > 0
    # The first two of six steps are warm-up.
    assert summary["measured_samples"] == 4 * 32
    assert summary["samples_per_second"] == pytest.approx(4 * 32 / summary["measured_seconds"])

    assert [line["step"] for line in resnet_run.train] == [2, 4, 6]
    head = {"event", "epoch", "step", "time"}
    keys = {"loss", "accuracy", "learning_rate", "samples_per_second", *WHERE_TIME_GOES}
    assert all(line.keys() == head | keys for line in resnet_run.train)
    assert [line["samples_per_second"] is None for line in resnet_run.train] == [True, False, False]
    for line in resnet_run.train:
        assert line["grad_norm"] > 0
        assert 0 < line["data_wait"] <= line["slowest_data_wait"] < 1
        assert line["slowest_data_rank"] in (0, 1)
        assert 0.1 < line["peak_memory_gib"] <= max(peaks) / 2**30 + 0.001
    (evaluation,) = resnet_run.evaluations
    assert evaluation.keys() == head | {"test_loss", "test_accuracy", "samples"}
    assert evaluation["test_accuracy"] == summary["test_accuracy"] and evaluation["samples"] == 128
    times = [line["time"] for line in (*resnet_run.train, evaluation)]
    assert times == sorted(times) and 0 < time.time() - times[0] < 86400


def test_a_file_gets_plain_lines_from_the_main_process_only(resnet_run):
    assert control_characters(resnet_run.output) == []
    shown = [line for line in resnet_run.output.splitlines() if line.startswith("step ")]
    line = resnet_run.train[1]
    names = ["loss", "accuracy", "learning_rate", "grad_norm", "samples_per_second", "data_wait"]
    names += ["peak_memory_gib"]
    values = " ".join(f"{name} {line[name]:,.4g}" for name in names)
    assert shown[1] == f"step 4/6 epoch 1 {values}"
    assert [line.split()[1] for line in shown] == ["2/6", "4/6", "6/6", "6/6"]
    assert "test_accuracy" in shown[3]
    facts = ["global_batch_size: 32", "world_size: 2", " steps: 6", "peak_learning_rate: 0.025"]
    for fact in (*facts, " samples: 128", torch.__version__):
        assert len(re.findall(re.escape(fact) + r"\b", resnet_run.output)) == 1, resnet_run.output


SLOW_DATA = """
indexed = ImageTensors.__getitems__


def index_slowly(dataset, indices):
    time.sleep(0.8 * int(os.environ["RANK"]))
    return indexed(dataset, indices)


ImageTensors.__getitems__ = index_slowly
"""


def test_a_terminal_gets_a_live_display_with_or_without_colours_and_a_dumb_one_plain_lines(
    tmp_path,
):
    """Also, in the run of two processes: the rank whose data are slow is named."""
    script = copy("amp_cifar", tmp_path / "slow.py", LITTLE_DATA, project=SLOW_DATA)
    (tmp_path / "0").mkdir()
    flags = ["--max-steps", 4, "--log-every", 2, "--batch-size", 64]
    terminal = {"TERM": "xterm-256color", "COLUMNS": "80"}
    runs = [
        (
            2,
            "amp_cifar",
            [*flags, "--batch-size", 16, *SMALL, "--output-dir", "."],
            {"terminal": True, "env": {**terminal, "NO_COLOR": ""}, "script": script},
        ),
        (1, "ddp_cifar", flags, {"terminal": True, "env": {**terminal, "NO_COLOR": "1"}}),
        (1, "ddp_cifar", flags, {"terminal": True, "env": {"TERM": "dumb"}}),
    ]
    results = train_forked(tmp_path, *runs)
    colours, none, dumb = (result.output.replace("\r\n", "\n") for result in results)
    for screen in (colours, none):
        one_display = "not one live display, from one process"
        assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") == 1, one_display
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
        assert re.search(r"steps ━+ 100% 0:00:00 4/4", text)
        lines = [x for x in re.split(r"[\r\n]+", text) if x.startswith("step ")]
        assert [line[:8] for line in lines] == ["step 2/4", "step 4/4", "step 4/4"]
    assert re.search(r"\x1b\[38;5;\d+m━", colours) and not re.search(r"\x1b\[[0-9;]*m", none)
    assert control_characters(dumb) == [] and dumb.count("step 4/4 epoch 1") == 2
    for line in results[0].train:
        assert line["slowest_data_rank"] == 1, line
        assert line["slowest_data_wait"] > 0.5, line
        assert line["data_wait"] == pytest.approx(line["slowest_data_wait"] / 2, abs=0.2), line


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """Side by side, on one core each: the compiler works on one for longer than most of the others
    take together."""
    directory = tmp_path_factory.mktemp("long")
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # trying instruction sets takes longer than compiling
    }
    short = ["--max-steps", 3, "--batch-size", 16]
    real = ["--data", "cifar10", "--data-dir", REAL_DATA]
    without_dropout = {
        "plain": False,
        "dropout": 0,
    }  # torch 2.11 does not compile the simple_cnn, an nn.Sequential
    runs = {
        "compiled": (
            1,
            "ddp_cifar",
            [*short, "--compile"],
            {**without_dropout, "env": cache, "patience": 400},
        ),
        "synthetic": (2, "ddp_cifar", ["--epochs", 6, "--batch-size", 32, "--lr", 0.2]),
        "eager": (1, "ddp_cifar", short, without_dropout),
    }
    if HAS_REAL_DATA:
        real += ["--batch-size", 32, "--max-steps", 60, "--lr", 0.4]
        runs |= {
            "fp32": (1, "ddp_cifar", real),
            "bf16": (1, "amp_cifar", [*real, "--precision", "bf16"]),
        }
    return dict(zip(runs, train_forked(directory, *runs.values()), strict=True))


@pytest.mark.slow
def test_it_learns_synthetic_data(long_runs):
    result = long_runs["synthetic"]
    assert result.summary["test_accuracy"] > 0.5
    assert [line["epoch"] for line in result.evaluations] == list(range(1, 7))


@pytest.mark.slow
@needs_real_data
def test_it_learns_cifar10_and_bf16_follows_fp32(long_runs):
    fp32, bf16 = long_runs["fp32"], long_runs["bf16"]
    assert fp32.summary["samples"] == 10_000
    assert fp32.summary["test_accuracy"] > 0.2
    losses, expected = ([line["loss"] for line in run.train] for run in (bf16, fp32))
    assert len(losses) == 60 and sum(expected[-5:]) < sum(expected[:5]) - 0.5
    assert losses != expected and losses == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_and_keeps_its_names(long_runs):
    cache = long_runs["compiled"].directory.parent / "cache"
    assert any(cache.rglob("*.py")), "nothing was compiled"
    weights, expected = (load_file(long_runs[name].weights) for name in ("compiled", "eager"))
    assert weights.keys() == expected.keys()
    assert max((weights[name] - value).abs().max() for name, value in expected.items()) < 1e-5
