# Parts of a copy, not a program: make new COPY=../mine.py WITH=reranker
# SPDX-License-Identifier: Apache-2.0
"""Train a reranker (cross-encoder): it reads a query with a document, and scores their relevance.

    python tools/toy.py queries
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/bert \\
        --train toy/queries/train.jsonl --test toy/queries/test.jsonl --negatives 4 --epochs 3 \\
        --batch-size 32 --lr 1e-3

With a model of the Hub and your own train.jsonl and test.jsonl, with labels:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base microsoft/MiniLM-L12-H384-uncased

The toy model has random weights: --lr is higher for it. They are JSON lines, CSV, Parquet or
datasets; --query, --document and --label are their columns. A label is a number from 0 to 1. With
--negatives N there are no labels: each row is a relevant pair, and N documents of other queries are
drawn for its query, in training others in each epoch. test_ndcg_at_10 and test_mrr are means over
the queries of the test set. The loss is the binary cross-entropy.

Without lora, `CrossEncoder("runs/mine")` of sentence-transformers loads a run: its `predict`
returns the probability that a document is relevant.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from lib.fine_tuning import make_optimizer
from lib.pretrained import load_pretrained, save_beside_weights
from lib.ranking import WithNegatives, ranking_scores, relevance
from lib.rows import nonempty_text, read_rows


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.jsonl", help="a file, or a dataset (train.jsonl)")
    add("--test", default="test.jsonl", help="a file, or a dataset (test.jsonl)")
    add("--query", default="query", help="the column of queries (query)")
    add("--document", default="document", help="the column of documents (document)")
    add("--label", default="label", help="the column of labels (label)")
    add("--negatives", type=int, default=0, help="drawn for each pair (0: there are labels)")
    add("--length", type=int, default=512, help="tokens of both; the longer is cut off (512)")
    parser.set_defaults(lr=2e-5, batch_size=32, epochs=1, clip_norm=1.0)


def pairs_of(path, args):
    """Return the dataset of (query, document, label) of a file."""
    columns = (args.query, nonempty_text), (args.document, nonempty_text)
    if args.negatives:
        return WithNegatives(read_rows(path, *columns), args.negatives)
    return read_rows(path, *columns, (args.label, relevance))


def model_config(args):
    """Return the configuration of the model, with one output."""
    return AutoConfig.from_pretrained(args.base, num_labels=1)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of {"input_ids": (B, T) int64, ...} as the
    tokenizer returns it, "labels": (B,) float32, and "queries", B texts."""
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    auto = AutoModelForSequenceClassification
    save_beside_weights(accelerator, args, auto, model_config(args), tokenizer)

    def encode(batch):
        queries, documents, labels = zip(*batch, strict=True)
        options = {"truncation": True, "max_length": args.length, "padding": True}
        encoded = tokenizer(queries, documents, return_tensors="pt", **options)
        return {**encoded, "labels": torch.tensor(labels), "queries": queries}

    options = {"batch_size": args.batch_size, "collate_fn": encode}
    train_set, test_set = (pairs_of(path, args) for path in (args.train, args.test))
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device."""
    return load_pretrained(AutoModelForSequenceClassification, args, model_config(args))


def compute_loss(model, batch, args):
    """Return {"loss": (B,)}, the binary cross-entropy of each pair. In evaluations, "outputs" are
    its query, its label and its score."""
    queries, labels = batch["queries"], batch["labels"]
    inputs = {name: x for name, x in batch.items() if name not in ("queries", "labels")}
    scores = model(**inputs).logits[:, 0].float()
    values = {"loss": F.binary_cross_entropy_with_logits(scores, labels, reduction="none")}
    if not torch.is_grad_enabled():
        values["outputs"] = list(zip(queries, labels.tolist(), scores.tolist(), strict=True))
    return values


def test_metrics(outputs, args):
    """Return the NDCG@10 and the mean reciprocal rank of the whole test set."""
    return ranking_scores(outputs)
