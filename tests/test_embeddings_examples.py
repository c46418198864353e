"""embeddings.py, contrastive.py and clip.py: the gradients are those of the whole global batch,
however it is divided. That copies of them pass `make check`: test_adapting.py."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import make, train
from conftest import ROUNDING, ROUNDING_FLOAT32, Exit, assert_same_training
from lazy import clip, contrastive, embeddings, lib, sentence_transformers, transformers
from PIL import Image
from torch.nn import functional as F

from ddp_cifar import seed_rng
from lib import negatives

pytestmark = pytest.mark.slow

IN_FLOAT64 = [
    ("config, dtype=torch.float32), pooling)", "config), pooling).double()"),
    (".train(), pooling)", ".train(), pooling).double()"),
    ("hidden.float()", "hidden"),
    ("log_scale.float()", "log_scale"),
    ("ROWS = 1024", "ROWS = 5"),  # few rows at a time
]
FLAGS = ["--cpu", "--max-steps", 3, "--global-batch-size", 16, "--clip-norm", 1e6, "--lr", 3e-3]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A directory of a BERT without dropout, and of two that sentence-transformers has saved."""
    directory = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    toy.bert(directory)
    config = directory / "bert/config.json"
    config.write_text(config.read_text().replace('dropout_prob": 0.1', 'dropout_prob": 0.0'))
    modules = sentence_transformers.sentence_transformer.modules
    for name, mode in (("cls", "cls"), ("last", "lasttoken")):
        words = modules.Transformer(str(directory / "bert"))
        layers = [words, modules.Pooling(64, pooling_mode=mode), modules.Normalize()]
        model = sentence_transformers.SentenceTransformer(modules=layers, device="cpu")
        model.save(str(directory / name))
    config = directory / "cls/1_Pooling/config.json"  # as former versions have saved it
    former = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False}
    config.write_text(json.dumps(former | {"pooling_mode_cls_token": True}))
    return directory


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    """A directory of 193 images with captions, and a CLIP. At 32 x 40, of which the model sees
    32 x 32, transformers and torchvision have the same center."""
    path = tmp_path_factory.mktemp("captions")
    names = [f"{number}.png" for number in range(193)]
    rows = [{"image": x, "caption": f"{x} {toy.draw_shape(path / x, 40, 50)}"} for x in names]
    toy.write_json_lines(path / "captions.jsonl", rows)
    torch.manual_seed(0)
    toy.clip(path)
    return path


@pytest.fixture(scope="module")
def trained(bases, tmp_path_factory):
    """{name: the outputs of the training}, and the 193 triples. A triple has two negatives of its
    own, one with token 0. The test set has 20."""
    path = tmp_path_factory.mktemp("trained")
    lines = [line[:40] for line in toy.LINES]
    pairs = [(f"{i} {lines[i]}", f"{lines[-i]} {i}") for i in range(193)]
    triples = [
        {"anchor": x, "positive": y, "negative_1": f"{other} not", "negative_2": f"<pad> {another}"}
        for (x, y), (another, other) in zip(pairs, pairs[::-1], strict=True)
    ]
    toy.write_json_lines(path / "triples.jsonl", triples)
    flags = [*FLAGS, "--pairs", path / "triples.jsonl"]
    runs = {"whole": ("ddp", "bert", 1), "sharded": ("sharded", "bert", 2)}
    runs |= {base: ("ddp", base, 2) for base in ("bert", "cls", "last")}
    described = []
    for recipe, base, processes in runs.values():
        script = make(path / f"{recipe}.py", recipe, "embeddings", replaced=IN_FLOAT64)
        own = ["--base", bases / base, "--batch-size", 16 if processes == 1 else 4]
        described.append((processes, script, [*flags, *own]))
    return dict(zip(runs, train(path, *described), strict=True)), triples


def test_any_division_of_the_global_batch_trains_as_the_whole_at_once(trained):
    """Also sharded. One process has the whole in one microbatch, by plain autograd."""
    runs, _ = trained
    expected = runs["whole"]
    for result in (runs["bert"], runs["sharded"]):
        assert_same_training(expected, result, ROUNDING)
    assert {len(x) for x in (expected.train, expected.evaluations)} == {3, 1}
    scale = expected.weights["log_scale"].item()
    assert scale != pytest.approx(math.log(20), abs=1e-4), "learned"


def assert_same_losses(run, other):
    losses, expected = ([line["loss"] for line in x.train] for x in (run, other))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_any_division_of_views_has_the_loss_of_the_whole(tmp_path):
    script = make(tmp_path / "contrastive.py", "ddp", "contrastive")
    flags = ["--data", "synthetic", *FLAGS, "--batch-size"]
    assert_same_losses(*train(tmp_path, (1, script, [*flags, 16]), (2, script, [*flags, 4])))


