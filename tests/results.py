"""Put the tables of the result files into the README: `make results`.

Between `<!-- FILE -->` and `<!-- end -->` stands the text of that file under bench_results/. test_readme.py holds the
README to it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def filled(readme):
    """Return the README's text with the result files' current content."""

    def block(match):
        return f"{match[1]}\n{(ROOT / match[2]).read_text().strip()}\n{match[3]}"

    return re.sub(r"(<!-- (bench_results/\S+) -->)\n.*?\n?(<!-- end -->)", block, readme, flags=re.DOTALL)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
