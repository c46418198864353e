"""Files of other programs, and names in place of files, in each reader: what they mean is trained,
or one line says why not. Each task: test_adapting.py. Images: test_images.py."""

import argparse
import csv
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import struct
import tarfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from composed import of_coco, write_wav
from conftest import Exit
from lazy import datasets, huggingface_hub, lib, pyarrow, table, tar_shards, tokens
from PIL import Image

from lib import coco, entities, rows, utterances

pytestmark = pytest.mark.slow


def changed(box):
    """A file of COCO whose second annotation has other values."""
    return of_coco({}, box)


def tar(*names, of_class=b"1", of_image=None, **headers):
    """A tar file with these members: images and classes."""
    image, file = io.BytesIO(), io.BytesIO()
    Image.new("L", (12, 12)).save(image, "png")
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            is_class = name.lower().endswith("cls")
            content = of_class if is_class else of_image or image.getvalue()
            info.size, info.pax_headers = len(content), headers
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_sounds(folder):
    samples = numpy.zeros((160, 1))
    write_wav(folder / "good.wav", samples)
    write_wav(folder / "rate.wav", samples, rate=8000)
    write_wav(folder / "width.wav", samples, width=4)
    write_wav(folder / "none.wav", samples[:0])
    content = (folder / "good.wav").read_bytes()
    for name, part in {"cut": content[:200], "begun": content[:30], "text": b"text"}.items():
        (folder / f"{name}.wav").write_bytes(part)


def header(magic, count):
    return numpy.array([magic, 1, count] + [0] * 253, "<i4").tobytes()


def index(code, lengths, magic=b"MMIDIDX\0\0"):
    lengths = numpy.array(lengths, "<i4")
    content = struct.pack("<9sQBQQ", magic, 1, code, len(lengths), len(lengths) + 1)
    return content + lengths.tobytes() + bytes(8 * (2 * len(lengths) + 1))


def rows_of(path):
    return rows.read_rows(path, ("x", rows.nonempty_text), ("y", rows.class_name))


def read_shards(path):
    shutil.copytree(path.parent, path.parent.parent / "test")
    args = {"shards": path.parent.parent, "index": None, "members": ["png", "cls"], "classes": 2}
    here = SimpleNamespace(main_process_first=nullcontext, local_main_process_first=nullcontext)
    args = SimpleNamespace(**args, seed=0, lanes=1, block=9, batch_size=1)
    _, loader = tar_shards.load_data(args, here)
    return [label for _, label in loader.dataset]


