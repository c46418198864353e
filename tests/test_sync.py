"""A recipe is read from top to bottom by whoever copies it: its size has a limit, its machinery is
one text in all recipes, which `make sync` copies, and the stories differ only where they say so."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from sync import COPIES, REFERENCE, checksum, machinery

RECIPES = ROOT / "recipes"
BASELINE = RECIPES / "data_parallel_cifar.py"
WITH_MACHINERY = [REFERENCE, *COPIES]
LINES = {
    "ddp_cifar": 1062,
    "amp_cifar": 1138,
    "pipeline_cifar": 1365,
    "sharded_cifar": 1395,
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
DDP = {"rebuild_buckets"}
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
    assert block.count("\n# -----") == 5
    names = {name for name, (_, shared) in definitions(REFERENCE).items() if shared}
    classes = {"Metrics", "Steps", "Checkpoints", "StopSignal", "HangDetector"}
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


def test_the_banner_has_the_checksum_of_the_machinery():
    banner, _, text = machinery(REFERENCE).partition("\n")
    assert f" machinery {checksum(text)}: " in banner and len(banner) == 100, "run `make sync`"


@pytest.fixture
def project(tmp_path):
    """A project with the recipes, of one machinery, and mine/train.py, a copy of one. Return a
    function that edits a file and runs `make sync` with arguments, in the project's directory; it
    returns the process and the texts of all files, {name: text}, before and after."""
    recipes = tmp_path / "project/recipes"
    shutil.copytree(RECIPES, recipes, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "project/tests").mkdir()
    shutil.copy(ROOT / "tests/sync.py", tmp_path / "project/tests")
    for path in COPIES:  # also where the recipes have drifted
        text = path.read_text().replace(machinery(path), machinery(REFERENCE))
        (recipes / path.name).write_text(text)

    def texts():
        return {path.name: path.read_text() for path in tmp_path.glob("*/**/*_cifar*.py")}

    def sync(name, old, new, *arguments):
        [path] = tmp_path.glob(f"*/**/{name}")
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
        before = texts()
        command = [sys.executable, "tests/sync.py", *arguments]
        options = {"cwd": tmp_path / "project", "capture_output": True, "text": True}
        process = subprocess.run(command, **options)
        return process, before, texts()

    process, _, _ = sync("ddp_cifar.py", "Train ResNet-50", "Train ResNet-50")
    assert process.returncode == 0, process.stderr
    (tmp_path / "mine").mkdir()
    shutil.copy(recipes / "amp_cifar.py", tmp_path / "mine/my_cifar.py")
    return sync


MINE = "../mine/my_cifar.py"
OLD, NEW = "timedelta(hours=1)", "timedelta(hours=3)"  # of the machinery


def test_make_sync_copies_a_change_of_the_reference_and_nothing_else(project):
    process, before, after = project("ddp_cifar.py", OLD, NEW)
    updated = "".join(f"{path.name}: updated\n" for path in WITH_MACHINERY)
    assert (process.returncode, process.stdout) == (0, updated), process.stderr
    for path in COPIES:
        assert without_banner(after[path.name]) == without_banner(
            before[path.name].replace(OLD, NEW)
        )
    for name in (BASELINE.name, "my_cifar.py"):
        assert after[name] == before[name]
    process, before, after = project("ddp_cifar.py", "Train ResNet-50", "Train a ResNet-50")
    assert process.stdout == updated.replace("updated", "up to date")
    assert before == after


def without_banner(text):
    return re.sub("# =+ machinery .*", "", text)


@pytest.mark.parametrize(("edited", "arguments"), [("amp_cifar.py", []), ("my_cifar.py", [MINE])])
def test_make_sync_does_not_overwrite_what_was_edited_in_a_copy(project, edited, arguments):
    process, before, after = project(edited, OLD, NEW, *arguments)
    assert process.returncode == 1 and before == after
    assert f"{edited}: its machinery was edited" in process.stderr
    changed = [line for line in process.stdout.splitlines() if line[0] in "+-"][2:]
    assert [NEW in changed[0], OLD in changed[1], len(changed)] == [True, True, 2]


def test_make_sync_gives_a_copy_outside_the_project_the_newest_machinery(project):
    """And keeps all else of it; the recipes stay as they are."""
    own = "def synthetic_images(samples, seed):"
    project("my_cifar.py", own, f"{own}  # mine", MINE)
    process, before, after = project("ddp_cifar.py", OLD, NEW, MINE)
    assert (process.returncode, process.stdout) == (0, "my_cifar.py: updated\n"), process.stderr
    mine, newest = after.pop("my_cifar.py"), before["amp_cifar.py"].replace(OLD, NEW)
    assert without_banner(mine.replace("  # mine", "")) == without_banner(newest)
    assert "  # mine" in mine
    assert after == {name: before[name] for name in after}


@pytest.mark.parametrize("recipe", ["ddp_cifar.py", "sharded_cifar.py"])
def test_make_sync_does_not_touch_a_recipe_without_a_banner(project, recipe):
    banner = re.search("\n# =+ this recipe's own", (RECIPES / recipe).read_text())[0]
    process, before, after = project(recipe, banner, "")
    assert process.returncode == 1 and before == after
    assert f"nothing was written: {recipe}: expected the banners of part 2" in process.stderr
