# SPDX-License-Identifier: Apache-2.0
"""Shared by sync.py and new.py: the parts of a recipe, its names, its imports."""

import ast
import builtins
import hashlib
import re
import shutil
import symtable
import tempfile
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "recipes/ddp_cifar.py"
COPIES = [ROOT / f"recipes/{name}_cifar.py" for name in ("amp", "pipeline", "sharded")]
BANNER = re.compile(r"^# =+ shared infrastructure\b.*\n", re.MULTILINE)
OLDER = "it is of the earlier structure, with functions of yours below the shared block: "
OLDER += "make a copy by `make new` with the same examples, and put your functions into it"


def parts(path):
    """Return a recipe in three parts: its owner's, the banner, and the shared block to the end of
    the file. Raise ValueError if it has no such block, SyntaxError if it is not Python."""
    text = path.read_text("utf-8")
    ast.parse(text, path)  # an error names the file and the line
    banner = BANNER.search(text)
    if not banner:
        kind = "a copy of ddp, amp, pipeline or sharded with its line '# ====='"
        raise ValueError(f"{path} has no shared block to update: it is not {kind}")
    before, block = text[: banner.start()], text[banner.end() :]
    if "\n# =====" in block:
        raise ValueError(f"{path}: {OLDER}")
    return before, banner[0], block


def checksum(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(16)  # parsing takes the time, a tree the memory
def parsed(text):
    return ast.parse(text)


@lru_cache(1000)  # for new.py, which asks statement by statement
def names(text):
    """Return the names that a module binds, and those that it uses and does not bind."""
    module = symtable.symtable(text, "", "exec")
    scopes = [module]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    found = [x for scope in scopes for x in scope.get_symbols() if scope is module or x.is_global()]
    bound = {x.get_name() for x in found if x.is_assigned() or x.is_imported()}
    used = {x.get_name() for x in found if x.is_referenced()}
    return bound, used - bound - {*dir(builtins), "__file__"}


@lru_cache(200)
def imports(text):
    """Return {name: the line that imports it}, and the number of the last line of the imports above
    all functions and classes."""
    lines, last, above = {}, 0, True
    for node in parsed(text).body:
        above = above and not isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno if above else last
            for alias in node.names:
                one = type(node)(**{**vars(node), "names": [alias]})
                lines[alias.asname or alias.name.partition(".")[0]] = ast.unparse(one)
    return lines, last


def write(path, text):
    """Write a copy with the line ends that it has. An error leaves it as it was."""
    path = path.resolve()  # not the link to it
    ending = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        unfinished = Path(directory, path.name)
        unfinished.write_text(text, "utf-8", newline=ending)
        shutil.copymode(path, unfinished)
        unfinished.replace(path)
