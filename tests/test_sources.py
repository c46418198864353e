# SPDX-License-Identifier: Apache-2.0
"""Rows of files and of the `datasets` library: the same, whatever their source is."""

import json

import pytest
from conftest import Exit, exit_by_exception
from lazy import datasets

from lib import rows

NAMES = ["O", "B-LOC"]
ROWS = [
    {"x": f"text {i}", "label": i % 2, "tags": [i % 2, 0], "tools": [{"a": {}}] if i % 3 else None}
    for i in range(10)
]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Set the working directory to one with rows.jsonl, the folder `files`, and `saved`, where the
    labels and the tags are classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "exit_with_error", exit_by_exception)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows.dataset_of.cache_clear()
    text = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    (tmp_path / "files").mkdir()
    for name in ("rows.jsonl", "files/train.jsonl"):
        (tmp_path / name).write_text(text)
    made = datasets.Dataset.from_list(ROWS)
    made = made.cast_column("label", datasets.ClassLabel(names=NAMES))
    made = made.cast_column("tags", datasets.List(datasets.ClassLabel(names=NAMES)))
    made.save_to_disk("saved")


def same(row):
    """Return what a task reads of a row of JSON, as of one of a dataset."""
    named = {"label": NAMES[row["label"]], "tags": [NAMES[x] for x in row["tags"]]}
    return {**row, **named}


def test_the_rows_of_all_sources_are_the_same(sources):
    assert [*rows.parsed_rows("rows.jsonl")] == ROWS
    assert [*rows.parsed_rows("files:train")] == ROWS
    assert [*rows.parsed_rows("saved")] == [*map(same, ROWS)]
    assert [*rows.parsed_rows("files:train[:20%]+train[9:]")] == [*ROWS[:2], ROWS[9]]
    assert [*rows.parsed_rows("files@main:default:train[-1:]")] == ROWS[9:]


def test_the_key_of_a_source_is_another_one_with_other_rows(sources, tmp_path):
    names = "rows.jsonl", "files:train", "files:train[:5]", "saved"
    keys = [rows.source_key(name) for name in names]
    assert len({*keys}) == len(names)
    rows.dataset_of.cache_clear()  # as in another process
    assert [rows.source_key(name) for name in names] == keys
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "files/train.jsonl").write_text('{"x": "a"}\n')
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk("other")
    (tmp_path / "saved").rename("old")
    (tmp_path / "other").rename("saved")
    rows.dataset_of.cache_clear()
    others = [rows.source_key(name) for name in names[:2] + names[3:]]
    assert not {*others} & {*keys}


WRONG = {
    "files:test": "Unknown split \"test\". Should be one of ['train']. Name a file, a folder of",
    "files:other:train": "BuilderConfig 'other' not found. Available: ['default']. Name a file",
    "files:train[:x]": "Unrecognized instruction format: train[:x]. Name a file",
    "files": "neither a `Dataset` directory nor a `DatasetDict` directory. Name a file",
    "split": "split: name the folder of a split: split/train",
    "nothing.jsonl": "nothing.jsonl: no such file. Name a file, a folder of save_to_disk, or NA",
    "no/such:train": "Couldn't reach 'no/such' on the Hub (LocalEntryNotFoundError). Name a",
    "unlabelled": "unlabelled, row 1: ValueError('it has no label, as in test sets of comp",
    "saved": "saved, row 1: KeyError('z'). Each row needs label, z; it has x, label, tags, tools",
}


@pytest.mark.parametrize("source", WRONG)
def test_a_wrong_source_is_one_line(source, sources, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = datasets.Dataset.from_list([{"label": -1}])
    made.cast_column("label", datasets.ClassLabel(names=NAMES)).save_to_disk("unlabelled")
    datasets.DatasetDict({"train": made}).save_to_disk("split")
    with pytest.raises(Exit) as error:
        rows.read_rows(source, ("label", rows.class_name), ("z", rows.nonempty_text))
    assert WRONG[source] in str(error.value) and "\n" not in str(error.value)


def test_numbers_without_names_are_no_tags(sources):
    columns = ("x", rows.nonempty_text), ("tags", rows.list_of_texts)
    assert rows.read_rows("saved", *columns)[1] == ("text 1", ["B-LOC", "O"])
    for source in ("rows.jsonl", "files:train"):
        with pytest.raises(Exit, match=r"row 1: .*\[0, 0\] are numbers without names: name the"):
            rows.read_rows(source, *columns)
