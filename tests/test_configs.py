"""The config files, and the promise behind each: so many processes, really cooperating."""

import difflib
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from conftest import CONFIGS, ROOT, forked, outputs, train
from safetensors.torch import load_file

GLOBAL_BATCH, STEPS = 64, 12
NODES = ROOT / "accelerate_configs/nodes.yaml"


@pytest.mark.parametrize("processes", CONFIGS)
def test_accelerate_loads_it(processes):
    config = load_config_from_file(str(CONFIGS[processes]))
    assert config.num_processes == processes
    assert config.distributed_type == ("MULTI_GPU" if processes > 1 else "NO")
    assert config.main_process_port == 0, "two jobs on one machine would collide"
    assert config.mixed_precision == "no"


@pytest.mark.parametrize("processes", [1, 2, 8, "nodes"])
def test_configs_differ_in_what_must_differ(processes):
    def settings(path):
        return [line for line in path.read_text().splitlines() if not line.startswith("#")]

    changes = [
        line[2:].split(":")[0]
        for line in difflib.ndiff(settings(CONFIGS[4]), settings(CONFIGS.get(processes, NODES)))
        if line.startswith("+ ")
    ]
    expected = {
        1: ["distributed_type", "num_processes"],
        "nodes": ["main_process_ip", "main_process_port", "num_machines", "num_processes"],
    }
    assert changes == expected.get(processes, ["num_processes"])


FLAGS = ["--max-steps", STEPS, "--lr", 0.2, "--batch-size"]


FORKED = [(8, 1), (1, 1), (2, 1), (1, 4), (2, 2)]
LAYOUTS = [(2, 1), (4, 1), (8, 1), (1, 4), (2, 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(processes, accumulation): the same training at one global batch}, by `accelerate launch`
    with 4gpu.yaml, from which 8gpu.yaml differs in one number, or without a launcher. 5120 samples
    are 80 global batches; 12 steps reach warm-up and decay."""
    directory = tmp_path_factory.mktemp("layouts")
    common = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--log-every", 1, *FLAGS]
    runs = []
    for processes, accumulation in FORKED:
        flags = [*common, GLOBAL_BATCH // processes // accumulation]
        flags += ["--global-batch-size", GLOBAL_BATCH]
        flags += ["--output-dir", f"{processes}-{accumulation}"]
        run = {"processes": processes, "script": ROOT / "recipes/ddp_cifar.py", "flags": flags}
        runs.append({**run, "directory": directory})
    for codes, output in forked(runs, directory, together=2):
        assert set(codes) == {0}, output
    found = {
        layout: SimpleNamespace(**outputs(directory / "{}-{}".format(*layout))) for layout in FORKED
    }
    return found | {(4, 1): train(4, directory / "4", *FLAGS, GLOBAL_BATCH // 4)}


@pytest.fixture
def result(results, layout):
    return results[layout]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), *LAYOUTS])
def test_launches_that_many_processes(result, layout):
    assert result.summary["world_size"] == layout[0]
    assert result.summary["global_batch_size"] == GLOBAL_BATCH
    assert result.summary["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_every_step_is_that_of_one_process(results, result, layout):
    losses, reference = ([line["loss"] for line in run.train] for run in (result, results[1, 1]))
    assert len(losses) == STEPS
    assert losses == pytest.approx(reference, abs=1e-5)
    assert reference[0] - reference[-1] > 0.005, (
        "the reference has learned nothing: an equal loss would prove nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_final_weights_and_accuracy_are_those_of_one_process(results, result, layout):
    weights, reference = load_file(result.weights), load_file(results[1, 1].weights)
    torch.testing.assert_close(weights, reference, rtol=0, atol=1e-5)
    assert result.summary["test_loss"] == pytest.approx(
        results[1, 1].summary["test_loss"], abs=1e-5
    )
    assert result.summary["samples"] == 1024


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), *LAYOUTS])
def test_the_learning_rate_of_every_step_is_the_documented_one(result, layout):
    peak, warmup = 0.2 * GLOBAL_BATCH / 128, STEPS // 5
    expected = [
        peak * min(step / warmup, (STEPS + 1 - step) / (STEPS - warmup))
        for step in range(1, STEPS + 1)
    ]
    assert [line["learning_rate"] for line in result.train] == pytest.approx(expected)