READERS = {
    "json": lambda path: coco.Objects(path.parent, path, 3)[0],
    "bin": lambda path: [*tokens.read_windows([path], SimpleNamespace(length=8, vocabulary=50304))],
    "conll": lambda path: entities.read_tagged(str(path), None),
    "csv": lambda path: table.read_columns(SimpleNamespace(table=str(path), target="y")),
    "lst": lambda path: utterances.Utterances(path, " ab"),
    "tar": read_shards,
    "rows": lambda path: rows_of(*path.parent.glob("name.*")),
    "pairs": lambda path: rows.read_texts(path, "x", "y", more="z"),
}
SEED = int(os.environ.get("SEED", 0))  # another one by hand
TOKENS = numpy.arange(100).astype("<u2").tobytes()
SAMPLE = "0001.png", "0001.cls"
SPARSE = {"GNU.sparse.size": f"{2**33}", "GNU.sparse.map": "0,1"}  # 8 GB, of which 1 byte is there
NESTED = b"[" * 10**6 + b"]" * 10**6
LISTS = "images", "categories"
NO_IDS = None, "1", -1, 1.7, []
BAD = {
    "json": [
        (of_coco({}, images=[]), "no image has the id 1"),
        (of_coco(images=[]), "has no images"),
        (of_coco(categories=[{"id": 9}, {"id": 1}]), "category 9: choose --classes 10 or more"),
        *[(of_coco(**{name: [{"id": x}]}), "COCO's format: ") for name in LISTS for x in NO_IDS],
        *[(of_coco(**{name: 2 * [{"id": 1}]}), "have one id") for name in LISTS],
        *[(changed({"category_id": x}), "annotation 2: ") for x in (*NO_IDS, 3)],
        *[(changed({"image_id": x}), "in annotation 2: ") for x in (*NO_IDS, 2)],
        *[(changed({"bbox": [x, 1, 2, 3]}), "annotation 2: ") for x in (None, "1", math.nan, -9)],
        *[(changed({"bbox": x}), "annotation 2: ") for x in (None, [], [1, 1, -2, 3], [1, 1, 2])],
        (of_coco(), "has no object: 0 of 0 boxes"),
        (of_coco({}, images=[{"id": 1, "file_name": "b.png"}]), "b.png is missing (1 files"),
        (of_coco({}, images=[{"id": 1, "file_name": "a.png", "width": 8}]), "by its JSON (8, 12)"),
        (of_coco({"bbox": [0, 0, 1, 0.5]}), "all boxes are within [0, 1]: write them in pixels"),
        (NESTED, "is not in COCO's format: RecursionError"),
    ],
    "bin": [
        (TOKENS[:80] + b"\xff\xff" + TOKENS, "token 40 is 65535, outside of the 50304"),
        (TOKENS[:-1], "has 199 bytes, not a multiple of 2"),
        (header(20240520, 100) + TOKENS[:150], "has 150 bytes, not 100 tokens of 2"),
        (header(20240522, 1) + TOKENS, "has the magic number 20240522, none of 20240520"),
        ({"": TOKENS, "idx": index(8, [99])}, "has 200 bytes, not 99 tokens of 2"),
        ({"": TOKENS, "idx": index(8, [100], b"TNTIDX\0\0")}, "is no index of Megatron's"),
        ({"": TOKENS, "idx": b"MMIDIDX"}, "is no index of Megatron's: move"),
        (TOKENS[:16], "has less than --length + 1 tokens"),
        (b"\x93NUMPY" + TOKENS, "is of numpy.save"),
        (numpy.arange(1, 100, dtype="<u4").tobytes(), "every second number of 16 bits is 0"),
        ("Once upon a time,\r\n\tĂ©té.\n".encode() * 9, "is a text"),
    ],
    "conll": [
        (b"in O\nRome\n", "line 2: 'Rome' is a word without a tag"),
        (b"New York\tB\nin\tO\n", "line 2: 'in\\tO' has 2 columns, the first word 3"),
        (b"1\tRome\tRome\tPROPN\t_\t_\t0\troot\t_\t_\n", "line 1 is of CoNLL-U"),
        (b"in IN _\nRome NN _\n", "all words have the same tag, _"),
        (b"1 in O\n2 Rome B-LOC\n", "all words are numbers"),
        ("in O\nOrléans B-LOC\n".encode("cp1252"), "codec can't decode byte 0xe9"),
    ],
    "csv": [
        (b"a,y\n" + b"1,2\n" * 300_000 + b"x,2\n", "#0: Row #300002: CSV conversion error"),
        (b"a,a,y\n1,2,3\n", "has two columns a"),
        (b"a,y\n1,2\n,3\n", "values are missing in a"),
        (b"a,day,name,y\n1,2024-01-01,b,2\n", "no numbers: day (date32[day]), name (string)"),
        ("é,y\n1,2\n".encode("cp1252"), "codec can't decode byte 0xe9"),
        (b"a,b\n1,2\n", "--target y"),
    ],
    "lst": [
        (b"good.wav ab", "line 2: 'good.wav ab'. Each line needs a path, a tab and a text"),
        (b"good.wav\tab\t1.0", "line 2: 'good.wav\\tab\\t1.0'. Each line needs"),
        ("good.wav\té".encode("cp1252"), "codec can't decode byte 0xe9"),
        (b"good.wav\ta!b?", "argument --characters"),
        (b"rate.wav\tab", "rate.wav is not a wav file of 16 bits and 16000 Hz: int16, 8000 Hz"),
        (b"width.wav\tab", "width.wav is not a wav file of 16 bits and 16000 Hz: int32, 16000 Hz"),
        (b"none.wav\tab", "16000 Hz: int16, 16000 Hz, 0 samples: ffmpeg -i"),
        (b"cut.wav\tab", "16000 Hz: mmap length is greater than file size"),
        (b"begun.wav\tab", "16000 Hz: unpack requires a buffer"),
    ],
    "tar": [
        (tar(*SAMPLE, *SAMPLE), "sample 0001 has png, cls, png, cls, not one png and cls"),
        (tar("a.1.png", "a.1.cls"), "sample a has 1.png, 1.cls, not one png and cls: see --mem"),
        (tar("a.png", "b.png", "a.cls", "b.cls"), "sample a has png, not one png and cls"),
        (tar(), "it was cut off, or joined with another one, behind sample None"),
        (tar(*SAMPLE)[:2048], "it was cut off, or joined with another one, behind sample 0001"),
        (tar(*SAMPLE) + tar("0002.png", "0002.cls"), "joined with another one, behind sample 0001"),
        (tar(*SAMPLE, **SPARSE), "sample 0001 has a sparse file"),
        (tar(*SAMPLE, of_class=b"2"), "sample 0001: class 2 is not below --classes, 2"),
        (tar(*SAMPLE, of_class=b"x"), "sample 0001: invalid literal for int()"),
        (tar(*SAMPLE, of_image=b"x"), "sample 0001: png: cannot identify image file"),
    ],
    "rows": [
        ({"jsonl": b'{"x": "a", "y": [1.5]}'}, "row 1: ValueError('[1.5] is not a label"),
        ({"jsonl": b'{"x": "a", "y": " "}'}, "row 1: ValueError(\"'' is not a label"),
        ({"jsonl": b'\n{"x": "a", "y": 1}\n\n{"x": "a"}'}, "row 2: KeyError('y'). Each row needs"),
        ({"json": b'[{"x": "a", "y": 1}, 2]'}, "row 2: ValueError('2 is no object')"),
        ({"csv": b"x,y\n,1\n"}, "row 1: ValueError(\"'' is not a text, or an empty one\")"),
        ({"csv": b"x,y\n"}, "has no rows"),
        ({"csv": b"x,y\na\n"}, "row 1: ValueError('1 fields, but 2 columns: quote"),
        ({"csv": b'x,y\na,1\n"b" c,1\n'}, "row 2: Error('\\',\\' expected after"),
        ({"csv": b"x,y,x\na,1,b\n"}, "row 1: ValueError('two columns have one name: x, y, x')"),
        ({"csv.gz": gzip.compress(b"a" * (2**26 + 1))}, "a line has more than 67108864 bytes"),
    ],
    "pairs": [
        (b'{"x": "a", "y": "b", "z": "c"}\n{"x": "a", "y": "b"}', 'row 2: ValueError("it has [], '),
        (b'{"x": "a", "y": ["b"]}', "row 1: ValueError(\"['b'] is not a text, or an empty one"),
        (b'{"x": "a", "y": "b", "answer": "reject"}', "row 1: ValueError('answer is reject, which"),
    ],
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_read_as_it_was_meant_is_one_line(kind, tmp_path):
    for number, (content, said) in enumerate(BAD[kind]):
        folder = tmp_path / str(number) / "train"
        folder.mkdir(parents=True)
        Image.new("L", (12, 12)).save(folder / "a.png")
        if kind == "lst":
            write_sounds(folder)
            content = b"good.wav\tba\n" + content
        for ending, x in (content if isinstance(content, dict) else {"": content}).items():
            (folder / f"name.{ending or kind}").write_bytes(x)
        with pytest.raises((Exit, OSError)) as error:
            READERS[kind](folder / f"name.{kind}")
        line = str(error.value)
        assert said in line and "\n" not in line, line
        assert "name." in line or ".wav" in line or "a.png" in line, line


# A column beside those that are used, its value in the last row, and whether it is harmless.
OTHERS = [("id", 7, True), ("title", 'a "b", c', True), ("answer", "accept", True)]
OTHERS += [("answer", "Reject", False), ("status", "discarded", False), ("skip", True, False)]
OTHERS += [("weight", 1, True), ("weight", "", True), ("weight", 0.5, False)]


def drawn_json(drawn, content):
    lines = [json.dumps(row, ensure_ascii=drawn.random() < 0.5) for row in content]
    end = drawn.choice(["\n", "\r\n", "\n\n"])
    return drawn.choice([end.join(lines), "".join(x + end for x in lines), f"[{','.join(lines)}]"])


def drawn_columns(drawn, content, comma):
    """Return a text of CSV or TSV, and whether it is to be read: not if fields that need quotes
    have none. No file tells that two quotes, such as those around a whole text, are not those of
    CSV: these are written as they should be."""
    names = drawn.sample([*content[0]], 3)
    fields = [["" if row[x] is None else str(row[x]) for x in names] for row in content]
    flat, end = [x for row in fields for x in row], drawn.choice(["\n", "\r\n"])
    has_break = any("\n" in x for x in flat)
    if "".join(flat).count('"') > 1 or drawn.random() < 0.6:
        file, quoting = io.StringIO(), drawn.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
        writer = csv.writer(file, delimiter=comma, lineterminator=end, quoting=quoting)
        writer.writerows([names, *fields])
        text, is_read = file.getvalue(), comma == "," or not has_break
    else:
        text = "".join(comma.join(x) + end for x in [names, *fields])
        is_read = not has_break and not any(comma in x or x[:1] == '"' for x in flat)
    return drawn.choice([text, text.removesuffix(end)]), is_read


def drawn_file(drawn):
    """Return the ending of a file, its bytes, its rows, and whether it is to be read."""
    encoding = drawn.choice(["utf-8", "utf-8-sig", "cp1252"])
    letters = "ab é,;\t\n\"'#{[\\" + "\u2028" * (encoding != "cp1252")
    name, value, is_read = drawn.choice(OTHERS)
    content = []
    for _ in range(drawn.randint(1, 4)):
        parts = ["".join(drawn.choices(letters, k=drawn.randint(0, 3))) for _ in range(2)]
        text = "a".join(parts).strip("\n")  # without quotes these would be blank lines
        content.append({"x": text, "y": drawn.choice(["0", "1", "b c"]), name: None})
    content[-1][name] = value
    expected = [(row["x"], row["y"]) for row in content]
    kind = drawn.choice(["jsonl", "json", "csv", "csv", "tsv", "parquet"])
    if kind == "parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), file)
        return kind, file.getvalue(), expected, is_read
    if kind.startswith("json"):
        text = drawn_json(drawn, content)
    else:
        text, fits = drawn_columns(drawn, content, "," if kind == "csv" else "\t")
        is_read = is_read and fits
    if encoding == "cp1252" and not text.isascii():
        is_read = False
    content = text.encode(encoding)
    if drawn.random() < 0.2:
        kind, content = f"{kind}.gz", gzip.compress(content)
    return drawn.choice([kind, kind.upper()]), content, expected, is_read


def test_the_rows_of_a_random_file_are_those_that_were_written_or_it_is_refused(tmp_path):
    drawn, counts = random.Random(SEED), Counter()
    for number in range(500):
        kind, content, expected, is_read = drawn_file(drawn)
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(content)
        try:
            found = rows_of(path)
        except Exit as error:
            found = None
            assert path.name in str(error) and "\n" not in str(error)
        assert found == (expected if is_read else None), content
        counts[is_read] += 1
    assert min(counts.values()) > 100


def test_files_of_other_programs_are_read_as_they_are_meant(tmp_path, capsys):
    """Endings in upper case, byte order marks, comments, members and folders that programs add."""
    lines = "\ufeff# id 1\tde", "Rome NNP B-LOC", "# # O", "10\xa0000 CD O", "", "-DOCSTART- -X- O"
    for ending in ("conll", "TXT", "iob"):
        path = tmp_path / f"a.{ending}"
        path.write_bytes("\r\n".join(lines).encode())
        sentence = ["Rome", "#", "10\xa0000"], ["B-LOC", "O", "O"]
        assert entities.read_tagged(str(path), None) == [sentence]
    assert "a.iob: 1 lines are comments, such as '# id 1" in capsys.readouterr().err

    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + changed({"iscrowd": 1}))
    Image.new("L", (12, 12)).save(tmp_path / "a.png")
    assert READERS["json"](tmp_path / "a.json")[1]["boxes"].tolist() == [[0, 0, 9, 9]]
    assert "a.json: 1 of 2 boxes are crowds, or below one pixel: they" in capsys.readouterr().err

    text = ",a,flag,y\n" + "0,1,true,2\n" * 150_000 + "1,0.5,false,2\n"  # with pandas' index
    for ending, content in {
        "CSV": text.encode(),
        "csv.gz": gzip.compress(text.encode()),
        "TSV": text.replace(",", "\t").encode(),
    }.items():
        (tmp_path / f"a.{ending}").write_bytes(content)
        names, values = READERS["csv"](tmp_path / f"a.{ending}")
        assert names == ["a", "flag", "y"] and values[-2:].tolist() == [[1, 1, 2], [0.5, 0, 2]]

    (tmp_path / "train").mkdir()
    names = "./._1.PNG", "./1.PNG", "./._1.cls", "./1.cls", "./1.json", "./README", "./2.png"
    (tmp_path / "train/0.tar").write_bytes(tar(*names, "./2.cls"))
    assert READERS["tar"](tmp_path / "train/0.tar") == [1, 1]
    samples = lib.tar_samples.TarSamples([tmp_path / "test/0.tar"], torch.tensor([[0, 0, 9999]]), 0)
    with pytest.raises(OSError, match=r"0\.tar is not as indexed: delete the index"):
        samples[0]

    (tmp_path / "a.jsonl").write_text('{"x": "a", "y": "b", "z": null}\n{"x": "a", "y": "b"}')
    assert READERS["pairs"](tmp_path / "a.jsonl") == 2 * [("a", "b")]

    samples = numpy.arange(320).reshape(160, 2)
    write_wav(tmp_path / "a.wav", samples)
    (tmp_path / "a.tsv").write_bytes("\ufeffa.wav\ta\u2028b\r\n\r\na.wav\ta".encode())
    (file, *first), (_, *second) = utterances.read_list(tmp_path / "a.tsv")
    assert [first, second] == [["a\u2028b", 160], ["a", 160]]
    assert utterances.read_wav(file).tolist() == (samples.mean(1) / 2**15).tolist()


