# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines."""

import json

from ddp_cifar import exit_with_error


def read_lines(path, named, form, make):
    """Return `make` of each line of a file that is not blank. Exit with an error, in which the file
    is called `named`, if it cannot be read, or if a line has not this form."""
    made, lines = [], 0
    try:
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte order mark
            for line in file:
                if line.strip():
                    made.append(make(json.loads(line)))
                lines += 1
    except OSError as error:
        exit_with_error(f"{named}: {error.strerror}")
    except Exception as error:  # chat templates raise many types
        exit_with_error(f"{named}, line {lines + 1}: {error!r:.200}. Each line needs {form}")
    return made


def texts_of(path, flag, *names, more=None):
    """Return a tuple of the texts with these names for each line of a file, and of those whose name
    begins with `more`. Exit with an error unless all lines have them."""
    in_first_line = []

    def texts(row):
        begun = [name for name in row if more and name.startswith(more)]
        optional = sorted(name for name in begun if row[name] is not None)
        in_first_line.append(optional)
        if optional != in_first_line[0]:
            raise ValueError(f"it has {optional}, the first line {in_first_line[0]}")
        found = tuple(row[name] for name in (*names, *optional))
        if not all(text.strip() for text in found):
            raise ValueError("an empty text")
        return found

    named = f"{flag} {path}"
    rows = read_lines(path, named, json.dumps(dict.fromkeys(names, "a text")), texts)
    if not rows:
        exit_with_error(f"{named}: the file is empty")
    return rows
