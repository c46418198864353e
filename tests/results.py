"""Put the tables of the result files into the README: `make results`.

Between `<!-- FILE -->` and `<!-- end -->` stands the text of that file; after `<!-- FILE short -->` the same without
the legend of its columns. test_readme.py holds the README to it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def filled(readme):
    """Return the README's text with the result files' current content."""

    def block(match):
        marker, file, short, end = match.groups()
        table, command, notes = (ROOT / file).read_text().strip().split("\n\n")
        if short:
            notes = "\n".join(notes.splitlines()[:2])
        return "\n\n".join([f"{marker}\n{table}", command, f"{notes}\n{end}"])

    return re.sub(r"(<!-- (bench_results/\S+)( short)? -->)\n.*?\n?(<!-- end -->)", block, readme, flags=re.DOTALL)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
