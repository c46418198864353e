"""`make new` and `make add`: a copy is whole and holds nothing that it does not use; what does not
fit is one line, and nothing is written."""

import ast
import gc
import itertools
import resource
import subprocess
import sys
import tempfile
from functools import cache, partial

import new
import pytest
import sync
import toy
from composed import assert_lists_its_packages
from conftest import CNN, SHORT, assert_same_training, copy
from processes import ROOT, run, train_forked
from shared_block import INFRASTRUCTURE, REFERENCE, parts

RECIPES = {name: new.description(name)[1] for name in new.EXAMPLES}
ADDITIONS = [name for name in RECIPES if new.TRAIN not in str(new.description(name)[0])]
TASK = "photos"


@pytest.fixture(autouse=True)
def without_gc():
    """Syntax trees, which these tests make by the hundred, have no cycles for it to find: it would
    take half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that does what `make new` or `make add` does, and returns the lines it prints."""

    def run(action, path, *examples, recipe="ddp"):
        words = [action, str(tmp_path / path), "--recipe", recipe]
        words += ["--with", *examples] if examples else []
        monkeypatch.setattr(sys, "argv", ["new.py", *words])
        return new.main()

    return run


# Of sharded, which has most examples, and diffs of its own, `make test` makes all copies.
OTHERS = [pytest.param(x, marks=pytest.mark.redundant) for x in new.RECIPES if x != "sharded"]


@pytest.mark.parametrize("recipe", ["sharded", *OTHERS])
def test_every_example_makes_a_copy_that_the_linter_passes_and_make_sync_updates(
    recipe, make, tmp_path, monkeypatch
):
    """Alone, and all additions together with a task, in any order; a task also in two files."""
    monkeypatch.setattr(new, "sorted_imports", lambda text: text)  # below, in all files at once
    monkeypatch.setattr(new, "next_commands", lambda *_: [])
    for name in ("put_functions", "apply", "with_imports", "without_unused"):  # for both forms
        monkeypatch.setattr(new, name, cache(getattr(new, name)))
    names = [name for name in RECIPES if recipe in RECIPES[name]]
    added = [name for name in ADDITIONS if name in names and not new.tasks_of(name)]
    combinations = [(name,) for name in names if not new.tasks_of(name)]
    combinations += [(x, name) for name in names for x in new.tasks_of(name) if x in names]
    combinations += [(TASK, *added), (TASK, *reversed(added))]
    _, banner, block = parts(REFERENCE)
    for examples in combinations:
        path = tmp_path / f"own_{'_'.join(examples)[:20]}.py"
        make("new", path.name, *examples, recipe=recipe)
        text = path.read_text()
        doc = ast.get_docstring(ast.parse(text))
        assert "mine.py" not in text and f"Made from {recipe}_cifar.py" in doc
        assert " ".join(doc.split()).endswith(f" with {', '.join(examples)}.")
        own = parts(path)[0]
        assert new.without_unused(own, block) == own and not new.unused_imports(own, block)
        assert sync.updated(path, banner, block) == (text, [])
        assert_lists_its_packages(text)
        if examples[0] not in ADDITIONS:
            make("new", f"two/{path.name}", *examples, "--split", recipe=recipe)
            two = [(tmp_path / "two" / name).read_text() for name in (path.name, INFRASTRUCTURE)]
            assert_lists_its_packages(*two)
    for command in ("check --fix --select I", "check", "format --check"):
        line = [sys.executable, "-m", "ruff", *command.split(), "--no-cache"]
        run([*line, "--config", ROOT / "pyproject.toml", tmp_path])


def test_what_a_copy_does_not_use_is_removed(make, tmp_path):
    make("new", "own.py", TASK)
    text = (tmp_path / "own.py").read_text()
    for name in ("class ImageTensors", "def cifar10", "CIFAR-10", '"--stem"'):
        assert name in REFERENCE.read_text() and name not in text
    make("new", "gan.py", "gan")  # it keeps the recipe's `add_flags`
    assert '"--data"' in (text := (tmp_path / "gan.py").read_text()) and '"--stem"' not in text


