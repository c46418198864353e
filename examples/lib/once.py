# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens that are made once: a file in --output-dir, which all ranks map."""

import hashlib
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_cifar import RANK, VERSIONS, exit_with_error, fsync_path, log_line
from lib.rows import made_rows, parsed_rows, source_key

CHUNK = 64  # rows that a worker hands over at once
ROWS_OF_A_WORKER = 500  # fewer do not pay for a process


def made_once(args, source, form, make, key, counts):
    """Return what `make` returns for each row of a source: a list of tensors (N, ...), mapped from
    a file. The main process makes the file, and so does the first one of each machine that does not
    see it, with all its cores. It is made again if the source, `key`, the versions or this file,
    and so a copy's code, have changed. What `make` counts in `counts`, a Counter, is in the file,
    too. Exit with an error as `read_lines` does."""
    before, found = counts.copy(), None
    if RANK == 0:  # copies of the data on other machines may have other times
        try:
            found = [VERSIONS, Path(__file__).read_text(), source_key(source), key]
        except OSError as error:
            exit_with_error(f"{source}: {error.strerror or error}")
        found = hashlib.sha256(repr(found).encode()).hexdigest()
    [found] = broadcast_object_list([found])
    name = hashlib.sha256(str(source).encode()).hexdigest()[:8]
    path = Path(args.output_dir, f"tokens-{name}.pt")
    state = PartialState()
    with state.main_process_first(), state.local_main_process_first():
        content = read_made(path)
        if content.get("key") != found:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"tokens-{name}-{RANK}.tmp")
            temporary.unlink(missing_ok=True)  # a link leads elsewhere
            torch.save({"key": found, **make_all(source, form, make, counts)}, temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
            content = read_made(path)
    counts.clear()
    counts.update(before)
    counts.update(content["counts"])
    tensors = iter(content["values"].split(content["lengths"].tolist()))
    return [[*islice(tensors, number)] for number in content["per_row"].tolist()]


def tokenizer_key(tokenizer):
    """Return what decides on the tokens of a text, and of a chat."""
    return tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, transformers.__version__


def read_made(path):
    """Return the content of a file of this module, mapped, or {} if there is none."""
    return torch.load(path, "cpu", weights_only=True, mmap=True) if path.exists() else {}


class Chunks(IterableDataset):
    """`make` of the rows of a source, packed by CHUNK rows, of which each worker has its own. After
    an error comes its text."""

    def __init__(self, source, form, make, counts):
        self.source = source
        self.form = form
        self.make = make
        self.counts = counts

    def __iter__(self):
        info = get_worker_info()
        own, workers = (info.id, info.num_workers) if info else (0, 1)

        def is_own(number):
            return (number - 1) // CHUNK % workers == own

        rows = made_rows(self.source, self.form, self.make, is_own)
        try:
            while chunk := [*islice(rows, CHUNK)]:
                yield self.packed(chunk)
        except ValueError as error:
            yield str(error)

    def packed(self, rows):
        """Return the tensors of rows as one array, their lengths, and how many a row has: of NumPy,
        since a tensor would keep a file open in the process that gets it."""
        tensors = [x for row in rows for x in row]
        counts = dict(self.counts)
        self.counts.clear()
        return {
            "values": torch.cat(tensors).numpy() if tensors else None,
            "lengths": torch.tensor([*map(len, tensors)], dtype=torch.int64).numpy(),
            "per_row": torch.tensor([*map(len, rows)]).numpy(),
            "counts": counts,
        }


def make_all(source, form, make, counts):
    """Return what the file has but for its key: {"values": the tensors of all rows, one behind the
    other, "lengths": (S,) int64, "per_row": how many tensors a row has, (R,) int64, "counts"}."""
    total = 0
    with suppress(Exception):  # the row will be named when it is made
        for _ in parsed_rows(source):
            total += 1
    workers = min(len(os.sched_getaffinity(0)), total // ROWS_OF_A_WORKER)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns of each fork
    options = {"num_workers": workers, "generator": torch.Generator()}  # not the global one
    options |= {"batch_size": None, "collate_fn": lambda part: part}  # or it would make tensors
    options |= {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(Chunks(source, form, make, counts), **options)
    parts, all_counts = [], Counter()
    for part in with_progress(loader, total, source):
        all_counts.update(part.pop("counts"))
        parts.append({name: torch.from_numpy(x) for name, x in part.items() if x is not None})
    if not parts:
        exit_with_error(f"{source} has no rows")
    empty = [torch.zeros(0, dtype=torch.int32)]
    columns = {
        name: torch.cat([part[name] for part in parts if name in part] or empty)
        for name in ("values", "lengths", "per_row")
    }
    return {**columns, "counts": dict(all_counts)}


def with_progress(parts, total, source):
    """Yield parts, and show how many of `total` rows are done: in a bar on a terminal, elsewhere in
    a line every 10 seconds. Exit with an error where a part is the text of one."""
    plain = not sys.stderr.isatty()
    bar = Progress(console=Console(stderr=True), disable=plain, transient=True, auto_refresh=False)
    began = said = time.monotonic()
    done = 0
    with bar:  # without a thread, whose locks a fork would inherit
        task = bar.add_task(f"tokens of {source}", total=total)
        for part in parts:
            if isinstance(part, str):
                bar.stop()
                exit_with_error(part)
            yield part
            done += len(part["per_row"])
            bar.update(task, completed=done, refresh=True)
            now = time.monotonic()
            if plain and now - said > 10:
                said = now
                left = (now - began) * (total - done) / done
                log_line(f"tokens of {source}: {done} of {total} rows, {left:.0f} s left")
