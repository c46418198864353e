"""text_classification, token_classification, seq2seq, masked_lm and reranker, against sklearn,
seqeval, sacrebleu, transformers and sentence-transformers. That copies of them pass `make check`:
test_adapting.py."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import close, make, train
from conftest import ROUNDING_FLOAT32, Exit
from lazy import (
    masked_lm,
    reranker,
    sacrebleu,
    sentence_transformers,
    seq2seq,
    seqeval,
    sklearn,
    text_classification,
    transformers,
)

from ddp_cifar import SeededSamples
from lib import entities, ranking, rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Models, and test sets that do not fill the last batch."""
    path = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "LINES", toy.LINES[::10])
        toy.make("entities", path)
        for make_other in (toy.lines, toy.llama, toy.t5):
            make_other(path)
    lines = (path / "entities/test.conll").read_text().split("\n\n")[:43]
    (path / "entities/test.conll").write_text("\n\n".join(lines))
    text = path / "lines/train.txt"
    text.write_text(text.read_text().replace("\n", "\n \n"))
    labelled = [
        {"query": f"{i % 7}", "document": f"{i} {j} {'x' * j}", "label": (i * j) % 3 / 2}
        for i in range(8)
        for j in range(11)
    ]
    easy = [{"source": str(i), "target": "no no no" + " no" * (i % 2)} for i in range(100)]
    texts = [
        {"text": f"{word} {i} {word}", "label": label}
        for i in range(81)
        for word, label in (("file", 3), ("line", 100), ("name", 20))
    ]
    # No model is right on all of these.
    others = [{**x, "label": 3} if i % 4 else x for i, x in enumerate(texts[:43])]
    made = {"queries": (labelled, labelled[:83]), "translations": (easy, easy[:11])}
    for name, both in {**made, "texts": (texts, others)}.items():
        for part, rows_of_it in zip(("train", "test"), both, strict=True):
            toy.write_json_lines(path / f"{name}/{part}.jsonl", rows_of_it)
    return path


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{examples: the outputs of the training} on two processes."""
    path = tmp_path_factory.mktemp("tasks")
    of_texts = [*files(data / "texts", "jsonl"), "--max-steps", 5, "--lr", 1e-2]
    flags = {
        "text_classification": of_texts,
        "text_classification lora": of_texts,
        "token_classification": [*files(data / "entities", "conll"), "--max-steps", 18],
        "seq2seq": [*files(data / "translations", "jsonl"), "--prefix", "say: ", "--beams", 2],
        "masked_lm": [*files(data / "lines", "txt"), "--length", 32, "--max-steps", 3],
        "reranker": [*files(data / "queries", "jsonl"), "--max-steps", 9, "--lr", 1e-2],
    }
    flags["reranker"] += ["--length", 12]
    flags["seq2seq"] += ["--new-tokens", 8, "--max-steps", 9, "--lr", 1e-2]
    described = []
    for task, more in flags.items():
        script = make(path / f"{task}.py", "ddp", *task.split())
        # The Llama has no token for padding, and is in bf16.
        base = data / {"seq2seq": "t5", "text_classification": "llama"}.get(task, "bert")
        common = ["--cpu", "--base", base, "--batch-size", 8, "--lr", 3e-3, "--epochs", 2]
        described.append((2, script, [*common, *more]))
    return dict(zip(flags, train(path, *described), strict=True))


def files(folder, ending):
    return ["--train", folder / f"train.{ending}", "--test", folder / f"test.{ending}"]


def args_of(run):
    """The flags of a run, whose directory was the current one."""
    return SimpleNamespace(**{**run.summary, "output_dir": run.directory})


def two_epochs(data):
    samples = SeededSamples(data, 0)
    for epoch in (0, 1):
        samples.set_epoch(epoch)
        yield [samples[i] for i in range(len(samples))]


def test_the_scores_of_a_run_are_those_of_its_saved_model_text_by_text(runs):
    """An adapter has the new head, in place of a random one."""
    run = runs["text_classification"]
    columns = ("text", rows.nonempty_text), ("label", rows.class_name)
    texts, truth = map(list, zip(*rows.read_rows(run.summary["test"], *columns), strict=True))
    classify = transformers.pipeline("text-classification", str(run.directory), device="cpu")
    assert [*classify.model.config.id2label.values()] == ["3", "20", "100"]
    predicted = [int(x["label"]) for x in classify(texts)]
    assert len({*predicted}) > 1 and predicted != truth, "or it would be no test"
    exact = sklearn.metrics.f1_score(truth, predicted, average="macro", zero_division=0)
    assert run.summary["test_macro_f1"] == close(exact)
    assert run.summary["test_accuracy"] == close(sklearn.metrics.accuracy_score(truth, predicted))

    run = runs["text_classification lora"]
    auto = transformers.AutoModelForSequenceClassification
    options = {"tokenizer": str(run.directory), "device": "cpu"}
    truth = [f"LABEL_{[3, 20, 100].index(x)}" for x in truth]
    model = auto.from_pretrained(run.directory / "adapter", num_labels=3)
    classify = transformers.pipeline("text-classification", model, **options)
    exact = sklearn.metrics.accuracy_score(truth, [x["label"] for x in classify(texts)])
    assert run.summary["test_accuracy"] == close(exact)
    with pytest.raises(ValueError, match="Unrecognized model"):  # not with other weights at random
        auto.from_pretrained(run.directory)


def test_labels_of_two_types_and_those_that_training_does_not_have_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 3}')
    args = SimpleNamespace(text="text", label="label", train="train.jsonl")
    config = SimpleNamespace(label2id={"1": 0, "2": 1})
    with pytest.raises(Exit, match=r"no text of train.jsonl has the label 3"):
        text_classification.labelled_texts(str(tmp_path / "a.jsonl"), config, args)
    with pytest.raises(ValueError, match=r"no word of train.jsonl has the tag B-LOC"):
        entities.labelled_tokens(None, {"O": 0}, args, (["in", "Rome"], ["O", "B-LOC"]))
    with pytest.raises(Exit, match=r"b.jsonl has labels that are strings, and others that are int"):
        rows.class_names("b.jsonl", [1, "1"])


def test_tags_that_are_not_of_entities_have_no_f1():
    pairs = [(["B-X", "I-X", "O"], ["B-X", "I-X", "B-X"])]
    scores = {"precision": 1 / 2, "recall": 1, "f1": 2 / 3}
    assert entities.entity_scores(pairs) == pytest.approx(scores)
    assert entities.entity_scores([*pairs, (["NOUN", "VERB"], ["NOUN", "NOUN"])]) == {}


def test_the_f1_of_a_run_is_seqevals_of_what_transformers_loads(runs):
    """And its loss is that of transformers; it and the accuracy are means over all words."""
    run = runs["token_classification"]
    model = transformers.AutoModelForTokenClassification.from_pretrained(run.directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.directory)
    truth, found, losses = [], [], 0
    for words, tags in entities.read_conll(str(run.summary["test"])):
        begins = [len(" ".join([*words[:i], ""])) for i in range(len(words))]
        encoded = tokenizer(" ".join(words), return_tensors="pt")
        first = [*map(encoded.char_to_token, begins)]
        labels = torch.full_like(encoded["input_ids"], -100)
        labels[0, first] = torch.tensor([model.config.label2id[tag] for tag in tags])
        with torch.no_grad():
            answer = model(**encoded, labels=labels)
        losses += answer.loss.double().item() * len(words)
        predicted = answer.logits[0].argmax(1).tolist()
        truth.append(tags)
        found.append([model.config.id2label[predicted[i]] for i in first])
    assert run.summary["test_f1"] == pytest.approx(seqeval.metrics.f1_score(truth, found))
    assert 0 < run.summary["test_f1"] < 1, "or it would be no test"
    right = [x == y for pair in zip(truth, found, strict=True) for x, y in zip(*pair, strict=True)]
    assert run.summary["test_loss"] == close(losses / len(right))
    assert run.summary["test_accuracy"] == close(sum(right) / len(right))
    assert model.config.architectures == ["BertForTokenClassification"]


def test_the_bleu_of_a_run_is_sacrebleus_of_what_transformers_loads(runs):
    """And its loss is that of transformers."""
    run = runs["seq2seq"]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(run.directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.directory)
    test = rows.read_rows(run.summary["test"], ("source", str), ("target", str))
    found, losses, tokens = [], 0, 0
    for source, target in test:
        inputs = tokenizer(f"say: {source}", return_tensors="pt")
        labels = tokenizer(target, return_tensors="pt", truncation=True, max_length=8)["input_ids"]
        with torch.no_grad():
            losses += model(**inputs, labels=labels).loss.double().item() * labels.numel()
            ids = model.generate(**inputs, max_new_tokens=8, num_beams=2, do_sample=False)
        found.append(tokenizer.decode(ids[0], skip_special_tokens=True))
        tokens += labels.numel()
    exact = sacrebleu.corpus_bleu(found, [[target for _, target in test]]).score
    assert run.summary["test_bleu"] == pytest.approx(exact)
    assert 0 < exact < 100, "or it would be no test"
    assert run.summary["test_loss"] == close(losses / tokens)


def test_rouge_is_the_mean_f_measure_over_the_test_set(runs):
    args = SimpleNamespace(base=args_of(runs["seq2seq"]).base, score="rouge")
    encode = transformers.AutoTokenizer.from_pretrained(args.base)
    outputs = [(encode(x)["input_ids"], y) for x, y in [("a b c", "a b c"), ("a x b", "a b y z")]]
    # Of the second: 2 of 3 and of 4 words; no pair of words; "a b" in this order.
    second = 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    expected = {"rouge1": 50 * (1 + second), "rouge2": 50, "rougeL": 50 * (1 + second)}
    assert seq2seq.test_metrics(outputs, args) == pytest.approx(expected)


def test_the_loss_of_masked_tokens_is_that_of_transformers(runs):
    run = runs["masked_lm"]
    model = transformers.AutoModelForMaskedLM.from_pretrained(run.directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.directory)
    samples, _ = two_epochs(masked_lm.Masked(run.summary["test"], tokenizer, args_of(run)))
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    with torch.no_grad():
        logits = model(inputs).logits
        loss = model(inputs, labels=targets).loss.item()
    assert run.summary["test_loss"] == close(loss)
    right = logits.argmax(2)[targets >= 0] == targets[targets >= 0]
    assert run.summary["test_accuracy"] == close(right.double().mean().item())


def test_masks_have_the_shares_of_bert(runs):
    """arXiv:1810.04805, section 3.1: of the tokens, 0.15; of these, a mask for 0.8, and 0.1 are
    kept. Special tokens are never chosen. Each epoch has other masks."""
    args = args_of(runs["masked_lm"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.base)
    data = masked_lm.Masked(args.train, tokenizer, args)
    samples, others = two_epochs(data)
    assert not any(one.equal(other) for (_, one), (_, other) in zip(samples, others, strict=True))
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    chosen = targets >= 0
    assert torch.equal(inputs[~chosen], data.sequences[~chosen])
    assert torch.equal(targets[chosen], data.sequences[chosen])
    lines = filter(str.strip, Path(args.train).read_text().splitlines())
    tokens = [x for line in lines for x in tokenizer(line)["input_ids"]]
    assert data.sequences.flatten().tolist() == tokens[: data.sequences.numel()]
    special = torch.isin(data.sequences, data.special)
    assert special.any() and not chosen[special].any()
    masked = inputs[chosen] == tokenizer.mask_token_id
    kept = inputs[chosen] == targets[chosen]
    shares = [x.double().mean().item() for x in (chosen[~special], masked, kept)]
    deviation = (0.25 / chosen.sum().item()) ** 0.5  # of a share of the chosen tokens, at most
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=6 * deviation)


def test_a_cross_encoder_loads_a_reranker_and_has_its_scores_and_loss(runs):
    """Of a query and a document the longer one is cut off."""
    run = runs["reranker"]
    args = args_of(run)
    model = reranker.build_model(args).eval()
    model.load_state_dict(run.weights)
    _, loader = reranker.load_data(args, SimpleNamespace(is_main_process=False))
    with torch.no_grad():
        outputs = [reranker.compute_loss(model, batch, args)["outputs"] for batch in loader]
    outputs = [row for batch in outputs for row in batch]
    names = ("query", rows.nonempty_text), ("document", rows.nonempty_text), ("label", float)
    queries, documents, labels = zip(*rows.read_rows(args.test, *names), strict=True)
    assert [row[:2] for row in outputs] == [*zip(queries, labels, strict=True)]
    loaded = sentence_transformers.CrossEncoder(str(run.directory), device="cpu", max_length=12)
    losses = sentence_transformers.cross_encoder.losses
    with torch.no_grad():
        loss = losses.BinaryCrossEntropyLoss(loaded)([queries, documents], torch.tensor(labels))
    assert run.summary["test_loss"] == close(loss.item())
    scores = torch.tensor([score for *_, score in outputs]).sigmoid().numpy()
    assert scores.std() > 10 * ROUNDING_FLOAT32, "or any order of them would do"
    assert loaded.predict([*zip(queries, documents, strict=True)]) == close(scores)
    assert 0 < run.summary["test_ndcg_at_10"] < 1


def test_the_scores_of_rankings_are_those_by_hand():
    """Equal scores are no ranking, and a single document is none. The tenth rank is the last one in
    NDCG; any label above 0 is relevant in MRR."""
    second, tenth = 1 / math.log2(3), 1 / math.log2(11)
    rows = [("alone", 1, 0.0), *(("equal", label, 0.0) for label in (1, 0, 0))]
    rows += [("half", 0.5, 2.0), ("half", 1.0, 1.0)]
    rows += [("eleven", float(rank >= 10), -rank) for rank in range(1, 12)]
    ndcg = (1 + second + 1 / 2) / 3, (0.5 + second) / (1 + 0.5 * second), tenth / (1 + second)
    expected = {"ndcg_at_10": sum(ndcg) / 3, "mrr": (1 / 3 + 1 + 1 / 10) / 3}
    assert ranking.ranking_scores(rows) == pytest.approx(expected)


def test_negatives_are_documents_of_other_queries_and_new_in_each_epoch():
    pairs = [("a", "1"), ("a", "2"), ("b", "3"), ("c", "4"), ("c", "1")]
    first, second = two_epochs(ranking.WithNegatives(pairs, 40))
    assert [x[:2] for x in first if x[2]] == pairs
    drawn = {query: {d for q, d, label in first if q == query and not label} for query in "abc"}
    assert drawn == {"a": {"3", "4"}, "b": {"1", "2", "4"}, "c": {"2", "3"}}
    assert first != second


def test_a_beam_search_reads_no_padding(runs):
    """Texts of the base differ without a search or a mask, those of a trained model may not."""
    args = args_of(runs["seq2seq"])
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(args.base).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.base)
    texts = "a", "name of a file", "two lines of text here"
    batch = {**tokenizer(texts, padding=True, return_tensors="pt"), "texts": texts}
    with torch.no_grad():
        values = seq2seq.compute_loss(model, {**batch, "labels": torch.ones(3, 2).long()}, args)
    for tokens, text in values["outputs"]:
        options = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        assert tokens == alone[0].tolist()