def test_the_next_commands_train_in_two_ways_and_check_at_any_path(make, tmp_path, monkeypatch):
    """A pipeline does not run on one process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["new.py", "new", "~/a b/c/my own.py", "--with", TASK])
    lines = "\n".join(new.main())
    assert (tmp_path / "a b/c/my own.py").exists()
    quoted = f"'{tmp_path}/a b/c/my own.py'"
    assert f"\npython {quoted} --photos toy/photos " in lines
    assert "--output-dir 'runs/my own-other'" in lines  # or it would resume the first run
    assert f"\nmake check COPY={quoted} ARGS='--photos toy/photos " in lines
    *_, two, four, _ = make("new", "own.py", recipe="pipeline")
    assert two.startswith(f"{new.TRAIN.replace('mine.py', str(tmp_path / 'own.py'))} --data ")
    assert four == two.replace("/2gpu", "/4gpu") + " --output-dir runs/own-other"
    assert "recipes/pipeline_cifar" not in (tmp_path / "own.py").read_text()


NEW = "\n\ndef add_flags("  # where an owner's own definitions are
FLAGS = "    args = parse_args(__doc__, add_technique_flags, add_flags)\n"
# Examples, a line of the copy and its replacement, what is said.
NOT_FITTING = [
    (["ema"], ("values, grad_norm =", "values, norm ="), "ema.diff does not fit"),
    (["trace", "trace"], (), "trace.diff does not fit main, or is there already"),
    (["ema"], (FLAGS, f"{FLAGS}\n{FLAGS}"), "ema.diff does not fit"),
    (["ema"], (NEW, f"\n\nRANK = 1\n{NEW}"), "RANK (line "),
    (["clip"], ("def train_step(", "def one_step("), "clip.diff does not fit train_step"),
    (["streaming"], (), "text_to_image: name it behind one of these"),
    (["ema"], ('"""Train ', 'text = """Train '), "has no docstring"),
    (["ema"], ("import argparse", "import argparse,"), "own.py, line "),
    (["lora"], ('= ["torch', '= [  # ours\n#     "torch'), "script: peft>=0.21"),
    (["ema", "photos"], ("\n\ndef build_", "\n\n# Ours:\ndef build_"), "build_model of the"),
    (["photos", "table"], (), "photos and table both have add_flags"),
    # The copy has the names of what an example brings.
    (["ema"], (NEW, f"\n\nif RANK:\n    add_ema_flags = 0\n{NEW}"), "add_ema_f"),
    (["lora"], ("import accelerate\n", "from ours import load_file\n"), "load_file"),
]


@pytest.mark.parametrize(("examples", "edit", "said"), NOT_FITTING)
def test_an_example_that_does_not_fit_changes_nothing(examples, edit, said, make, tmp_path):
    path = tmp_path / "own.py"
    copy("ddp_cifar", path, *[edit] * bool(edit))
    text = path.read_text()
    with pytest.raises((OSError, SyntaxError, ValueError)) as raised:
        make("add", path.name, *examples)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == text


def test_a_new_copy_hides_no_module_overwrites_nothing_and_has_examples_of_its_recipe(
    make, tmp_path
):
    for name in ("copy.py", "new/torch.py"):
        with pytest.raises(ValueError, match=r"in place of its own module .*: choose another name"):
            make("new", name)
    with pytest.raises(ValueError, match="gan is for ddp"):
        make("new", "own.py", "gan", recipe="pipeline")
    for action, recipe in (("news", "ddp"), ("new", "gan")):
        with pytest.raises(SystemExit):
            make(action, "own.py", recipe=recipe)
    assert not any(tmp_path.iterdir())
    (tmp_path / "own.py").write_text("mine")
    with pytest.raises(FileExistsError):
        make("new", "own.py")
    assert (tmp_path / "own.py").read_text() == "mine"


IMPORTED = "from torch.utils.data import DataLoader, Dataset"
BELOW_THE_IMPORTS = """, Subset
import torch.backends.cudnn
try:
    import apex
except ImportError:
    apex = None  # ours

SPLIT = "a\f b"
"""
ABOVE_TRAIN_STEP = """
    # Below a function.


# Above one.
from json import *  # noqa: F403


def part(data):
    return Subset(data, [0]), synthetic_images


