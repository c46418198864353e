"""embeddings.py and contrastive.py: their gradients are those of the whole global batch, however it
is divided. That copies of them pass `make check`: test_adapting.py."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from composed import make
from conftest import (
    ROUNDING,
    ROUNDING_FLOAT32,
    Exit,
    assert_same_training,
    exit_by_exception,
    project,
    train_forked,
)
from torch.nn import functional as F

from lib import json_lines, negatives

pytestmark = pytest.mark.slow

# The whole global batch at once, by plain autograd and other formulas, on one process.
WHOLE = {"train_step": "whole_step", "test_metrics": "whole_metrics"}
TEXTS = {"build_model": "model_in_float64"}
IMAGES = {**TEXTS, "of_all": "of_images", "main": "main_with_images_in_float64"}
SCALED = project("amp", compute_loss="plain_loss")  # as in fp16; autocast leaves float64 as it is
train = partial(train_forked, imports=["transformers.models.bert.modeling_bert", "peft"])
FLAGS = ["--cpu", "--max-steps", 3, "--global-batch-size", 16]


def written(path, recipe, task, chosen, more=""):
    """Write a copy that compares few rows at a time, with definitions of programs/copies."""
    make(path, recipe, task)
    text = path.read_text()
    replaced = [("ROWS = 1024", "ROWS = 5")]
    if task == "embeddings" and "build_model" in chosen:
        replaced += [("hidden.float()", "hidden"), ("log_scale.float()", "log_scale")]
    # 53 samples do not fill the last batch of a test.
    replaced += [("synthetic_images(64, ", "synthetic_images(53, ")] * (task == "contrastive")
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    end = '\n\nif __name__ == "__main__":'
    path.write_text(text.replace(end, f"{project('whole_batch', **chosen)}{more}\n{end}"))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The flags of a training on 193 pairs, and another model with dropout. The test set has 20."""
    import tokenizers
    import transformers

    directory = tmp_path_factory.mktemp("texts")
    generator = torch.Generator().manual_seed(0)
    words = "find open close read write file line name path text code list test".split()
    with open(directory / "pairs.jsonl", "w") as file:
        for number in range(193):
            chosen = torch.randint(len(words), (1 + number % 7,), generator=generator).tolist()
            answer = " ".join(words[index].upper() for index in chosen)
            pair = {"anchor": " ".join(words[index] for index in chosen[:3]) + f" {number}"}
            file.write(json.dumps(pair | {"positive": f"{answer} {number * 7}"}) + "\n")
    for name, dropout in (("base", 0.0), ("dropout", 0.2)):
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train(str(directory / "pairs.jsonl"), 300)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        tokenizer.save_pretrained(directory / name)
        config = transformers.BertConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=300,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(directory / name)
    flags = ["--pairs", directory / "pairs.jsonl", "--lr", 3e-3, *FLAGS]
    return SimpleNamespace(
        directory=directory,
        flags=[*flags, "--base", directory / "base"],
        dropout=[*flags, "--base", directory / "dropout"],
    )


def test_any_division_of_the_global_batch_trains_as_the_whole_at_once(texts, tmp_path):
    """Embeddings of texts, on 1, 2 and 4 processes, in 1 to 8 microbatches, sharded, and with a
    scaled loss."""
    reference = written(tmp_path / "whole.py", "ddp", "embeddings", TEXTS | WHOLE)
    ddp = written(tmp_path / "ddp.py", "ddp", "embeddings", TEXTS)
    sharded = written(tmp_path / "sharded.py", "sharded", "embeddings", TEXTS)
    amp = written(tmp_path / "amp.py", "amp", "embeddings", TEXTS, SCALED)
    expected, *results = train(
        tmp_path,
        (1, reference, [*texts.flags, "--batch-size", 16]),
        (1, ddp, [*texts.flags, "--batch-size", 2]),
        (2, ddp, [*texts.flags, "--batch-size", 4, "--clip-norm", 1e6]),
        (4, ddp, [*texts.flags, "--batch-size", 4]),
        (2, sharded, [*texts.flags, "--batch-size", 4]),
        (2, amp, [*texts.flags, "--batch-size", 4]),
    )
    assert results[-1].train[-1]["loss_scale"] == 1024
    for result in results:
        ignored = ("loss_scale", "skipped_steps")
        assert_same_training(expected, result, ROUNDING, ignored)
    assert {len(x) for x in (expected.train, expected.evaluations)} == {3, 1}
    assert expected.weights["log_scale"].item() != pytest.approx(math.log(20), abs=1e-4), "learned"


