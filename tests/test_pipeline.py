"""The pipeline against the unsplit model, and both stages against each other."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchvision
from conftest import ROOT, answer, launch, load, run, the_error_line, train, train_forked
from safetensors.torch import load_file

RECIPE = ROOT / "recipes/pipeline_cifar.py"
recipe = load("recipes/pipeline_cifar.py")


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_gradients_and_steps_are_those_of_the_unsplit_model_over_the_same_microbatches(processes, tmp_path):
    cases = answer("pipeline_gradient", processes, tmp_path)
    assert len(cases) == {2: 14 + 1 + 4, 4: 7 + 2 + 1, 8: 7 + 2}[processes]
    for case, (deviation, largest, loss, expected_loss) in cases.items():
        assert deviation < 1e-5 < 1e-2 < largest, case
        assert loss == pytest.approx(expected_loss, abs=1e-5), case


def test_twenty_steps_are_those_of_ddp_that_accumulates(tmp_path):
    """The whole recipe against the whole reference: one process that accumulates over microbatches of 8 samples, as
    many as all pipelines have together."""
    runs = []
    for processes, schedule in ((2, "gpipe"), (4, "1f1b")):
        flags = ["--max-steps", 20, "--lr", 0.2, "--epochs", 4, "--batch-size"]
        runs.append((processes, "pipeline_cifar", [*flags, 32, "--schedule", schedule, "--microbatches", 4]))
        runs.append((1, "ddp_cifar", [*flags, 8, "--accumulation-steps", 2 * processes]))
    runs = train_forked(tmp_path, *runs)
    torch.manual_seed(0)
    initial = recipe.build_model(type("Args", (), {"model": "simple_cnn"})).state_dict()
    for piped, whole, batch in zip(runs[::2], runs[1::2], (32, 64), strict=True):
        assert piped.summary["global_batch_size"] == whole.summary["global_batch_size"] == batch
        for key, tolerance in (("loss", 1e-5), ("learning_rate", 0)):
            values, expected = ([line[key] for line in run.train] for run in (piped, whole))
            assert len(values) == 20
            assert values == pytest.approx(expected, abs=tolerance)
        weights, expected = load_file(piped.weights), load_file(whole.weights)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
        moved = max((weights[name] - initial[name]).abs().max().item() for name in initial)
        assert moved > 1e-3, "weights that have not moved prove nothing"


def test_both_stages_see_the_same_samples_and_different_pipelines_different_ones(tmp_path):
    script = tmp_path / "logged.py"
    logging = """
original = ImageTensors.__getitems__


def logged(self, indices):
    if self.seed is not None:
        with open(f"rank{os.environ['RANK']}", "a") as file:
            file.write(json.dumps(indices) + "\\n")
    return original(self, indices)


ImageTensors.__getitems__ = logged

