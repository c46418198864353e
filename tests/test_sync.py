"""The recipes' machinery is one text, and what they do alike is written alike; `make sync` copies
it, and overwrites nothing that was edited elsewhere."""

import ast
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from sync import COPIES, REFERENCE, machinery

RECIPES = ROOT / "recipes"
# What a recipe has in parts 1 and 3 under the reference's name, but does otherwise.
OWN = {
    "amp_cifar": {"add_technique_flags", "make_optimizer", "train_step", "main"},
    "data_parallel_cifar": {"train_step", "main"},
    "pipeline_cifar": {"add_technique_flags", "compute_loss", "train_step", "evaluate", "main"},
    "sharded_cifar": {"add_technique_flags", "make_optimizer", "train_step", "main"},
}
# What it does not have.
DDP = {"skip_batchnorm_broadcasts", "rebuild_ddp_buckets"}
WITHOUT = {
    "amp_cifar": set(),
    "data_parallel_cifar": {"add_technique_flags", *DDP},
    "pipeline_cifar": DDP,
    "sharded_cifar": DDP,
}


def by_recipe(path):
    return path.stem


def definitions(path):
    """Return {name: text} of the functions and classes in parts 1 and 3."""
    text = path.read_text()
    first = text[: text.index(machinery(path))].count("\n")
    last = first + machinery(path).count("\n")
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not first < node.lineno <= last
    }


def test_every_recipe_is_compared():
    """All that stand in recipes/, but for the baseline, which has no machinery."""
    compared = {path.stem for path in (REFERENCE, *COPIES)}
    assert compared | {"plain_ddp_cifar"} == {path.stem for path in RECIPES.glob("*.py")}
    assert compared == OWN.keys() | {"ddp_cifar"} and WITHOUT.keys() == OWN.keys()


def test_the_machinery_is_the_whole_of_it():
    """What is compared is not next to nothing: all rooms, and the classes that are in them."""
    block = machinery(REFERENCE)
    assert block.count("\n# -----") == 6
    names = {node.name for node in ast.parse(block).body if hasattr(node, "name")}
    classes = {"Metrics", "Steps", "Checkpoints", "StopSignal", "HangDetector", "ImageTensors"}
    assert classes | {"parse_args", "exit_with_error", "check_launcher"} <= names
    assert not names & definitions(REFERENCE).keys()


@pytest.mark.parametrize("path", COPIES, ids=by_recipe)
def test_the_machinery_is_the_references_text(path):
    same = machinery(path) == machinery(REFERENCE)
    assert same, f"{path.name} has drifted from {REFERENCE.name}: run `make sync`"


@pytest.mark.parametrize("path", COPIES, ids=by_recipe)
def test_the_story_is_the_references_but_for_what_is_named_here(path):
    reference = definitions(REFERENCE)
    mine = definitions(path)
    assert {"load_data", "build_model", "lr_lambda", "evaluate", "main"} <= reference.keys()
    differing = {name for name in reference if name in mine and mine[name] != reference[name]}
    assert differing == OWN[path.stem]
    assert reference.keys() - mine.keys() == WITHOUT[path.stem]


@pytest.mark.parametrize("path", [REFERENCE, *COPIES], ids=by_recipe)
def test_a_story_is_a_page(path):
    story, _, _ = path.read_text().partition("# =====")
    assert story.count("\n") < 240


@pytest.fixture
def project(tmp_path):
    """The recipes, and `make sync` on them after an edit: the process, and {name: text}."""
    shutil.copytree(RECIPES, tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/sync.py", tmp_path / "tests")
    for path in COPIES:  # also where the recipes have drifted
        text = path.read_text().replace(machinery(path), machinery(REFERENCE))
        (tmp_path / "recipes" / path.name).write_text(text)

    def sync(edited, old, new):
        path = tmp_path / "recipes" / edited
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
        edited_texts = texts()
        command = [sys.executable, tmp_path / "tests/sync.py"]
        process = subprocess.run(command, capture_output=True, text=True)
        return process, edited_texts, texts()

    def texts():
        return {path.stem: path.read_text() for path in (tmp_path / "recipes").glob("*_cifar.py")}

    return sync


def test_make_sync_copies_a_change_of_the_reference(project):
    for old, new in (("mul_(48)", "mul_(47)"), ("mul_(47)", "mul_(46)")):
        process, before, after = project("ddp_cifar.py", old, new)
        updated = "".join(f"updated recipes/{path.name}\n" for path in COPIES)
        assert (process.returncode, process.stdout) == (0, updated), process.stderr
        for path in COPIES:
            assert after[path.stem] == before[path.stem].replace(old, new)
        assert after["plain_ddp_cifar"] == before["plain_ddp_cifar"]


def test_make_sync_does_nothing_where_nothing_has_drifted(project):
    process, before, after = project("ddp_cifar.py", "Train ResNet-50", "Train a ResNet-50")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert before == after


def test_make_sync_does_not_overwrite_what_was_edited_in_a_copy(project):
    process, before, after = project("amp_cifar.py", "mul_(48)", "mul_(47)")
    assert process.returncode == 1 and before == after
    assert "amp_cifar.py: its machinery was edited" in process.stderr


@pytest.mark.parametrize("recipe", ["ddp_cifar.py", "sharded_cifar.py"])
@pytest.mark.parametrize("banner", ["machinery: the same text", "this recipe's own"])
def test_make_sync_refuses_a_recipe_without_a_banner(project, recipe, banner):
    text = (RECIPES / recipe).read_text()
    (line,) = [x for x in text.splitlines() if x.startswith("# =====") and banner in x]
    process, before, after = project(recipe, f"{line}\n", "")
    assert process.returncode == 1 and before == after
    expected = f"ValueError: {recipe}: expected the banners of part 2 and of part 3"
    assert expected in process.stderr
