# SPDX-License-Identifier: Apache-2.0
"""What is made once of the data: a file in --output-dir, which all ranks map."""

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
from lib.rows import dataset_of, is_dataset, made_rows, parsed_rows, source_key, unreadable

CHUNK = 64  # rows that a worker hands over at once
ROWS_OF_A_WORKER = 500  # fewer do not pay for a process


def kept(path, key, make):
    """Return what `make` returns, its tensors mapped from a file. The main process makes the file,
    and so does the first one of each machine that does not see it. It is made again if the key of
    the main process, of any type, has changed."""
    # Copies of the data on other machines may have other times.
    [key] = broadcast_object_list([hashlib.sha256(repr(key).encode()).hexdigest()])
    state = PartialState()
    with state.main_process_first(), state.local_main_process_first():
        content = read_kept(path)
        if content.get("key") != key:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.stem}-{RANK}.tmp")
            temporary.unlink(missing_ok=True)  # a link leads elsewhere
            torch.save({"key": key, "made": make()}, temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
            content = read_kept(path)
    return content["made"]


def read_kept(path):
    return torch.load(path, "cpu", weights_only=True, mmap=True) if path.exists() else {}


def made_once(args, source, form, make, key, counts):
    """Return what `make` returns for each row of a source, a list of tensors (N, ...), `kept` in
    --output-dir. All cores of a machine make it: again if the source, `key`, the versions or this
    file, and so a copy's code, have changed. What `make` counts in `counts`, a Counter, is in the
    file, too. Exit with an error as `read_lines` does."""
    before = counts.copy()
    counts.clear()  # or they would be in the file, too
    if RANK == 0:  # a rank that finds the file needs no data
        try:
            key = VERSIONS, Path(__file__).read_text(), source_key(source), key
        except OSError as error:
            exit_with_error(unreadable(source, error))
    name = hashlib.sha256(str(source).encode()).hexdigest()[:8]
    path = Path(args.output_dir, f"tokens-{name}.pt")
    made = kept(path, key, lambda: make_all(source, form, make, counts))
    counts.update(before)
    counts.update(made["counts"])
    tensors = iter(made["values"].split(made["lengths"].tolist()))
    return [[*islice(tensors, number)] for number in made["per_row"].tolist()]


def tokenizer_key(tokenizer):
    """Return what decides on the tokens of a text, and of a chat."""
    own = tokenizer.chat_template, tokenizer.special_tokens_map, transformers.__version__
    return tokenizer.backend_tokenizer.to_str(), *own


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
    """Return what `made_once` keeps: {"values": the tensors of all rows, one behind the
    other, "lengths": (S,) int64, "per_row": how many tensors a row has, (R,) int64, "counts"}."""
    total = number_of_rows(source)
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


def number_of_rows(source):
    """Return the number of rows of a source, up to the first that cannot be read."""
    if is_dataset(source):
        return len(dataset_of(source))
    total = 0
    with suppress(Exception):  # the row will be named when it is made
        for _ in parsed_rows(source):
            total += 1
    return total


def with_progress(parts, total, source):
    """Yield parts, and show how many of `total` rows are done: in a bar on a terminal, elsewhere in
    a line every 10 seconds. Exit with an error where a part is the text of one."""
    plain = not sys.stderr.isatty()
    # Without a thread, and not redirected: a fork would inherit locks that are held.
    bar = Progress(
        console=Console(stderr=True),
        disable=plain,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    began = said = time.monotonic()
    done = 0
    with bar:
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
