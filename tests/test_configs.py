"""The config files, and the promise behind each: so many processes, really cooperating."""

import difflib

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from conftest import CONFIGS, ROOT, load, train
from safetensors.torch import load_file

GLOBAL_BATCH, STEPS = 64, 12
NODES = ROOT / "accelerate_configs/nodes.yaml"
recipe = load("recipes/ddp_cifar.py")


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training at one global batch: over 1, 2, 4, 8 processes, and accumulated over 4 microbatches by one
    process and over 2 by two. 5120 samples are 80 global batches; 12 steps reach warm-up and decay."""
    layouts = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 2)]
    flags = ["--max-steps", STEPS, "--lr", 0.2]
    return {
        (processes, accumulation): train(
            processes,
            tmp_path_factory.mktemp("run"),
            *flags,
            *("--batch-size", GLOBAL_BATCH // processes // accumulation, "--accumulation-steps", accumulation),
        )
        for processes, accumulation in layouts
    }


LAYOUTS = [(2, 1), (4, 1), (8, 1), (1, 4), (2, 2)]


@pytest.mark.parametrize("processes", CONFIGS)
def test_launches_that_many_processes(runs, processes):
    summary = runs[processes, 1].summary
    assert summary["world_size"] == processes
    assert summary["global_batch_size"] == GLOBAL_BATCH
    assert summary["steps"] == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_every_step_is_that_of_one_process(runs, layout):
    losses, reference = ([line["loss"] for line in runs[key].train] for key in (layout, (1, 1)))
    assert len(losses) == STEPS
    assert losses == pytest.approx(reference, abs=1e-5)
    assert reference[0] - reference[-1] > 0.01, "the reference has learned nothing: an equal loss would prove nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_final_weights_and_accuracy_are_those_of_one_process(runs, layout):
    weights, reference = load_file(runs[layout].weights), load_file(runs[1, 1].weights)
    torch.testing.assert_close(weights, reference, rtol=0, atol=1e-5)
    assert runs[layout].summary["test_loss"] == pytest.approx(runs[1, 1].summary["test_loss"], abs=1e-5)
    assert runs[layout].summary["samples"] == 1024


@pytest.mark.parametrize("layout", [(1, 1), *LAYOUTS])
def test_the_learning_rate_of_every_step_is_the_documented_one(runs, layout):
    peak, warmup = 0.2 * GLOBAL_BATCH / 128, STEPS // 5
    expected = [peak * min(step / warmup, (STEPS + 1 - step) / (STEPS - warmup)) for step in range(1, STEPS + 1)]
    assert [line["learning_rate"] for line in runs[layout].train] == pytest.approx(expected)
