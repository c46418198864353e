"""Each example trains: composed by `make new`, with additions, it passes `make check` on the data
that the commands in its docstring make, and reads these rows from any source. What they compute:
test_examples.py."""

import json
import re
import shlex
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path

import accelerate
import check
import new
import numpy
import pytest
import running
import toy
from composed import IMPORTS, make
from conftest import Exit, load
from lazy import datasets, lib, validation
from processes import execute
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler

from ddp_cifar import seed_rng

pytestmark = pytest.mark.slow

TEXTS = {name: "\n\n".join(new.description(name)[0]) for name in new.EXAMPLES}
RECIPES = {name: new.description(name)[1] for name in new.EXAMPLES}
TASKS = [name for name, text in TEXTS.items() if new.TRAIN in text]
# What each task is composed with, where the recipe can have it.
WITH_LORA = "fine_tune embeddings sft vision_chat grpo text_to_image"
ADDED = {
    "photos": "ema best_weights auroc validation activation_checkpointing background_saves",
    "language_model": "second_optimizer ema",
    "segmentation": "lora trace best_weights",
    "distillation": "second_optimizer",
    **dict.fromkeys(WITH_LORA.split(), "lora"),
}
# In evaluations, too, their samples are drawn, by (seed, index).
DRAWN = {"grpo", "masked_lm", "reranker", "text_to_image"}
WINDOWS = {"fine_tune", "language_model", "mixture", "tokens"}  # of tokens, and their targets
FOLDERS = {"photos", "balanced", "tar_shards", "vit"}  # for training and test
BY_LENGTH = {"by_length", "sft", "preferences", "speech", "fine_tune_speech"}
OF_TEXT = {"by_length", "language_model", "mixture"}  # of a file as a whole
MADE_ONCE = {"fine_tune", "masked_lm", "preferences", "sft", "token_classification", "vision_chat"}
OF_IMAGES = "toy/photos", "toy/rare", "toy/captions"  # which are folders
NOT_ON_CPU = {"sync_batchnorm"}
COPIES = [(task, recipe) for task in TASKS for recipe in RECIPES[task]]
WHISPER = "--base", "toy/whisper", "--language", "english"
OTHER_MODELS = [("fine_tune_speech", recipe, *WHISPER) for recipe in RECIPES["fine_tune_speech"]]
# With lanes, a task is a stream of the Parquet files beside its data.
OF_LANES = "--lanes 4 --block 4"
STREAMS = {
    "fine_tune": f"--text toy/text-?.parquet {OF_LANES}",
    "sft": f"--chats toy/chats-?.parquet {OF_LANES}",
    "clip": f"--captions toy/captions-?.parquet {OF_LANES}",
    "text_to_image": f"--images toy/captions-?.parquet --caption caption {OF_LANES}",
}
STREAMED = [(task, recipe, *x.split()) for task, x in STREAMS.items() for recipe in RECIPES[task]]
# Copies of these bring most additions to the other recipes.
IN_OTHERS = {"photos", "language_model"}
# Two of these are unlike them: two models with a loss each, and samples of any length. Tests of
# their own train the other tasks, whose copies only `make test-all` checks.
IN_DDP = {"photos", "gan", "speech"}
FLAGS = "--cpu --max-steps 4 --epochs 4".split()
# Of the toy data, for four steps and an evaluation.
LINES = {"*.txt": 200, "*.jsonl": 160, "test.jsonl": 16, "metadata.jsonl": 48, "test.conll": 100}
LINES |= {"train.tsv": 96, "test.tsv": 16}
OF_LENGTHS = "language_model by_length fine_tune mixture text_classification token_classification"
FLAGS_OF = {
    # At these rates rounding is amplified little: no accuracy changes by a sample.
    **dict.fromkeys(("photos", "balanced"), "--lr 1e-3 --size 32"),
    "tar_shards": "--lr 1e-3",
    "segmentation": "--lr 1e-4 --size 16",
    "resnet20": "--data synthetic --global-batch-size 32 --lr 1e-3",
    "fast_cifar": "--data synthetic --model simple_cnn --lr 1e-3",
    "detection": "--size 128 --batch-size 2",
    "speech": "--layers 1 --width 32",
    **dict.fromkeys([*OF_LENGTHS.split(), "masked_lm"], "--length 32"),
    "embeddings": "--length 32 --lr 1e-3",
    "clip": "--length 16 --lr 1e-3",
    "text_to_image": "--epochs 1 --batch-size 4",
    "vit": "--layers 2 --lr 1e-4",
    # A unit of bfloat16 more or less in one activation is beyond the bound of the loss.
    "sft": "--base-dtype bfloat16 --lr 1e-5",
    "seq2seq": "--new-tokens 4",
    "reranker": "--length 32 --negatives 1",
    "grpo": "--lr 1e-3 --beta 0.1",
}


