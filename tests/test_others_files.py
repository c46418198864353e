"""Files that others can hand in, and files of the owner's: SECURITY.md."""

import os
import re
import shutil

import pytest
import torch
from conftest import CNN, SHORT, Exit, copy, load
from processes import ROOT, forked, train_forked

FLAGS = ["--max-steps", 2, "--checkpoint-every", 1, "--keep", 1]
recipe = load("recipes/ddp_cifar.py", exits=True)


@pytest.mark.parametrize("name", ["ddp_cifar", "sharded_cifar"])
def test_files_of_the_owner_stay_as_they_are(name, tmp_path):
    """Named nearly as those of a run, or links of its names."""
    script = copy(name, tmp_path / f"{name}.py", *SHORT)
    flags = [*CNN, *FLAGS, "--batch-size", 32]
    (first,) = train_forked(tmp_path, (1, script, flags, {"directory": tmp_path / "first"}))
    output = tmp_path / "0"
    output.mkdir()
    suffix = ".pt" if name == "ddp_cifar" else ""
    newest = first.directory / f"step-00000002{suffix}"
    for near in ("step-00000002-best", "step-00000001.bak", "step-2", "old-step-00000001"):
        (shutil.copytree if newest.is_dir() else shutil.copy)(newest, output / f"{near}{suffix}")
    for folder in ("step-00000001-notes", "notes.tmp", "step-00000001-notes.tmp"):
        (output / folder).mkdir()
        (output / folder / "text").write_text("mine")
    (tmp_path / "folder").mkdir()
    for link in ("link.tmp", "step-00000009.tmp"):
        (output / link).symlink_to(tmp_path / "folder")
    (tmp_path / "victim").write_text("mine")
    links = "unfinished.jsonl.tmp", "metrics.jsonl", "summary.json", f"{name}.from-00000000.py"
    for link in links:
        (output / link).symlink_to(tmp_path / "victim")
    before = {x: x.read_bytes() for x in output.rglob("*") if x.is_file() and not x.is_symlink()}
    (run,) = train_forked(tmp_path, (1, script, flags))
    assert run.summary["resumed_from"] == 0 and "resuming" not in run.output
    assert before and all(x.read_bytes() == content for x, content in before.items())
    assert (tmp_path / "victim").read_text() == "mine" and (output / "link.tmp").is_symlink()


def in_itself():
    found = {}
    found |= {"a": found, "b": found}
    return found


def shared_levels():
    found = {"weight": 1}
    for _ in range(40):
        found = {"a": found, "b": found}
    return found


HOSTILE = {
    in_itself: "nothing in .* fits this model",
    shared_levels: "nothing in .* fits this model",
    lambda: [1, 2]: "cannot load",
    lambda: {"x" * 10_000: torch.ones(2)}: "nothing in .* it has x{80}$",
}


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_weights_are_one_line_and_a_hostile_checkpoint_is_damaged(make, tmp_path):
    torch.save(make(), tmp_path / "weights.pt")
    with pytest.raises(Exit, match=f"argument --weights: {HOSTILE[make]}"):
        recipe.load_weights(torch.nn.Linear(3, 2), str(tmp_path / "weights.pt"))
    if make in (in_itself, shared_levels):
        torch.save({"states": make()}, tmp_path / "step-00000001.pt")
        with pytest.raises((ValueError, RecursionError)):
            recipe.read_file(tmp_path / "step-00000001.pt")


def test_a_line_does_not_control_the_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))  # the launcher prints it
    recipe.log_error("a\x1b[2J\x07\r\nb\udcff\u202e")
    told = capsys.readouterr().err.removesuffix("\n")
    assert told.isprintable() and "a [2J" in told
    monkeypatch.setattr(recipe.os, "_exit", lambda status: None)
    load("recipes/ddp_cifar.py").exit_with_error("a", 1, "Traceback\n  a\x1b[2J\x07\n")
    first, *lines = capsys.readouterr().err.splitlines()
    assert (first, lines[0]) == ("Traceback", "  a[2J") and lines[1].endswith("error: a")
    assert "\\u001b" not in (tmp_path / "error").read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path))  # which cannot be written
    recipe.log_error("a")


@pytest.mark.skipif(os.getuid(), reason="needs root, to give a folder to another user")
def test_what_another_user_has_compiled_is_not_run(tmp_path):
    """As that of whoever first made the folder in /tmp that torch takes by default."""
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 12345, -1)
    one = {"processes": 1, "script": ROOT / "recipes/ddp_cifar.py", "directory": tmp_path}
    one["env"] = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    flags = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--epochs", 0]
    runs = [{**one, "flags": [*flags, *compiled]} for compiled in (["--compile"], [])]
    (codes, output), without = forked(runs, tmp_path)
    assert codes == [2] and f"{cache} belongs to another user" in output, output
    assert without[0] == [0], without[1]
    assert [*cache.iterdir()] == []


def test_no_file_is_unpickled_without_its_types():
    for folder in ("recipes", "examples", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = re.findall(r"torch\.load[(,]|pickle\.loads?\(", path.read_text())
            assert len(calls) == path.read_text().count("weights_only=True"), path