@pytest.mark.parametrize(
    ("width", "top", "magic", "code"), [("<u2", 60000, 20240520, 8), ("<u4", 100000, 20240801, 4)]
)
def test_windows_of_files_of_tokens_lie_one_after_the_other(width, top, magic, code, tmp_path):
    """Of a file without a header, one of llm.c, and one of Megatron with its index."""
    generator = numpy.random.default_rng(0)
    parts = [generator.integers(top, size=size) for size in (30, 9, 416)]
    heads = b"", header(magic, len(parts[1])), b""
    for number, (head, part) in enumerate(zip(heads, parts, strict=True)):
        (tmp_path / f"{number}.bin").write_bytes(head + part.astype(width).tobytes())
    (tmp_path / "2.idx").write_bytes(index(code, [3, 413]))
    paths = sorted(map(str, tmp_path.glob("*.bin")))
    args = SimpleNamespace(train=paths, test=None, length=8, batch_size=4, vocabulary=top)
    train, test = (loader.dataset for loader in tokens.load_data(args, None))
    expected = [part[i : i + 9].tolist() for part in parts for i in range(0, len(part) - 8, 8)]
    assert [x.tolist() for x in [*train, *test]] == expected and len(test) == 1
    args.test = args.train[1:2]
    train, test = (loader.dataset for loader in tokens.load_data(args, None))
    assert len(train) == len(expected) and [x.tolist() for x in test] == [parts[1].tolist()]