def test_cached_gradients_are_those_of_the_whole_batch_at_once(bases):
    """Of a model with dropout, which is the same in both passes, by plain autograd."""
    model = embeddings.build_model(SimpleNamespace(base=bases / "bert"))
    for module in model.modules():
        module.p = 0.2
    here = SimpleNamespace(process_index=0, num_processes=1, gather=lambda x: x)
    run = SimpleNamespace(accelerator=here, args=SimpleNamespace(seed=0), step=5)
    batches = [(torch.randint(999, (3, 7)), torch.randint(999, (3, 9))) for _ in range(4)]

    def seeded(compute, batches):
        for index, batch in enumerate(batches):
            seed_rng(0, 5, index)
            yield compute(batch)

    pairs = torch.cat([*seeded(lambda batch: model(*batch), batches)])
    exact = negatives.info_nce(pairs, torch.arange(12))["loss"]
    cached = negatives.with_cached_gradients(run, model, batches, negatives.info_nce)
    values = seeded(lambda x: negatives.loss_among_all(model, x, negatives.info_nce), cached)
    losses = torch.cat([x["loss"] for x in values])
    torch.testing.assert_close(losses, exact)
    gradients = [torch.autograd.grad(x.mean(), [*model.parameters()]) for x in (losses, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_sentence_transformers_encodes_by_the_pooling_that_was_trained(trained):
    """The reference is the loss of the test set, whose last batches are filled up on two processes.
    A base of transformers alone has the mean as pooling."""
    runs, triples = trained
    for run in runs.values():
        model = sentence_transformers.SentenceTransformer(str(run.directory), device="cpu")
        columns = [model.encode([row[name] for row in triples[::10]]) for name in triples[0]]
        vectors = [torch.tensor(column).double() for column in columns]
        scale = run.weights["log_scale"].double().exp()
        expected = symmetric_loss(scale)(vectors).item()
        assert run.evaluations[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert len({round(run.train[0]["loss"], 3) for run in runs.values()}) == 3


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


def test_a_base_that_embeds_in_another_way_ends_with_one_line(tmp_path):
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").write_text(json.dumps(both))
    for last, said in (
        ("Dense", "has the modules Transformer, Pooling, Dense"),
        ("Normalize", "no pooling but mean, cls, last"),
    ):
        kinds = "Transformer", "Pooling", last
        modules = [{"type": f"sentence_transformers.models.{x}", "path": "1"} for x in kinds]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(Exit, match=said):
            lib.pooling.pooling_of(tmp_path)


def test_a_temperature_begins_at_a_twentieth_and_is_at_least_that_of_clip(bases):
    model = embeddings.build_model(SimpleNamespace(base=bases / "bert")).eval()
    tokens = torch.tensor([[4, 5, -100]])
    for scale in (20, 100):
        [[one, other]] = model(tokens, tokens[:, :2])
        assert (one @ other).item() == pytest.approx(scale, rel=1e-4)
        model.log_scale.data.fill_(9)


def test_views_find_each_other_among_all_views():
    """nt_xent, of a few rows at a time, by plain sums in float64."""
    pairs = torch.randn(11, 2, 4).double()
    views = pairs.flatten(0, 1)
    products = (views @ views.T).fill_diagonal_(-math.inf)
    partner = products[range(22), [index ^ 1 for index in range(22)]]
    found = (products <= partner[:, None]).all(1).float().view(-1, 2).mean(1)
    losses = (products.logsumexp(1) - partner).view(-1, 2).mean(1)
    expected = {"loss": losses, "recall_at_1": found}
    parts = [negatives.nt_xent(pairs, rows) for rows in torch.arange(11).split(4)]
    parts = {name: torch.cat([part[name] for part in parts]) for name in expected}
    torch.testing.assert_close(parts, expected)


def test_views_are_others_in_another_epoch():
    views, numbers = contrastive.TwoViews(range(9), seed=0), []
    for epoch in (0, 1, 0):
        views.set_epoch(epoch)
        numbers.append(views.numbers.clone())
    assert numbers[0].equal(numbers[2]) and not numbers[0].equal(numbers[1])


def test_transformers_loads_clip_with_a_temperature_that_was_limited(captions, tmp_path):
    """The reference reads the test set by the processors of transformers. The base has a lower
    temperature than 0.01, the lowest of the paper; each pair counts once, on two processes, too."""
    model = transformers.CLIPModel.from_pretrained(captions / "clip")
    model.logit_scale.data.fill_(5.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(captions / "clip")
    toy.save(tmp_path / "base", tokenizer, model)
    script = make(tmp_path / "mine.py", "ddp", "clip")
    flags = ["--captions", captions / "captions.jsonl", *FLAGS, "--base", tmp_path / "base"]
    flags.append("--batch-size")
    run, whole = train(tmp_path, (2, script, [*flags, 4]), (1, script, [*flags, 16]))
    assert_same_losses(run, whole)
    model.config.save_pretrained(run.directory)
    model = transformers.CLIPModel.from_pretrained(run.directory)
    assert 4.5 < model.logit_scale.item() <= math.log(100) + 1e-6
    lines = [json.loads(x) for x in (captions / "captions.jsonl").read_text().splitlines()[::10]]
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    images = [Image.open(captions / line["image"]) for line in lines]
    pixels = transformers.CLIPImageProcessor(**size)(images, return_tensors="pt")
    words = tokenizer([x["caption"] for x in lines], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**pixels, **words, return_loss=True)
        halves = clip.build_model(SimpleNamespace(base=captions / "clip")).bfloat16()
        compared = halves(pixels["pixel_values"].bfloat16(), words["input_ids"])
    assert compared.dtype == torch.float32
    line = run.evaluations[-1]
    assert line["test_loss"] == pytest.approx(found.loss.item(), rel=ROUNDING_FLOAT32)
    recall = (found.logits_per_image.argmax(1) == torch.arange(20)).double().mean().item()
    assert line["test_recall_at_1"] == pytest.approx(recall)


def test_captions_that_clip_cannot_read_end_with_one_line(captions):
    config = transformers.CLIPTextConfig.from_pretrained(captions / "clip")
    config.eos_token_id = 998
    for length, said in (
        (78, "argument --length: .* has positions for 77 tokens"),
        (77, "--base .*: its tokenizer ends no text with eos_token_id, 998"),
    ):
        args = SimpleNamespace(length=length, base=captions / "clip")
        with pytest.raises(Exit, match=said):
            lib.captions.tokenizer_of(args, config)
