# SPDX-License-Identifier: Apache-2.0
"""Reads two columns of a Parquet file, or of JSON lines, for text_classification.py."""

import pyarrow.json
import pyarrow.parquet

from ddp_cifar import exit_with_error


def columns(path, args):
    """Return the texts and the labels of a file, as lists."""
    reads = pyarrow.parquet.read_table if path.endswith(".parquet") else pyarrow.json.read_json
    table = reads(path)
    for name in (args.text, args.label):
        if name not in table.column_names:
            exit_with_error(f"{path} has no column {name}, but {', '.join(table.column_names)}")
        if table[name].null_count:
            exit_with_error(f"{path}: values are missing in {name}")
    return table[args.text].to_pylist(), table[args.label].to_pylist()