@pytest.mark.parametrize("by_order", [True, False])
def test_a_tenth_of_a_table_is_the_test_set_and_the_columns_file_gives_its_rows_back(
    by_order, tmp_path
):
    """The last tenth, or rows drawn in the same way for any seed. The statistics are of the others
    alone."""
    columns = {name: numpy.random.default_rng(ord(name)).normal(5, 3, 47) for name in "yab"}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    args = SimpleNamespace(table=str(tmp_path / "t.parquet"), target="y", by_order=by_order)
    args.batch_size, args.output_dir = 9, tmp_path
    splits = []
    for args.seed in (0, 1):
        loaders = table.load_data(args, SimpleNamespace(device="cpu"))
        splits.append([loader.dataset.values.double().numpy() for loader in loaders])
    (train, test), (_, same) = splits
    assert (len(train), len(test)) == (43, 4) and (test == same).all()
    assert abs(train.mean(0)).max() < 1e-6
    saved = json.loads((tmp_path / "columns.json").read_text())
    assert saved["names"] == ["a", "b", "y"], "the target at the end"
    rows = numpy.concatenate((train, test)) * saved["std"] + saved["mean"]
    expected = numpy.stack([columns[name] for name in "aby"], axis=1)
    assert (rows == pytest.approx(expected, abs=1e-5)) == by_order
    by_target = [x[x[:, 2].argsort()] for x in (rows, expected)]
    assert by_target[0] == pytest.approx(by_target[1], abs=1e-5)


