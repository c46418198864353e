"""All ranks agree on their flags and data, also many ranks. On the checkpoint from which they
resume: test_checkpoints.py."""

import json
import re
import sys

import pytest
import torch
from conftest import ROUNDING_FLOAT32, project
from processes import ROOT, launch, outputs


def one_differs(name, said, more="", fewer="0", **chosen):
    """The second rank has other flags or versions, or fewer samples."""
    run = {"project": project("ranks", **chosen), "env": {"MORE": more, "FEWER": fewer}}
    mark = pytest.mark.copied("ddp_cifar", processes=2, flags=["--batch-size", 32], **run)
    return pytest.param(name, said, marks=mark, id=name)


DIFFERENCES = [
    one_differs("lr", ("0.1", "0.05"), "--lr 0.05"),
    one_differs("versions", ("torch 0", "torch 1"), VERSIONS='f"torch {RANK}"'),
    one_differs("samples", ("[256, 64]", "[196, 4]"), fewer="60"),
]


@pytest.mark.parametrize(("name", "said"), DIFFERENCES)
def test_ranks_that_were_started_differently_exit_before_the_first_step(outcome, name, said):
    assert outcome.codes[0] == 2 and outcome.codes[1] != 0, outcome.output
    (line,) = re.findall("^mine: error: (.*)$", outcome.output, re.MULTILINE)
    assert line.startswith(f"{name}: ") and "rank 0 on" in line and "on rank 1 on" in line
    assert all(value in line for value in said), line
    assert "step 1/" not in outcome.output


MACHINES = {"MORE": "--data-dir elsewhere --threads 1 --output-dir ./run", "FEWER": "0"}


@pytest.mark.copied("ddp_cifar", project=project("ranks"), processes=2, env=MACHINES)
def test_a_machine_may_have_paths_and_threads_of_its_own(outcome):
    assert outcome.codes == [0, 0], outcome.output


@pytest.mark.slow
def test_eight_ranks_train_as_one_and_stop_together(tmp_path):
    """After a signal to the last one. If gloo connects only ranks that communicate, as above 64
    ranks, each rank calls the store fewer than 40 times plus once per rank, gloo's own calls
    included. As many lines are printed as by one process."""
    command = [sys.executable, ROOT / "benchmarks/ranks.py", "--processes", 1, 8]
    command += ["--output-dir", tmp_path]
    launch(command, TORCH_GLOO_LAZY_INIT="1")  # an error if a stopped rank's status is not 143
    calls = [json.loads(x.read_text())["calls"] for x in tmp_path.glob("8/rank-*.json")]
    assert len(calls) == 8 and max(calls) < 40 + 8
    one, many = ((tmp_path / n / "output.txt").read_text().count("\n") for n in ("1", "8"))
    assert one == many > 40
    weights = [outputs(tmp_path / n / "run").weights for n in ("1", "8")]
    torch.testing.assert_close(*weights, rtol=0, atol=ROUNDING_FLOAT32)
    assert list(tmp_path.glob("8-stopped/run/step-*.pt"))
