# SPDX-License-Identifier: Apache-2.0
"""Written by new.py: the docstring of a copy, with its title, its commands, and its examples."""

import ast
import re
import textwrap
from functools import lru_cache

from catalogue import RECIPES, TRAIN, description
from recipe import parsed

MADE = re.compile(r"Made from (.*\))(?:\s+with\s+(.*))?\.", re.DOTALL)
FILE = re.compile(r"'[^'\n]*\.py'|\S+\.py")


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
    launch = r"accelerate launch --config_file \S+/(\d)gpu.yaml"
    paragraph = re.sub(launch, r"torchrun --standalone --nproc_per_node \1", paragraph)
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
