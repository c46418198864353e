# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines."""

import json

from ddp_cifar import exit_with_error


def texts_of(path, flag, *names):
    """Return a tuple of the texts with these names for each line of a file. Exit with an error if a
    line has not all of them."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                texts = [row[name] for name in names]
                if not all(text.strip() for text in texts):
                    raise ValueError("an empty text")
                rows.append(tuple(texts))
    except OSError as error:
        exit_with_error(f"{flag} {path}: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        needed = json.dumps(dict.fromkeys(names, "a text"))
        exit_with_error(f"{flag} {path}, line {len(rows) + 1}: {error!r}: a line is {needed}")
    if not rows:
        exit_with_error(f"{flag} {path}: the file is empty")
    return rows
