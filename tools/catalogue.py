# SPDX-License-Identifier: Apache-2.0
"""Read by new.py: the recipes, the examples, what each of these defines and is for."""

import ast
import re
from functools import lru_cache

from recipe import COPIES, IMPORTS, REFERENCE, ROOT, statements

RECIPES = {path.stem.removesuffix("_cifar"): path for path in (REFERENCE, *COPIES)}
EXAMPLES = sorted({path.name.partition(".")[0] for path in ROOT.glob("examples/[a-z]*.*")})
GROUPS = ("vision", "language", "speech", "tables", "additions")
TRAIN = "torchrun --standalone --nproc_per_node 2 mine.py"  # of an example with a task


def source(name, kind, recipe=""):
    """Return the text of examples/NAME.RECIPE.KIND, or of examples/NAME.KIND, or ""."""
    paths = [ROOT / "examples" / f"{name}{part}.{kind}" for part in (f".{recipe}", "")]
    return next((path.read_text("utf-8") for path in paths if path.exists()), "")


@lru_cache
def description(name):
    """Return the paragraphs on an example, the recipes that it is for, and its group."""
    code = source(name, "py")
    text = ast.get_docstring(ast.parse(code)) if code else source(name, "diff").partition("@@")[0]
    *paragraphs, last = text.strip().split("\n\n")
    group, recipes = re.fullmatch(r"Group: (\w+)\. Recipes: (.*)\.", last).groups()
    return paragraphs, recipes.split(", "), group


def titles():
    """Return the examples of each group, each with its first line, and the recipes."""
    width = max(map(len, EXAMPLES)) + 2
    lines = ["WITH= takes one task and any additions, in their order"]
    for group in GROUPS:
        lines += ["", f"{group}:"]
        for name in EXAMPLES:
            paragraphs, _, of = description(name)
            lines += [f"    {name:{width}}{paragraphs[0]}"] if of == group else []
    return "\n".join([*lines, "", f"RECIPE= one of {', '.join(RECIPES)}"])


def bound(node):
    """Return the names that a statement defines, but not those that it imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]


@lru_cache(200)
def definitions(text):
    """Return {name: lines} of what a module defines, of a name defined twice both."""
    found = {}
    for node, lines in statements(text):
        for name in bound(node):
            found[name] = found.get(name, "") + lines.strip()
    return found


@lru_cache
def load(name, recipe):
    """Return the imports of an example, and {name: lines} of what it defines, and of the helpers
    and what it names of another example, or of another recipe."""
    lines, defined, own = [], {}, definitions(RECIPES[recipe].read_text("utf-8"))
    for node, part in statements(text := source(name, "py", recipe)):
        module = (getattr(node, "module", None) or "").replace(".", "/")
        if source(module, "py", recipe):  # another example, or of examples/lib
            more, theirs = load(module, recipe)
            lines += more
            given = {alias.name for alias in node.names}
            defined |= {key: x for key, x in theirs.items() if key in given or key not in own}
        elif module.endswith("_cifar"):
            theirs = definitions(RECIPES[module.removesuffix("_cifar")].read_text("utf-8"))
            lacking = {alias.name for alias in node.names} - own.keys()
            defined |= {key: re.sub(r"^# -{20}.*\n", "", theirs[key]) for key in sorted(lacking)}
        elif isinstance(node, IMPORTS):
            lines.append(part.strip())
    return lines, defined | definitions(text)
