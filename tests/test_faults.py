"""faults.py: a recipe survives random faults, and copies that do not are found out."""

import json
import sys

import pytest
from conftest import CNN, SHORT, copy
from processes import ROOT, launch

pytestmark = pytest.mark.slow

FLAGS = [*CNN, "--batch-size", "8", "--epochs", "2", "--checkpoint-every", "4", "--threads", "1"]
FORGETFUL = (
    "            if is_wanted:\n",
    '            if is_wanted and name != "optimizer":\n',
)
LEAVES_A_PROCESS = """
import subprocess

plain_step = train_step


def train_step(run, *arguments):
    if run.resumed_from and run.step == run.resumed_from + 1:
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return plain_step(run, *arguments)
"""
KILL = "SIGKILL of a rank"
REMOVED = "directory removed"
# name: (recipe, kinds, faults, processes, replacements, project, the error)
COPIES = {
    "good": ("ddp", [KILL, "SIGTERM of the launcher", "cut checkpoint"], 3, 2, [], "", ""),
    "removed": ("sharded", [REMOVED], 1, 1, [], "", ""),
    "forgetful": ("ddp", [KILL], 1, 1, [FORGETFUL], "", "other evaluations"),
    "littering": ("ddp", [KILL], 1, 1, [], LEAVES_A_PROCESS, "1 processes are left after 20 s"),
}


# In `make test`, the quickest is enough.
REDUNDANT = [pytest.param(x, marks=pytest.mark.redundant) for x in COPIES if x != "removed"]


@pytest.mark.parametrize("name", ["removed", *REDUNDANT])
def test_faults_change_nothing_in_a_recipe_and_a_broken_copy_is_found(name, tmp_path):
    """The seed is one whose faults come after a checkpoint."""
    recipe, kinds, faults, processes, replacements, project, error = COPIES[name]
    path = tmp_path / f"{name}.py"
    script = copy(f"{recipe}_cifar", path, *SHORT, *replacements, project=project)
    command = [sys.executable, ROOT / "benchmarks/faults.py", script, "--faults", faults]
    command += ["--processes", processes, "--limit", 20, "--seed", 32, "--kinds", *kinds]
    command += ["--output-dir", tmp_path / "faults", "--", *FLAGS]
    done = launch(command, check=False)
    assert done.returncode == bool(error), done.stdout + done.stderr
    rows = json.loads((tmp_path / f"faults/{name}.json").read_text())["faults"]
    assert [row["kind"] in kinds for row in rows[:faults]] == [True] * faults
    found = [row["error"] for row in rows if row["error"]]
    assert len(found) == bool(error) and all(x.startswith(error) for x in found), found
