"""check.py: copies that train the same in every way pass it, mistakes are found, with their step."""

import json
import subprocess
import sys
from pathlib import Path

import bench
import check
import pytest
import torch
from conftest import IN_FLOAT64, LITTLE_DATA, ROOT, SMALL, copy, forked, free_port

FLAGS = [*SMALL, "--max-steps", "6", "--batch-size", "8"]


def execute(command, environment, timeout):
    """As `bench.execute` of torchrun, without a launcher."""
    processes, script, *flags = command[command.index("--nproc_per_node") + 1 :]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = {"processes": int(processes), "script": script, "flags": flags, "directory": Path.cwd()}
    run |= {"env": names if processes == "1" else {}, "grace": 0.5, "terminate": True}
    [(codes, output)] = forked([run], Path.cwd())
    return int(any(codes)), [(0.0, output)]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """A function that checks a copy, and returns the exit status, the output and the JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "execute", execute)

    def run(recipe, *replacements, project="", flags=()):
        copy(f"{recipe}_cifar", tmp_path / "mine.py", LITTLE_DATA, *replacements, project=project)
        monkeypatch.setattr(sys, "argv", ["check.py", "mine.py", *FLAGS, *flags])
        with pytest.raises(SystemExit) as end:
            check.main()
        results = json.loads(Path("runs/check/mine.json").read_text())
        return end.value.code, capsys.readouterr().out, {x["name"]: x for x in results["runs"]}

    return run


DROPOUT = """
plain_model = build_model


def build_model(args):
    first, *others = plain_model(args)
    return nn.Sequential(nn.Sequential(first, nn.Dropout(0.5)), *others)
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "amp", "sharded", "pipeline"])
def test_a_good_copy_passes(recipe, checked):
    code, output, runs = checked(
        recipe, project=DROPOUT, flags=["--batch-size", "16"] * (recipe == "pipeline")
    )
    print(output)
    assert code == 0, output
    assert 0
