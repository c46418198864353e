"""Part 2 of the recipes, the machinery, is one text: `make sync` copies it from ddp_cifar.py.

    python tests/sync.py  # into the other recipes
    python tests/sync.py ../mine/train.py  # into a copy of a recipe

It stands between two banners, "# === machinery CHECKSUM" and "# === this recipe's own". A block
that is not the one of its checksum was edited by hand: that is an error, and nothing is written.
"""

import difflib
import hashlib
import sys
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
REFERENCE = RECIPES / "ddp_cifar.py"
COPIES = [RECIPES / f"{name}_cifar.py" for name in ("amp", "pipeline", "sharded")]


def machinery(path):
    """Return the text between the banners; raise ValueError unless each is there once."""
    lines = path.read_text().splitlines(keepends=True)
    banners = [i for i, line in enumerate(lines) if line.startswith("# =====")]
    if len(banners) != 2 or " machinery" not in lines[banners[0]]:
        raise ValueError(f"{path.name}: expected the banners of part 2 and of part 3")
    return "".join(lines[banners[0] : banners[1]])


def checksum(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main(paths):
    _, _, text = machinery(REFERENCE).partition("\n")
    title = f" machinery {checksum(text)}: the same text, byte for byte, in all recipes"
    new = f"# {title:=>98}\n{text}"
    blocks = {path: machinery(path) for path in paths}
    for path, block in blocks.items():
        banner, _, own = block.partition("\n")
        if own != text and checksum(own) not in banner:
            lines = [x.splitlines(keepends=True) for x in (block, new)]
            sys.stdout.writelines(difflib.unified_diff(*lines, str(path), REFERENCE.name))
            sys.exit(
                f"{path.name}: its machinery was edited, as shown above; nothing was written. Make "
                f"the change in {REFERENCE.name}, or define the function again below the machinery."
            )
    for path, block in blocks.items():
        path.write_text(path.read_text().replace(block, new))
        print(f"{path.name}: {'up to date' if block == new else 'updated'}")


if __name__ == "__main__":
    try:
        main([Path(name) for name in sys.argv[1:]] or [REFERENCE, *COPIES])
    except (OSError, ValueError) as error:
        sys.exit(f"nothing was written: {error}")
