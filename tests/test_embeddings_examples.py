"""embeddings.py, contrastive.py and clip.py: the gradients are those of the whole global batch,
however it is divided. That copies of them pass `make check`: test_adapting.py."""

import json
import math
from copy import deepcopy
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
)
from lazy import clip, contrastive, embeddings, lib, sentence_transformers, tokenizers, transformers
from PIL import Image
from processes import train_forked
from torch.nn import functional as F

from lib import negatives

pytestmark = pytest.mark.slow

# The whole global batch at once, by plain autograd and other formulas, on one process.
WHOLE = {"train_step": "whole_step", "test_metrics": "whole_metrics"}
TEXTS = {"build_model": "model_in_float64"}
IMPORTS = ["transformers.models.bert.modeling_bert", "peft"]
IMPORTS += ["transformers.models.clip.modeling_clip", "transformers.models.clip.tokenization_clip"]
train = partial(train_forked, imports=IMPORTS)
SIZES = {"hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2}
FLAGS = ["--cpu", "--max-steps", 3, "--global-batch-size", 16, "--clip-norm", 1e6]


def written(path, recipe, chosen):
    """Write a copy that compares few rows at a time, with definitions of programs/overrides."""
    replaced = [("ROWS = 1024", "ROWS = 5")]
    if "build_model" in chosen:
        replaced += [("hidden.float()", "hidden"), ("log_scale.float()", "log_scale")]
    end = '\n\nif __name__ == "__main__":'
    replaced.append((end, f"{project('whole_batch', **chosen)}\n{end}"))
    return make(path, recipe, "embeddings", replaced=replaced)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The flags of a training on 193 pairs. The test set has 20. The model has dropout."""
    directory = tmp_path_factory.mktemp("texts")
    generator = torch.Generator().manual_seed(0)
    words = "find open close read write file line name path text code list test".split()
    with open(directory / "pairs.jsonl", "w") as file:
        for number in range(193):
            chosen = torch.randint(len(words), (1 + number % 7,), generator=generator).tolist()
            answer = " ".join(words[index].upper() for index in chosen)
            pair = {"anchor": " ".join(words[index] for index in chosen[:3]) + f" {number}"}
            file.write(json.dumps(pair | {"positive": f"{answer} {number * 7}"}) + "\n")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(str(directory / "pairs.jsonl"), 300, special_tokens=["<end>"])
    options = {"tokenizer_object": tokenizer, "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(directory / "base")
    sizes = {**SIZES, "vocab_size": 300, "hidden_dropout_prob": 0.2}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    model.save_pretrained(directory / "base")
    with_pooling(directory, "cls", "cls")
    with_pooling(directory, "last", "lasttoken")
    config = directory / "cls/1_Pooling/config.json"  # as former versions have saved it
    former = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": False}
    config.write_text(json.dumps(former | {"pooling_mode_cls_token": True}))
    flags = ["--pairs", directory / "pairs.jsonl", "--lr", 3e-3, *FLAGS]
    return SimpleNamespace(
        directory=directory, others=flags, flags=[*flags, "--base", directory / "base"]
    )


def with_pooling(directory, name, mode):
    """Save the model of `texts` as sentence-transformers does."""
    modules = sentence_transformers.sentence_transformer.modules
    words = modules.Transformer(str(directory / "base"))
    layers = [words, modules.Pooling(16, pooling_mode=mode), modules.Normalize()]
    model = sentence_transformers.SentenceTransformer(modules=layers, device="cpu")
    model.save(str(directory / name))


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    """A directory of 193 images with captions, and the base of a CLIP. At 16 x 20, of which the
    model sees 16 x 16, transformers and torchvision have the same center."""
    directory = tmp_path_factory.mktemp("captions")
    generator = torch.Generator().manual_seed(0)
    with open(directory / "captions.jsonl", "w") as file:
        for number in range(193):
            pixels = torch.randint(256, (20, 25, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(directory / f"{number}.png")
            text = " ".join(["a photo of number", *str(number * 7919)][: 2 + number % 9])
            line = {"image": f"{number}.png", "caption": f"{number} {text}"}
            file.write(json.dumps(line) + "\n")
    lines = (directory / "captions.jsonl").read_text().splitlines()
    tokenizer = transformers.CLIPTokenizer().train_new_from_iterator(lines, 300)
    tokenizer.save_pretrained(directory / "base")
    torch.manual_seed(0)
    transformers.CLIPModel(clip_config(eos_token_id=1)).save_pretrained(directory / "base")
    return directory


def clip_config(**of_text):
    text = {**SIZES, "vocab_size": 300, "max_position_embeddings": 24, **of_text}
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)


def flags_of_clip(directory, base):
    """The test set has 20 pairs."""
    flags = ["--captions", directory / "captions.jsonl", "--length", 24, "--lr", 3e-3]
    return [*flags, *FLAGS, "--base", base]


def test_any_division_of_the_global_batch_trains_as_the_whole_at_once(texts, tmp_path):
    """Also sharded. Both passes have the same dropout, which depends on the size of the
    microbatches."""
    whole = written(tmp_path / "whole.py", "ddp", TEXTS | WHOLE)
    scripts = [written(tmp_path / f"{x}.py", x, TEXTS) for x in ("ddp", "sharded")]
    flags = [*texts.flags, "--batch-size", 4]
    described = [(1, whole, flags), *((2, script, flags) for script in scripts)]
    expected, *results = train(tmp_path, *described)
    for result in results:
        assert_same_training(expected, result, ROUNDING)
    assert {len(x) for x in (expected.train, expected.evaluations)} == {3, 1}
    scale = expected.weights["log_scale"].item()
    assert scale != pytest.approx(math.log(20), abs=1e-4), "learned"


def test_any_size_of_a_microbatch_has_the_loss_of_the_global_batch(captions, tmp_path):
    flags = {
        "clip": flags_of_clip(captions, captions / "base"),
        "contrastive": ["--data", "synthetic", *FLAGS],
    }
    runs = []
    for task, of_task in flags.items():
        script = make(tmp_path / f"{task}.py", "ddp", task)
        runs += [(1, script, [*of_task, "--batch-size", size]) for size in (16, 4)]
    losses = [[line["loss"] for line in run.train] for run in train(tmp_path, *runs)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[3] == pytest.approx(losses[2], rel=1e-4)


def test_bf16_is_that_of_the_whole_at_once(texts, tmp_path):
    """Its forward passes are the same. A gradient in bf16 may be the next number."""
    reference = written(tmp_path / "whole.py", "amp", WHOLE)
    amp = written(tmp_path / "amp.py", "amp", {})
    flags = [*texts.flags, "--batch-size", 8]
    runs = [(1, script, [*flags, "--precision", "bf16"]) for script in (reference, amp)]
    expected, ours, fp32 = train(tmp_path, *runs, (1, amp, [*flags, "--precision", "fp32"]))
    first, other, exact = (run.train[0] for run in (ours, expected, fp32))
    assert first["loss"] == pytest.approx(other["loss"], rel=ROUNDING_FLOAT32)
    norm = first["grad_norm"]
    assert norm == pytest.approx(other["grad_norm"], rel=torch.finfo(torch.bfloat16).eps)
    assert norm != exact["grad_norm"], "it was not in bf16"


def test_sentence_transformers_encodes_by_the_pooling_that_was_trained(texts, tmp_path):
    """The reference is the loss of the test set, whose last batches are filled up on two processes.
    A triple has two negatives of its own, one with token 0. A base of transformers alone has the
    mean as pooling."""
    lines = (texts.directory / "pairs.jsonl").read_text().splitlines()
    triples = [json.loads(line) for line in lines]
    for row, other in zip(triples, triples[7:] + triples[:7], strict=True):
        row |= {
            "negative_1": other["positive"] + " not",
            "negative_2": "no <end> " + other["anchor"],
        }
    (tmp_path / "triples.jsonl").write_text("\n".join(map(json.dumps, triples)))
    script = written(tmp_path / "mine.py", "ddp", TEXTS)
    flags = [*texts.others, "--max-steps", 4, "--pairs", tmp_path / "triples.jsonl"]
    runs = [
        (processes, script, [*flags, "--base", texts.directory / base, "--batch-size", 4])
        for processes, base in ((2, "cls"), (1, "cls"), (1, "last"), (1, "base"))
    ]
    cls, whole, *others = train(tmp_path, *runs)
    assert_same_training(cls, whole, ROUNDING)
    for run in (cls, *others):
        model = sentence_transformers.SentenceTransformer(str(run.directory), device="cpu")
        names = ("anchor", "positive", "negative_1", "negative_2")
        columns = [model.encode([row[name] for row in triples[::10]]) for name in names]
        vectors = [torch.tensor(column).double() for column in columns]
        scale = run.weights["log_scale"].double().exp()
        expected = symmetric_loss(scale)(vectors).item()
        assert run.evaluations[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert len({round(run.train[0]["loss"], 3) for run in (cls, *others)}) == 3


def symmetric_loss(scale):
    """That of sentence-transformers, of a list of embeddings."""
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    losses = sentence_transformers.sentence_transformer.losses
    loss = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=scale, **both)
    return lambda vectors: loss.compute_loss_from_embeddings(vectors, None)


def test_one_microbatch_that_is_the_whole_goes_through_the_model_once():
    run = SimpleNamespace(accelerator=SimpleNamespace(process_index=0, num_processes=1))
    pairs = F.normalize(torch.randn(5, 4, 3), dim=2)
    (batch,) = negatives.with_cached_gradients(run, None, iter([(pairs,)]), negatives.info_nce)
    values = negatives.loss_among_all(lambda pairs: pairs, batch, negatives.info_nce)
    torch.testing.assert_close(values["loss"].mean(), symmetric_loss(1)(pairs.unbind(1)))


@pytest.mark.parametrize(
    ("modules", "config", "said"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "has the modules Transformer, Pooling, Dense"),
        (["Transformer"], {}, "has the modules Transformer: this"),
        (["Transformer", "Pooling"], {"pooling_mode": "max"}, "no pooling but mean, cls, last"),
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "no pooling but mean, cls, last",
        ),
    ],
)
def test_a_base_that_embeds_in_another_way_ends_with_one_line(
    modules, config, said, tmp_path, monkeypatch
):
    monkeypatch.setattr("lib.pooling.exit_with_error", exit_by_exception)
    listed = [{"type": f"sentence_transformers.models.{x}", "path": "1"} for x in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").write_text(json.dumps(config))
    with pytest.raises(Exit, match=said):
        lib.pooling.pooling_of(tmp_path)


def test_a_temperature_is_at_least_that_of_clip():
    model = torch.nn.Module()
    model.forward = lambda tokens, attention_mask: SimpleNamespace(
        last_hidden_state=F.one_hot(tokens, 9).float()
    )
    embeddings.with_pairs(model, "mean")
    tokens = torch.tensor([[4, 4, -100]])
    pairs = model(tokens, tokens[:, :2])
    assert (pairs[0, 0] @ pairs[0, 1]).item() == pytest.approx(20)
    model.log_scale.data.fill_(9)
    pairs = model(tokens, tokens)
    assert (pairs[0, 0] @ pairs[0, 1]).item() == pytest.approx(100)


def test_views_find_each_other_among_all_views():
    """nt_xent, by plain sums in float64."""
    pairs = torch.randn(11, 2, 4).double()
    views = pairs.flatten(0, 1)
    products = (views @ views.T).fill_diagonal_(-math.inf)
    partner = products[range(22), [index ^ 1 for index in range(22)]]
    found = (products <= partner[:, None]).all(1).float().view(-1, 2).mean(1)
    losses = (products.logsumexp(1) - partner).view(-1, 2).mean(1)
    expected = {"loss": losses, "recall_at_1": found}
    torch.testing.assert_close(negatives.nt_xent(pairs, torch.arange(11)), expected)


def test_views_are_others_in_another_epoch():
    views, numbers = contrastive.TwoViews(range(9), seed=0), []
    for epoch in (0, 1, 0):
        views.set_epoch(epoch)
        numbers.append(views.numbers.clone())
    assert numbers[0].equal(numbers[2]) and not numbers[0].equal(numbers[1])


def test_rows_are_those_of_all_at_once(monkeypatch):
    pairs = torch.randn(11, 2, 4).double()
    for losses in (negatives.info_nce, negatives.nt_xent):
        monkeypatch.setattr(negatives, "ROWS", 4)
        parts = negatives.means_among_all(list(pairs), losses)
        whole = {name: x.double().mean() for name, x in losses(pairs, torch.arange(11)).items()}
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("eos", [299, 2], ids=["the end's number", "that of old configs"])
def test_images_and_captions_have_the_loss_and_the_gradients_of_transformers(eos, tmp_path):
    """Also captions of different lengths, which are padded."""
    torch.manual_seed(0)
    reference = transformers.CLIPModel(clip_config(eos_token_id=eos)).train()
    reference.save_pretrained(tmp_path)
    # The embeddings are in float32, the layers here are not: they would multiply its rounding.
    reference = reference.double()
    model = clip.build_model(SimpleNamespace(base=tmp_path)).double()
    texts = [torch.tensor([298, *range(3, 3 + number), 299]) for number in (4, 1, 12, 2, 7)]
    images = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    batch = lib.captions.pad_captions([*zip(images, texts, strict=True)])
    values = clip.compute_loss(model, batch, None)
    pixels, tokens = batch
    halves = deepcopy(model).bfloat16()(pixels.bfloat16(), tokens)
    assert halves.dtype == torch.float32, "what is compared"
    masked = {"attention_mask": (tokens >= 0).long(), "input_ids": tokens.where(tokens >= 0, 299)}
    expected = reference(**masked, pixel_values=pixels, return_loss=True)
    values["loss"].mean().backward()
    expected.loss.backward()
    loss = values["loss"].mean().item()
    assert loss == pytest.approx(expected.loss.item(), rel=ROUNDING_FLOAT32)
    found = expected.logits_per_image.argmax(1) == torch.arange(5)
    assert torch.equal(values["recall_at_1"], found)
    gradients = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():  # a key's bias has the gradient 0
        error = (gradients[name].grad - parameter.grad).norm()
        assert error <= ROUNDING_FLOAT32 * parameter.grad.norm() + ROUNDING, name


def test_transformers_loads_clip_with_a_temperature_that_was_limited(captions, tmp_path):
    """The reference reads the test set by the processors of transformers. The base has a lower
    temperature than 0.01, the lowest of the paper; each pair counts once, on two processes, too."""
    base = tmp_path / "base"
    model = transformers.CLIPModel.from_pretrained(captions / "base")
    model.logit_scale.data.fill_(5.0)
    model.save_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(captions / "base")
    tokenizer.save_pretrained(base)
    script = make(tmp_path / "mine.py", "ddp", "clip")
    (run,) = train(tmp_path, (2, script, [*flags_of_clip(captions, base), "--batch-size", 4]))
    (run.directory / "config.json").write_bytes((base / "config.json").read_bytes())
    model = transformers.CLIPModel.from_pretrained(run.directory)
    assert 4.5 < model.logit_scale.item() <= math.log(100) + 1e-6
    lines = [json.loads(x) for x in (captions / "captions.jsonl").read_text().splitlines()[::10]]
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = [Image.open(captions / line["image"]) for line in lines]
    pixels = transformers.CLIPImageProcessor(**size)(images, return_tensors="pt")
    words = tokenizer([x["caption"] for x in lines], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**pixels, **words, return_loss=True)
    line = run.evaluations[-1]
    assert line["test_loss"] == pytest.approx(found.loss.item(), rel=ROUNDING_FLOAT32)
    recall = (found.logits_per_image.argmax(1) == torch.arange(20)).double().mean().item()
    assert line["test_recall_at_1"] == pytest.approx(recall)


@pytest.mark.parametrize(
    ("length", "of_text", "line"),
    [
        (25, {"eos_token_id": 1}, "argument --length: {base} has positions for 24 tokens"),
        (24, {"eos_token_id": 299}, "--base {base}: its tokenizer ends no text with eos_token_id"),
        (24, {"eos_token_id": 2}, "--base {base}: its tokenizer ends no text with eos_token_id, 2"),
    ],
)
def test_captions_that_clip_cannot_read_end_with_one_line(
    length, of_text, line, captions, monkeypatch
):
    monkeypatch.setattr("lib.captions.exit_with_error", exit_by_exception)
    args = SimpleNamespace(length=length, base=captions / "base")
    with pytest.raises(Exit) as error:
        lib.captions.tokenizer_of(args, clip_config(**of_text).text_config)
    assert line.format(base=args.base) in str(error.value)