def test_any_division_of_the_global_batch_shows_a_view_the_same_others(tmp_path):
    """Views of images: another size of microbatches changes no random number."""
    reference = written(tmp_path / "whole.py", "ddp", "contrastive", IMAGES | WHOLE)
    ddp = written(tmp_path / "ddp.py", "ddp", "contrastive", IMAGES)
    sharded = written(tmp_path / "sharded.py", "sharded", "contrastive", IMAGES)
    flags = ["--data", "synthetic", *FLAGS]
    expected, *results = train(
        tmp_path,
        (1, reference, [*flags, "--batch-size", 16]),
        (1, ddp, [*flags, "--batch-size", 4]),
        (2, ddp, [*flags, "--batch-size", 4]),
        (4, ddp, [*flags, "--batch-size", 4]),
        (2, sharded, [*flags, "--batch-size", 8]),
    )
    for result in results:
        assert_same_training(expected, result, ROUNDING)


def test_both_passes_have_the_same_dropout(texts, tmp_path):
    reference = written(tmp_path / "whole.py", "ddp", "embeddings", TEXTS | WHOLE)
    ddp = written(tmp_path / "ddp.py", "ddp", "embeddings", TEXTS)
    without, expected, *results = train(
        tmp_path,
        (1, reference, [*texts.flags, "--batch-size", 4]),
        (1, reference, [*texts.dropout, "--batch-size", 4]),
        (1, ddp, [*texts.dropout, "--batch-size", 4]),
        (2, ddp, [*texts.dropout, "--batch-size", 4]),
    )
    for result in results:
        assert_same_training(expected, result, ROUNDING)
    assert without.train[0]["loss"] != pytest.approx(expected.train[0]["loss"], rel=1e-6)


def test_bf16_is_that_of_the_whole_at_once(texts, tmp_path):
    """Its forward passes are the same. A gradient in bf16 may be the next number."""
    reference = written(tmp_path / "whole.py", "amp", "embeddings", WHOLE)
    amp = written(tmp_path / "amp.py", "amp", "embeddings", {})
    flags = [*texts.dropout, "--batch-size", 8]
    runs = [(1, script, [*flags, "--precision", "bf16"]) for script in (reference, amp)]
    expected, ours, fp32 = train(tmp_path, *runs, (1, amp, [*flags, "--precision", "fp32"]))
    first, other, exact = (run.train[0] for run in (ours, expected, fp32))
    assert first["loss"] == pytest.approx(other["loss"], rel=ROUNDING_FLOAT32)
    norm = first["grad_norm"]
    assert norm == pytest.approx(other["grad_norm"], rel=torch.finfo(torch.bfloat16).eps)
    assert norm != pytest.approx(exact["grad_norm"], rel=ROUNDING_FLOAT32), "it was not in bf16"


