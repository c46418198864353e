"""A recipe is read from top to bottom by whoever copies it: its size has a limit, its machinery is
one text in all recipes, which `make sync` copies, and the stories differ only where they say so."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from sync import COPIES, REFERENCE, machinery

RECIPES = ROOT / "recipes"
BASELINE = RECIPES / "data_parallel_cifar.py"
WITH_MACHINERY = [REFERENCE, *COPIES]
LINES = {
    "ddp_cifar": 1000,
    "amp_cifar": 1080,
    "pipeline_cifar": 1320,
    "sharded_cifar": 1400,
    "data_parallel_cifar": 320,
}
# Functions that a recipe has under the reference's name, but with another text.
ALL = {"add_technique_flags", "train_step", "main"}
OWN = {
    "amp_cifar": ALL | {"make_optimizer"},
    "pipeline_cifar": ALL | {"compute_loss", "evaluate"},
    "sharded_cifar": ALL | {"compute_loss", "evaluate", "make_optimizer"},
}
# Functions of the reference that it does not have.
DDP = {"skip_batchnorm_broadcasts", "rebuild_buckets"}
WITHOUT = {"amp_cifar": set(), "pipeline_cifar": DDP, "sharded_cifar": DDP}
# The baseline has the reference's code of these, or it would not be one.
OF_THE_BASELINE = {"load_data", "build_model", "compute_loss", "make_optimizer", "lr_lambda"}
OF_THE_BASELINE |= {"seed_rng", "ImageTensors", "cifar10", "synthetic_images"}


def definitions(path):
    """Return {name: (lines, whether it is machinery)} of the functions and classes of a recipe."""
    text = path.read_text()
    block = machinery(path)
    first = text[: text.index(block)].count("\n")
    last = first + block.count("\n")
    lines = text.splitlines()
    return {
        node.name: (lines[node.lineno - 1 : node.end_lineno], first < node.lineno <= last)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def own_definitions(path):
    """Return {name: lines} of the story, and of the recipe's own part."""
    return {name: lines for name, (lines, shared) in definitions(path).items() if not shared}


def test_no_recipe_escapes_these_tests():
    assert LINES.keys() == {path.stem for path in RECIPES.glob("*.py")}
    assert LINES.keys() == {path.stem for path in (*WITH_MACHINERY, BASELINE)}
    assert OWN.keys() == WITHOUT.keys() == {path.stem for path in COPIES}


@pytest.mark.parametrize("path", [*WITH_MACHINERY, BASELINE], ids=lambda path: path.stem)
def test_a_recipe_can_be_read_in_one_go(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LINES[path.stem]
    assert max(map(len, lines)) <= 100
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name not in ("main", "parse_args"):
            assert node.end_lineno - node.lineno < 45, f"{node.name} is too long"


@pytest.mark.parametrize("path", WITH_MACHINERY, ids=lambda path: path.stem)
def test_the_story_ends_by_line_240(path):
    story, _, _ = path.read_text().partition("# =====")
    assert story.count("\n") < 240


@pytest.mark.parametrize("path", [*WITH_MACHINERY, BASELINE], ids=lambda path: path.stem)
def test_no_sentence_hides_its_subject_behind_what(path):
    """In a comment or a docstring: code has no word with this capital."""
    assert re.findall(r".*\bWhat\b.*", path.read_text()) == []


def test_the_machinery_that_is_compared_is_the_whole_of_it():
    block = machinery(REFERENCE)
    assert block.count("\n# -----") == 6
    names = {name for name, (_, shared) in definitions(REFERENCE).items() if shared}
    classes = {"Metrics", "Steps", "Checkpoints", "StopSignal", "HangDetector", "ImageTensors"}
    assert classes | {"parse_args", "exit_with_error", "make_accelerator"} <= names


@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_the_machinery_is_the_references_text(path):
    same = machinery(path) == machinery(REFERENCE)
    assert same, f"{path.name} has drifted from {REFERENCE.name}: run `make sync`"


@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_the_story_is_the_references_but_for_what_is_named_here(path):
    reference, mine = own_definitions(REFERENCE), own_definitions(path)
    assert {"load_data", "build_model", "lr_lambda", "evaluate", "main"} <= reference.keys()
    differing = {name for name in reference if name in mine and mine[name] != reference[name]}
    assert differing == OWN[path.stem]
    assert reference.keys() - mine.keys() == WITHOUT[path.stem]


def test_the_baseline_trains_the_same_model_on_the_same_data():
    code = {}
    for path in (REFERENCE, BASELINE):
        nodes = [x for x in ast.parse(path.read_text()).body if hasattr(x, "name")]
        for node in nodes:
            node.body = node.body[ast.get_docstring(node) is not None :]
        code[path] = {x.name: ast.unparse(x) for x in nodes if x.name in OF_THE_BASELINE}
    assert code[BASELINE].keys() == OF_THE_BASELINE and code[BASELINE] == code[REFERENCE]


@pytest.mark.parametrize("name", ["has_bf16", "check_bf16"])
def test_bf16_is_looked_for_alike_in_all_recipes_that_use_it(name):
    first, *others = [own_definitions(path)[name] for path in COPIES]
    assert others == [first] * 2


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


def test_make_sync_copies_a_change_of_the_reference_and_nothing_else(project):
    process, before, after = project("ddp_cifar.py", "mul_(48)", "mul_(47)")
    updated = "".join(f"updated recipes/{path.name}\n" for path in COPIES)
    assert (process.returncode, process.stdout) == (0, updated), process.stderr
    for path in COPIES:
        assert after[path.stem] == before[path.stem].replace("mul_(48)", "mul_(47)")
    assert after[BASELINE.stem] == before[BASELINE.stem]
    process, before, after = project("ddp_cifar.py", "Train ResNet-50", "Train a ResNet-50")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert before == after


def test_make_sync_does_not_overwrite_what_was_edited_in_a_copy(project):
    process, before, after = project("amp_cifar.py", "mul_(48)", "mul_(47)")
    assert process.returncode == 1 and before == after
    assert "amp_cifar.py: its machinery was edited" in process.stderr


@pytest.mark.parametrize("recipe", ["ddp_cifar.py", "sharded_cifar.py"])
def test_make_sync_does_not_touch_a_recipe_without_a_banner(project, recipe):
    banner = re.search("\n# =+ this recipe's own", (RECIPES / recipe).read_text())[0]
    process, before, after = project(recipe, banner, "")
    assert process.returncode == 1 and before == after
    assert f"ValueError: {recipe}: expected the banners of part 2" in process.stderr