def test_the_errors_of_a_table_are_those_of_each_row():
    model, inputs, targets = torch.nn.Linear(3, 1), torch.randn(5, 3), torch.randn(5)
    values = table.compute_loss(model, (inputs, targets), None)
    errors = torch.cat([model(x) - y for x, y in zip(inputs, targets, strict=True)])
    torch.testing.assert_close(values, {"loss": errors**2, "absolute_error": errors.abs()})


# --------------------------------------------------------------------- names in place of files
NAMES = ["O", "B-LOC"]
ROWS = [
    {"x": f"text {i}", "label": i % 2, "tags": [i % 2, 0], "tools": [{"a": {}}] if i % 3 else None}
    for i in range(10)
]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Write rows.jsonl, the folder `files`, and `saved`, where labels and tags are classes, into
    the working directory. Forget the rows of earlier tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for function in (rows.dataset_of, rows.read_rows):
        function.cache_clear()
    text = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    (tmp_path / "files").mkdir()
    for name in ("rows.jsonl", "files/train.jsonl"):
        (tmp_path / name).write_text(text)
    made = datasets.Dataset.from_list(ROWS)
    made = made.cast_column("label", datasets.ClassLabel(names=NAMES))
    made = made.cast_column("tags", datasets.List(datasets.ClassLabel(names=NAMES)))
    made.save_to_disk("saved")


