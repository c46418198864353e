# SPDX-License-Identifier: Apache-2.0
"""Rows with named columns: of JSON lines, CSV or Parquet files."""

import csv
import gzip
import json
from functools import lru_cache

from ddp_cifar import exit_with_error


def parsed_rows(path):
    """Yield {name: value} for each row of a file, whose kind is its ending. Raise ValueError if a
    row of CSV has more fields than columns: a comma in a text without quotes."""
    if path.endswith(".parquet"):
        from pyarrow.parquet import read_table  # needed for these files alone

        yield from read_table(path).to_pylist()
        return
    name = path.removesuffix(".gz")
    opened = gzip.open if name != path else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:  # with or without a BOM
        if not name.endswith((".csv", ".tsv")):
            yield from (json.loads(line) for line in file if line.strip())
            return
        for row in csv.DictReader(file, delimiter="\t" if name.endswith(".tsv") else ","):
            if None in row:
                raise ValueError(f"{row[None]} is behind the last column: quote texts with commas")
            yield row


@lru_cache(4)  # the names of classes come from the training set, which several functions read
def read_rows(path, *columns):
    """Return a tuple of values for each row of a file. `columns` are pairs: a name, and a function
    that converts a value, or raises ValueError. Exit with an error that names the row if a value is
    missing or wrong."""
    rows = []
    try:
        for row in parsed_rows(path):
            rows.append(tuple(convert(row[name]) for name, convert in columns))
    except OSError as error:
        exit_with_error(f"cannot read {path}: {error}")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        names = ", ".join(name for name, _ in columns)
        exit_with_error(f"{path}, row {len(rows) + 1}: {error!r:.200}. Each row needs {names}")
    if not rows:
        exit_with_error(f"{path} has no rows")
    return rows


def nonempty_text(value):
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text, or an empty one")
    return value


def class_name(value):
    if isinstance(value, str):
        value = value.strip()
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"{value!r} is not a label: a string or an integer")
    return value


def list_of_texts(value):
    """Return a list of strings, also of integers, as the `datasets` library writes classes."""
    if not isinstance(value, list) or not all(isinstance(x, str | int) for x in value):
        raise ValueError(f"{value!r} is not a list of strings")
    return [*map(str, value)]
