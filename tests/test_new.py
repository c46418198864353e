"""`make new` and `make add`: a copy is whole and holds nothing that it does not use; what does not
fit is one line, and nothing is written."""

import ast
import subprocess
import sys

import new
import pytest
import sync
from conftest import ROOT
from recipe import REFERENCE, parts

RECIPES = {name: new.description(name)[1] for name in new.EXAMPLES}
ADDITIONS = [name for name in RECIPES if new.TRAIN not in str(new.description(name)[0])]
TASK = "photos"


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that does what `make new` or `make add` does, and returns the lines it prints."""

    def run(action, path, *examples, recipe="ddp"):
        words = [action, str(tmp_path / path), "--recipe", recipe, "--with", *examples]
        monkeypatch.setattr(sys, "argv", ["new.py", *words])
        return new.main()

    return run


def lint(directory):
    """The complaints of ruff, with the rules of this repository."""
    rules = ["--config", ROOT / "pyproject.toml", "--no-cache", directory]
    commands = (["check", "--output-format", "concise"], ["format", "--check"])
    for command in commands:
        line = [sys.executable, "-m", "ruff", *command, *rules]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("recipe", new.RECIPES)
def test_every_example_makes_a_copy_that_the_linter_passes_and_make_sync_updates(
    recipe, make, tmp_path
):
    """Alone, and all additions together with a task, in any order."""
    names = [name for name in RECIPES if recipe in RECIPES[name]]
    added = [name for name in ADDITIONS if name in names]
    combinations = [(name,) for name in names]
    combinations += [(TASK, *added), (TASK, *reversed(added))]
    for examples in combinations:
        path = tmp_path / f"{'_'.join(examples)[:20]}.py"
        make("new", path.name, *examples, recipe=recipe)
        text = path.read_text()
        doc = ast.get_docstring(ast.parse(text))
        assert "mine.py" not in text and f"Made from {recipe}_cifar.py" in doc
        assert " ".join(doc.split()).endswith(f" with {', '.join(examples)}.")
        assert not new.unused(text) - new.definitions(parts(path)[2]).keys()
        _, banner, block = parts(REFERENCE)
        assert all(line in block for line in new.unread_flags(text))
        assert sync.updated(path, banner, block) == (text, [])
    lint(tmp_path)


def test_what_a_copy_does_not_use_is_removed(make, tmp_path):
    make("new", "own.py", TASK)
    text = (tmp_path / "own.py").read_text()
    for name in ("ImageTensors", "cifar10", "synthetic_images", "CIFAR-10", "import F\n", "--stem"):
        assert name in REFERENCE.read_text() or name == "import F\n"
        assert name not in text
    assert "def set_up_ddp" in text


def test_an_example_added_later_makes_the_same_copy(make, tmp_path):
    make("new", "one.py", TASK, "best_weights")
    make("new", "two.py", TASK)
    make("add", "two.py", "best_weights")
    one, two = ((tmp_path / name).read_text() for name in ("one.py", "two.py"))
    assert one.replace("one.py", "two.py") == two
    path = tmp_path / "by_hand.py"
    path.write_text(REFERENCE.read_text().replace("\n", "\r\n"), newline="")
    make("add", path.name, "best_weights")
    assert b"\nMade from ddp_cifar.py" in path.read_bytes().replace(b"\r\n", b"\n")
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")


def test_what_an_example_does_not_replace_may_be_edited(make, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(REFERENCE.read_text().replace('"accuracy"', '"share"'))
    make("add", path.name, TASK)
    assert '"share": logits' in path.read_text()


def test_a_path_may_have_spaces_a_tilde_and_new_folders(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["new.py", "new", "~/a b/c/my own.py", "--with", TASK])
    lines = "\n".join(new.main())
    assert (tmp_path / "a b/c/my own.py").exists()
    quoted = f"'{tmp_path}/a b/c/my own.py'"
    assert f"\npython {quoted} --photos photos " in lines
    assert "--output-dir 'runs/my own-other'" in lines  # or it would resume the first run
    assert f"\nmake check COPY={quoted} ARGS='--photos photos " in lines
    other = (tmp_path / "a b/c/my own.py").rename(tmp_path / "other.py")  # with an old docstring
    monkeypatch.setattr(sys, "argv", ["new.py", "add", str(other), "--with", "ema"])
    assert "\n".join(new.main()[1:]) == (
        "\n".join(lines.splitlines()[1:])
        .replace(quoted, str(other))
        .replace("'runs/my own-other'", "runs/other-other")
    ).lstrip("\n")


EDITED = ("values, grad_norm = train_step", "values, norm = train_step")


@pytest.mark.parametrize(
    ("action", "examples", "recipe", "edit", "said"),
    [
        ("new", [], "ddp", None, "exists"),
        ("new", ["photo"], "ddp", None, "there is no example photo"),
        ("new", [TASK, "table"], "ddp", None, "table.py: add_flags of the copy is edited"),
        ("new", ["gan"], "pipeline", None, "gan is for ddp"),
        ("add", ["best_weights", "best_weights"], "ddp", None, "best_weights.diff does not fit"),
        ("add", ["ema"], "ddp", EDITED, "ema.diff does not fit main"),
        ("add", [TASK], "ddp", ("(num_classes=10, z", "(num_classes=9, z"), "build_model of the"),
        ("add", ["ema"], "ddp", ("# =====", "# -----"), "has no shared block"),
        ("add", ["ema"], "ddp", ('"""Train ', 'text = """Train '), "has no docstring"),
        ("add", ["ema"], "ddp", ("import argparse", "import argparse,"), "own.py, line "),
    ],
)
def test_an_example_that_does_not_fit_changes_nothing(
    action, examples, recipe, edit, said, make, tmp_path
):
    path = tmp_path / "own.py"
    text = REFERENCE.read_text()
    if edit:
        assert edit[0] in text
        text = text.replace(*edit)
    if action == "add" or not examples:
        path.write_text(text)
    with pytest.raises((OSError, SyntaxError, ValueError)) as raised:
        make(action, path.name, *examples, recipe=recipe)
    assert said in str(raised.value)
    assert (path.read_text() == text) if path.exists() else not any(tmp_path.iterdir())
    assert "there is no" in said or "\n" not in str(raised.value)


def test_make_new_alone_and_an_unknown_name_list_the_examples():
    lines = subprocess.run(["make", "-s", "new"], cwd=ROOT, capture_output=True, text=True)
    assert lines.returncode == 0 and lines.stdout.count("\n    ") == len(new.EXAMPLES)
    command = ["make", "-s", "new", "COPY=/tmp/none.py", "WITH=photo"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert lines.returncode != 0 and lines.stderr.startswith("nothing was written: there is no ")
    assert f"    {TASK}   " in lines.stderr
    lines = subprocess.run([*command, "RECIPE=ddp2"], cwd=ROOT, capture_output=True, text=True)
    assert lines.returncode != 0 and "invalid choice: 'ddp2'" in lines.stderr
