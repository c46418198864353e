# Parts of a copy, not a program: make new COPY=../mine.py WITH=table
# SPDX-License-Identifier: Apache-2.0
r"""Train a small network on the columns of a Parquet or CSV file: a regression.

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
from pyarrow.csv import open_csv, read_csv
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


def column_names(args):
    """Return the names of the table's columns, with the target at the end."""
    try:
        is_csv = str(args.table).endswith(".csv")
        schema = open_csv(args.table).schema if is_csv else read_schema(args.table)
    except (OSError, pyarrow.ArrowInvalid) as error:
        exit_with_error(f"--table {args.table}: {error}")
    # Not the index, which pandas writes as a column.
    schema = [x for x in schema if x.name not in ("", "Unnamed: 0", "__index_level_0__")]
    names, types = [x.name for x in schema], pyarrow.types
    if args.target not in names:
        exit_with_error(f"--target {args.target}: {args.table} has {', '.join(names)}")
    numeric = types.is_integer, types.is_floating, types.is_decimal, types.is_boolean
    others = [f"{x.name} ({x.type})" for x in schema if not any(is_it(x.type) for is_it in numeric)]
    if others:
        exit_with_error(
            f"--table {args.table} has columns that are no numbers: {', '.join(others)}"
        )
    return [*(name for name in names if name != args.target), args.target]


def add_flags(parser):
    parser.add_argument("--table", default="table.parquet", help=".parquet or .csv (table.parquet)")
    parser.add_argument("--target", default="y", help="the column to predict (y)")
    parser.add_argument("--by-order", action="store_true", help="test on the last rows")


def load_data(args, accelerator):
    """Return the DataLoaders of ((B, columns), (B,)) float32 for training and test."""
    names = column_names(args)
    is_csv = str(args.table).endswith(".csv")
    table = read_csv(args.table) if is_csv else read_table(args.table, columns=names)
    values = numpy.stack([table[name].to_numpy() for name in names], axis=1).astype("float64")
    missing = [name for name, x in zip(names, values.T, strict=True) if not numpy.isfinite(x).all()]
    if missing:
        exit_with_error(f"--table {args.table}: values are missing in {', '.join(missing)}")
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
    inputs = len(column_names(args)) - 1
    hidden = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), hidden, nn.Linear(128, 1))


def compute_loss(model, batch, args):
    inputs, targets = batch
    error = model(inputs).squeeze(1) - targets
    return {"loss": error**2, "absolute_error": error.abs()}
