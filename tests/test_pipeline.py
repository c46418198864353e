"""The pipeline against the unsplit model, and both stages against each other."""

import json
from types import SimpleNamespace

import pytest
import torch
import torchvision
from conftest import ROOT, answers, forked, launch, load, train_forked
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/pipeline_cifar.py"
SMALL = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", 1]
recipe = load("recipes/pipeline_cifar.py")


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    return answers("pipeline_gradient", [2, 4, 8], tmp_path_factory.mktemp("gradients"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_gradients_and_steps_are_those_of_the_unsplit_model_over_the_same_microbatches(
    gradients, processes
):
    """ResNet-50 by both schedules, cut in different places, and over several steps; on 8 processes
    the small model."""
    cases = gradients[processes]["equal"]
    assert len(cases) == {2: 7 + 4, 4: 7 + 1, 8: 7}[processes]
    for case, (deviation, largest, loss, expected_loss) in cases.items():
        assert deviation < 1e-9 < 1e-2 < largest, case
        assert loss == pytest.approx(expected_loss, abs=1e-5), case


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_weighted_gradient_is_the_weighted_mean_however_the_batch_is_divided(
    gradients, processes
):
    """Also where all samples of a microbatch, or of a pipeline, have no weight, and when it is
    clipped."""
    cases = gradients[processes]["weighted"]
    assert len(cases) == (7 if processes == 2 else 6)  # where (4 // replicas, 1) is there already
    for case, (deviation, largest, loss, expected_loss) in cases.items():
        assert deviation < 1e-6 < 1e-3 < largest, case
        assert loss == pytest.approx(expected_loss, abs=1e-5), case


def test_ten_steps_are_those_of_ddp_that_accumulates(tmp_path):
    """The whole recipe against the whole reference: one process that accumulates over microbatches
    of 8 samples, as many as all pipelines have together."""
    flags = ["--max-steps", 10, "--lr", 0.4, "--batch-size"]
    runs = train_forked(
        tmp_path,
        (1, "ddp_cifar", [*flags, 8, "--global-batch-size", 32]),
        (2, "pipeline_cifar", [*flags, 32, "--schedule", "gpipe", "--microbatches", 4]),
        (4, "pipeline_cifar", [*flags, 16, "--schedule", "1f1b", "--microbatches", 2]),
        (4, "pipeline_cifar", [*flags, 8, "--global-batch-size", 32, "--microbatches", 2]),
        (2, "pipeline_cifar", [*flags, 32, "--precision", "bf16"]),
    )
    torch.manual_seed(0)
    initial = recipe.build_model(SimpleNamespace(model="simple_cnn")).state_dict()
    whole, *_, bf16 = runs
    expected_weights = load_file(whole.weights)
    moved = max((expected_weights[name] - initial[name]).abs().max().item() for name in initial)
    assert moved > 1e-3, "weights that have not moved prove nothing"
    for piped in runs[1:]:
        assert piped.summary["global_batch_size"] == whole.summary["global_batch_size"] == 32
        assert piped.summary["peak_learning_rate"] == whole.summary["peak_learning_rate"] == 0.1
        for key, tolerance in (("loss", 1e-2 if piped is bf16 else 1e-5), ("learning_rate", 0)):
            values, expected = ([line[key] for line in run.train] for run in (piped, whole))
            assert len(values) == 10
            assert values == pytest.approx(expected, abs=tolerance)
            assert (values == pytest.approx(expected, abs=1e-5)) != (
                piped is bf16 and key == "loss"
            )
        weights = load_file(piped.weights)
        torch.testing.assert_close(
            weights, expected_weights, rtol=0, atol=1e-3 if piped is bf16 else 1e-5
        )

    seen = [(runs[2].directory / f"batches.{rank}").read_text().splitlines() for rank in range(4)]
    assert seen[0] == seen[1] and seen[2] == seen[3] and len(seen[0]) == 10, (
        "the stages of a pipeline, the same batches"
    )
    assert not set(seen[0]) & set(seen[2]), "different pipelines, different batches"


@pytest.fixture(scope="module")
def resnet_runs(tmp_path_factory):
    flags = ["--model", "resnet50", "--stem", "imagenet", "--max-steps", 1, "--batch-size", 256]
    return train_forked(
        tmp_path_factory.mktemp("resnet"),
        (2, "pipeline_cifar", flags),
        (1, "ddp_cifar", flags),
        together=1,
    )


@pytest.mark.slow
def test_the_merged_weights_evaluate_to_the_same_loss_in_a_plain_torchvision_model(resnet_runs):
    piped, _ = resnet_runs
    model, weights = torchvision.models.resnet50(num_classes=10), load_file(piped.weights)
    assert {int(count) for name, count in weights.items() if "num_batches" in name} == {8}, (
        "microbatches of one step"
    )
    model.load_state_dict(weights, strict=True)
    model.eval()
    images, labels = recipe.ImageTensors(
        *recipe.synthetic_images(128, seed=2), torch.device("cpu")
    ).__getitems__(list(range(128)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert loss == pytest.approx(piped.summary["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_each_stage_needs_less_memory_than_the_whole_model(resnet_runs):
    piped, whole = resnet_runs
    peaks = piped.summary["rank_peak_memory_bytes"]
    assert (
        len(peaks) == 2
        and max(peaks) == piped.summary["peak_memory_bytes"] < whole.summary["peak_memory_bytes"]
    )
    first, second = piped.summary["stages"]
    assert first.startswith("conv1, ") and "layer3.1: " in first
    assert second.startswith("layer3.2, ") and "fc: " in second


@pytest.mark.slow
def test_evaluation_counts_each_sample_once(tmp_path):
    """128 test samples in batches of 24: 6 batches, the last of 8."""
    flags = ["--max-steps", 2, "--batch-size", 24, "--microbatches", 4]
    images = recipe.ImageTensors(*recipe.synthetic_images(128, seed=2), torch.device("cpu"))
    images, labels = images.__getitems__(list(range(128)))
    for result in train_forked(
        tmp_path, *((processes, "pipeline_cifar", flags) for processes in (2, 4))
    ):
        summary, model = result.summary, recipe.build_model(SimpleNamespace(model="simple_cnn"))
        model.load_state_dict(load_file(result.weights))
        with torch.no_grad():
            logits = model(images)
        assert summary["samples"] == 128
        assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(
            summary["test_loss"], rel=1e-4
        )
        assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(
            summary["test_accuracy"], abs=1e-6
        )


def test_the_cut_moves_and_the_stages_hold_everything_once():
    args = SimpleNamespace(model="resnet50", stem="cifar", split=None)
    model = recipe.build_model(args)
    blocks = recipe.model_blocks(model)
    assert list(blocks)[:5] == ["conv1", "bn1", "relu", "maxpool", "layer1.0"]
    assert list(blocks)[-3:] == ["avgpool", "flatten", "fc"]
    for stem, boundary in (("cifar", "layer3.0"), ("imagenet", "layer3.2")):
        args.stem = stem
        first, second = recipe.cut(blocks, args)
        assert next(iter(second)) == boundary and [*first, *second] == list(blocks)
    args.split = "layer1.2"
    assert next(iter(recipe.cut(blocks, args)[1])) == "layer1.2"
    sequential = torch.nn.Sequential(
        *[block for part in recipe.cut(blocks, args) for block in part.values()]
    ).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sequential(images), model.eval()(images))


def test_a_block_that_comes_twice_runs_twice():
    first, activation, last = torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    blocks = recipe.model_blocks(torch.nn.Sequential(first, activation, first, activation, last))
    assert list(blocks.values()) == [first, activation, first, activation, last]


RETURNED = '    return {"loss": loss, "accuracy": logits.argmax(1) == labels}\n'


def launched_with(returned, processes, directory):
    """What the launcher prints about a copy whose `compute_loss` ends with another line."""
    source = RECIPE.read_text()
    assert source.count(RETURNED) == 1
    script = directory / "own.py"
    script.write_text(source.replace(RETURNED, f"    {returned}\n"))
    return launch(processes, script, *SMALL, cwd=directory, check=False).stderr


@pytest.mark.slow
def test_a_mistake_that_only_last_stages_know_is_told_once_by_the_first_of_them(tmp_path):
    printed = launched_with("return loss.mean()", 4, tmp_path)
    line, *others = printed.splitlines()
    assert line.startswith("own: error: rank 1: compute_loss returned Tensor: return {"), printed
    assert not any(other.startswith("own: ") for other in others), printed
    assert "Traceback" not in printed.partition("Sending process")[0]


@pytest.mark.slow
def test_an_exception_in_the_last_stage_is_printed(tmp_path):
    printed = launched_with('return batch["y"]', 2, tmp_path).partition("Sending process")[0]
    assert printed.count("Traceback") == 1, "of the rank that knows it, and of no other one"
    assert 'return batch["y"]' in printed and "TypeError: tuple indices" in printed


ONLY_IN_EVALUATIONS = """
per_sample = compute_loss


def compute_loss(model, batch):
    metrics = per_sample(model, batch)
    if not torch.is_grad_enabled():
        metrics["certain"] = metrics["loss"] < 0.1
    return metrics
"""


@pytest.mark.slow
@pytest.mark.copied("pipeline_cifar", project=ONLY_IN_EVALUATIONS, processes=2)
def test_other_metrics_in_evaluations_are_told_before_the_first_step(outcome):
    """The first stage knows the names of those in training, and sends no values for others."""
    words = "compute_loss: return the same keys, in the same order, in training and in evaluations"
    assert f"mine: error: rank 1: {words}" in outcome.output
    assert "step 1/" not in outcome.output and "test_loss" not in outcome.output


TIED = """
def build_model(args):
    blocks = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    blocks += [nn.Linear(16, 16) for _ in range(4)] + [nn.Linear(16, 10)]
    blocks[4].weight = blocks[3].weight
    blocks[6].bias = blocks[5].bias
    return nn.Sequential(*blocks).to(memory_format=torch.channels_last)
"""


@pytest.mark.slow
@pytest.mark.copied(
    "pipeline_cifar", project=TIED, processes=2, flags=["--split", 5, "--batch-size", 64]
)
def test_weights_tied_within_either_stage_are_written_once_and_are_those_of_the_unsplit_model(
    outcome,
):
    assert outcome.codes == [0, 0], outcome.output
    weights = load_file(outcome.directory / "run/model.safetensors")
    names = {"nn": torch.nn, "torch": torch}
    exec(TIED, names)
    model = names["build_model"](None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["4.weight", "6.bias"], [])
    images, labels = recipe.synthetic_images(64, seed=2)
    images = recipe.ImageTensors(images, labels, torch.device("cpu")).__getitems__(range(64))[0]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    summary = json.loads((outcome.directory / "run/summary.json").read_text())
    assert loss == pytest.approx(summary["test_loss"], rel=1e-5)


REFUSALS = {
    "one process": (1, [], ["takes two processes, not 1:", "--num_processes 2"]),
    "three processes": (3, [], ["takes two processes, not 3:", "--num_processes 2"]),
    "batch that does not divide": (
        2,
        ["--batch-size", 100],
        ["--microbatches: 8 do not divide a batch of 100"],
    ),
    "batch smaller than its parts": (
        2,
        ["--batch-size", 4],
        ["--microbatches: 8 do not divide a batch of 4"],
    ),
    "too few microbatches": (
        2,
        ["--schedule", "1f1b", "--microbatches", 1],
        ["--microbatches", "1f1b", "gpipe"],
    ),
    "unknown boundary": (2, ["--split", "layer9"], ["--split", "layer9", "1, 2"]),
    "cut before everything": (2, ["--split", "0"], ["--split", "1, 2"]),
    "compilation": (2, ["--compile"], ["--compile"]),
}


@pytest.mark.slow
def test_the_groups_of_stages_and_replicas_have_the_timeout_of_all(gradients):
    timeouts = gradients[4]["timeouts"]
    assert timeouts and set(timeouts) == {recipe.TIMEOUT.total_seconds()}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    directory, runs = tmp_path_factory.mktemp("refused"), []
    for case, (processes, flags, _) in REFUSALS.items():
        flags = [*SMALL, *flags, "--output-dir", case]
        runs.append(
            {
                "processes": processes,
                "script": RECIPE,
                "directory": directory,
                "flags": flags,
                "grace": 0.5,
            }
        )
    return dict(zip(REFUSALS, forked(runs, directory, together=2), strict=True))


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(refusals, case):
    codes, output = refusals[case]
    assert codes[0] == 2 and 0 not in codes
    own = [line for line in output.splitlines() if line.startswith("pipeline_cifar: ")]
    assert len(own) == 1 and own[0].startswith("pipeline_cifar: error: "), output
    assert all(word in own[0] for word in REFUSALS[case][2]), output