def test_transformers_loads_the_weights_and_finds_as_many_positives(texts, tmp_path):
    """Each test pair counts once, also in the last batches, which are filled up on two processes;
    tokens behind the end of a text do not count. The reference embeds one text at a time."""
    import transformers

    scripts = [tmp_path / "plain.py", tmp_path / "lora.py"]
    for script, added in zip(scripts, ([], ["lora"]), strict=True):
        make(script, "ddp", "embeddings", *added)
    flags = [*texts.flags, "--batch-size", 4, "--max-steps", 12]
    runs = [(processes, script, flags) for processes, script in zip((2, 1), scripts, strict=True)]
    run, adapted = train(tmp_path, *runs)
    for path in (texts.directory / "base").iterdir():
        if path.name != "model.safetensors":
            (run.directory / path.name).write_bytes(path.read_bytes())
    model = transformers.AutoModel.from_pretrained(run.directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.directory)
    lines = (texts.directory / "pairs.jsonl").read_text().splitlines()[::10]

    @torch.no_grad()
    def embedding(text):
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        mean = model(tokens).last_hidden_state[0].double().mean(0)
        return mean / mean.square().sum().sqrt()

    anchors, positives = (
        torch.stack([embedding(json.loads(line)[name]) for line in lines])
        for name in ("anchor", "positive")
    )
    products = (anchors @ positives.T) * run.weights["log_scale"].double().exp()
    losses = [-x.softmax(1).diagonal().log().mean().item() for x in (products, products.T)]
    found = [row.argmax().item() == index for index, row in enumerate(products)]
    line = run.evaluations[-1]
    assert len(found) == 20
    assert line["test_loss"] == pytest.approx(sum(losses) / 2, rel=ROUNDING_FLOAT32)
    assert line["test_recall_at_1"] == pytest.approx(sum(found) / 20)
    assert 0.05 < line["test_recall_at_1"], "better than by chance"
    loaded = transformers.AutoModel.from_pretrained(adapted.directory / "adapter").state_dict()
    trained = {name: loaded[name] for name in adapted.weights}
    torch.testing.assert_close(trained, adapted.weights, rtol=0, atol=0)


def test_a_temperature_is_at_least_that_of_clip():
    import embeddings

    model = torch.nn.Module()
    model.forward = lambda tokens, attention_mask: SimpleNamespace(
        last_hidden_state=F.one_hot(tokens, 9).float()
    )
    embeddings.with_pairs(model)
    tokens = torch.tensor([[4, 4, -100]])
    pairs = model(tokens, tokens[:, :2])
    assert (pairs[0, 0] @ pairs[0, 1]).item() == pytest.approx(20)
    model.log_scale.data.fill_(9)
    pairs = model(tokens, tokens)
    assert (pairs[0, 0] @ pairs[0, 1]).item() == pytest.approx(100)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "--pairs pairs.jsonl: No such file or directory"),
        ("", "--pairs pairs.jsonl: the file is empty"),
        ('{"anchor": "a", "positive": "b"}\n{"anchor": "a"}', "line 2: KeyError('positive')"),
        ('{"anchor": "a", "positive": "b"}\n\n', "line 2: JSONDecodeError('Expecting value"),
        ('{"anchor": "a", "positive": ["b"]}', "line 1: AttributeError("),
        ('{"anchor": "a", "positive": " "}', "line 1: ValueError('an empty text')"),
        ('["a", "b"]', "line 1: TypeError("),
        (b"\xff\xfe", "line 1: UnicodeDecodeError("),
    ],
)
def test_a_wrong_file_ends_with_one_line(content, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(json_lines, "exit_with_error", exit_by_exception)
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "pairs.jsonl").write_bytes(content)
    with pytest.raises(Exit) as error:
        json_lines.texts_of("pairs.jsonl", "--pairs", "anchor", "positive")
    assert line in str(error.value) and "\n" not in str(error.value)


def test_rows_are_those_of_all_at_once(monkeypatch):
    pairs = torch.randn(11, 2, 4).double()
    for losses in (negatives.info_nce, negatives.nt_xent):
        monkeypatch.setattr(negatives, "ROWS", 4)
        parts = negatives.means_among_all(list(pairs), losses)
        whole = {name: x.double().mean() for name, x in losses(pairs, torch.arange(11)).items()}
        torch.testing.assert_close(parts, whole)
