# SPDX-License-Identifier: Apache-2.0
"""Texts and their labels, of Parquet files or JSON lines, for text_classification.py."""

from pyarrow import ArrowInvalid
from pyarrow.json import read_json
from pyarrow.parquet import read_table

from ddp_cifar import exit_with_error


def columns(path, args):
    """Return the texts and the labels of a file, as lists."""
    try:
        table = read_table(path) if path.endswith(".parquet") else read_json(path)
    except (OSError, ArrowInvalid) as error:
        exit_with_error(f"cannot read {path}: {error}")
    for name in (args.text, args.label):
        if name not in table.column_names:
            exit_with_error(f"{path} has no column {name}, but {', '.join(table.column_names)}")
        if table[name].null_count:
            exit_with_error(f"{path}: values are missing in {name}")
    return table[args.text].to_pylist(), table[args.label].to_pylist()


def labelled_texts(path, config, args):
    """Return [(text, index of its label in the configuration of the model), ...]."""
    texts, names = columns(path, args)
    indices = [config.label2id.get(str(name)) for name in names]
    if None in indices:
        unknown = names[indices.index(None)]
        exit_with_error(f"{path}: no text of {args.train} has the label {unknown}")
    return list(zip(texts, indices, strict=True))
