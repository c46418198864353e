"""The blocks that the recipes share: functions and classes of one name are the text of ddp_cifar.py, byte for byte.

`python tests/sync.py` (make sync) copies them from the reference into the other recipes; test_sync.py holds them to it.
`main` is every recipe's own story. So are `load_data` and `build_model` in your copy, but not here.
"""

import ast
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
REFERENCE = RECIPES / "ddp_cifar.py"


def blocks(path):
    """Return {name: (first line, line after the last)} of the top-level functions and classes, counted from 0."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "main":
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = (first - 1, node.end_lineno)
    return found


def shared(path):
    """Return [(name, text here, text in the reference)] of the blocks that a recipe shares with the reference."""
    here, there = path.read_text().splitlines(), REFERENCE.read_text().splitlines()
    reference = blocks(REFERENCE)
    return [
        (name, "\n".join(here[slice(*lines)]), "\n".join(there[slice(*reference[name])]))
        for name, lines in blocks(path).items()
        if name in reference
    ]


def others():
    return sorted(set(RECIPES.glob("*_cifar.py")) - {REFERENCE})


if __name__ == "__main__":
    for recipe in others():
        text = recipe.read_text()
        for _, mine, theirs in shared(recipe):
            text = text.replace(mine, theirs)
        if text != recipe.read_text():
            recipe.write_text(text)
            print(f"updated {recipe.relative_to(RECIPES.parent)}")
