"""The blocks that recipes share have not drifted from the reference, and as many were compared as there should be."""

import subprocess
import sys

import pytest
from conftest import ROOT
from sync import others, shared

SHARED_BLOCKS = {"amp_cifar": 14, "data_parallel_cifar": 15, "pipeline_cifar": 13, "plain_ddp_cifar": 1}


def test_every_recipe_is_counted():
    assert {path.stem for path in others()} == SHARED_BLOCKS.keys()


@pytest.mark.parametrize("path", others(), ids=lambda path: path.stem)
def test_shared_blocks_are_the_references_text(path):
    compared = shared(path)
    drifted = [name for name, mine, theirs in compared if mine != theirs]
    assert not drifted, f"{path.name} has drifted from ddp_cifar.py: run `make sync`"
    assert len(compared) == SHARED_BLOCKS[path.stem]


def test_make_sync_mends_drift(tmp_path):
    for name in ("recipes/ddp_cifar.py", "recipes/plain_ddp_cifar.py", "tests/sync.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    copy = tmp_path / "recipes/plain_ddp_cifar.py"
    copy.write_text(copy.read_text().replace("48 * noise", "47 * noise"))
    command = [sys.executable, tmp_path / "tests/sync.py"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "updated recipes/plain_ddp_cifar.py\n"
    assert copy.read_text() == (ROOT / "recipes/plain_ddp_cifar.py").read_text()
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""
