# SPDX-License-Identifier: Apache-2.0
"""Rows with named columns: of JSON lines, CSV or Parquet files, or of the `datasets` library."""

import csv
import gzip
import io
import json
import re
import sys
from functools import cache, lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import NamedTuple

from ddp_cifar import RANK, exit_with_error, log_line

DATASET = re.compile(r"([^:@]+)(?:@([^:]+))?(?::([^:\[]+))?:(\w[^:\[]*(?:\[.*)?)")
LONGEST = 2**26  # bytes of a line of a file
csv.field_size_limit(LONGEST)
# By these columns programs leave out a row, or weigh it; and the values that do so.
MEANT = {
    "answer": "reject|ignore",  # Prodigy's
    "status": "discarded",  # Argilla's
    **dict.fromkeys(("was_cancelled", "ignore", "skip", "exclude"), "true|yes|1"),
    **dict.fromkeys(("weight", "sample_weight"), r"(?!1(\.0*)?$).+"),
}
SOURCES = "a file, a folder of save_to_disk, or NAME[@REVISION][:CONFIG]:SPLIT of the Hub"


def is_dataset(source):
    """Return whether a source is one of the `datasets` library, not a file."""
    named = DATASET.fullmatch(str(source)) and not Path(source).exists()
    return bool(named) or Path(source).is_dir()


def hub_name(source):
    """Return the name on the Hub of a source, or None."""
    named = DATASET.fullmatch(str(source))
    return named[1] if named and not Path(source).exists() and not Path(named[1]).exists() else None


@cache
def dataset_of(source):
    """Return the Dataset of a source: a folder that `save_to_disk` has written, or
    NAME[@REVISION][:CONFIG]:SPLIT, where NAME is on the Hub, or a folder of files. Its rows stay on
    the disk. Images and sounds are not decoded. Raise OSError if there is none."""
    import datasets  # needed for these alone
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # without a network, each rank would print each try
    if RANK or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if Path(source).is_dir():
            rows = datasets.load_from_disk(source)
        else:
            if RANK == 0:
                log_line(f"loading {source}")
            name, revision, config, split = DATASET.fullmatch(source).groups()
            rows = datasets.load_dataset(name, config, revision=revision, split=split)
    except Exception as error:  # many types
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise OSError(f"{reason:.300}. Name {SOURCES}") from None
    if isinstance(rows, dict):
        raise OSError(f"name the folder of a split: {', '.join(f'{source}/{x}' for x in rows)}")
    for name, feature in rows.features.items():
        one = getattr(feature, "feature", feature)  # of a list, its elements
        if isinstance(one, datasets.Image | datasets.Audio):
            one.decode = False
            rows.info.features[name] = feature
    return rows


class Stored(NamedTuple):
    """An image or a sound in a row of a dataset. It stays on the disk."""

    source: str
    index: int
    column: str
    place: int | None = None  # in a list

    def __str__(self):
        return f"{self.source}, row {self.index + 1}"

    def value(self):
        """Return {"bytes": ..., "path": ...}, one of them None. Raise OSError if there is none."""
        value = dataset_of(self.source)[self.index][self.column]
        value = value if self.place is None else value[self.place]
        if value is None:
            raise OSError(f"{self}: {self.column} is missing")
        return value

    def file(self):
        """Return an open file, or the path of one."""
        value = self.value()
        return io.BytesIO(value["bytes"]) if value["bytes"] else value["path"]


@cache
def located(folder):
    """Return a function that converts a value of a row: the name of a file, into its path from this
    folder. What is `Stored` stays so."""

    def path(value):
        return value if isinstance(value, Stored) else Path(folder, nonempty_text(value))

    return path


