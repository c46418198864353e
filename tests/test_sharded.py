"""The sharded training is that of ddp_cifar.py, a process holds its share, and a checkpoint is whole or not there."""

import pytest
import torch
from conftest import forked, load, outputs
from safetensors.torch import load_file

recipe = load("recipes/sharded_cifar.py")


def run_all(directory, runs):
    """{name: what a run left behind}, of runs {name: (processes, recipe, flags)} that have to succeed."""
    described = [
        {"processes": processes, "recipe": name, "flags": ["--log-every", 1, *flags], "directory": directory / case}
        for case, (processes, name, flags) in runs.items()
    ]
    for one in described:
        one["plain"] = True
    for codes, output in forked(described, directory):
        assert set(codes) == {0}, output
    return {case: outputs(directory / case) for case in runs}


EQUAL = {  # processes, flags, and those of ddp_cifar.py on one process
    "1": (1, ["--batch-size", 32], []),
    "2": (2, ["--batch-size", 16], []),
    "4": (4, ["--batch-size", 8], []),
    "8": (8, ["--batch-size", 4], []),
    "2x2": (4, ["--batch-size", 8, "--replicas", 2], []),
    "accumulated": (2, ["--batch-size", 4, "--accumulation-steps", 4], []),
    "accumulated in shards": (2, ["--batch-size", 8, "--accumulation-steps", 2, "--sync-each-batch"], []),
    "accumulated 2x2": (4, ["--batch-size", 4, "--accumulation-steps", 2, "--replicas", 2], []),
    "clipped": (4, ["--batch-size", 8, "--clip-norm", 0.05], ["--clip-norm", 0.05]),
    "clipped 2x2": (4, ["--batch-size", 8, "--replicas", 2, "--clip-norm", 0.05], ["--clip-norm", 0.05]),
}


@pytest.fixture(scope="module")
def equal_runs(tmp_path_factory):
    flags = ["--max-steps", 8, "--lr", 0.2]
    runs = {case: (processes, "sharded_cifar", [*flags, *own]) for case, (processes, own, _) in EQUAL.items()}
    for _, _, theirs in EQUAL.values():
        runs[f"ddp {theirs}"] = 1, "ddp_cifar", [*flags, "--batch-size", 32, *theirs]
    return run_all(tmp_path_factory.mktemp("equal"), runs)


@pytest.mark.parametrize("case", EQUAL)
def test_losses_and_weights_are_those_of_ddp(equal_runs, case):
    sharded, whole = equal_runs[case], equal_runs[f"ddp {EQUAL[case][2]}"]
    assert sharded["summary"]["global_batch_size"] == 32
    for key in ("loss", "accuracy", "learning_rate"):
        values, expected = ([line[key] for line in run["train"]] for run in (sharded, whole))
        assert len(values) == 8
        assert values == pytest.approx(expected, abs=1e-5, rel=0)
    assert sharded["summary"]["test_loss"] == pytest.approx(whole["summary"]["test_loss"], abs=1e-5)
    weights, expected = load_file(sharded["weights"]), load_file(whole["weights"])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    torch.manual_seed(0)
    initial = recipe.build_model(type("Args", (), {"model": "simple_cnn"})).state_dict()
    moved = max((weights[name] - initial[name]).abs().max().item() for name in initial)
    assert moved > 1e-3, "weights that have not moved prove nothing"