def test_a_part_of_a_source_has_its_rows_and_a_changed_source_another_key(sources):
    assert [*rows.parsed_rows("files:train[:20%]+train[9:]")] == [*ROWS[:2], ROWS[9]]
    assert [*rows.parsed_rows("files@main:default:train[-1:]")] == ROWS[9:]
    names, keys = ("rows.jsonl", "files:train", "saved"), []
    for _ in ("as they are", "in another process", "changed"):
        keys.append([rows.source_key(name) for name in names])
        if len(keys) == 2:
            shutil.rmtree("saved")
            datasets.Dataset.from_list(ROWS[:2]).save_to_disk("saved")
            Path("rows.jsonl").write_text('{"x": "a"}\n')
            Path("files/train.jsonl").write_text('{"x": "a"}\n')
        rows.dataset_of.cache_clear()
    assert keys[0] == keys[1] and not {*keys[0]} & {*keys[2]}
    assert rows.source_key("files:train[:1]") != rows.source_key("files:train")


WRONG = {
    "files:test": "Unknown split \"test\". Should be one of ['train']. Name a file, a folder of",
    "split": "split: name the folder of a split: split/train",
    "nothing.jsonl": "nothing.jsonl: no such file. Name a file, a folder of save_to_disk, or NA",
    "no/such:train": "Couldn't reach 'no/such' on the Hub (LocalEntryNotFoundError). Name a",
    "unlabelled": "unlabelled, row 1: ValueError('it has no label, as in test sets of comp",
    "saved": "saved, row 1: KeyError('z'). Each row needs label, z; it has x, label, tags, tools",
}


