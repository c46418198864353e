# Parts of a copy, not a program: make new COPY=../mine.py WITH=text_classification
# SPDX-License-Identifier: Apache-2.0
"""Classify texts: fine-tune a model of the Hugging Face Hub, or of a directory, on labelled lines.

    python tools/toy.py labels
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/bert \\
        --train toy/labels/train.jsonl --test toy/labels/test.jsonl --epochs 4 --batch-size 16 \\
        --lr 1e-3

With a model and a dataset of the Hub, or your own train.jsonl and test.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base distilbert/distilbert-base-uncased --train stanfordnlp/imdb:train \\
        --test stanfordnlp/imdb:test

The toy model has random weights: --lr is higher for it. --train and --test are JSON lines, CSV,
Parquet or datasets; --text and --label are their columns. Labels are strings or integers. Each
batch is padded to its longest text. test_macro_f1 is the mean F1 over the classes that occur in the
test set or in its predictions. Tokenizer and config.json, with the names of the classes, are in the
output directory: without lora, `transformers.pipeline("text-classification", "runs/mine")` uses the
model.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from sklearn.metrics import f1_score
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ddp_cifar import exit_with_error
from lib.fine_tuning import make_optimizer
from lib.pretrained import load_pretrained, save_beside_weights
from lib.rows import class_name, class_names, nonempty_text, read_rows


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.jsonl", help="a file, or a dataset (train.jsonl)")
    add("--test", default="test.jsonl", help="a file, or a dataset (test.jsonl)")
    add("--text", default="text", help="the column of texts (text)")
    add("--label", default="label", help="the column of labels (label)")
    add("--length", type=int, default=512, help="tokens of a text at most (512)")
    # Usual for pretrained weights.
    parser.set_defaults(lr=2e-5, batch_size=32, epochs=3, clip_norm=1.0)


def rows_of(path, args):
    """Return [(text, label)] of a file."""
    return read_rows(path, (args.text, nonempty_text), (args.label, class_name))


def labelled_texts(path, config, args):
    """Return [(text, number of its class)] of a file."""
    rows = rows_of(path, args)
    if unknown := {str(label) for _, label in rows} - config.label2id.keys():
        exit_with_error(f"{path}: no text of {args.train} has the label {min(unknown)}")
    return [(text, config.label2id[str(label)]) for text, label in rows]


def tokenizer_and_config(args):
    """Return the tokenizer, and the configuration with the names of the classes."""
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = AutoConfig.from_pretrained(args.base)
    labels = [label for _, label in rows_of(args.train, args)]
    config.id2label = dict(enumerate(class_names(args.train, labels)))
    config.label2id = {name: index for index, name in config.id2label.items()}
    config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, config


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of {"input_ids": (B, T) int64, ...} as the
    tokenizer returns it, and "labels": (B,) int64."""
    tokenizer, config = tokenizer_and_config(args)
    auto = AutoModelForSequenceClassification
    save_beside_weights(accelerator, args, auto, config, tokenizer)
    train_set, test_set = (labelled_texts(path, config, args) for path in (args.train, args.test))

    def encode(batch):
        texts, labels = zip(*batch, strict=True)
        length = {"truncation": True, "max_length": args.length, "padding": True}
        return {**tokenizer(texts, return_tensors="pt", **length), "labels": torch.tensor(labels)}

    options = {"batch_size": args.batch_size, "collate_fn": encode}
    options |= {"num_workers": 2, "persistent_workers": True}  # per process
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    _, config = tokenizer_and_config(args)
    return load_pretrained(AutoModelForSequenceClassification, args, config)


def compute_loss(model, batch, args):
    """Return loss and accuracy of each text. "outputs" are its label and the predicted one."""
    labels = batch["labels"]
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    found = logits.argmax(1)
    loss = F.cross_entropy(logits, labels, reduction="none")
    outputs = torch.stack((labels, found), dim=1)
    return {"loss": loss, "accuracy": found == labels, "outputs": outputs}


def test_metrics(outputs, args):
    """Return {"macro_f1": the mean of the F1 of each class that occurs}."""
    labels, found = torch.stack(outputs).T
    return {"macro_f1": float(f1_score(labels, found, average="macro", zero_division=0))}
