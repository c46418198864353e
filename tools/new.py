# SPDX-License-Identifier: Apache-2.0
"""Compose a copy of a recipe with examples, or add examples to a copy: `make new`, `make add`.

    python tools/new.py new ../mine.py --recipe sharded --with language_model ema
    python tools/new.py add ../mine.py --with lora

examples/NAME.py has functions that replace the recipe's, and all that they need. The lines of
examples/NAME.diff change functions. NAME.sharded.py and NAME.sharded.diff are those of one recipe.
Functions, flags and imports that the copy does not use are removed. Nothing is written if an
example does not fit, and no file is overwritten.
"""

import argparse
import ast
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from recipe import COPIES, REFERENCE, ROOT, checksum, imports, names, parsed, parts, write

RECIPES = {path.stem.removesuffix("_cifar"): path for path in (REFERENCE, *COPIES)}
EXAMPLES = sorted({path.name.partition(".")[0] for path in ROOT.glob("examples/[a-z]*.*")})
TRAIN = "torchrun --nproc_per_node 2 mine.py"  # in the docstring of an example with a task
MADE = re.compile(r"\n*Made from (.*\))(?: with (.*))?\.$", re.DOTALL)


# ----------------------------------------------------------------------------------- an example
def source(name, kind, recipe=""):
    """Return the text of examples/NAME.RECIPE.KIND, or of examples/NAME.KIND, or ""."""
    paths = [ROOT / "examples" / f"{name}{part}.{kind}" for part in (f".{recipe}", "")]
    return next((path.read_text("utf-8") for path in paths if path.exists()), "")


def description(name):
    """Return the paragraphs on an example, and the recipes that it is for."""
    code = source(name, "py")
    text = ast.get_docstring(ast.parse(code)) if code else source(name, "diff").partition("@@")[0]
    *paragraphs, last = text.strip().split("\n\n")
    return paragraphs, re.findall(r"\w+", last.removeprefix("Recipes:"))


def titles():
    """Return the examples, each with its first line, and the recipes."""
    rows = [f"    {name:18}{description(name)[0][0]}" for name in EXAMPLES]
    return "\n".join(
        ["WITH= takes examples, in their order:", *rows, f"RECIPE= one of {', '.join(RECIPES)}"]
    )


def statements(text):
    """Return [(node, its lines, with the comments above it)] of a module."""
    lines = text.splitlines(keepends=True)
    nodes = parsed(text).body
    ends = [0, *(node.end_lineno for node in nodes)]
    return [(x, "".join(lines[i : x.end_lineno])) for x, i in zip(nodes, ends, strict=False)]


