# SPDX-License-Identifier: Apache-2.0
"""Compose a copy of a recipe with examples, or add examples to a copy: `make new`, `make add`.

    python tools/new.py new ../mine.py --recipe sharded --with language_model ema
    python tools/new.py new ../mine/train.py --split  # and infrastructure.py beside it
    python tools/new.py add ../mine.py --with lora

examples/NAME.py has functions that replace the recipe's, and all that they need. The lines of
examples/NAME.diff change functions. NAME.sharded.py and NAME.sharded.diff are those of one recipe.
`new` leaves out the functions, flags and imports that the copy does not use. `add` removes nothing,
and replaces only what its owner has not edited. Nothing is written if an example does not fit.
examples/NAME.TASK.py has what an addition puts in place of that task's functions.
"""

import argparse
import ast
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from shared_block import (
    COPIES,
    IMPORTS,
    INFRASTRUCTURE,
    METADATA,
    REFERENCE,
    ROOT,
    check_names,
    checksum,
    ending,
    imports,
    infrastructure,
    is_split,
    names,
    parsed,
    parts,
    statements,
    with_infrastructure,
    with_metadata,
    without_imports,
    write,
)

RECIPES = {path.stem.removesuffix("_cifar"): path for path in (REFERENCE, *COPIES)}
EXAMPLES = sorted({path.name.partition(".")[0] for path in ROOT.glob("examples/[a-z]*.*")})
GROUPS = ("vision", "language", "speech", "tables", "additions")
TRAIN = "accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py"  # of a task
MADE = re.compile(r"Made from (.*\))(?:\s+with\s+(.*))?\.", re.DOTALL)
FILE = re.compile(r"'[^'\n]*\.py'|\S+\.py")


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


def tasks_of(addition):
    """Return the tasks that it has functions for, or none if it is for all."""
    return sorted(path.name.split(".")[1] for path in ROOT.glob(f"examples/{addition}.*.py"))


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


@lru_cache(16)
def docstring(text):
    """Return the paragraphs of a copy's docstring above "Made from", its match, and those below."""
    doc = ast.get_docstring(parsed(text), clean=False)
    if doc is None:
        raise ValueError("the copy has no docstring, in which its examples are named: write one")
    paragraphs = doc.rstrip().split("\n\n")
    for i, made in enumerate(MADE.fullmatch(x.strip()) for x in paragraphs):
        if made:
            return paragraphs[:i], made, paragraphs[i + 1 :]
    return paragraphs, None, []


def parents(text):
    """Return the names of the examples in a copy."""
    made = docstring(text)[1]
    return re.findall(r"\w+", made[2] or "") if made else []


def adapted(paragraph, file_name):
    """Return a paragraph of a recipe or an example with the name of the copy."""
    return re.sub(r"recipes/\w+_cifar\.py|\bmine\.py", lambda _: file_name, paragraph)


def with_docstring(text, file_name, recipe, origin, examples):
    """Return a copy whose docstring has the title and the commands of the example with a task in
    place of the recipe's, and then the other examples' paragraphs and the origin. All that is not
    the recipe's stays."""
    above, made, below = docstring(text)
    recipes_own = docstring(RECIPES[recipe].read_text("utf-8"))[0]
    above = [adapted(x, file_name) if x in recipes_own else x for x in above]
    replaced = {FILE.sub("", adapted(x, "")) for x in recipes_own[:2]}
    for name in examples:
        paragraphs = description(name)[0]
        is_task = TRAIN in "\n\n".join(paragraphs)
        kept = [x for x in above if not (is_task and FILE.sub("", x) in replaced)]
        # Below a title of the owner's own.
        at = (kept[:1] == above[:1]) if is_task else len(kept)
        above = [*kept[:at], *(adapted(x, file_name) for x in paragraphs), *kept[at:]]
    examples = [*parents(text), *examples]
    origin = f"Made from {made[1] if made else origin}{' with ' * bool(examples)}"
    end = textwrap.fill(f"{origin}{', '.join(examples)}.", 100)
    doc = "\n\n".join([*above, end, *below])
    node = parsed(text).body[0]
    lines = text.split("\n")
    ending = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    doc = doc.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    ending = ending or "  # noqa: E501" * any(len(line) > 100 for line in doc.split("\n"))
    lines[node.lineno - 1 : node.end_lineno] = f'"""{doc}\n"""{ending}'.split("\n")
    return "\n".join(lines)


