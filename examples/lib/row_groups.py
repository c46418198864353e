# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files that stay where they are: hf://, s3://, https://, or a disk.

A row group is what Parquet can read alone. Its footer says where it lies, so any row is one read
away, and a stream is a map-style dataset and an order: nothing to skip, nothing to save.
"""

import hashlib
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import fsspec
import pyarrow
import torch
from accelerate.utils import broadcast_object_list
from pyarrow.parquet import ParquetFile, read_metadata
from torch.utils.data import DataLoader, Dataset

from ddp_cifar import (
    LOCAL_WORLD_SIZE,
    RANK,
    WORLD_SIZE,
    exit_with_error,
    log_line,
    positive,
    replace_file,
)
from lib.memory import available_memory
from lib.order import ByLane
from lib.progress import with_progress

AHEAD = 128  # rows of a worker, whose row groups are read before it needs them
REQUEST_SECONDS = 60  # after which it is tried again
WAITS = 1, 4, 16  # seconds between requests that fail
FOOTER = 2**16  # bytes of a file's end that are read at first


def add_stream_flags(parser):
    """Add the flags of a stream, which a resumed run must repeat."""
    add = parser.add_argument
    add("--test", metavar="URL", help="Parquet files (the last row group of the others)")
    add("--columns", nargs="+", metavar="NAME", help="in place of the names that the task expects")
    add("--lanes", type=positive(int), default=64, help="row groups side by side in an epoch (64)")
    add("--block", type=positive(int), default=8, help="neighbours of a lane in a batch (8)")
    add("--workers", type=int, default=2, help="that read, per process (2)")


def file_in(value):
    """Return an open file of a row: its bytes, or {"bytes": ..., "path": ...} of `datasets`."""
    return io.BytesIO(value["bytes"] if isinstance(value, dict) else value)


class File(io.RawIOBase):
    """A file behind a URL. Each read is one request, without one before it and without more bytes
    than asked for. A failed one is tried again; then it is an OSError that names the file."""

    def __init__(self, url, size):
        self.url = url
        self.size = size
        self.position = 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=os.SEEK_SET):
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def read(self, count=-1):
        begin = self.position
        self.position = self.size if count < 0 else min(self.size, begin + count)
        for wait in (*WAITS, None):
            try:
                return self.request(begin, self.position)
            except (FileNotFoundError, PermissionError) as error:
                raise OSError(f"{self.url}: {error!r:.200}") from None
            except Exception as error:  # each file system has its own
                if wait is None:
                    raise OSError(f"{self.url}: {error!r:.200}") from None
                time.sleep(wait)

    def request(self, begin, end):
        system, path = fsspec.core.url_to_fs(self.url)  # made anew in a worker's fork
        options = {"size": self.size, "cache_type": "none"}  # or it would ask, and read ahead
        options = {"timeout": REQUEST_SECONDS} if system.async_impl else options
        content = system.cat_file(path, start=begin, end=end, **options)
        if len(content) != end - begin:
            raise OSError(f"{len(content)} bytes in place of {end - begin}")
        return content


def read_footer(url, size):
    """Return the size of a Parquet file, a hash that changes with its rows, and its metadata."""
    if size is None:  # of a list of links
        system, path = fsspec.core.url_to_fs(url)
        size = system.size(path)
    tail = min(size, FOOTER)
    while True:
        file = File(url, size)
        file.seek(size - tail)
        content = file.read()
        needed = int.from_bytes(content[-8:-4], "little") + 8
        if content[-4:] != b"PAR1" or needed > size:
            raise OSError(f"{url} is no Parquet file")
        if needed <= tail:
            footer = content[-needed:]
            digest = hashlib.sha256(footer).hexdigest()
            return size, digest, read_metadata(io.BytesIO(b"PAR1" + footer))
        tail = needed


def find_files(source, output_dir):
    """Return {URL: (size, hash, metadata)} of a URL, or of a pattern. Exit with an error if a file
    is not the one that it was when the run of --output-dir began."""
    try:
        system, path = fsspec.core.url_to_fs(source)
        found = system.glob(path, detail=True) if fsspec.core.has_magic(path) else {}
        found = found or {path: system.info(path)}
        sizes = {system.unstrip_protocol(path): info["size"] for path, info in found.items()}
        with ThreadPoolExecutor(32) as pool:
            read = pool.map(read_footer, sizes, sizes.values())
            read = with_progress(read, len(sizes), f"footers of {source}")
            files = dict(zip(sizes, read, strict=True))
    except Exception as error:  # each file system has its own; or its package is missing
        exit_with_error(f"cannot read {source}: {error!r:.200}")
    now = {url: [size, digest] for url, (size, digest, _) in files.items()}
    key = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = Path(output_dir, f"files-{key}.json")
    before = json.loads(path.read_text()) if path.exists() else now
    for url in sorted({*before, *now}):
        if before.get(url) != now.get(url):
            why = f"is new, missing or changed since this run began ({path})"
            exit_with_error(f"{url} {why}: restore it, or choose another --output-dir")
    replace_file(path, lambda temporary: Path(temporary).write_text(json.dumps(now)))
    return files


def row_groups(source, args):
    """Return the row groups of files: a list of (URL, size, metadata, number). The main process
    reads their footers, so all processes have the same list."""
    found = [find_files(source, args.output_dir) if RANK == 0 else None]
    [files] = broadcast_object_list(found)
    return [
        (url, size, metadata, number)
        for url, (size, _, metadata) in sorted(files.items())
        for number in range(metadata.num_row_groups)
    ]


@cache
def threads(process):
    """Return the threads of a process that read. A fork has none of those before it."""
    return ThreadPoolExecutor(16)


class RowGroups(Dataset):
    """`make` of the rows, {name: value}, of row groups. `names`: {name: that of the column}. A row
    of which `make` raises an error is an OSError with its file, row group and number in it."""

    def __init__(self, groups, names, make):
        self.groups = groups
        self.names = names
        self.make = make
        self.sizes = torch.tensor([metadata.row_group(i).num_rows for *_, metadata, i in groups])
        self.ends = self.sizes.cumsum(0)
        self.tables = {}  # futures
        for url, _, metadata, _ in groups:
            columns = metadata.schema.to_arrow_schema().names
            if missing := [name for name in names.values() if name not in columns]:
                has = f"has the columns {', '.join(columns)}, not {missing[0]}"
                exit_with_error(f"{url} {has}: name others by --columns")

    def __len__(self):
        return int(self.ends[-1])

    def read(self, group):
        url, size, metadata, number = self.groups[group]
        try:
            file = pyarrow.PythonFile(File(url, size), "r")
            parquet = ParquetFile(file, metadata=metadata, pre_buffer=True)
            columns = [*self.names.values()]
            return parquet.read_row_group(number, columns=columns, use_threads=False)
        except pyarrow.ArrowException as error:
            raise OSError(f"{url} is damaged, or has changed: {error}") from None

    def table(self, group):
        """Return the future of a row group, which is read once until it is dropped."""
        if group not in self.tables:
            self.tables[group] = threads(os.getpid()).submit(self.read, group)
        return self.tables[group]

    def __getitem__(self, index):
        """Return a sample, where all are read in their order: it keeps two row groups."""
        group = int(torch.searchsorted(self.ends, index, right=True))
        near = range(group, min(group + 2, len(self.groups)))
        self.tables = {number: self.table(number) for number in near}
        return self.sample(group, index)

    def sample(self, group, index):
        table = self.table(group).result()
        row = index - int(self.ends[group] - self.sizes[group])
        values = {name: table[column][row].as_py() for name, column in self.names.items()}
        try:
            return self.make(values)
        except Exception as error:  # chat templates, PIL and others raise many types
            url, *_, number = self.groups[group]
            where = f"{url}, row group {number}, row {row}"
            raise OSError(f"{where}: {error!r:.200}") from None


class Stream(ByLane):
    """RowGroups by lane. A worker keeps the row groups of the lanes that its samples are in, and
    those of its next AHEAD rows, which threads read at the same time."""

    def __init__(self, rows, args):
        super().__init__(rows, args.seed, rows.sizes, args.lanes, args.block)
        self.batch_size = args.batch_size
        self.whole = len(self) // args.global_batch_size * args.global_batch_size
        self.step = WORLD_SIZE * max(1, args.workers)  # from a microbatch of a worker to its next
        self.latest = self.begun = None  # microbatches
        self.in_lane = {}  # the row group of each

    def lanes_of_a_worker(self):
        """Return in how many lanes the samples of the first worker are."""
        period = self.lanes * self.block
        begins = range(0, period * self.batch_size * self.step, self.batch_size * self.step)
        found = {(x + i) % period // self.block for x in begins for i in range(self.batch_size)}
        return len(found)

    def read_ahead(self, batch):
        """Begin to read what this microbatch and the next ones of this worker need."""
        goes_on = self.latest is not None and batch == self.latest + self.step
        if not goes_on:  # another epoch, or a resumed one
            self.dataset.tables.clear()
            self.in_lane.clear()
        first = self.begun + self.step if goes_on else batch
        self.latest, self.begun = batch, batch + -(-AHEAD // self.batch_size) * self.step
        for begin in range(first, self.begun + 1, self.step):
            begin *= self.batch_size
            for position in range(begin, min(begin + self.batch_size, self.whole)):
                self.dataset.table(self.place(position)[1])

    def __getitem__(self, position):
        if position // self.batch_size != self.latest:
            self.read_ahead(position // self.batch_size)
        lane, group, index = self.place(position)
        before = self.in_lane.get(lane, group)
        self.in_lane[lane] = group
        if before != group and before not in self.in_lane.values():
            self.dataset.tables.pop(before, None)
        return self.dataset.sample(group, index)


def check_memory(source, train_set, args):
    """Log what the workers read. Exit with an error if that exceeds the memory."""

    def size(group):
        return group[2].row_group(group[3]).total_byte_size

    rows = train_set.dataset
    _, _, metadata, number = max(rows.groups, key=size)
    largest = metadata.row_group(number)
    columns = [largest.column(index) for index in range(largest.num_columns)]
    used = tuple(f"{name}." for name in rows.names.values())
    sizes = {f"{x.path_in_schema}.": x.total_uncompressed_size for x in columns}
    megabytes = sum(x for path, x in sizes.items() if path.startswith(used)) / 2**20
    lanes = train_set.lanes_of_a_worker()
    reads = f"{len(rows.groups)} row groups of up to {megabytes:.1f} MB"
    log_line(f"{source}: {reads}; a worker reads {lanes} of {args.lanes} lanes")
    workers = LOCAL_WORLD_SIZE * max(1, args.workers)
    kept = min(lanes + AHEAD / largest.num_rows, len(rows.groups))
    needed = 2 * workers * kept * megabytes / 2**10  # each is decoded from its bytes
    free = available_memory() / 2**30
    if needed > free:
        why = f"its row groups would take {needed:.1f} GB of memory, {free:.1f} GB are free"
        exit_with_error(f"{source}: {why}: set fewer --lanes")


def stream(args, source, names, make, make_test, collate):
    """Return the DataLoaders for training and test of Parquet files: `collate` of lists of `make`
    of rows, and of `make_test` for the test. A row is {name: value}."""
    names = dict(zip(names, args.columns or names, strict=False))
    train = row_groups(source, args)
    train, test = (train, row_groups(args.test, args)) if args.test else (train[:-1], train[-1:])
    if not train:
        exit_with_error(f"{source} has one row group, which would be the test set: name a --test")
    train_set = Stream(RowGroups(train, names, make), args)
    if RANK == 0:
        check_memory(source, train_set, args)
    options = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": args.workers}
    options |= {"persistent_workers": args.workers > 0, "pin_memory": torch.cuda.is_available()}
    test_set = RowGroups(test, names, make_test)
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)
