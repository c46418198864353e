# SPDX-License-Identifier: Apache-2.0
"""Rows of files and of the `datasets` library: the same, whatever their source is."""

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import toy
from conftest import Exit, exit_by_exception
from lazy import datasets, huggingface_hub, lib
from PIL import Image
from scipy.io import wavfile
from torch.utils.data import Subset
from torchvision.transforms.v2.functional import to_image

import ddp_cifar
from lib import rows
from lib.images import read_image

NAMES = ["O", "B-LOC"]
ROWS = [
    {"x": f"text {i}", "label": i % 2, "tags": [i % 2, 0], "tools": [{"a": {}}] if i % 3 else None}
    for i in range(10)
]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Set the working directory, and forget the rows of earlier tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "exit_with_error", exit_by_exception)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for function in (rows.dataset_of, rows.read_rows):
        function.cache_clear()


@pytest.fixture
def sources(directory, tmp_path):
    """Write rows.jsonl, the folder `files`, and `saved`, where labels and tags are classes."""
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


# ------------------------------------------------------------------------- all tasks that read rows
def chat(i):
    said = f"What is {i} + 1?", f"It is {i + 1}."
    return [{"role": x, "content": y} for x, y in zip(("user", "assistant"), said, strict=True)]


def row(task, i):
    """Return a row of a task, by which file an image or a sound is named."""
    line, other = toy.LINES[i], toy.LINES[99 + i]
    photo = {"image": f"train/{'ab'[i // 12]}/{i:02}.png"}
    return {
        "text_classification": {"text": line, "label": "ab"[i % 2]},
        "token_classification": {"tokens": ["Ada", "slept"], "ner_tags": ["B-PER", "O"]},
        "seq2seq": {"source": line, "target": other},
        "reranker": {"query": line, "document": other, "label": i / 24},
        "embeddings": {"anchor": line, "positive": other, "negative": "no"},
        "sft": {"messages": chat(i)},
        "preferences": {"prompt": chat(i)[:1], "chosen": chat(i)[1:], "rejected": chat(i + 1)[1:]},
        "grpo": {"prompt": chat(i)[0]["content"], "answer": i + 1},
        "vision_chat": {"messages": chat(i), "images": [photo["image"]]},
        "clip": {**photo, "caption": line},
        "text_to_image": {**photo, "text": line},
        "fine_tune": {"text": line},
        "masked_lm": {"text": line},
        "speech": {"audio": f"{i}.wav", "text": "ab" * (1 + i % 2)},
        "fine_tune_speech": {"audio": f"{i}.wav", "text": "ab" * (1 + i % 2)},
    }.get(task, {**photo, "label": "ab"[i // 12]})


BASES = {
    "seq2seq": "t5",
    "vision_chat": "qwen",
    "clip": "clip",
    "text_to_image": "none",
    "fine_tune_speech": "wav2vec2",
}
BASES |= dict.fromkeys(["sft", "preferences", "grpo", "fine_tune"], "llama")
BASES |= dict.fromkeys(["photos", "balanced", "vit", "speech"])
FLAGS = {"sft": "--chats --test", "vision_chat": "--chats", "preferences": "--pairs --test"}
FLAGS |= {"embeddings": "--pairs", "grpo": "--prompts", "clip": "--captions"}
FLAGS |= {"text_to_image": "--images", "fine_tune": "--text"}
FLAGS |= dict.fromkeys(["photos", "balanced", "vit"], "--photos --test")
SIZES = {"vit": "--size 16 --patch 8 --width 64", "photos": "--size 8", "balanced": "--size 8"}
SIZES |= {"fine_tune": "--length 9", "masked_lm": "--length 9"}
TASKS = "text_classification token_classification seq2seq reranker embeddings sft preferences grpo"
TASKS = f"{TASKS} vision_chat clip text_to_image fine_tune masked_lm photos balanced vit"
TASKS += " speech fine_tune_speech"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    path = tmp_path_factory.mktemp("bases")
    for kind in (toy.bert, toy.llama, toy.t5, toy.clip, toy.qwen, toy.wav2vec2):
        kind(path)
    return path


def write_sources(task):
    """Write the rows of a task into the working directory. Return the source that is a file, or a
    folder of photos, and those of the `datasets` library."""
    rows = [row(task, i) for i in range(24)]
    for image in (x.get("image") or x.get("images", [""])[0] for x in rows):
        pixels = Image.effect_noise((20, 18), 99).convert("RGB")
        for part in ("train", "test") if image else ():
            path = Path(image.replace("train", part))
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels.save(path)
    toy.write_json_lines(Path("rows.jsonl"), rows)
    named = Path("rows.jsonl").read_text().replace('"image"', '"file_name"')
    Path("metadata.jsonl").write_text(named)
    Path("text.txt").write_text("".join(f"{x['text']}\n" for x in rows if "text" in x))
    if "audio" in rows[0]:
        for i, x in enumerate(rows):
            noise = numpy.random.default_rng(i).integers(-999, 999, 9999 - 99 * i, "<i2")
            wavfile.write(x["audio"], 16000, noise)
        Path("list.tsv").write_text("".join(f"{x['audio']}\t{x['text']}\n" for x in rows))
    made = datasets.Dataset.from_list(rows)
    if "audio" in rows[0]:
        made = made.cast_column("audio", datasets.Audio())
    if "image" in rows[0]:
        made = made.cast_column("image", datasets.Image())
    if "images" in rows[0]:
        made = made.cast_column("images", datasets.List(datasets.Image()))
    if isinstance(rows[0].get("label"), str):
        made = made.class_encode_column("label")
    made.save_to_disk("saved")
    Path("files").mkdir()
    made.to_parquet("files/train.parquet")
    files = {"fine_tune": "text.txt", "masked_lm": "text.txt", "text_to_image": "."}
    files |= {"speech": "list.tsv", "fine_tune_speech": "list.tsv"}
    first = "." if task in ("photos", "balanced", "vit") else files.get(task, "rows.jsonl")
    return first, "saved", "files:train"


def plain(value):
    """Return a value without tensors and arrays, which `==` compares."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def samples_of(task, source, bases, monkeypatch):
    """Return all samples of a task, and the first ones as a batch."""
    flags = FLAGS.get(task, "--train --test").split()
    if source == ".":
        flags = flags[:1]  # photos have a folder of tests
    argv = ["mine.py", *SIZES.get(task, "").split(), "--batch-size", "4", "--output-dir", "out"]
    argv += [x for flag in flags for x in (flag, source)]
    base = BASES.get(task, "bert")
    argv += ["--base", str(bases / base)] if base else []
    monkeypatch.setattr("sys.argv", argv)
    module = importlib.import_module(task)
    if task == "text_to_image":  # without its models: the rows that they would encode
        monkeypatch.setattr(module, "encoded_once", lambda rows, *_: rows)
        monkeypatch.setattr(module, "DDPMScheduler", mock.MagicMock())
        monkeypatch.setattr(module, "Noisy", lambda rows, _: Subset(rows, range(len(rows))))
        monkeypatch.setattr(module, "located", lambda _: lambda image: to_image(read_image(image)))
    args = ddp_cifar.parse_args("", module.add_flags)
    args.global_batch_size = 4
    found = []
    for loader in module.load_data(args, SimpleNamespace(is_main_process=True)):
        samples = []
        for index in range(len(loader.dataset)):
            torch.manual_seed(index)
            samples.append(loader.dataset[index])
        torch.manual_seed(0)
        found += [samples, loader.collate_fn(samples[:4])]
    return plain(found)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.split())
def test_all_sources_give_a_task_the_same_samples(task, bases, directory, monkeypatch):
    first, *others = write_sources(task)
    expected = samples_of(task, first, bases, monkeypatch)
    assert len(expected[0]) > 4
    for source in others:
        assert samples_of(task, source, bases, monkeypatch) == expected, source


def test_a_sound_that_cannot_be_read_as_it_was_meant_is_one_line(directory, monkeypatch):
    monkeypatch.setattr("datasets.config.TORCHCODEC_AVAILABLE", False)
    monkeypatch.setattr("lib.utterances.exit_with_error", exit_by_exception)
    for name, rate in (("good", 16000), ("rate", 8000)):
        wavfile.write(f"{name}.wav", rate, numpy.arange(999, dtype="<i2"))
    Path("cut.wav").write_bytes(Path("good.wav").read_bytes()[:-100])
    Path("text.wav").write_text("no sound")
    cases = {"rate": "please install 'torchcodec'. To decode it, all but wav files of 16 bits and"}
    cases |= {"text": cases["rate"], "cut": "was cut off: Reached EOF prematurely"}
    for name, said in cases.items():
        made = datasets.Dataset.from_dict({"audio": [f"{name}.wav"], "text": ["a"]})
        made.cast_column("audio", datasets.Audio()).save_to_disk(name)
        with pytest.raises(Exit) as error:
            lib.utterances.read_list(name)
        assert f"{name}, row 1" in str(error.value) and said in str(error.value)
