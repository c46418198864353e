# SPDX-License-Identifier: Apache-2.0
"""The shared block is one text in all recipes: `make sync` copies it from ddp_cifar.py.

    python tools/sync.py  # into the other recipes
    python tools/sync.py ../mine/train.py  # into a copy of a recipe

It stands below the banner "# === ... CHECKSUM", to the end of the file; of a copy in two files it
is infrastructure.py. Missing imports are added. Nothing is written if a block was edited by hand
(it is not the one of its checksum), or if names would be undefined, or are on both
sides of the banner.
"""

import ast
import difflib
import re
import sys
from pathlib import Path

from shared_block import (
    COPIES,
    INFRASTRUCTURE,
    REFERENCE,
    check_names,
    checksum,
    divided,
    ending,
    imports,
    infrastructure,
    is_split,
    names,
    parts,
    with_metadata,
    write,
)


def check_unedited(path, banner, block, newest):
    """Raise ValueError if a block is not that of its checksum, or has none: edits would be lost."""
    if block == newest or checksum(block) in banner:
        return
    texts = [x.splitlines(keepends=True) for x in (block, newest)]
    sys.stdout.writelines(difflib.unified_diff(*texts, str(path), REFERENCE.name))
    why = "its shared block was edited, or is too old, as shown above"
    remedy = f"put your changes into functions of yours, and paste that of {REFERENCE.name} over it"
    raise ValueError(f"{path}: {why}: {remedy}")


def updated(path, banner, newest):
    """Return the text of a file with the newest block, and the import lines that were added."""
    before, old_banner, old = parts(path)
    check_unedited(path, old_banner, old, newest)
    check_names(path, before, newest)
    reference = REFERENCE.read_text("utf-8")
    (ours, _), (known, _) = names(reference), imports(reference)
    undefined = names(before + newest)[1]
    added = sorted(known[name] for name in undefined & known.keys())
    # Only names that the recipes know: a star import may define others.
    undefined = (undefined - known.keys()) & (ours | names(old)[0] | names(newest)[1])
    if found := ", ".join(sorted(undefined)):
        what = "with the newest shared block these are defined nowhere"
        raise ValueError(f"{path}: {what}: {found}: see diff {REFERENCE} {path}")
    lines, last = before.split("\n"), imports(before)[1]
    lines[last:last] = added
    return with_metadata("\n".join(lines)) + banner + newest, added


def updated_infrastructure(path, newest):
    """Return the newest shared infrastructure in place of that at `path`."""
    _, banner, old = divided(path.read_text("utf-8"), path)
    check_unedited(path, banner, old + ending(newest), newest)
    for script in sorted(path.parent.glob("*.py")):
        for node in ast.parse(script.read_text("utf-8"), script).body:
            if isinstance(node, ast.ImportFrom) and node.module == path.stem:
                if gone := {alias.name for alias in node.names} - names(newest)[0]:
                    what = "the newest shared block does not define"
                    raise ValueError(f"{script}: {what} {', '.join(sorted(gone))}")
    return infrastructure()


def main(paths):
    _, banner, newest = parts(REFERENCE)
    title = re.sub("( [0-9a-f]{12})?:", f" {checksum(newest)}:", banner.strip("# =\n"))
    banner = f"# {' ' + title:=>98}\n"
    results = {}
    for path in paths:
        if path.name == INFRASTRUCTURE or is_split(path.read_text("utf-8")):
            beside = path.with_name(INFRASTRUCTURE)
            results[beside] = updated_infrastructure(beside, newest), []
            if path != beside:
                results[path] = with_metadata(path.read_text("utf-8")), []
        else:
            results[path] = updated(path, banner, newest)
    for path, (text, added) in results.items():
        what = "up to date" if text == path.read_text("utf-8") else "updated"
        write(path, text)
        print("; ".join([f"{path.name}: {what}", *added]))


if __name__ == "__main__":
    try:
        main([Path(name).expanduser() for name in sys.argv[1:]] or [REFERENCE, *COPIES])
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"nothing was written: {error}")
