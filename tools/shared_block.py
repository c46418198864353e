# SPDX-License-Identifier: Apache-2.0
"""Shared by sync.py, new.py and check.py: the parts of a recipe, its names, its imports."""

import ast
import builtins
import hashlib
import json
import re
import shutil
import symtable
import tempfile
import tomllib
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "recipes/ddp_cifar.py"
COPIES = [ROOT / f"recipes/{name}_cifar.py" for name in ("amp", "pipeline", "sharded")]
INFRASTRUCTURE = "infrastructure.py"  # of a copy in two files: the shared block
HEADER = """# SPDX-License-Identifier: Apache-2.0
\"\"\"The shared infrastructure of the scripts in this folder: checkpoints, metrics, signals, hangs.
Do not edit it: `make sync COPY=` with this file replaces it by the newest one.\"\"\"

"""
END = '\n\nif __name__ == "__main__":'
BANNER = re.compile(r"^# =+ shared infrastructure\b.*\n", re.MULTILINE)
METADATA = re.compile(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///\n", re.MULTILINE)
OTHER_NAMES = {"PIL": "torchvision", "sklearn": "scikit_learn"}
LISTED = re.compile(r'^dependencies = \[(?:[^]"#]|"[^"]*")*\]', re.MULTILINE)
IMPORTS = (ast.Import, ast.ImportFrom)


def parts(path):
    """Return a recipe in three parts: its owner's, the banner, and the shared block to the end of
    the file. Of a copy in two files the first is the whole script. Raise ValueError if there is no
    such block, SyntaxError if it is not Python."""
    text = path.read_text("utf-8")
    if not is_split(text):
        return divided(text, path)
    ast.parse(text, path)
    beside = path.with_name(INFRASTRUCTURE)
    _, banner, block = divided(beside.read_text("utf-8"), beside)
    return text, banner, block + ending(parts(REFERENCE)[2])


def is_split(text):
    """Return whether a script imports the shared infrastructure."""
    return bool(re.search(rf"^from {Path(INFRASTRUCTURE).stem} import ", text, re.MULTILINE))


def ending(block):
    """Return the lines at the end of a block that call `main`. A script in two files has them."""
    return block[block.index(END) :]


@lru_cache  # for new.py, whose tests make copies by the hundred
def infrastructure():
    """Return the shared block as a file of its own."""
    own, banner, block = parts(REFERENCE)
    block = block.removesuffix(ending(block))
    lines = own.split("\n")[parsed(own).body[0].end_lineno + 1 : imports(own)[1]]
    needed = "\n".join([*lines, ""])
    needed = without_imports(needed, imports(needed)[0].keys() - names(block)[1])
    return f"{HEADER}{needed}\n{banner}{block}"


def with_infrastructure(own, block):
    """Return a script with what it uses, and does not import yet, of the shared infrastructure, and
    of the imports that this file has."""
    lines, last = own.split("\n"), imports(own)[1]
    lacking, known = names(own)[1], imports(parts(REFERENCE)[0])[0]
    added = [known[name] for name in sorted(lacking & known.keys())]
    if shared := ", ".join(sorted(lacking & names(block)[0])):
        added.append(f"from {Path(INFRASTRUCTURE).stem} import {shared}")
    lines[last:last] = added
    return "\n".join(lines)


@lru_cache(8)
def divided(text, path):
    """Return the parts of a text, which is that of the file at `path`."""
    banner = BANNER.search(text)
    if not banner:
        kind = "a copy of ddp, amp, pipeline or sharded with its line '# ====='"
        raise ValueError(f"{path} has no shared block to update: it is not {kind}")
    ast.parse(text, path)  # an error names the file and the line
    return text[: banner.start()], banner[0], text[banner.end() :]


def checksum(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(16)  # parsing takes the time, a tree the memory
def parsed(text):
    return ast.parse(text)


def statements(text):
    """Return [(node, its lines, with the comments above it)] of a module: all of its text."""
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")]
    nodes = parsed(text).body
    ends = [0, *(node.end_lineno for node in nodes[:-1]), len(lines)]
    return [(x, "".join(lines[i:j])) for x, (i, j) in zip(nodes, pairwise(ends), strict=False)]


@lru_cache(1000)  # for new.py, which asks statement by statement
def names(text):
    """Return the names that a module binds, and those that it uses and does not bind."""
    scopes = [symtable.symtable(text, "", "exec")]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    found = [x for scope in scopes for x in scope.get_symbols() if x.is_global()]
    bound = {x.get_name() for x in found if x.is_assigned() or x.is_imported()}
    used = {x.get_name() for x in found if x.is_referenced()}
    return bound, used - bound - {*dir(builtins), "__file__"}


def imported(node):
    """Return {name: the full name of what it stands for} of an import statement."""
    found = {}
    for alias in node.names:
        first = alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        else:
            found[alias.asname or first] = alias.name if alias.asname else first
    return found


@lru_cache(200)
def modules(text):
    """Return the modules of which it imports something anywhere, without their submodules."""
    found = [imported(x) for x in ast.walk(parsed(text)) if isinstance(x, IMPORTS)]
    return {name.partition(".")[0] for names in found for name in names.values()}


def check_names(path, own, block):
    """Raise ValueError if the owner's part binds a name that the shared block binds, too, or one
    that the block uses, to another thing than the reference's import."""
    if is_split(own):  # these names are the script's own
        return
    (newest, _), (bound, used) = names(parts(REFERENCE)[2]), names(block)
    theirs = dict.fromkeys(newest & bound)
    for node in parsed(parts(REFERENCE)[0]).body:
        if isinstance(node, IMPORTS):
            theirs |= {name: thing for name, thing in imported(node).items() if name in used}
    found = []
    for node, text in statements(own):
        is_import = isinstance(node, IMPORTS)
        ours = imported(node) if is_import else dict.fromkeys(names(text)[0], "")
        found += [(name, node.lineno) for name, x in ours.items() if theirs.get(name, x) != x]
    if listed := ", ".join(f"{name} (line {line})" for name, line in found):
        why = f"names on both sides of the line '# =====': {listed}"
        raise ValueError(f"{path}: {why}: rename yours")


@lru_cache(200)
def imports(text):
    """Return {name: the line that imports it}, and the number of the last line of the imports above
    all functions and classes."""
    lines, last, above = {}, 0, True
    for node in parsed(text).body:
        above = above and not isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, IMPORTS):
            last = node.end_lineno if above else last
            for alias in node.names:
                one = type(node)(**{**vars(node), "names": [alias]})
                lines[alias.asname or alias.name.partition(".")[0]] = ast.unparse(one)
    return lines, last


def without_imports(own, gone):
    """Return the owner's part without the imports of these names."""
    lines = own.split("\n")
    for node in reversed(parsed(own).body):
        if isinstance(node, IMPORTS):
            place = slice(node.lineno - 1, node.end_lineno)
            kept = [x for x in node.names if (x.asname or x.name.partition(".")[0]) not in gone]
            one = type(node)(**{**vars(node), "names": kept})
            lines[place] = [ast.unparse(one)] if kept else []
    return "\n".join(lines)


def module_of(requirement):
    """Return the module of a requirement such as "rouge-score >= 0.1.2"."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("-", "_")


def with_metadata(own):
    """Return a script whose inline metadata (PEP 723) lists the packages that it imports, with the
    bounds of pyproject.toml. What is listed already stays as it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    known = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    known = {module_of(x): x.replace(" ", "") for x in known}
    if not METADATA.search(own):
        python = f'# requires-python = "{project["requires-python"]}"'
        at = re.match("(#.*\n)*", own).end()
        own = f"{own[:at]}# /// script\n{python}\n# dependencies = []\n# ///\n{own[at:]}"
    found = METADATA.search(own)
    content = re.sub("^# ?", "", found[1], flags=re.MULTILINE)
    listed = tomllib.loads(content).get("dependencies", [])
    used = modules(own) | modules(infrastructure())
    # PIL comes with torchvision, with which transformers reads images.
    used |= {other for name, other in OTHER_NAMES.items() if name in used}
    used -= {*map(module_of, listed)}
    lacking = [known[name] for name in known if name in used]
    if not lacking:
        return own
    if not LISTED.search(content):
        raise ValueError(f"add to the dependencies in the lines # /// script: {', '.join(lacking)}")
    listed = sorted([*listed, *lacking], key=lambda x: [*known, module_of(x)].index(module_of(x)))
    line = f"dependencies = {json.dumps(listed)}"
    line = line if len(line) < 99 else f"dependencies = {json.dumps(listed, indent=4)}"
    content = LISTED.sub(lambda _: line, content)
    content = re.sub("^", "# ", content.rstrip(), flags=re.MULTILINE)
    return f"{own[: found.start(1)]}{content}\n{own[found.end(1) :]}"


def write(path, text):
    """Write a copy with the line ends that it has. An error leaves it as it was."""
    path = path.resolve()  # not the link to it
    ending = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        unfinished = Path(directory, path.name)
        unfinished.write_text(text, "utf-8", newline=ending)
        shutil.copymode(path, unfinished)
        unfinished.replace(path)