# A remark.
def train_step("""
# Lines of an owner, where no example has to replace them.
OWN = [
    ('"torch>=2.11"', '"torch==2.15.0", "apex"'),
    ('"""Train ResNet-50', "r'''Our \\d classes"),
    ("4gpu.yaml recipes/ddp_cifar.py --epochs 100", "4gpu.yaml ours.py --epochs 90"),
    ('structure.\n"""', 'structure. A """ of recipes/ours_cifar.py.\n' + "'''  # noqa: D205"),
    ("import accelerate\n", "import accelerate  # ours\nimport antigravity  # registers ops\n"),
    (f"{IMPORTED}\n", f"{IMPORTED}{BELOW_THE_IMPORTS}"),
    ("\ndef train_step(", ABOVE_TRAIN_STEP),
    ("    plain = accel", "    print('ours')\n    plain = accel"),
    ("of this technique.", 'of ours."""\n    add = print\n    add("--ours", 1)\n    """'),
    ("        exit_with_exception(error)\n", "        exit_with_exception(error)\n# The end\n"),
]


@pytest.mark.parametrize("examples", ["ema lora", "photos best_weights ema", "segmentation ema"])
def test_no_line_of_the_owner_is_removed(examples, make, tmp_path):
    """Imports, definitions, flags, comments, and what the docstring has of theirs."""
    path = tmp_path / "own.py"
    first = "import warnings\n" * ("lora" in examples)  # and so all imports stay unsorted
    copy("ddp_cifar", path, ("import argparse\n", f"{first}import argparse\n"), *OWN)
    before = path.read_text()
    example, *others = examples.split()
    make("add", path.name, example)
    below = path.read_text().replace('\n"""  # noqa', '\n\nBelow.\n"""  # noqa')
    path.write_text(below)
    for example in others:
        make("add", path.name, example)
    text = path.read_text()
    assert f"{first}import argparse\n" in text
    assert '"torch==2.15.0"' in text and '"apex"' in text
    noted = text.replace("# dependencies = [\n", "# dependencies = [  # ours\n")
    assert new.with_metadata(noted) == noted, "nothing is lacking"
    own, _, block = new.parts(path)
    assert new.unused_imports(own, block) <= new.imports(before)[0].keys()
    assert ('"peft>=0.21"' in text) == ("lora" in examples)
    assert text.find("from peft import") < text.index("\ndef add_flags("), "above all functions"
    documented = ast.get_docstring(ast.parse(text))
    assert documented.startswith("Our \\d classes on CIFAR-10 with Hugging Face")
    assert documented.index("4gpu.yaml ours.py --epochs 90") < documented.index("(EMA)")
    assert 'structure. A """ of recipes/ours_cifar.py.' in documented
    assert documented.endswith("\n\nBelow.")
    known = {*REFERENCE.read_text().split("\n"), *text.split("\n")}
    assert [x for x in before.partition("  # noqa: D205\n")[2].split("\n") if x not in known] == []
    assert '\n"""  # noqa: D205\n' in text
    assert new.imports(text)[0]["Subset"] == "from torch.utils.data import Subset"


def test_add_brings_what_the_owner_deleted_and_removes_nothing_that_is_not_used_any_more(
    make, tmp_path
):
    """It names such imports. Of an example that another one names it takes what it needs."""
    path = tmp_path / "own.py"
    ours = new.definitions(REFERENCE.read_text())
    data = "\n\n\n".join(ours[name] for name in ("cifar10", "synthetic_images"))
    deleted = (data, ""), (ours["compute_loss"], "")
    imported = "import accelerate\n", "import antigravity\nimport accelerate\n"
    copy("ddp_cifar", path, imported, *deleted)
    lines = make("add", path.name, "language_model")
    assert lines[1] == "not used any more (F401): torchvision"
    text = path.read_text()
    assert text.count("\ndef compute_loss(") == 1
    for line in ("import antigravity\n", "import torchvision\n", "class ImageTensors("):
        assert line in text
    make("new", "other.py")
    make("add", "other.py", "embeddings")  # which names some functions of language_model
    assert "LlamaConfig" not in (tmp_path / "other.py").read_text()


def test_a_renamed_copy_gets_the_title_and_the_commands_of_a_task(make, tmp_path):
    make("new", "old.py")
    path = (tmp_path / "old.py").rename(tmp_path / "a b.py")
    make("add", path.name, TASK)
    make("new", "other.py", TASK)
    ours, theirs = (
        ast.get_docstring(ast.parse(x.read_text())) for x in (path, path.with_name("other.py"))
    )
    assert "simple_cnn" not in ours and "Train ResNet-50" not in ours
    assert ours.replace("'a b.py'", "other.py") == theirs


