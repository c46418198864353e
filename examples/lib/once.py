# SPDX-License-Identifier: Apache-2.0
"""What is made once of the data: a file in --output-dir, which all ranks map."""

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ddp_cifar import RANK, VERSIONS, exit_with_error, fsync_path, log_line
from lib.progress import with_progress
from lib.rows import (
    dataset_of,
    is_dataset,
    made_rows,
    parsed_rows,
    read_text,
    source_key,
    unreadable,
)

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
            log_line(f"making {path}")
            temporary = path.with_name(f"{path.stem}-{RANK}.tmp")
            temporary.unlink(missing_ok=True)  # a link leads elsewhere
            torch.save({"key": key, "made": make()}, temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
            content = read_kept(path)
    return content["made"]


def read_kept(path):
    return torch.load(path, "cpu", weights_only=True, mmap=True) if path.exists() else {}


class Ragged(Dataset):
    """Samples of different lengths, (N, ...) each, in one array, (T, ...), in which each has a
    begin and an end, (S,) int64. There is no object for each sample."""

    def __init__(self, values, begins, ends):
        self.values = values
        self.begins = begins
        self.ends = ends

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        return self.values[self.begins[index] : self.ends[index]]

    @property
    def lengths(self):
        return self.ends - self.begins

    def chosen(self, index):
        """Return the samples of a slice, or those with these indices, (M,) int64, in this order."""
        return type(self)(self.values, self.begins[index], self.ends[index])


def made_once(args, source, form, make, key, counts, rows=parsed_rows):
    """Return what `make` returns for each of the `rows` of a source, a list of samples, which are
    tensors (N, ...), `kept` in --output-dir: all samples, `Ragged`, and how many each row has, (R,)
    int64. All cores of a machine make it: again if the source, `key`, the versions or this file,
    and so a copy's code, have changed. What `make` counts in `counts`, a Counter, is in the file,
    too. In `args.tokens` each source has a digest of its samples, which a resumed run compares with
    that of its checkpoint. Exit with an error as `read_lines` does."""
    before = counts.copy()
    counts.clear()  # or they would be in the file, too
    if RANK == 0:  # a rank that finds the file needs no data
        try:
            key = VERSIONS, Path(__file__).read_text(), source_key(source), key
        except OSError as error:
            exit_with_error(unreadable(source, error))
    name = hashlib.sha256(str(source).encode()).hexdigest()[:8]
    path = Path(args.output_dir, f"tokens-{name}.pt")
    made = kept(path, key, lambda: make_all(source, form, make, counts, rows))
    counts.update(before)
    counts.update(made["counts"])
    args.tokens = {**vars(args).get("tokens", {}), str(source): made["digest"]}
    return Ragged(made["values"], made["offsets"][:-1], made["offsets"][1:]), made["per_row"]


def tokenizer_key(tokenizer):
    """Return what decides on the tokens of a text, and of a chat."""
    own = tokenizer.chat_template, tokenizer.special_tokens_map, transformers.__version__
    of_latest_call = {"truncation": None, "padding": None}
    return json.loads(tokenizer.backend_tokenizer.to_str()) | of_latest_call, *own


def text_once(args, source, tokenizer, parts=lambda text: [text]):
    """Return the tokens of the `parts` of a text, without blank ones, each with what the tokenizer
    adds, one behind the other, (T,) int32: `made_once` of a file, or of --column of a dataset."""

    def texts(source):
        return filter(str.strip, parts(read_text(source, args.column)))

    def tokens(text):
        return [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32)]

    key = tokenizer_key(tokenizer), args.column
    samples, _ = made_once(args, source, "a text", tokens, key, Counter(), texts)
    return samples.values


class Chunks(IterableDataset):
    """`make` of the rows of a source, packed by CHUNK rows, of which each worker has its own. After
    an error comes its text."""

    def __init__(self, source, form, make, counts, rows):
        self.source = source
        self.form = form
        self.make = make
        self.counts = counts
        self.rows = rows

    def __iter__(self):
        info = get_worker_info()
        own, workers = (info.id, info.num_workers) if info else (0, 1)

        def is_own(number):
            return (number - 1) // CHUNK % workers == own

        rows = made_rows(self.source, self.form, self.make, is_own, self.rows)
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


def make_all(source, form, make, counts, rows):
    """Return what `made_once` keeps: {"values": the samples of all rows, one behind the other,
    "offsets": where they begin, and the end, (S + 1,) int64, "per_row", "counts", "digest"}."""
    total = number_of_rows(source, rows)
    workers = min(len(os.sched_getaffinity(0)), total // ROWS_OF_A_WORKER)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns of each fork
    options = {"num_workers": workers, "generator": torch.Generator()}  # not the global one
    options |= {"batch_size": None, "collate_fn": lambda part: part}  # or it would make tensors
    options |= {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(Chunks(source, form, make, counts, rows), **options)
    parts, all_counts = [], Counter()
    work = with_progress(without_errors(loader), total, f"tokens of {source}", rows_in)
    for part in work:
        all_counts.update(part.pop("counts"))
        parts.append({name: torch.from_numpy(x) for name, x in part.items() if x is not None})
    if not parts:
        exit_with_error(f"{source} has no rows")
    empty = [torch.zeros(0, dtype=torch.int32)]
    values, lengths, per_row = (
        torch.cat([part[name] for part in parts if name in part] or empty)
        for name in ("values", "lengths", "per_row")
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    made = {"values": values, "offsets": offsets, "per_row": per_row}
    digest = hashlib.sha256()
    for array in made.values():
        digest.update(array.numpy())
    return {**made, "counts": dict(all_counts), "digest": digest.hexdigest()[:12]}


def rows_in(part):
    return len(part["per_row"])


def without_errors(parts):
    """Yield parts. Exit with an error where one is the text of one."""
    for part in parts:
        if isinstance(part, str):
            exit_with_error(part)
        yield part


def number_of_rows(source, rows):
    """Return the number of `rows` of a source, up to the first that cannot be read."""
    if rows is parsed_rows and is_dataset(source):
        return len(dataset_of(source))
    total = 0
    with suppress(Exception):  # the row will be named when it is made
        for _ in rows(source):
            total += 1
    return total