def with_imports(own, name, recipe):
    """Return a copy with the imports that it lacks of an example. Raise ValueError if it has
    another thing of the same name."""
    (ours, last), (theirs, _) = imports(own), imports("\n".join(load(name, recipe)[0]))
    needed = used(own)
    missing = {key: x for key, x in theirs.items() if key in needed and ours.get(key) != x}
    for key in missing.keys() & names(own)[0]:
        if missing[key].startswith("from "):
            raise ValueError(f"{name}.py: {missing[key]}: {key} of the copy is something else")
    lines = own.split("\n")
    lines[last:last] = missing.values()
    return "\n".join(lines)


def put_functions(text, name, recipe, before):
    """Return a copy with an example's functions in place of the recipe's, and what they need above
    the first of them. Raise ValueError if one of these was edited, or is of an example `before`."""
    defined = load(name, recipe)[1]
    original, ours = definitions(RECIPES[recipe].read_text("utf-8")), definitions(text)
    if task := name.partition(".")[2]:
        original = original | load(task, recipe)[1]
    for key in sorted(defined.keys() & names(text)[0]):
        if ours.get(key, "") not in (original.get(key), defined[key]):
            for other in before:
                if key in load(other, recipe)[1]:
                    raise ValueError(f"{other} and {name} both have {key}: take one task alone")
            why = f"{key} of the copy is edited, or of another example"
            raise ValueError(f"{name}.py: {why}: put in by hand what examples/{name}.py has")
    first = next((key for key in ours if key in defined and key in original), "main")
    helpers = dict.fromkeys(part for key, part in defined.items() if key not in ours)
    result = []
    for node, part in statements(text):
        for key in bound(node):
            result += [f"\n\n{x}\n" for x in helpers] if key == first else []
            part = f"\n\n{defined[key]}\n" if key in defined else part
        result.append(part)
    return "".join(result)


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
        lines = text.split("\n")
        first, last = place(text, path) or (0, 0)
        within = "\n".join(["", *lines[first:last], ""])
        if f"{new}\n" in within or within.count(f"{old}\n") != 1:
            shown = " | ".join(line[1:].strip() for line in hunk)
            raise ValueError(f"{name}.diff does not fit {path}, or is there already: {shown}")
        lines[first:last] = within.replace(f"{old}\n", f"{new}\n").split("\n")[1:-1]
        text = "\n".join(lines)
    return text


def used(own):
    """Return the names that a statement uses which does not define them."""
    return set().union(*(names(lines)[1] for _, lines in statements(own)))


def without_unused(own, block):
    """Return the owner's part without definitions and flags that neither it nor the block uses."""
    while gone := definitions(own).keys() - used(own) - names(block)[1]:
        own = "".join(part for node, part in statements(own) if not gone & {*bound(node)})
    read = {*re.findall(r"\bargs\.(\w+)", own + block)}
    for line, flag in re.findall(r'^( +add\("--([\w-]+)", .*\)\n)', own, re.MULTILINE):
        own = own if flag.replace("-", "_") in read else own.replace(line, "")
    return own.rstrip() + "\n\n\n"


def unused_imports(own, block=""):
    """Return the names of imports that neither the owner's part nor the block uses."""
    return imports(own)[0].keys() - used(own) - names(block)[1]


def sorted_imports(text):
    """Sort and merge the imports, as the rules of this repository say."""
    words = "-m ruff check --fix --exit-zero --quiet --select I --stdin-filename copy.py -"
    command = [sys.executable, *words.split(), "--config", ROOT / "pyproject.toml"]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"{done.stderr.strip()}: pip install ruff")
    return done.stdout


def compose(path, name, recipe, examples, adds=False, split=False):
    """Return the copy at `path`, or a recipe, with examples put in, for a file of this name. With
    `split` it is the script beside the shared infrastructure."""
    own, banner, block = parts(path)
    check_names(path, own, block)
    before, present = own, [*parents(own), *examples]
    for index, example in enumerate(examples):
        if example not in EXAMPLES:
            raise ValueError(f"there is no example {example}\n{titles()}")
        recipes = description(example)[1]
        if recipe not in recipes:
            raise ValueError(f"{example} is for {', '.join(recipes)}, not for {recipe}")
        tasks = tasks_of(example)
        named = [task for task in tasks if task in present]
        if tasks and not named:
            raise ValueError(f"{example} is for {', '.join(tasks)}: name it behind one of these")
        for part in (example, *(f"{example}.{task}" for task in named)):
            own = put_functions(own, part, recipe, tuple(examples[:index]))
            own = apply(own, source(part, "diff", recipe), part)
            own = with_imports(own, part, recipe)
    if not adds:
        own = without_unused(own, block)
        own = own.rstrip() + "\n" + ending(block) if split else own
        own = without_imports(own, unused_imports(own, "" if split else block))
        own = METADATA.sub("", own)  # the recipe's
    own = with_infrastructure(own, block) if split else own
    origin = f"{recipe}_cifar.py (shared infrastructure {checksum(block)})"
    own = with_metadata(own)
    own = with_docstring(own, shlex.quote(name), recipe, origin, examples)
    # Imports that their owner did not sort may have an order that matters.
    own = sorted_imports(own) if sorted_imports(before) == before else own
    return own if split else own + banner + block


