"""Part 2 of the recipes, the machinery, is one text: `make sync` copies it from ddp_cifar.py.

It stands between two banners, "# === machinery" and "# === this recipe's own". A copy that differs
from all other copies was edited by hand: that is an error, and nothing is overwritten.
"""

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


if __name__ == "__main__":
    blocks = {path: machinery(path) for path in COPIES}
    for path, block in blocks.items():
        others = [other for name, other in blocks.items() if name != path]
        if block not in (*others, machinery(REFERENCE)):
            sys.exit(
                f"{path.name}: its machinery was edited. Make the change in {REFERENCE.name}, or "
                "override a method in this recipe's own part; nothing was copied."
            )
    for path, block in blocks.items():
        text = path.read_text().replace(block, machinery(REFERENCE))
        if text != path.read_text():
            path.write_text(text)
            print(f"updated recipes/{path.name}")
