# Parts of a copy, not a program: make new COPY=../mine.py WITH=token_classification
# SPDX-License-Identifier: Apache-2.0
"""Find named entities: fine-tune a model of the Hub, or of a directory, to tag the words of texts.

    python tools/toy.py entities
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/bert \\
        --train toy/entities/train.conll --test toy/entities/test.conll --epochs 4 \\
        --batch-size 16 --lr 1e-3

With a model of the Hub and your own train.conll and test.conll:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base google-bert/bert-base-cased

The toy model has random weights: --lr is higher for it. A line of a .conll, .txt, .iob or .bio file
has a word, any other columns, and its tag; an empty line ends a sentence. Others are JSON lines,
Parquet or datasets, whose columns --words and --tags are lists of strings. A word's first token has
its tag, and every word counts once. If all tags are those of entities, as B-PER, I-PER and O, then
test_precision, test_recall and test_f1 count whole entities of the test set, as conlleval does.
Without lora, `transformers.pipeline("token-classification", "runs/mine",
aggregation_strategy="first")` finds entities.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
)

from lib.entities import Labelled, entity_scores, read_tagged
from lib.fine_tuning import make_optimizer
from lib.pretrained import load_pretrained, save_beside_weights

AUTO = AutoModelForTokenClassification


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.conll", help="a file, or a dataset (train.conll)")
    add("--test", default="test.conll", help="a file, or a dataset (test.conll)")
    add("--words", default="tokens", help="the column of words, not of .conll (tokens)")
    add("--tags", default="ner_tags", help="the column of tags, not of .conll (ner_tags)")
    add("--length", type=int, default=512, help="tokens of a sentence; others are cut off (512)")
    parser.set_defaults(lr=2e-5, batch_size=32, epochs=3, clip_norm=1.0)


def model_config(args):
    """Return the configuration of the model, with the names of the tags."""
    config = AutoConfig.from_pretrained(args.base)
    names = sorted({tag for _, tags in read_tagged(args.train, args) for tag in tags})
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    return config


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of {"input_ids": (B, T) int64, ...} as the
    tokenizer returns it, and "labels": (B, T) int64, -100 where no word begins."""
    config = model_config(args)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    save_beside_weights(accelerator, args, AUTO, config, tokenizer)
    train_set, test_set = (Labelled(tokenizer, x, config, args) for x in (args.train, args.test))
    options = {"batch_size": args.batch_size}
    options["collate_fn"] = DataCollatorForTokenClassification(tokenizer)  # pads
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device."""
    return load_pretrained(AUTO, args, model_config(args))


def compute_loss(model, batch, args):
    """Return the mean loss and accuracy of each sentence's words, and their number as its weight.
    "outputs" are the numbers of a sentence's true and predicted tags: (B, T, 2), -100 elsewhere."""
    labels = batch["labels"]
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    losses = F.cross_entropy(logits.mT, labels, reduction="none")  # 0 at -100
    words = labels != -100
    found = logits.argmax(2).where(words, -100)
    number = words.sum(1)
    share = words / number.clamp(min=1)[:, None]  # a word of control characters has no token
    values = {"loss": (losses * share).sum(1), "accuracy": ((found == labels) * share).sum(1)}
    return {**values, "weight": number, "outputs": torch.stack((labels, found), dim=2)}


def test_metrics(outputs, args):
    """Return precision, recall and F1 of the entities of all sentences."""
    names = model_config(args).id2label
    rows = (row[row[:, 0] != -100].T.tolist() for row in outputs)
    return entity_scores([[names[x] for x in tags] for tags in pair] for pair in rows)