def recipe_of(own):
    """Return the recipe that has the most lines in common with a copy."""
    ours = {*own.splitlines()}
    theirs = {name: {*parts(x)[0].splitlines()} for name, x in RECIPES.items()}
    return max(theirs, key=lambda name: len(ours & theirs[name]) / len(ours | theirs[name]))


def next_commands(path, recipe):
    """Return the lines that make the data of a copy's task, train it in two ways, and check it."""
    texts = [x for name in parents(path.read_text("utf-8")) for x in description(name)[0]]
    texts = [re.sub(r" \\\n +", " ", x) for x in texts]  # one line for each command
    recipes_own = f"    {TRAIN} --data synthetic --model simple_cnn"
    task = next((x for x in texts if TRAIN in x), recipes_own)
    other, path = (shlex.quote(str(x)) for x in (f"runs/{path.stem}-other", path))
    task = task.replace("mine.py", path)
    two = TRAIN.replace("mine.py", path)
    data, _, flags = task.rpartition(f"    {two}")
    one = two.replace("2", "4", 1) if recipe == "pipeline" else f"python {path}"
    lines = [". .venv/bin/activate", *textwrap.dedent(data).splitlines()]
    check = f"make check COPY={path} ARGS={shlex.quote(flags.strip())}"
    return [*lines, f"{two}{flags}", f"{one}{flags} --output-dir {other}", check]


def new(target, recipe, examples, split):
    """Write a copy. Return the lines to print."""
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    if target.stem in sys.stdlib_module_names or PathFinder.find_spec(target.stem, installed):
        why = f"Python would import it in place of its own module {target.stem}"
        raise ValueError(f"{target}: {why}: choose another name")
    text = compose(RECIPES[recipe], target.name, recipe, examples, split=split)
    beside = target.with_name(INFRASTRUCTURE)
    if split and beside.exists() and beside.read_text("utf-8") != infrastructure():
        raise ValueError(f"{beside} is not the newest: make sync COPY={shlex.quote(str(beside))}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "x", encoding="utf-8") as file:  # "x": none is overwritten
        file.write(text)
    if split:
        beside.write_text(infrastructure(), "utf-8")
    return next_commands(target, recipe)


def add(target, examples):
    """Put examples into a copy. Return its recipe, and the lines to print."""
    own, _, block = parts(target)
    recipe = recipe_of(own)
    write(target, compose(target, target.name, recipe, examples, adds=True, split=is_split(own)))
    unused = unused_imports(parts(target)[0], block) - unused_imports(own, block)
    lines = [f"not used any more (F401): {', '.join(sorted(unused))}"] if unused else []
    check = f'make check COPY={shlex.quote(str(target))} ARGS="your flags"'
    return recipe, [*lines, check]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("new", "add"), help="write a copy, or add to it")
    parser.add_argument("copy", nargs="?", help="the file")
    parser.add_argument("--recipe", default="ddp", choices=RECIPES, help="of a new copy (ddp)")
    parser.add_argument("--split", action="store_true", help="the shared part in a file of its own")
    parser.add_argument("--with", nargs="*", default=[], dest="examples", help="in this order")
    args = parser.parse_args()
    if not args.copy:
        return [titles()]
    target, recipe = Path(args.copy).expanduser(), args.recipe
    if args.action == "add":
        recipe, lines = add(target, args.examples)
    else:
        lines = new(target, recipe, args.examples, args.split)
    made = f"{target}: {recipe}_cifar.py with {' '.join(args.examples) or 'no example'}. Next:\n"
    return [made, *lines]


if __name__ == "__main__":
    try:
        lines = main()
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"nothing was written: {error}")
    print(*lines, sep="\n")
