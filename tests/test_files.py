"""Files of other programs, in each reader: what they mean is trained, or one line says why not.
Images: test_images.py. Chats: test_chat_examples.py."""

import io
import json
import math
import struct
import tarfile
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
from composed import write_wav
from conftest import Exit, exit_by_exception
from lazy import table, tar_shards
from PIL import Image

from lib import coco, entities, images, token_files, utterances

pytestmark = pytest.mark.slow


def of_coco(box=None, **changed):
    """A file of COCO in which the last of two annotations, or a list, has other values."""
    first = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9]}
    content = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [first]}
    content["annotations"] += [first | (box or {})]
    content["categories"] = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    return json.dumps({**content, **changed}).encode()


def tar(*names):
    """A tar file with these members: images, and classes 1."""
    image, file = io.BytesIO(), io.BytesIO()
    Image.new("L", (12, 12)).save(image, "png")
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            content = b"1" if name.lower().endswith("cls") else image.getvalue()
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def sparse_tar():
    """A member of 8 GB, by GNU's old format, of which the file has nothing."""
    info = tarfile.TarInfo("a.png")
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b"%011o\0%011o\0" % (2**33 - 1, 0)
    block[483:495] = b"%011o\0" % (2**33 - 1)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + tar("a.cls")


def write_sounds(folder):
    samples = numpy.zeros((160, 1))
    sounds = {"good": {}, "rate": {"rate": 8000}, "width": {"width": 4}}
    for name, options in sounds.items():
        write_wav(folder / f"{name}.wav", samples, **options)
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


def saved(array):
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def read_shards(path):
    args = {"shards": path.parent.parent, "index": None, "members": ["png", "cls"], "classes": 2}
    here = SimpleNamespace(main_process_first=nullcontext, local_main_process_first=nullcontext)
    args = SimpleNamespace(**args, seed=0, buffer=9, batch_size=1)
    return [[*loader.dataset] for loader in tar_shards.load_data(args, here)]