def added(task, recipe, more=()):
    names = [*ADDED.get(task, "").split(), *["streaming"] * ("--lanes" in more)]
    return [name for name in names if recipe in RECIPES[name]]


def commands(task):
    """The kinds of toy data that a task's first command needs, and the flags of its training."""
    text = re.sub(r" \\\n +", " ", TEXTS[task])  # one line for each command
    data, _, flags = text.partition(f"    {new.TRAIN} ")
    flags = re.sub(r"--batch-size \d+", "", flags.splitlines()[0])  # check's own is smaller
    return re.findall(r"^    python tools/toy.py (\w+)$", data, re.MULTILINE), shlex.split(flags)


def flags_of_rows(task):
    """The files of rows, and the folders of images, that its first command names."""
    flags = commands(task)[1]
    return [x for x in flags if x.endswith((".jsonl", ".tsv", ".conll", ".txt")) or x in OF_IMAGES]


WITH_DATA = [task for task in TASKS if commands(task)[0]]
OF_ROWS = [task for task in WITH_DATA if flags_of_rows(task) and task not in OF_TEXT]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A function that returns a directory with the toy data of a task. Each kind is made once."""
    path = tmp_path_factory.mktemp("adapting")
    made = set()

    def with_data(task):
        for kind in {*commands(task)[0]} - made:
            made.add(kind)
            toy.make(kind, path / "toy")
            for pattern, lines in LINES.items():
                for file in (path / "toy").rglob(pattern):
                    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
        return path

    return with_data


def case(task, recipe, *more):
    """A parameter of the test, with more flags. amp is ddp plus autocast."""
    redundant = recipe == "amp" or task not in (IN_DDP if recipe == "ddp" else IN_OTHERS)
    if "--lanes" in more:
        redundant = (task, recipe) != ("sft", "ddp")
    name = "-".join((task, recipe, *more)).replace("/", " ")
    return pytest.param(task, recipe, more, marks=[pytest.mark.redundant] * redundant, id=name)


@pytest.mark.parametrize(
    ("task", "recipe", "more"), [case(*one) for one in [*COPIES, *OTHER_MODELS, *STREAMED]]
)
def test_a_copy_with_an_example_passes_make_check(
    task, recipe, more, directory, monkeypatch, capsys
):
    """On one process and two the same, and killed in mid-epoch and rerun bit for bit. Most of other
    recipes than ddp, which have its data and its loss: the latter."""
    monkeypatch.chdir(directory(task))
    monkeypatch.setattr(running, "execute", partial(execute, imports=IMPORTS))
    examples = task, *added(task, recipe, more)
    copy = f"{'_'.join(examples)}_{recipe}.py"
    make(Path(copy), recipe, *examples)
    flags = [*commands(task)[1], *FLAGS, *FLAGS_OF.get(task, "").split(), *more]
    alone = recipe == "ddp" or (task, recipe) == ("photos", "sharded")
    flags += ["--processes", *("12" if alone else "2")]
    monkeypatch.setattr(sys, "argv", ["check.py", copy, *flags])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 0, capsys.readouterr().out


def contents(data, seed=0, most=2000):
    """The samples of a dataset, or a part of many, with the same random numbers, as bytes."""
    for index in range(0, len(data), 1 + len(data) // most):
        seed_rng(seed)
        has_batches = hasattr(data, "__getitems__")
        sample = data.__getitems__([index]) if has_batches else data[index]
        yield tuple(numpy.asarray(x).tobytes() for x in tree_leaves(sample))


def assert_no_test_sample_is_trained_on(task, mine, args, train, test):
    """The training set has another order in each epoch."""
    trained, tested = train.dataset, {*contents(test.dataset)}
    orders = (getattr(mine, "Ordered", ()), getattr(mine, "ByLane", ()))
    is_ordered = isinstance(trained, orders)
    assert is_ordered or isinstance(train.sampler, RandomSampler)
    assert task not in WINDOWS or next(iter(train)).shape == (8, args.length + 1)
    assert task in DRAWN or tested == {*contents(test.dataset, seed=1)}
    if task in BY_LENGTH:  # each global batch has samples of similar lengths
        sizes = [max(numpy.asarray(x).size for x in tree_leaves(sample)) for sample in trained]
        batches = sorted(sorted(sizes[i : i + 8]) for i in range(0, len(sizes), 8))
        assert [x for batch in batches for x in batch] == sorted(sizes) and len({*sizes}) > 8
    if not getattr(args, "test", None) and task not in FOLDERS:  # one file for both
        trained = trained.dataset if is_ordered else trained
        shared = tested & {*contents(validation.read_as_test(trained, test.dataset))}
        assert len(shared) <= (task == "vision_chat"), "in which chats without images are equal"


def rows_in(path):
    """The rows of a file, or of a folder of images in classes, with the files that they name."""
    path = path / "metadata.jsonl" if (path / "metadata.jsonl").exists() else path
    if path.is_dir():
        return [{"image": str(x), "label": x.parent.name} for x in sorted(path.glob("*/*.png"))]
    lines = path.read_text().splitlines()
    if path.suffix == ".conll":
        sentences = lib.entities.read_conll(str(path))
        return [{"tokens": words, "ner_tags": tags} for words, tags in sentences]
    if path.suffix == ".tsv":
        pairs = [line.split("\t") for line in lines]
        return [{"audio": str(path.parent / x), "text": text} for x, text in pairs]
    if path.suffix == ".txt":
        return [{"text": line} for line in lines]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        for name in row.keys() & {"image", "file_name"}:
            row["image"] = str(path.parent / row.pop(name))
        if path.parent.name == "image_chats":
            question, answer = row["messages"]
            images = [part for part in question["content"] if "path" in part]
            row["images"] = [str(path.parent / image.pop("path")) for image in images]
            answer["content"] = [{"type": "text", "text": answer["content"]}]
    return rows


@cache
def as_parquet(flag):
    """Write the rows of a flag by the `datasets` library. Return their source."""
    made = datasets.Dataset.from_list(rows_in(Path(flag)))
    image, audio = datasets.Image(), datasets.Audio()
    kinds = {"image": image, "audio": audio, "images": datasets.List(image)}
    for name in kinds.keys() & {*made.column_names}:
        made = made.cast_column(name, kinds[name])
    if "label" in made.column_names:
        made = made.class_encode_column("label")
    Path(f"{flag}.files").mkdir()
    made.to_parquet(f"{flag}.files/train.parquet")
    return f"{flag}.files:train"


def other_sources(task):
    """Return {flag of its first command: flags in its place}, which name the same rows."""
    flags = flags_of_rows(task)
    if task in FOLDERS:
        sources = [as_parquet(f"{flags[0]}/{part}") for part in ("train", "test")]
        return {flags[0]: [sources[0], "--test", sources[1]]}
    return {flag: [as_parquet(flag)] for flag in flags}


def bad_sources(flag):
    """Yield files whose second row is without a value, or has one of another type."""
    first, row, *_ = [json.loads(x) for x in Path(flag).read_text().splitlines()]
    for number, (name, value) in enumerate(product(row, (None, {"a": 1}))):
        path = flag.replace(".jsonl", f"{number}.jsonl")
        toy.write_json_lines(Path(path), [first, row | {name: value}])
        yield path


@pytest.mark.parametrize("task", WITH_DATA)
def test_each_source_gives_a_task_its_samples_and_none_of_the_test_to_training(
    task, directory, monkeypatch
):
    """Random numbers are for training. A row that cannot be read is one line."""
    monkeypatch.chdir(directory(task))
    mine = load(make(Path(f"{task}_data.py").absolute(), "ddp", task), exits=True)

    def loaders(**changed):
        flags = [*commands(task)[1], *FLAGS_OF.get(task, "").split(), "--batch-size", "8"]
        flags = [x for flag in flags for x in changed.get(flag, [flag])]
        monkeypatch.setattr(sys, "argv", ["mine.py", *flags, "--output-dir", f"data_of_{task}"])
        args = mine.parse_args("", mine.add_flags)
        mine.set_batch_sizes(args, 1, 1)
        Path(args.output_dir).mkdir(exist_ok=True)
        return args, *mine.load_data(args, accelerate.Accelerator(cpu=True))

    args, *both = loaders()
    assert {*vars(args).get("tokens", ())} == {*(flags_of_rows(task) if task in MADE_ONCE else ())}
    with monkeypatch.context() as patch:
        patch.setattr(mine, "make_all", pytest.fail, raising=task in MADE_ONCE)
        loaders()  # its tokens are in files
    assert_no_test_sample_is_trained_on(task, mine, args, *both)
    if task not in OF_ROWS:
        return
    expected = [[*contents(x.dataset, most=50)] for x in both]
    _, *both = loaders(**other_sources(task))
    assert [[*contents(x.dataset, most=50)] for x in both] == expected
    flag = flags_of_rows(task)[0]
    for path in bad_sources(flag) if flag.endswith(".jsonl") else ():
        with pytest.raises(Exit) as error:
            loaders(**{flag: [path]})
        line = str(error.value)
        assert f"{path}, row 2: " in line and "\n" not in line


def test_each_addition_is_part_of_a_copy_of_each_recipe_that_it_is_for():
    additions = RECIPES.keys() - set(TASKS) - NOT_ON_CPU
    for name in additions:
        copies = [*COPIES, *STREAMED]
        tried = {recipe for task, recipe, *x in copies if name in added(task, recipe, x)}
        assert tried == {*RECIPES[name]}, name
