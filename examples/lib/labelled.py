# SPDX-License-Identifier: Apache-2.0
"""Texts and their labels, of Parquet files or JSON lines, for text_classification.py."""

from functools import lru_cache

from pyarrow import ArrowInvalid
from pyarrow.json import read_json
from pyarrow.parquet import read_table

from ddp_cifar import exit_with_error


@lru_cache(2)  # the names of the classes are those of the training set
def columns(path, text, label):
    """Return the columns of texts and of labels of a file, as lists."""
    try:
        table = read_table(path) if path.endswith(".parquet") else read_json(path)
    except (OSError, ArrowInvalid) as error:
        exit_with_error(f"cannot read {path}: {error}")
    for name in (text, label):
        if name not in table.column_names:
            exit_with_error(f"{path} has no column {name}, but {', '.join(table.column_names)}")
        if table[name].null_count:
            exit_with_error(f"{path}: values are missing in {name}")
    return table[text].to_pylist(), table[label].to_pylist()


def labelled_texts(path, config, args):
    """Return [(text, index of its label in the configuration of the model), ...]."""
    texts, names = columns(path, args.text, args.label)
    indices = [config.label2id.get(str(name)) for name in names]
    if None in indices:
        unknown = names[indices.index(None)]
        exit_with_error(f"{path}: no text of {args.train} has the label {unknown}")
    return list(zip(texts, indices, strict=True))
