"""The shared block is one text in all recipes, which `make sync` copies. The rest of a recipe
differs from the reference only where this file says so."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import sync
from conftest import load
from new import definitions
from processes import ROOT, run
from shared_block import COPIES, INFRASTRUCTURE, REFERENCE, checksum, infrastructure, parts

RECIPES = ROOT / "recipes"
BASELINE = RECIPES / "data_parallel_cifar.py"
WITH_BLOCK = [REFERENCE, *COPIES]
# Functions that a recipe has under the reference's name, but with another text.
ALL = {"add_technique_flags", "train_step", "main"}
OWN = {
    "amp_cifar": ALL,
    "pipeline_cifar": ALL | {"compute_loss", "evaluate", "before_first_step"},
    "sharded_cifar": ALL | {"compute_loss", "evaluate", "make_optimizer", "before_first_step"},
}
# The baseline has the reference's code of these, or it would not be one.
OF_THE_BASELINE = {"load_data", "build_model", "compute_loss", "make_optimizer"}
OF_THE_BASELINE |= {"seed_rng", "ImageTensors", "cifar10", "synthetic_images"}


def test_no_recipe_escapes_these_tests():
    assert {*RECIPES.glob("*.py")} == {*WITH_BLOCK, BASELINE}
    assert OWN.keys() == {path.stem for path in COPIES}


def test_the_block_that_is_compared_is_the_whole_of_it_and_has_its_checksum():
    _, banner, block = parts(REFERENCE)
    assert f" {checksum(block)}: " in banner and len(banner) == 101, "run `make sync`"
    listed = re.findall(r"^\| `([0-9a-f]{12})` \|", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert listed[0] == checksum(block), "CHANGELOG.md: a line on this change of the block"
    names = {"Run", "Metrics", "Checkpoints", "Watcher", "parse_args", "make_accelerator"}
    assert names <= definitions(block).keys()


@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_a_recipe_is_the_reference_but_for_what_is_named_here(path):
    theirs, banner, block = parts(REFERENCE)
    same = parts(path)[1:] == (banner, block)
    assert same, f"{path.name} has drifted from {REFERENCE.name}: run `make sync`"
    reference, mine = definitions(theirs), definitions(parts(path)[0])
    assert {"load_data", "build_model", "evaluate", "main"} <= reference.keys() <= mine.keys()
    assert {name for name in reference if mine[name] != reference[name]} == OWN[path.stem]


def test_the_baseline_trains_the_same_model_on_the_same_data():
    defined = [definitions(path.read_text()) for path in (REFERENCE, BASELINE)]
    for name in OF_THE_BASELINE:
        one, other = (re.sub('(?s)""".*?"""', "", x[name], count=1) for x in defined)
        assert one == other, name


def test_bf16_is_looked_for_alike_in_all_recipes_that_use_it():
    pipeline, sharded = (definitions(parts(path)[0]) for path in COPIES[1:])
    assert pipeline["check_bf16"] == sharded["check_bf16"]


MINE = "my dir/my_cifar.py"


@pytest.fixture
def project(tmp_path):
    """A project with the recipes, and a copy of one, with an older banner, no list of packages, and
    the line ends of Windows. Return a function that edits a file and runs `make sync`. It returns
    what was printed, errors, and the files before and after, {name: text}."""
    recipes = tmp_path / "project/recipes"
    shutil.copytree(RECIPES, recipes, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "project/tools").mkdir()
    for name in ("Makefile", "pyproject.toml", "tools/sync.py", "tools/shared_block.py"):
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    (tmp_path / MINE).parent.mkdir()
    text = (recipes / "amp_cifar.py").read_text()
    older = re.sub("(# =+) .*( [0-9a-f]{12}:)", r"\1 shared infrastructure\2", text)
    older = re.sub("# /// script\n.*?# ///\n", "", older, flags=re.DOTALL)
    (tmp_path / MINE).write_text(older, newline="\r\n")

    def texts():
        return {path.name: path.read_text() for path in tmp_path.glob("*/**/*_cifar*.py")}

    def sync(name, old, new, copy=None):
        [path] = tmp_path.glob(f"*/**/{name}")
        content = path.read_bytes()
        assert content.count(old.encode()) == 1
        path.write_bytes(content.replace(old.encode(), new.encode()))
        before = texts()
        command = ["make", "--silent", "sync", f"PYTHON={sys.executable}"]
        command += [f"COPY=../{copy}"] if copy else []
        done = run(command, cwd=tmp_path / "project", check=False)
        assert (done.returncode == 0) == (done.stderr == "")
        assert done.returncode == 0 or texts() == before
        return done.stdout, done.stderr, before, texts()

    return sync


OLD, NEW = "timedelta(hours=6)", "timedelta(hours=3)"  # of the block


def without_banner(text):
    return re.sub("# =+ .* [0-9a-f]{12}:.*", "", text)


def test_make_sync_copies_a_change_of_the_reference_and_nothing_else(project):
    printed, errors, before, after = project("ddp_cifar.py", OLD, NEW)
    updated = "".join(f"{path.name}: updated\n" for path in WITH_BLOCK)
    assert printed == updated, errors
    for name, text in after.items():
        is_recipe = name not in (BASELINE.name, "my_cifar.py")
        expected = before[name].replace(OLD, NEW) if is_recipe else before[name]
        assert without_banner(text) == without_banner(expected)
    printed, errors, before, after = project("ddp_cifar.py", "Train ResNet-50", "Train a ResNet-50")
    assert printed == updated.replace("updated", "up to date") and before == after, errors


def test_make_sync_gives_a_copy_the_newest_block_and_the_imports_that_it_needs(project, tmp_path):
    """And keeps all else of it, also its line ends. The recipes stay as they are."""
    own, imported = "def synthetic_images(samples, seed):", "from textwrap import dedent as outdent"
    project("my_cifar.py", own, f"{own}  # mine", MINE)
    project("ddp_cifar.py", "import argparse\n", f"import argparse\n{imported}\n", MINE)
    needs = f"{NEW}\nINDENTED = outdent(' a')"
    printed, errors, before, after = project("ddp_cifar.py", OLD, needs, MINE)
    assert printed == f"my_cifar.py: updated; {imported}\n", errors
    mine, newest = after.pop("my_cifar.py"), before["amp_cifar.py"].replace(OLD, needs)
    assert mine.count("  # mine") == mine.count(f"\n{imported}\n") == 1
    mine = mine.replace("  # mine", "").replace(f"{imported}\n", "")
    assert without_banner(mine) == without_banner(newest)
    assert after == {name: before[name] for name in after}
    content = (tmp_path / MINE).read_bytes()
    assert content.count(b"\n") == content.count(b"\r\n") > 1000
    assert load(tmp_path / MINE).INDENTED == "a"


DDP, OWNER = "ddp_cifar.py", "my_cifar.py"
STEP, LOG = "def train_step(", "def log_line("


@pytest.mark.parametrize(
    ("name", "old", "new", "copy", "message"),
    [
        (DDP, "def choose_device(", "def choose_gpu(", MINE, "nowhere: choose_device: see diff"),
        (DDP, LOG, LOG, "project/recipes/data_parallel_cifar.py", "no shared block"),
        (DDP, LOG, LOG, "none.py", "No such file"),
        (OWNER, STEP, f"RANK = 1\n{STEP}", MINE, r"# =====': RANK \(line \d+\): rename"),
        (OWNER, STEP, f"from datasets import Dataset\n{STEP}", MINE, r"# =====': Dataset \(line"),
        (OWNER, OLD, NEW, MINE, "my_cifar.py: its shared block was edited"),
    ],
)
def test_make_sync_changes_nothing_if_edits_would_be_lost_or_the_copy_would_not_run(
    project, name, old, new, copy, message
):
    """Names have moved out of the block, are gone, or stand for something else in the copy; there
    is no block, or it was edited."""
    printed, errors, *_ = project(name, old, new, copy)
    line, _ = errors.splitlines()  # the second one is of make
    assert line.startswith("nothing was written: ") and re.search(message, line), line
    if (old, new) == (OLD, NEW):
        minus, plus = [x for x in printed.splitlines() if x[0] in "+-"][2:]
        assert NEW in minus and OLD in plus


def test_make_sync_replaces_the_infrastructure_beside_scripts_that_import_it(tmp_path):
    """Unless it was edited, or one of the scripts needs a name that is gone."""
    script, shared = tmp_path / "train.py", tmp_path / INFRASTRUCTURE
    script.write_text(text := "from infrastructure import Run\n")
    block, newest = parts(REFERENCE)[2], infrastructure()

    def earlier(old, new):
        return newest.replace(old, new).replace(checksum(block), checksum(block.replace(old, new)))

    older = earlier(OLD, NEW)
    for path in (script, shared):
        shared.write_text(older)
        sync.main([path])
        assert shared.read_text() == newest and script.read_text().endswith(f"# ///\n{text}")
    shared.write_text(edited := newest.replace(OLD, NEW))
    with pytest.raises(ValueError, match=r"infrastructure.py: its shared block was edited"):
        sync.main([script])
    assert shared.read_text() == edited
    shared.write_text(older := earlier("\nclass Run:", "\ngone = 1\n\n\nclass Run:"))
    Path(tmp_path, "other.py").write_text("from infrastructure import Run, gone\n")
    with pytest.raises(ValueError, match=r"other.py: the newest .* does not define gone"):
        sync.main([script])
    assert shared.read_text() == older