if __name__ == "__main__":"""
    script.write_text(RECIPE.read_text().replace('if __name__ == "__main__":', logging))
    launch(4, script, *SMALL, "--max-steps", "5", "--batch-size", "16", cwd=tmp_path)
    seen = [[json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()] for rank in range(4)]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert len(seen[0]) >= 5
    first, second = ({index for batch in seen[rank] for index in batch} for rank in (0, 2))
    assert first and second and not first & second


SMALL = ["--data", "synthetic", "--model", "simple_cnn", "--cpu"]


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resnet")
    flags = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 128, "--max-steps", 3]
    return train(2, directory, *flags, recipe="pipeline_cifar")


def test_the_merged_weights_evaluate_to_the_same_accuracy_in_a_plain_torchvision_model(resnet_run):
    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(load_file(resnet_run.weights), strict=True)
    model.eval()
    dataset = recipe.ImageTensors(*recipe.synthetic_images(1024, seed=2), torch.device("cpu"))
    with torch.no_grad():
        batches = [dataset.__getitems__(list(range(start, start + 256))) for start in range(0, 1024, 256)]
        losses = [torch.nn.functional.cross_entropy(model(images), labels).item() for images, labels in batches]
    assert sum(losses) / 4 == pytest.approx(resnet_run.summary["test_loss"], rel=1e-4)


def test_each_stage_needs_less_memory_than_the_whole_model(resnet_run, tmp_path):
    flags = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 128, "--max-steps", 3]
    whole = train(1, tmp_path, *flags)
    assert max(resnet_run.summary["stage_peak_memory_bytes"]) < whole.summary["peak_memory_bytes"]
    first, second = resnet_run.summary["stages"]
    assert first.startswith("conv1, ") and "layer3.1: " in first
    assert second.startswith("layer3.2, ") and "fc: " in second


def test_evaluation_counts_each_sample_once(tmp_path):
    """128 test samples in batches of 24: 6 batches, the last of 8."""
    flags = ["--max-steps", 2, "--batch-size", 24, "--microbatches", 4]
    images = recipe.ImageTensors(*recipe.synthetic_images(128, seed=2), torch.device("cpu"))
    images, labels = images.__getitems__(list(range(128)))
    for result in train_forked(tmp_path, *((processes, "pipeline_cifar", flags) for processes in (2, 4))):
        summary, model = result.summary, recipe.build_model(type("Args", (), {"model": "simple_cnn"}))
        model.load_state_dict(load_file(result.weights))
        with torch.no_grad():
            logits = model(images)
        assert summary["samples"] == 128
        assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(summary["test_loss"], rel=1e-4)
        assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(summary["test_accuracy"], abs=1e-6)


def test_clipping_is_to_the_norm_of_the_whole_model(tmp_path):
    """One step at a learning rate of 1: the update of both stages together is 1.9 times the clipped gradient (Nesterov
    momentum) and weight decay."""
    flags = ["--max-steps", 1, "--batch-size", 128, "--lr", 1, "--clip-norm", 0.01]
    (result,) = train_forked(tmp_path, (2, "pipeline_cifar", flags))
    torch.manual_seed(0)
    initial = recipe.build_model(type("Args", (), {"model": "simple_cnn"})).state_dict()
    updated = load_file(result.weights)
    gradient = [(initial[name] - updated[name]) / 1.9 - 5e-4 * initial[name] for name in initial]
    assert torch.cat([part.flatten() for part in gradient]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_cut_moves_and_the_stages_hold_everything_once():
    args = type("Args", (), {"model": "resnet50", "stem": "cifar", "split": None})
    model = recipe.build_model(args)
    blocks = recipe.model_blocks(model)
    assert list(blocks)[:5] == ["conv1", "bn1", "relu", "maxpool", "layer1.0"] and list(blocks)[-3:] == [
        "avgpool",
        "flatten",
        "fc",
    ]
    for stem, boundary in (("cifar", "layer3.0"), ("imagenet", "layer3.2")):
        args.stem = stem
        first, second = recipe.cut(blocks, args)
        assert next(iter(second)) == boundary and [*first, *second] == list(blocks)
    args.split = "layer1.2"
    assert next(iter(recipe.cut(blocks, args)[1])) == "layer1.2"
    sequential = torch.nn.Sequential(*[block for part in recipe.cut(blocks, args) for block in part.values()]).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sequential(images), model.eval()(images))


REFUSALS = {
    "one process": (1, [], ["2gpu.yaml", "4gpu.yaml"]),
    "batch that does not divide": (2, ["--batch-size", "100"], ["--microbatches", "8", "100"]),
    "too few microbatches": (2, ["--schedule", "1f1b", "--microbatches", "1"], ["--microbatches", "1f1b", "gpipe"]),
    "unknown boundary": (2, ["--split", "layer9"], ["--split", "layer9", "1, 2"]),
    "cut before everything": (2, ["--split", "0"], ["--split", "1, 2"]),
    "accumulation": (2, ["--accumulation-steps", "2"], ["--accumulation-steps"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(refusals, case):
    line = the_error_line(refusals[case])
    assert all(word in line for word in REFUSALS[case][2]), line


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    def refused(case):
        processes, flags, _ = REFUSALS[case]
        flags = [*SMALL, "--max-steps", "1", *flags]
        return launch(processes, RECIPE, *flags, cwd=tmp_path_factory.mktemp("refused"), check=False)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSALS, pool.map(refused, REFUSALS), strict=True))


def test_three_processes_are_refused(tmp_path):
    launched = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}
    line = the_error_line(run([sys.executable, RECIPE, *SMALL], cwd=tmp_path, check=False, **launched))
    assert "2gpu.yaml" in line
