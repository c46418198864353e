# SPDX-License-Identifier: Apache-2.0
"""Rows with named columns: of JSON lines, CSV or Parquet files."""

import csv
import json
from functools import lru_cache

from ddp_cifar import exit_with_error


def parsed_rows(path):
    """Yield {name: value} for each row of a file, whose kind is its ending."""
    if path.endswith(".parquet"):
        from pyarrow.parquet import read_table  # needed for these files alone

        yield from read_table(path).to_pylist()
        return
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file) if path.endswith(".csv") else map(json.loads, file)


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
    if not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a label: a string or an integer")
    return value


def list_of_texts(value):
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{value!r} is not a list of strings")
    return value
