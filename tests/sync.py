"""The blocks that recipes share: what has one name at the top level is the text of ddp_cifar.py, byte for byte.

`python tests/sync.py` (make sync) copies them from the reference into the other recipes; test_sync.py compares them.
`main`, RECIPE and what OWN names are each recipe's own. A block that was edited in one copy, not in the reference, is
not overwritten.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
REFERENCE = RECIPES / "ddp_cifar.py"
OWN = {"pipeline_cifar": {"train_step", "evaluate"}}  # the same tasks, done differently


def blocks(source):
    """Return {name: text} of the top-level functions, classes and constants of a recipe, but for its own."""
    found, lines = {}, source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, first = node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            name, first = ast.unparse(node.targets[0]), node.lineno
        else:
            continue
        if name not in ("main", "RECIPE"):
            found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def imports(source):
    """Return {name: where it is imported from}."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (getattr(node, "module", None), alias.name)
    return found


def shared(path):
    """Return [(name, text here, text in the reference)] of the blocks that a recipe shares with the reference."""
    reference, here = blocks(REFERENCE.read_text()), blocks(path.read_text())
    names = [name for name in here if name in reference and name not in OWN.get(path.stem, ())]
    return [(name, here[name], reference[name]) for name in names]


def unmet(path):
    """Return the names that a recipe's shared blocks use and that are imported, or defined, in the reference alone."""
    there, here = REFERENCE.read_text(), path.read_text()
    reference, own = {**imports(there), **blocks(there)}, {**imports(here), **blocks(here)}
    used = {node.id for _, text, _ in shared(path) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    used &= reference.keys() - OWN.get(path.stem, set())
    return sorted(name for name in used if own.get(name) != reference[name])


def others():
    return sorted(set(RECIPES.glob("*_cifar.py")) - {REFERENCE})


def committed(path):
    """Return a file's texts in the last thirty commits that changed it; none where there is no git."""

    def git(*words):
        return subprocess.run(["git", "-C", path.parent, *words], capture_output=True, text=True).stdout

    return [git("show", f"{commit}:./{path.name}") for commit in git("log", "-30", "--format=%H", path.name).split()]


if __name__ == "__main__":
    stale = [blocks(text) for text in committed(REFERENCE)]
    # An uncommitted version that an earlier `make sync` has copied is in several recipes, an edit of a copy in one.
    copies = Counter(block for recipe in others() for block in blocks(recipe.read_text()).items())
    for recipe in others():
        text = recipe.read_text()
        for name, mine, theirs in shared(recipe):
            known = mine in (theirs, *(reference.get(name) for reference in stale)) or copies[name, mine] > 1
            if not known:
                sys.exit(
                    f"{recipe.name}: {name} was edited here and not in {REFERENCE.name}. Make the change there, or "
                    f"undo it here (git checkout), or give the block a name of its own; nothing more was copied."
                )
            text = text.replace(mine, theirs)
        if text != recipe.read_text():
            recipe.write_text(text)
            print(f"updated {recipe.relative_to(RECIPES.parent)}")
        for name in unmet(recipe):
            print(f"{recipe.name}: {name} is missing, or another than the shared blocks need")
