"""Tokens that are made once per machine: the same as row by row, in any number of processes."""

import argparse
import importlib
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import toy
from conftest import Exit, exit_by_exception
from lazy import lib

once = lib.once
COUNTS = Counter()


def make(row):
    """No tensor for some rows, two for others."""
    COUNTS["rows"] += 1
    tokens = torch.arange(row["n"] % 5 + 1, dtype=torch.int32)
    return [torch.stack((tokens, tokens + row["n"]), 1)] * (row["n"] % 3)


def make_nothing(row):
    raise AssertionError("it was made before")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that reads some rows with a key, of which a worker has at least 100."""
    monkeypatch.setattr(once, "ROWS_OF_A_WORKER", 100)
    monkeypatch.setattr(once, "exit_with_error", exit_by_exception)
    path = tmp_path / "rows.jsonl"
    args = SimpleNamespace(output_dir=tmp_path / "run")

    def rows(numbers, function=make, key="", cores=3):
        text = "".join(json.dumps({"n": n}) + "\n" for n in numbers)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        monkeypatch.setattr(once.os, "sched_getaffinity", lambda _: range(cores))
        COUNTS.clear()
        return once.made_once(args, str(path), "a number n", function, key, COUNTS)

    return rows


@pytest.mark.parametrize(("number", "cores"), [(7, 3), (64, 3), (333, 2), (333, 3), (400, 1)])
def test_rows_are_those_of_a_loop_by_any_number_of_workers_and_are_made_once(number, cores, read):
    expected = [make({"n": n}) for n in range(number)]
    for function in (make, make_nothing):
        samples, per_row = read(range(number), function, cores=cores)
        assert per_row.tolist() == [len(row) for row in expected]
        assert samples.lengths.tolist() == [len(x) for row in expected for x in row]
        for ours, theirs in zip(samples, [x for row in expected for x in row], strict=True):
            assert torch.equal(ours, theirs)
        assert COUNTS == {"rows": number}
    with pytest.raises(Exit, match="it was made before"):
        read(range(number), make_nothing, key="another tokenizer", cores=cores)
    assert len(read(range(number + 1), cores=cores)[1]) == number + 1, "the rows have changed"


# The toy data of a task, and its flags.
TASKS = {
    "fine_tune": ("text", "--base llama --text text.txt"),
    "masked_lm": ("lines", "--base bert --train lines/train.txt --test lines/test.txt"),
    "preferences": ("preferences", "--base llama --pairs preferences.jsonl"),
    "sft": ("chats", "--base llama --chats chats.jsonl"),
    "token_classification": (
        "entities",
        "--base bert --train entities/train.conll --test entities/test.conll",
    ),
    "vision_chat": ("image_chats", "--base qwen --chats image_chats/chats.jsonl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_tokens_of_a_task_are_those_of_its_rows_and_a_restart_makes_none(
    task, tmp_path, monkeypatch
):
    kind, flags = TASKS[task]
    monkeypatch.setattr(toy, "LINES", toy.LINES[::10])
    toy.make(kind, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(once, "ROWS_OF_A_WORKER", 20)
    monkeypatch.setattr(once.os, "sched_getaffinity", lambda _: range(3))
    module = importlib.import_module(task)
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    module.add_flags(parser)
    args = parser.parse_args(flags.split())
    args.output_dir, args.seed, args.global_batch_size = "run", 0, 4
    accelerator = SimpleNamespace(is_main_process=False)
    make_all, made = once.make_all, []

    def compared(source, form, make, counts, rows):
        found = make_all(source, form, make, counts, rows)
        of_rows = [make(row) for row in rows(source)]
        samples = [x for row in of_rows for x in row]
        assert torch.equal(found["values"], torch.cat(samples))
        assert found["offsets"].diff().tolist() == [*map(len, samples)]
        assert found["per_row"].tolist() == [*map(len, of_rows)]
        made.append(source)
        return found

    monkeypatch.setattr(once, "make_all", compared)
    module.load_data(args, accelerator)
    assert made == [x for x in flags.split() if "." in x]
    monkeypatch.setattr(once, "make_all", None)
    module.load_data(args, accelerator)


@pytest.mark.parametrize("cores", [1, 3])
def test_a_bad_row_is_named_by_its_number_and_the_file_before_it_stays(cores, read, tmp_path):
    read(range(300), cores=cores)
    before = [*(tmp_path / "run").iterdir()]
    with pytest.raises(Exit, match=r"rows.jsonl, row 251: .* Each row needs a number n"):
        read([*range(250), None, *range(99)], cores=cores)
    assert [*(tmp_path / "run").iterdir()] == before


def test_counts_and_digests_of_two_sources_are_those_of_a_restart(read, tmp_path, monkeypatch):
    """Where workers are forked with what was counted before, and where there are none. A resumed
    run compares the digests as it does flags."""
    args = SimpleNamespace(output_dir=tmp_path / "run")
    monkeypatch.setattr(once.os, "sched_getaffinity", lambda _: range(3))
    for name, number in (("train", 300), ("test", 7)):
        text = "".join(json.dumps({"n": n}) + "\n" for n in range(number))
        (tmp_path / f"{name}.jsonl").write_text(text)
    for function in (make, make_nothing):
        args.tokens = {}
        COUNTS.clear()
        for name in ("train", "test", "train"):
            path = str(tmp_path / f"{name}.jsonl")
            once.made_once(args, path, "a number n", function, "", COUNTS)
        assert COUNTS == {"rows": 300 + 7 + 300}
        digests = args.tokens
    (tmp_path / "test.jsonl").write_text(text.replace("5", "8"))
    once.made_once(args, path.replace("train", "test"), "a number n", make, "", COUNTS)
    assert [x for x in digests if digests[x] != args.tokens[x]] == [path.replace("train", "test")]


def test_a_missing_file_is_the_line_of_all_readers(read):
    args = SimpleNamespace(output_dir="run")
    with pytest.raises(Exit, match=r"none.jsonl: no such file. Name a file, a folder"):
        once.made_once(args, "none.jsonl", "", make, "", COUNTS)
