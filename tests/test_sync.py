"""The blocks that recipes share have not drifted from the reference, and as many were compared as there should be."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from sync import others, shared, unmet

SHARED_BLOCKS = {
    "amp_cifar": 30,
    "data_parallel_cifar": 30,
    "pipeline_cifar": 28,
    "plain_ddp_cifar": 1,
    "sharded_cifar": 29,
}


def test_every_recipe_is_counted():
    assert {path.stem for path in others()} == SHARED_BLOCKS.keys()


@pytest.mark.parametrize("path", others(), ids=lambda path: path.stem)
def test_shared_blocks_are_the_references_text(path):
    compared = shared(path)
    drifted = [name for name, mine, theirs in compared if mine != theirs]
    assert not drifted, f"{path.name} has drifted from ddp_cifar.py: run `make sync`"
    assert len(compared) == SHARED_BLOCKS[path.stem]
    assert unmet(path) == []


@pytest.fixture
def project(tmp_path):
    """The recipes under git, and `make sync` on them: what it prints, its complaint, and the changed files."""
    for name in ("recipes", "tests"):
        (tmp_path / name).mkdir()
    for name in ("recipes/ddp_cifar.py", "recipes/amp_cifar.py", "recipes/sharded_cifar.py", "tests/sync.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)

    def sync(edited, old, new):
        path = tmp_path / "recipes" / edited
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        process = subprocess.run([sys.executable, tmp_path / "tests/sync.py"], capture_output=True, text=True)
        return process, [(tmp_path / "recipes" / name).read_text() for name in ("ddp_cifar.py", "amp_cifar.py")]

    return sync


def test_make_sync_copies_a_change_of_the_reference(project):
    process, (reference, copy) = project("ddp_cifar.py", "mul_(48)", "mul_(47)")
    updated = "updated recipes/amp_cifar.py\nupdated recipes/sharded_cifar.py\n"
    assert (process.returncode, process.stdout) == (0, updated)
    assert "mul_(47)" in reference and "mul_(47)" in copy
    process, (reference, copy) = project("ddp_cifar.py", "mul_(47)", "mul_(46)")
    assert (process.returncode, process.stdout) == (0, updated), "again, without a commit in between"
    assert "mul_(46)" in reference and "mul_(46)" in copy


def test_make_sync_does_not_overwrite_what_was_edited_in_a_copy(project):
    process, (reference, copy) = project("amp_cifar.py", "mul_(48)", "mul_(47)")
    assert process.returncode == 1 and "amp_cifar.py: synthetic_images was edited here" in process.stderr
    assert "mul_(47)" in copy and "mul_(48)" in reference


def test_make_sync_names_a_missing_import(project):
    process, _ = project("amp_cifar.py", "from itertools import islice\n", "")
    assert process.stdout == "amp_cifar.py: islice is missing, or another than the shared blocks need\n"
