# Parts of a copy, not a program: make new COPY=../mine.py WITH=table
# SPDX-License-Identifier: Apache-2.0
"""Train a small network on the columns of a Parquet, CSV or TSV file: a regression.

    python tools/toy.py table
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --table toy/table.parquet --target y --epochs 5

All columns are numbers. A random tenth of the rows is the test set, with --by-order the last tenth:
for a time series, whose neighbours in time are alike. The other rows' mean and standard deviation
normalise the columns. They are in columns.json in the output directory: a prediction is in standard
deviations of the target, from its mean. So a loss of 0.1 means that 90% of the target's variance is
explained.

Group: tables. Recipes: ddp, amp, pipeline, sharded.
"""

import json
from pathlib import Path

import numpy
import pyarrow
import torch
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv, read_csv
from pyarrow.parquet import read_schema, read_table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_cifar import exit_with_error, replace_file


class Rows(Dataset):
    """(N, columns + 1) float32 on the device, the target in the last column. One indexing operation
    returns a batch: (B, columns) and (B,)."""

    def __init__(self, values, device):
        self.values = torch.from_numpy(values).float().to(device)

    def __len__(self):
        return len(self.values)

    def __getitems__(self, indices):
        rows = self.values[indices]
        return rows[:, :-1], rows[:, -1]


def text_file(path):
    """Return what pyarrow needs to read a CSV or TSV file, or None for one of Parquet."""
    name = str(path).lower()
    kind = Path(name.removesuffix(".gz")).suffix
    if kind not in (".csv", ".tsv"):
        return None
    stream = pyarrow.input_stream(str(path), compression="gzip" if name.endswith(".gz") else None)
    parsing = ParseOptions(delimiter="\t" if kind == ".tsv" else ",")
    in_order = ReadOptions(use_threads=False)  # an error names the row
    return {"input_file": stream, "parse_options": parsing, "read_options": in_order}


def column_types(args):
    """Return {name: type} of the table's columns, with the target at the end."""
    try:
        file = text_file(args.table)
        schema = open_csv(**file).schema if file else read_schema(args.table)
        # Not the index, which pandas writes as a column.
        index = "", "Unnamed: 0", "__index_level_0__"
        names = [x.name for x in schema if x.name not in index]
    except (OSError, ValueError) as error:
        exit_with_error(f"--table {args.table}: {error}")
    if args.target not in names:
        exit_with_error(f"--target {args.target}: {args.table} has {', '.join(names)}")
    if twice := {name for name in names if names.count(name) > 1}:
        exit_with_error(f"--table {args.table} has two columns {min(twice)}")
    found, types = {name: schema.field(name).type for name in names}, pyarrow.types
    numeric = types.is_integer, types.is_floating, types.is_decimal, types.is_boolean
    others = [f"{k} ({x})" for k, x in found.items() if not any(is_it(x) for is_it in numeric)]
    if others:
        exit_with_error(
            f"--table {args.table} has columns that are no numbers: {', '.join(others)}"
        )
    target = found.pop(args.target)
    return {**found, args.target: target}


def read_columns(args):
    """Return the names of the columns, and their values, (N, columns) float64."""
    types = column_types(args)
    # The types of a text are those of its first rows: a later number may not be an integer.
    types = {k: x if pyarrow.types.is_boolean(x) else pyarrow.float64() for k, x in types.items()}
    options = ConvertOptions(column_types=types, include_columns=types)
    try:
        if file := text_file(args.table):
            table = read_csv(**file, convert_options=options)
        else:
            table = read_table(args.table, columns=[*types])
    except (OSError, ValueError) as error:
        exit_with_error(f"--table {args.table}: {error}")
    values = numpy.stack([table[name].to_numpy() for name in types], axis=1).astype("float64")
    names = [*types]
    missing = [name for name, x in zip(names, values.T, strict=True) if not numpy.isfinite(x).all()]
    if missing:
        exit_with_error(f"--table {args.table}: values are missing in {', '.join(missing)}")
    return names, values


def add_flags(parser):
    parser.add_argument("--table", default="table.parquet", help="also .csv, .tsv (table.parquet)")
    parser.add_argument("--target", default="y", help="the column to predict (y)")
    parser.add_argument("--by-order", action="store_true", help="test on the last rows")


def load_data(args, accelerator):
    """Return the DataLoaders of ((B, columns), (B,)) float32 for training and test."""
    names, values = read_columns(args)
    if not args.by_order:
        numpy.random.default_rng(0).shuffle(values)  # the same split for any --seed
    train, test = numpy.split(values, [len(values) - len(values) // 10])
    mean, std = train.mean(0), train.std(0)
    std[std == 0] = 1  # a constant column
    text = json.dumps({"names": names, "mean": mean.tolist(), "std": std.tolist()})
    path = Path(args.output_dir, "columns.json")
    replace_file(path, lambda temporary: temporary.write_text(text))
    train_set, test_set = (Rows((x - mean) / std, accelerator.device) for x in (train, test))
    options = {"batch_size": args.batch_size, "collate_fn": tuple}  # Rows makes batches
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU: (B, columns) in, (B, 1) out."""
    inputs = len(column_types(args)) - 1
    hidden = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), hidden, nn.Linear(128, 1))


def compute_loss(model, batch, args):
    inputs, targets = batch
    error = model(inputs).squeeze(1) - targets
    return {"loss": error**2, "absolute_error": error.abs()}