def test_an_example_is_added_to_a_script_that_imports_the_infrastructure(make, tmp_path):
    make("new", "mine/train.py", TASK, "--split")
    make("new", "mine/other.py", "language_model", "--split", recipe="sharded")
    infrastructure = (tmp_path / "mine/infrastructure.py").read_text()
    assert make("add", "mine/train.py", "trace", "best_weights")[1].startswith("make check COPY=")
    make("new", "theirs/train.py", TASK, "trace", "best_weights", "--split")
    ours, theirs = ((tmp_path / x / "train.py").read_text() for x in ("mine", "theirs"))
    assert ours == theirs and "# =====" not in ours
    files = {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()}
    assert files.keys() == {"train.py", "other.py", "infrastructure.py"}
    assert files["infrastructure.py"] == infrastructure
    (tmp_path / "mine/train.py").write_text(f"{ours}oh no\n")
    with pytest.raises(SyntaxError, match=r"train.py, line \d+"):
        make("add", "mine/train.py", "ema")
    (tmp_path / "mine/infrastructure.py").write_text(infrastructure + "# edited\n")
    with pytest.raises(ValueError, match=r"infrastructure.py is not the newest: make sync COPY="):
        make("new", "mine/third.py", TASK, "--split")
    make("new", "mine/whole.py", TASK)
    assert not (tmp_path / "mine/third.py").exists()


@pytest.mark.slow
def test_a_copy_in_two_files_trains_as_the_one_in_one_file(make, tmp_path):
    make("new", "one.py", recipe="sharded")
    make("new", "two/train.py", "--split", recipe="sharded")
    scripts = [tmp_path / "one.py", tmp_path / "two/train.py"]
    for path, (larger, smaller) in itertools.product(scripts, SHORT):
        path.write_text(path.read_text().replace(larger, smaller))
    flags = [*CNN, "--max-steps", 3, "--batch-size", 16, "--clip-norm", 1]
    one, two = train_forked(tmp_path, *((2, path, flags) for path in scripts))
    assert_same_training(two, one, atol=0)


def test_a_full_disk_and_a_link_to_a_copy(make, tmp_path, monkeypatch):
    make("new", "own.py")
    path = tmp_path / "own.py"
    path.chmod(0o640)
    before = path.read_text()
    (link := tmp_path / "link.py").symlink_to(path)
    limit = [len(before) // 2] * 2
    full = {"preexec_fn": partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit)}
    command = [sys.executable, ROOT / "tools/new.py", "add", link, "--with", "ema"]
    done = subprocess.run(command, capture_output=True, text=True, **full)
    assert done.returncode == 1 and done.stderr.startswith("nothing was written: ")
    assert "File too large" in done.stderr and done.stderr.count("\n") == 1
    assert path.read_text() == before and {*tmp_path.iterdir()} == {path, link}
    monkeypatch.setattr(tempfile, "tempdir", "/none")  # or a copy could not be renamed into place
    make("add", link.name, "ema")
    assert link.is_symlink() and "class Average" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640


def test_imports_are_sorted_whatever_the_version_of_python_by_ruff(monkeypatch):
    text = "import os\n\ntype Name = str\n"  # of 3.12
    assert new.sorted_imports(text) == text
    monkeypatch.setattr(sys, "executable", "false")  # which has no ruff
    with pytest.raises(ValueError, match="pip install ruff"):
        new.sorted_imports(text)


def test_make_new_alone_and_an_unknown_name_list_the_examples():
    listed = run(["make", "-s", "new"]).stdout
    assert listed.count("\n    ") == len(new.EXAMPLES)
    assert all(f"\n\n{group}:\n" in listed for group in new.GROUPS)
    unknown = run(["make", "-s", "new", "COPY=/tmp/none.py", "WITH=photo"], check=False)
    assert unknown.returncode == 2 and "nothing was written: there is no " in unknown.stderr
    assert listed.strip() in unknown.stderr


def test_toy_data_names_the_package_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["toy.py", "chats"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"transformers.*: pip install transformers$"):
        toy.main()