def dataset_rows(source):
    """Yield the rows of a dataset. Classes have their names, or None in place of -1; images and
    sounds are `Stored`."""
    import datasets

    rows = dataset_of(source)
    features = rows.features
    one = {name: getattr(x, "feature", x) for name, x in features.items()}
    classes = {name: x.names for name, x in one.items() if isinstance(x, datasets.ClassLabel)}
    media = [name for name, x in one.items() if isinstance(x, datasets.Image | datasets.Audio)]
    alone = [name for name in media if one[name] is features[name]]
    lists = {*media} - {*alone}

    def named(value, names):
        if isinstance(value, list):
            return [named(x, names) for x in value]
        return None if value in (None, -1) else names[value]

    for index, row in enumerate(rows.remove_columns(alone)):
        row |= {name: named(row[name], names) for name, names in classes.items()}
        row |= {name: Stored(source, index, name) for name in alone}
        for name in lists:
            row[name] = [Stored(source, index, name, i) for i in range(len(row[name] or []))]
        yield row


def source_key(source):
    """Return a text that is another one when the rows of a source are: the size and the time of a
    file, or the fingerprint of a dataset, into which its revision and its split have gone."""
    if is_dataset(source):
        return dataset_of(source)._fingerprint
    file = Path(source).stat()
    return f"{file.st_size} {file.st_mtime_ns}"


def parsed_rows(source):
    """Return an iterator of the rows, {name: value}, of a dataset, or of a file, whose kind is its
    ending, in lower or upper case."""
    source = str(source)
    if is_dataset(source):
        return dataset_rows(source)
    kind = Path(source.lower().removesuffix(".gz")).suffix
    if kind == ".parquet":
        from pyarrow.parquet import read_table  # needed for these files alone

        return iter(read_table(source).to_pylist())
    lines = lines_of(source)
    return csv_rows(lines, kind) if kind in (".csv", ".tsv") else json_rows(lines)


def lines_of(path):
    """Yield the lines of a text, with or without a byte order mark. Raise ValueError at one that is
    no UTF-8, or that has more than `LONGEST` bytes: a small compressed file may fill any memory."""
    opened = gzip.open if path.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        while line := file.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise ValueError(f"a line has more than {LONGEST} bytes")
            yield line.decode("utf-8-sig")


def json_rows(lines):
    """Yield the rows of JSON lines, or of one array. Raise ValueError if one is no object."""
    for line in filter(str.strip, lines):
        is_array = line.lstrip().startswith("[")
        for row in json.loads(line + "".join(lines)) if is_array else [json.loads(line)]:
            if not isinstance(row, dict):
                raise ValueError(f"{row!r:.80} is no object")
            yield row


def csv_rows(lines, kind):
    """Yield the rows of CSV or TSV. Raise ValueError if one has not a field for each column: a text
    with commas or line breaks has no quotes. Texts of TSV are often written without: two that begin
    or end with a quote would be one field, with all that is between them."""
    rows = filter(None, csv.reader(lines, delimiter="\t" if kind == ".tsv" else ",", strict=True))
    names = next(rows, [])
    if len({*names}) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    for row in rows:
        if len(row) != len(names):
            found = f"{len(row)} fields, but {len(names)} columns"
            raise ValueError(f"{found}: quote texts with commas")
        if kind == ".tsv" and any("\n" in text for text in row):
            raise ValueError("quotes are around a line break: write .csv, or double each quote")
        yield dict(zip(names, row, strict=True))


def check_others(row, used):
    """Raise ValueError if a row has a value that means something for its training, `MEANT`, in a
    column that is not among those that are used."""
    for name in MEANT.keys() & row.keys() - {*used}:
        value = "" if row[name] is None else str(row[name])
        if re.fullmatch(MEANT[name], value, re.IGNORECASE):
            remedy = "leave out such rows, or the column"
            raise ValueError(f"{name} is {value:.80}, which has no effect here: {remedy}")


def unreadable(source, error):
    """Return the line of an OSError."""
    if isinstance(error, FileNotFoundError):
        return f"{source}: no such file. Name {SOURCES}"
    return f"{source}: {error.strerror or error}"