def bound(node):
    """Return the names that a statement defines, but not those that it imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]


def definitions(text):
    """Return {name: lines} of what a module defines."""
    return {name: lines.strip() for node, lines in statements(text) for name in bound(node)}


def load(name, recipe):
    """Return the imports of an example, and {name: lines} of what it defines, and of the helpers
    and what it names of another example. What it imports from a recipe is in the copy already."""
    lines, defined, own = [], {}, definitions(RECIPES[recipe].read_text("utf-8"))
    for node, part in statements(text := source(name, "py", recipe)):
        module = (getattr(node, "module", None) or "").replace(".", "/")
        if source(module, "py", recipe):  # another example, or of examples/lib
            more, theirs = load(module, recipe)
            lines += more
            given = {alias.name for alias in node.names}
            defined |= {key: x for key, x in theirs.items() if key in given or key not in own}
        elif isinstance(node, ast.Import | ast.ImportFrom) and not module.endswith("_cifar"):
            lines.append(part.strip())
    return lines, defined | definitions(text)


# --------------------------------------------------------------------------------------- the copy
def put_functions(text, name, recipe):
    """Return a copy with an example's functions in place of the recipe's, and what they need above
    the first of them. Raise ValueError if one of these was edited, or replaced before."""
    added_imports, defined = load(name, recipe)
    original, ours = definitions(RECIPES[recipe].read_text("utf-8")), definitions(text)
    for key in sorted(defined.keys() & original.keys()):
        if ours.get(key) not in (original[key], defined[key]):
            raise ValueError(f"{name}.py: {key} of the copy is edited, or of another example")
    first = next((key for key in ours if key in defined), "main")
    helpers = dict.fromkeys(part for key, part in defined.items() if key not in ours)
    result = []
    for node, part in statements(text):
        for key in bound(node):
            result += [f"\n\n{x}\n" for x in helpers] if key == first else []
            part = f"\n\n{defined[key]}\n" if key in defined else part
        result.append(part)
    lines = "".join(result).splitlines()
    last = imports(text)[1]
    lines[last:last] = added_imports
    return "\n".join(lines) + "\n"


def place(text, path):
    """Return the first and the last line of a function, "Class" or "Class.method", or None."""
    body = parsed(text).body
    for name in path.split("."):
        node = next((x for x in body if getattr(x, "name", "") == name), None)
        if node is None:
            return None
        body = node.body
    return node.lineno - 1, node.end_lineno


def apply(text, diff, name):
    """Return a copy changed by a diff, in which `@@ FUNCTION` is the place of a hunk. Raise
    ValueError if a hunk does not fit there exactly once."""
    for path, hunk in re.findall(r"^@@ (\S+)\n((?:[ +-].*\n|\n)+)", diff, re.MULTILINE):
        hunk = [line or " " for line in hunk.rstrip("\n").split("\n")]
        old, new = ("".join(f"\n{x[1:]}" for x in hunk if x[0] in f" {sign}") for sign in "-+")
        lines = text.splitlines()
        first, last = place(text, path) or (0, 0)
        within = "\n".join(["", *lines[first:last], ""])
        if f"{new}\n" in within or within.count(f"{old}\n") != 1:
            shown = " | ".join(line[1:].strip() for line in hunk)
            raise ValueError(f"{name}.diff does not fit {path}, or is there already: {shown}")
        lines[first:last] = within.replace(f"{old}\n", f"{new}\n").split("\n")[1:-1]
        text = "\n".join(lines) + "\n"
    return text


def unused(text):
    """Return the names of definitions that no other statement uses."""
    defined = definitions(text)
    used = [names(lines)[1] for _, lines in statements(text)]
    return defined.keys() - set().union(*used)


def unread_flags(text):
    """Return the lines, of one flag each, whose flag nothing reads."""
    found = re.findall(r'^( +add\("--([\w-]+)", .*\)\n)', text, re.MULTILINE)
    names = set(re.findall(r"\bargs\.(\w+)", text))
    return {line for line, flag in found if flag.replace("-", "_") not in names}


def without_unused(text, before, shared):
    """Return a copy without definitions and flags that are not used, unless they were not used
    before, or are in its shared block."""
    keep = unused(before) | definitions(shared).keys()
    while gone := unused(text) - keep:
        text = "".join(part for node, part in statements(text) if not gone & {*bound(node)})
    for line in unread_flags(text) - unread_flags(before):
        text = text if line in shared else text.replace(line, "")
    return text


def with_docstring(text, file_name, origin, examples):
    """Return a copy whose docstring begins with that of the example with a task, or else with the
    recipe's title and commands, and ends with the other examples' and the origin."""
    before = ast.get_docstring(parsed(text))
    if before is None:
        raise ValueError("the copy has no docstring, in which its examples are named: write one")
    made = MADE.search(before)
    parents = [*(made[2] or "").split(), *examples] if made else examples
    head, rest = before[: made and made.start()].split("\n\n"), []
    for paragraphs in (description(name)[0] for name in examples):
        if TRAIN in "\n\n".join(paragraphs):
            head[:2] = paragraphs
        else:
            rest += paragraphs
    origin = f"Made from {made[1] if made else origin}{' with ' * bool(parents)}"
    end = textwrap.fill(f"{origin}{', '.join(x.strip(',') for x in parents)}.", 100)
    doc = "\n\n".join([*head, *rest, end])
    launch = r"accelerate launch --config_file \S+/(\d)gpu.yaml"
    doc = re.sub(launch, r"torchrun --nproc_per_node \1", doc)
    doc = re.sub(r"recipes/\w+_cifar\.py|\bmine\.py", file_name, doc)
    ending = "  # noqa: E501" * any(len(line) > 100 for line in doc.splitlines())
    doc = doc.replace("\\", "\\\\")
    lines = text.splitlines()
    node = parsed(text).body[0]
    lines[node.lineno - 1 : node.end_lineno] = f'"""{doc}\n"""{ending}'.splitlines()
    return "\n".join(lines) + "\n"


def tidy(text):
    """Sort, merge and prune the imports, as the rules of this repository say."""
    command = [sys.executable, "-m", "ruff", "check", "--fix", "--quiet", "--select", "I,F401,F811"]
    command += ["--config", ROOT / "pyproject.toml", "--stdin-filename", "copy.py", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def compose(path, name, recipe, examples):
    """Return the copy at `path`, or a recipe, with examples put in, for a file of this name."""
    before = text = path.read_text("utf-8")
    block = parts(path)[2]
    for example in examples:
        if example not in EXAMPLES:
            raise ValueError(f"there is no example {example}\n{titles()}")
        recipes = description(example)[1]
        if recipe not in recipes:
            raise ValueError(f"{example} is for {', '.join(recipes)}, not for {recipe}")
        text = put_functions(text, example, recipe)
        text = apply(text, source(example, "diff", recipe), example)
    text = without_unused(text, before, block)
    origin = f"{recipe}_cifar.py (shared infrastructure {checksum(block)})"
    return tidy(with_docstring(text, shlex.quote(name), origin, examples))


def recipe_of(path):
    """Return the recipe that has the most lines in common with a copy."""
    ours = {*path.read_text("utf-8").splitlines()}
    theirs = {name: {*x.read_text("utf-8").splitlines()} for name, x in RECIPES.items()}
    return max(theirs, key=lambda name: len(ours & theirs[name]) / len(ours | theirs[name]))


def next_commands(path, recipe):
    """Return the lines that make the data of a copy's task, train it in two ways, and check it."""
    parents = MADE.search(ast.get_docstring(ast.parse(path.read_text("utf-8"))))[2]
    texts = [x for name in re.findall(r"\w+", parents or "") for x in description(name)[0]]
    recipes_own = f"    {TRAIN} --data synthetic --model simple_cnn"
    other, path = (shlex.quote(str(x)) for x in (f"runs/{path.stem}-other", path))
    task = next((x for x in texts if TRAIN in x), recipes_own).replace("mine.py", path)
    two = TRAIN.replace("mine.py", path)
    data, _, flags = task.rpartition(f"    {two} ")
    one = two.replace("2", "4", 1) if recipe == "pipeline" else f"python {path}"
    lines = [". .venv/bin/activate", *textwrap.dedent(data).splitlines()]
    check = f"make check COPY={path} ARGS={shlex.quote(flags)}"
    return [*lines, f"{two} {flags}", f"{one} {flags} --output-dir {other}", check]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("new", "add"))
    parser.add_argument("copy", nargs="?", help="the file")
    parser.add_argument("--recipe", default="ddp", choices=RECIPES, help="of a new copy (ddp)")
    parser.add_argument("--with", nargs="*", default=[], dest="examples", help="in this order")
    args = parser.parse_args()
    if not args.copy:
        return [titles()]
    target = Path(args.copy).expanduser()
    if args.action == "add":
        recipe = recipe_of(target)
        write(target, compose(target, target.name, recipe, args.examples))
    else:
        recipe = args.recipe
        text = compose(RECIPES[recipe], target.name, recipe, args.examples)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "x", encoding="utf-8") as file:  # "x": none is overwritten
            file.write(text)
    made = f"{target}: {recipe}_cifar.py with {' '.join(args.examples) or 'no example'}. Next:\n"
    return [made, *next_commands(target, recipe)]


if __name__ == "__main__":
    try:
        lines = main()
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"nothing was written: {error}")
    print(*lines, sep="\n")
