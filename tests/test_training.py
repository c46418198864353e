"""The training step and the evaluation against independent references, and a run as a whole."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchvision
from conftest import (
    ACCELERATE,
    CONFIGS,
    REAL_DATA,
    ROOT,
    answer,
    control_characters,
    load,
    needs_real_data,
    run,
    train,
    train_forked,
)
from safetensors.torch import load_file

recipe = load("recipes/ddp_cifar.py")


@pytest.mark.parametrize("processes", [2, 4])
def test_resnet50_applies_the_mean_gradient_of_all_ranks(processes, tmp_path):
    gradient = answer("ddp_gradient", processes, tmp_path)
    assert gradient["largest"] > 0.01
    assert gradient["deviation"] < 1e-5


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_counts_each_sample_once(processes, tmp_path):
    for size, (told, direct) in answer("evaluation", processes, tmp_path).items():
        assert told == pytest.approx(direct, abs=1e-6), f"{size} samples"


def test_a_training_set_smaller_than_a_window_is_weighted_right(tmp_path):
    """640 samples in microbatches of 256 are 2 of the 4 that were asked for: one step an epoch, on their mean."""
    flags = ["--batch-size", 256, "--epochs", 1, "--accumulation-steps"]
    partial, full = train_forked(tmp_path, (1, "ddp_cifar", [*flags, 4]), (1, "ddp_cifar", [*flags, 2]))
    assert partial.summary["steps"] == 1 and partial.summary["global_batch_size"] == 512
    torch.testing.assert_close(load_file(partial.weights), load_file(full.weights), rtol=0, atol=0)


@pytest.mark.parametrize("total_steps", [1, 2, 5, 6, 100])
def test_the_schedule_is_defined_everywhere_and_ends_near_zero(total_steps):
    factors = [recipe.learning_rate_factor(step, total_steps) for step in range(total_steps + 1)]
    assert all(0 < factor <= 1 for factor in factors[:-1])
    assert max(factors) == 1 and factors[-1] == 0
    if total_steps == 100:
        assert factors[19] == 1 and factors[:20] == sorted(factors[:20]) and factors[19:] == sorted(factors[19:])[::-1]


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resnet")
    flags = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 32, "--max-steps", 6, "--log-every", 2]
    return train(2, directory, *flags)


def test_weights_load_in_a_plain_torchvision_model(resnet_run):
    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(load_file(resnet_run.weights), strict=True)
    model.eval()
    dataset = recipe.ImageTensors(*recipe.synthetic_images(1024, seed=2), torch.device("cpu"))
    with torch.no_grad():
        batches = [dataset.__getitems__(list(range(start, start + 256))) for start in range(0, 1024, 256)]
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)
    assert correct / 1024 == pytest.approx(resnet_run.summary["test_accuracy"], abs=2e-3)


def test_summary_and_metrics_hold_what_is_documented(resnet_run):
    summary = resnet_run.summary
    assert summary["recipe"] == "ddp_cifar" and summary["device"] == "cpu" and summary["precision"] == "fp32"
    assert (summary["model"], summary["stem"], summary["data"]) == ("resnet50", "imagenet", "synthetic")
    assert (summary["world_size"], summary["global_batch_size"]) == (2, 64)
    assert (summary["epochs"], summary["steps"], summary["seed"]) == (30, 6, 0)
    assert summary["versions"].keys() == {"torch", "torchvision", "accelerate"}
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["train_loss"] == resnet_run.train[-1]["loss"]
    assert 100 * 2**20 < summary["peak_memory_bytes"] < 100 * 2**30
    assert summary["seconds"] > summary["measured_seconds"] > 0
    # The first two of six steps are warm-up.
    assert summary["measured_images"] == 4 * 64
    assert summary["images_per_second"] == pytest.approx(4 * 64 / summary["measured_seconds"])

    assert [line["step"] for line in resnet_run.train] == [2, 4, 6]
    keys = {"event", "epoch", "step", "loss", "accuracy", "learning_rate", "images_per_second"}
    assert all(line.keys() == keys for line in resnet_run.train)
    assert [line["images_per_second"] is None for line in resnet_run.train] == [True, False, False]
    (evaluation,) = resnet_run.evaluations
    assert evaluation.keys() == {"event", "epoch", "step", "test_loss", "test_accuracy", "samples"}
    assert evaluation["test_accuracy"] == summary["test_accuracy"] and evaluation["samples"] == 1024


def test_a_pipe_gets_plain_lines_from_the_main_process_only(resnet_run):
    text = resnet_run.process.stdout
    assert control_characters(text) == []
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("step ")] == [
        ["step", "2/6"],
        ["step", "4/6"],
        ["step", "6/6"],
    ]
    for fact in ("global_batch_size: 64", "world_size: 2", " steps: 6\n", "linear warm-up to 0.01", torch.__version__):
        assert text.count(fact) == 1, text


def on_a_terminal(command, **env):
    """What a command writes to a terminal of its own, which script(1) gives it."""
    line = " ".join(map(str, [*command, "--data synthetic --model simple_cnn --cpu --max-steps 4 --log-every 2"]))
    return run(["script", "--quiet", "--return", "--command", line, "/dev/null"], **env).stdout


def test_a_terminal_gets_a_panel_and_a_live_display(tmp_path):
    launch = [ACCELERATE, "launch", "--config_file", CONFIGS[2], ROOT / "recipes/amp_cifar.py"]
    screen = on_a_terminal([*launch, "--output-dir", tmp_path], TERM="xterm-256color", COLUMNS="80")
    assert screen.count("╭") == 2, "one panel before and one after, from the main process alone"
    assert "\x1b[?25l" in screen and "\x1b[?25h" in screen, "no live display, or the cursor was not given back"
    assert "\x1b[38;5;" in screen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert max(map(len, re.split(r"[\r\n]+", text))) == 80
    assert re.search("4/4 .* images/s [0-9,]+ ", text)
    assert text.index("global_batch_size") < text.index("first steps")


def test_a_terminal_without_colours_or_without_a_cursor(tmp_path):
    command = [sys.executable, ROOT / "recipes/ddp_cifar.py", "--output-dir"]
    screen = on_a_terminal([*command, tmp_path / "1"], NO_COLOR="1", TERM="xterm-256color", COLUMNS="80")
    assert "╭" in screen and not re.search(r"\x1b\[[0-9;]*m", screen)
    dumb = on_a_terminal([*command, tmp_path / "2"], TERM="dumb")
    assert control_characters(dumb.replace("\r\n", "\n")) == [] and "step 4/4 epoch 1" in dumb


def test_it_learns_synthetic_data(tmp_path):
    result = train(2, tmp_path, "--epochs", 3, "--batch-size", 64, "--lr", 0.2)
    assert result.summary["test_accuracy"] > 0.8
    assert [line["epoch"] for line in result.evaluations] == [1, 2, 3]


@needs_real_data
def test_it_learns_cifar10(tmp_path):
    flags = ["--data", "cifar10", "--data-dir", REAL_DATA, "--batch-size", 64, "--max-steps", 60, "--log-every", 20]
    result = train(2, tmp_path, *flags, "--lr", 0.2)
    assert result.summary["samples"] == 10_000
    assert result.summary["test_accuracy"] > 0.2
    assert result.train[-1]["loss"] < result.train[0]["loss"]


def test_every_launch_leaves_cleanly(tmp_path):
    """Gloo aborts at exit now and then where the process group is left to the interpreter."""

    def code(index):
        flags = ["--max-steps", 1, "--batch-size", 8]
        return train(2, tmp_path / str(index), *flags, check=False).process.returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(code, range(8))) == [0] * 8


def test_a_compiled_model_learns_the_same_and_keeps_its_names(tmp_path):
    flags = ["--max-steps", 3, "--batch-size", 16]
    eager = train(2, tmp_path / "eager", *flags)
    compiled = train(2, tmp_path / "compiled", *flags, "--compile", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert any((tmp_path / "cache").rglob("*.py")), "nothing was compiled"
    weights, expected = load_file(compiled.weights), load_file(eager.weights)
    assert weights.keys() == expected.keys()
    assert max((weights[name] - value).abs().max() for name, value in expected.items()) < 1e-5