READERS = {
    "json": lambda path: coco.Objects(path.parent, path, 3),
    "bin": lambda path: token_files.Windows(path, 8, 50304),
    "conll": lambda path: entities.read_tagged(str(path), None),
    "csv": lambda path: table.read_columns(SimpleNamespace(table=str(path), target="y")),
    "lst": lambda path: utterances.Utterances(path, " ab"),
    "tar": read_shards,
}
TOKENS = numpy.arange(100).astype("<u2").tobytes()
SAMPLE = "0001.png", "0001.cls"
NESTED = b"[" * 10**6 + b"]" * 10**6
BAD = {
    "json": [
        (of_coco(images=None), "is not in COCO's format: TypeError"),
        (of_coco(images=[]), "no image has the id 1"),
        (of_coco(images=[], annotations=[]), "has no images"),
        (of_coco(categories=[]), "is not in COCO's format: ValueError"),
        (of_coco(categories=[{"id": 1}, {"id": 9}]), "category 9: choose --classes 10 or more"),
        (of_coco(categories=[{"id": "1"}]), "the id '1' is not a number from 0 on"),
        (of_coco(images=[{"id": "1"}]), "the id '1' is not a number from 0 on"),
        (of_coco(images=[{"id": 1}, {"id": 1}]), "have one id"),
        (of_coco(categories=[{"id": 1}, {"id": 1}]), "have one id"),
        (of_coco({"category_id": 3}), "annotation 2: ValueError('no category has the id 3')"),
        (of_coco({"category_id": -5}), "annotation 2: ValueError('no category has the id -5')"),
        (of_coco({"category_id": 1.7}), "annotation 2: ValueError('no category has the id 1.7')"),
        (of_coco({"image_id": 2}), "annotation 2: ValueError('no image has the id 2')"),
        (of_coco({"bbox": []}), "annotation 2: IndexError"),
        (of_coco({"bbox": [None, 1, 2, 3]}), "annotation 2: TypeError"),
        (of_coco({"bbox": ["1", "2", "3", "4"]}), "annotation 2: TypeError"),
        (of_coco({"bbox": [math.nan, 1, 2, 3]}), "annotation 2: ValueError"),
        (of_coco({"bbox": [1, 1, -2, 3]}), "annotation 2: ValueError"),
        (of_coco({"bbox": [-9, 1, 2, 3]}), "annotation 2: ValueError"),
        (of_coco(annotations=[]), "has no object: 0 of 0 boxes"),
        (of_coco(images=[{"id": 1, "file_name": "b.png"}]), "b.png is missing (1 files in all)"),
        (b"{", "is not in COCO's format: JSONDecodeError"),
        (NESTED, "is not in COCO's format: RecursionError"),
    ],
    "bin": [
        (TOKENS[:-1], "has 199 bytes, not a multiple of 2"),
        (header(20240520, 100) + TOKENS[:150], "has 150 bytes, not 100 tokens of 2"),
        (header(20240522, 1) + TOKENS, "has the magic number 20240522, none of 20240520"),
        ({"": TOKENS, "idx": index(8, [99])}, "has 200 bytes, not 99 tokens of 2"),
        ({"": TOKENS, "idx": index(8, [100], b"TNTIDX\0\0")}, "is no index of Megatron's"),
        ({"": TOKENS, "idx": b"MMIDIDX"}, "is no index of Megatron's: move"),
        ({"": TOKENS, "idx": index(8, [100])[:36]}, "mmap length is greater"),
        (b"", "cannot mmap an empty file"),
        (TOKENS[:16], "has less than --length + 1 tokens"),
        (saved(numpy.arange(100, dtype="<u2")), "is of numpy.save"),
        (numpy.arange(1, 100, dtype="<u4").tobytes(), "every second number of 16 bits is 0"),
        (numpy.arange(1, 100, dtype="<i8").tobytes(), "every second number of 16 bits is 0"),
        (numpy.arange(1, 100, dtype=">u4").tobytes(), "every second number of 16 bits is 0"),
        ("Once upon a time,\r\n\tĂ©té.\n".encode() * 9, "is a text"),
    ],
    "conll": [
        (b"in O\nRome\n", "line 2: 'Rome' is a word without a tag"),
        (b"in NN O\nRome NN\n", "line 2: 'Rome NN' has 2 columns, the first word 3"),
        (b"New York\tB\nin\tO\n", "line 2: 'in\\tO' has 2 columns, the first word 3"),
        (b"1\tRome\tRome\tPROPN\t_\t_\t0\troot\t_\t_\n", "line 1 is of CoNLL-U"),
        (b"in IN _\nRome NN _\n", "all words have the same tag, _"),
        (b"1 in O\n2 Rome B-LOC\n", "all words are numbers"),
        ("in O\nOrléans B-LOC\n".encode("cp1252"), "codec can't decode byte 0xe9"),
        (b"", "all words have the same tag"),
    ],
    "csv": [
        (b"a,y\n" + b"1,2\n" * 300_000 + b"x,2\n", "#0: Row #300002: CSV conversion error"),
        (b"a,a,y\n1,2,3\n", "has two columns a"),
        (b"a,y\n1\n", "Row #2: Expected 2 columns, got 1"),
        (b"a,y\n1,2\n,3\n", "values are missing in a"),
        (b"a,day,name,y\n1,2024-01-01,b,2\n", "no numbers: day (date32[day]), name (string)"),
        ("é,y\n1,2\n".encode("cp1252"), "codec can't decode byte 0xe9"),
        (b"a,b\n1,2\n", "--target y"),
        (b"", "Empty CSV file"),
        (None, "No such file"),
    ],
    "lst": [
        (b"good.wav ab", "line 2: 'good.wav ab'. Each line needs a path, a tab and a text"),
        (b"good.wav\tab\t1.0", "line 2: 'good.wav\\tab\\t1.0'. Each line needs"),
        ("good.wav\té".encode("cp1252"), "codec can't decode byte 0xe9"),
        (b"good.wav\ta!b?", "argument --characters"),
        (b"rate.wav\tab", "rate.wav is not a wav file of 16 bits and 16000 Hz: int16, 8000 Hz"),
        (b"width.wav\tab", "width.wav is not a wav file of 16 bits and 16000 Hz: int32, 16000 Hz"),
        (b"text.wav\tab", "16000 Hz: File format b'text' not understood"),
        (b"none.wav\tab", "16000 Hz: int16, 16000 Hz, 0 samples: ffmpeg -i"),
        (b"cut.wav\tab", "16000 Hz: mmap length is greater than file size"),
        (b"begun.wav\tab", "16000 Hz: unpack requires a buffer"),
    ],
    "tar": [
        (tar(*SAMPLE, *SAMPLE), "sample 0001 has png, cls, png, cls, not one png and cls"),
        (tar("a.1.png", "a.1.cls"), "sample a has 1.png, 1.cls, not one png and cls: see --mem"),
        (tar("a.png", "b.png", "a.cls", "b.cls"), "sample a has png, not one png and cls"),
        (tar(), "it was cut off, or joined with another one, behind sample None"),
        (tar(*SAMPLE)[:1600], "unexpected end of data"),
        (tar(*SAMPLE)[:2048], "it was cut off, or joined with another one, behind sample 0001"),
        (tar(*SAMPLE) + tar("0002.png", "0002.cls"), "joined with another one, behind sample 0001"),
        (sparse_tar(), "sample a has a sparse file"),
        (b"no tar", "truncated header"),
    ],
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_read_as_it_was_meant_is_one_line(kind, tmp_path, monkeypatch):
    for module in (coco, entities, images, utterances):
        monkeypatch.setattr(module, "exit_with_error", exit_by_exception)
    for module in ("table", "tar_shards"):
        monkeypatch.setattr(f"{module}.exit_with_error", exit_by_exception)
    for number, (content, said) in enumerate(BAD[kind]):
        folder = tmp_path / str(number) / "train"
        folder.mkdir(parents=True)
        Image.new("L", (12, 12)).save(folder / "a.png")
        write_sounds(folder)
        content = content if isinstance(content, dict) else {"": content}
        for ending, x in content.items():
            if x is not None:
                x = b"good.wav\tba\n" + x if kind == "lst" else x
                (folder / f"name.{ending or kind}").write_bytes(x)
        with pytest.raises((Exit, OSError)) as error:
            READERS[kind](folder / f"name.{kind}")
        line = str(error.value)
        assert said in line and "\n" not in line, line
        assert "name." in line or "--characters" in line or ".wav" in line or "missing" in line