def made_rows(source, form, make, is_wanted=lambda number: True, rows=parsed_rows):
    """Yield `make` of the `rows` of a source whose numbers, from 1 on, are wanted. Raise
    ValueError, with a line that names the row, if one has not this form, or if the source cannot be
    read."""
    number = 1
    try:
        for row in rows(source):
            if is_wanted(number):
                yield make(row)
            number += 1
    except OSError as error:
        raise ValueError(unreadable(source, error)) from None
    except Exception as error:  # chat templates raise many types
        has = f"; it has {', '.join(row)}" if isinstance(error, KeyError) else ""
        found = f"{source}, row {number}: {error!r:.200}"
        raise ValueError(f"{found}. Each row needs {form}{has}") from None


def read_lines(source, form, make):
    """Return `make` of each row of a source. Exit with an error that names the row if one has not
    this form, if there is none, or if the source cannot be read."""
    try:
        made = [*made_rows(source, form, make)]
    except ValueError as error:
        exit_with_error(str(error))
    if not made:
        exit_with_error(f"{source} has no rows")
    return made


@lru_cache(4)  # the names of classes come from the training set, which several functions read
def read_rows(source, *columns):
    """Return a tuple of values for each row of a source. `columns` are pairs: a name, such as text,
    or translation.de of a column of dictionaries, and a function that converts a value, or raises
    ValueError. Exit with an error as `read_lines` does."""

    def value(row, name):
        return reduce(getitem, [name] if name in row else name.split("."), row)

    def values(row):
        check_others(row, [name for name, _ in columns])
        return tuple(convert(value(row, name)) for name, convert in columns)

    return read_lines(source, ", ".join(name for name, _ in columns), values)


def read_text(source, column):
    """Return the text of a file or, of a dataset, those of a column, each ending its line."""
    if not is_dataset(source):
        return Path(source).read_text("utf-8")
    return "".join(read_lines(source, column, lambda row: row[column].removesuffix("\n") + "\n"))


def divided(read, source, test):
    """Return what `read` makes of two sources: lists for training and for the test. Without a
    `test` that is the last tenth."""
    rows = read(source)
    if test:
        return rows, read(test)
    count = len(rows) * 9 // 10
    return rows[:count], rows[count:]


def read_texts(source, *names, more=None):
    """Return a tuple of the texts with these names for each row, and of those whose name begins
    with `more`. Exit with an error unless all rows have them."""
    in_first_row = []

    def texts(row):
        begun = [name for name in row if more and name.startswith(more)]
        optional = sorted(name for name in begun if row[name] is not None)
        in_first_row.append(optional)
        if optional != in_first_row[0]:
            raise ValueError(f"it has {optional}, the first row {in_first_row[0]}")
        check_others(row, names)
        return tuple(nonempty_text(row[name]) for name in (*names, *optional))

    return read_lines(source, ", ".join(names), texts)


def nonempty_text(value):
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text, or an empty one")
    return value


def stored(value):
    if not isinstance(value, Stored):
        raise ValueError(f"{value!r:.80} is no image or sound that a dataset stores")
    return value


def class_name(value):
    if value is None:
        raise ValueError("it has no label, as in test sets of competitions")
    if isinstance(value, str):
        value = value.strip()
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"{value!r} is not a label: a string or an integer")
    return value


def class_names(source, labels):
    """Return the names of the classes of a source, in the order of its labels. Exit with an error
    if some are strings and others integers."""
    if len({*map(type, labels)}) > 1:
        exit_with_error(f"{source} has labels that are strings, and others that are integers")
    return [*map(str, sorted({*labels}))]


def list_of_texts(value):
    if isinstance(value, list) and any(isinstance(x, int) for x in value):
        raise ValueError(f"{value!r:.80} are numbers without names: name the dataset, not its file")
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{value!r} is not a list of strings")
    return value
