"""Tokens that are made once per machine: the same as row by row, in any number of processes."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Exit
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
def args(tmp_path):
    return SimpleNamespace(output_dir=tmp_path / "run", tokens={})


@pytest.fixture
def read(args, tmp_path, monkeypatch):
    """A function that reads some rows of a file with a key, by one worker for 100 of them, and
    returns what is made."""
    monkeypatch.setattr(once, "ROWS_OF_A_WORKER", 100)

    def rows(numbers, function=make, key="", cores=3, name="rows"):
        path = tmp_path / f"{name}.jsonl"
        text = "".join(json.dumps({"n": n}) + "\n" for n in numbers)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        monkeypatch.setattr(once.os, "sched_getaffinity", lambda _: range(cores))
        return once.made_once(args, str(path), "a number n", function, key, COUNTS)

    COUNTS.clear()
    return rows


@pytest.mark.parametrize(("number", "cores"), [(7, 3), (64, 3), (333, 2), (333, 3), (400, 1)])
def test_rows_are_those_of_a_loop_by_any_number_of_workers_and_are_made_once(number, cores, read):
    expected = [make({"n": n}) for n in range(number)]
    for function in (make, make_nothing):
        COUNTS.clear()
        samples, per_row = read(range(number), function, cores=cores)
        assert per_row.tolist() == [len(row) for row in expected]
        assert samples.lengths.tolist() == [len(x) for row in expected for x in row]
        for ours, theirs in zip(samples, [x for row in expected for x in row], strict=True):
            assert torch.equal(ours, theirs)
        assert COUNTS == {"rows": number}
    with pytest.raises(Exit, match="it was made before"):
        read(range(number), make_nothing, key="another tokenizer", cores=cores)
    assert len(read(range(number + 1), cores=cores)[1]) == number + 1, "the rows have changed"


def test_counts_and_digests_of_two_sources_are_those_of_a_restart(read, args):
    """Where workers are forked with what was counted before, and where there are none. A resumed
    run compares the digests as it does flags."""
    digests = []
    for function in (make, make_nothing):
        COUNTS.clear()
        for name, number in (("train", 300), ("test", 7), ("train", 300)):
            read(range(number), function, name=name)
        assert COUNTS == {"rows": 300 + 7 + 300}
        digests.append(args.tokens)
        args.tokens = {}
    assert digests[0] == digests[1]
    read(range(300), name="train")
    read([*range(6), 8], name="test")
    changed = [x for x in digests[0] if digests[0][x] != args.tokens[x]]
    assert [Path(x).stem for x in changed] == ["test"]


@pytest.mark.parametrize("cores", [1, 3])
def test_a_bad_row_is_named_by_its_number_and_the_file_before_it_stays(cores, read, args):
    read(range(300), cores=cores)
    before = [*args.output_dir.iterdir()]
    with pytest.raises(Exit, match=r"rows.jsonl, row 251: .* Each row needs a number n"):
        read([*range(250), None, *range(99)], cores=cores)
    assert [*args.output_dir.iterdir()] == before
    with pytest.raises(Exit, match=r"none.jsonl: no such file. Name a file, a folder"):
        once.made_once(args, "none.jsonl", "", make, "", COUNTS)