def test_a_wrong_source_is_one_line(sources, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = datasets.Dataset.from_list([{"label": -1}])
    made.cast_column("label", datasets.ClassLabel(names=NAMES)).save_to_disk("unlabelled")
    datasets.DatasetDict({"train": made}).save_to_disk("split")
    for source, said in WRONG.items():
        with pytest.raises(Exit, match=re.escape(said)):
            rows.read_rows(source, ("label", rows.class_name), ("z", rows.nonempty_text))
    columns = ("label", rows.class_name), ("tags", rows.list_of_texts)
    assert rows.read_rows("saved", *columns)[1] == ("B-LOC", ["B-LOC", "O"])
    with pytest.raises(Exit, match=r"row 1: .*\[0, 0\] are numbers without names: name the"):
        rows.read_rows("files:train", *columns)


def test_a_sound_that_cannot_be_read_as_it_was_meant_is_one_line(sources, monkeypatch):
    monkeypatch.setattr("datasets.config.TORCHCODEC_AVAILABLE", False)
    write_sounds(Path())
    Path("end.wav").write_bytes(Path("good.wav").read_bytes()[:-100])
    cases = {"rate": "please install 'torchcodec'. To decode it, all but wav files of 16 bits and"}
    cases |= {"text": cases["rate"], "end": "was cut off: Reached EOF prematurely"}
    for name, said in cases.items():
        made = datasets.Dataset.from_dict({"audio": [f"{name}.wav"], "text": ["a"]})
        made.cast_column("audio", datasets.Audio()).save_to_disk(name)
        with pytest.raises(Exit, match=f"{name}, row 1.*{re.escape(said)}"):
            utterances.read_list(name)


def test_a_model_card_names_data_of_the_hub_the_command_and_all_flags(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mine.py", "--lr", "1e-3"])
    args = argparse.Namespace(output_dir=str(tmp_path), base="a/bert", lr=1e-3, weights=None)
    args.train, args.test, args.prompt = "b/texts@main:config:train[:9]", "test.jsonl", "c/d:train"
    lib.pretrained.save_card(args)
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    expected = {"base_model": "a/bert", "datasets": ["b/texts"], "library_name": "transformers"}
    assert card.data.to_dict() == expected
    assert "`python mine.py --lr 1e-3`" in card.text and "--weights" not in card.text
    assert "\n--lr 0.001\n--train b/texts@main:config:train[:9]\n" in card.text
    (tmp_path / "README.md").write_text("mine")
    lib.pretrained.save_card(args)
    assert (tmp_path / "README.md").read_text() == "mine"
