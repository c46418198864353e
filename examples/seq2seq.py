# Parts of a copy, not a program: make new COPY=../mine.py WITH=seq2seq
# SPDX-License-Identifier: Apache-2.0
"""Translate or summarize: fine-tune an encoder and decoder of the Hub on sources and targets.

    python tools/toy.py translations
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/t5 \\
        --train toy/translations/train.jsonl --test toy/translations/test.jsonl --epochs 20 \\
        --batch-size 16 --lr 3e-3

With a model of the Hub and your own train.csv and test.csv:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base google-t5/t5-small --prefix "summarize: " --train train.csv --test test.csv \\
        --source document --target summary --score rouge

The toy model has random weights: --lr is higher for it. They are JSON lines, CSV, Parquet or
datasets; --source and --target are their columns, such as translation.de and translation.en. Every
token of a target counts once. In evaluations the model generates a target for each test source, by
--beams and with at most --new-tokens tokens. --score bleu compares them with the whole true targets
by sacrebleu, --score rouge by rouge-score, with stemming. All scores are from 0 to 100.

Without lora, AutoModelForSeq2SeqLM and AutoTokenizer load it by `from_pretrained("runs/mine")`.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from lib.fine_tuning import make_optimizer
from lib.generation import generate
from lib.pretrained import load_pretrained, save_beside_weights
from lib.rows import nonempty_text, read_rows


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.jsonl", help="a file, or a dataset (train.jsonl)")
    add("--test", default="test.jsonl", help="a file, or a dataset (test.jsonl)")
    add("--source", default="source", help="the column of sources (source)")
    add("--target", default="target", help="the column of targets (target)")
    add("--prefix", default="", help='of each source: "summarize: " for T5')
    add("--length", type=int, default=512, help="tokens of a source; others are cut off (512)")
    add("--new-tokens", type=int, default=128, help="tokens of a target, at most (128)")
    add("--beams", type=int, default=1, help="of a beam search in evaluations (1: greedy)")
    add("--score", choices=("bleu", "rouge"), default="bleu", help="of the test set (bleu)")
    parser.set_defaults(lr=5e-5, batch_size=16, epochs=3, clip_norm=1.0)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of {"input_ids": (B, S) int64, ...} as the
    tokenizer returns it, "labels": (B, T) int64, -100 behind the shorter ones, and the "texts" of
    the targets."""
    config = AutoConfig.from_pretrained(args.base)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    save_beside_weights(accelerator, args, AutoModelForSeq2SeqLM, config, tokenizer)
    pad = DataCollatorForSeq2Seq(tokenizer)

    def encode(batch):
        sources, targets = zip(*batch, strict=True)
        sources = [args.prefix + source for source in sources]
        encoded = tokenizer(sources, truncation=True, max_length=args.length)
        cut = {"truncation": True, "max_length": args.new_tokens}
        encoded["labels"] = tokenizer(text_target=targets, **cut)["input_ids"]
        rows = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
        return {**pad(rows), "texts": targets}

    columns = (args.source, nonempty_text), (args.target, nonempty_text)
    train_set, test_set = (read_rows(path, *columns) for path in (args.train, args.test))
    options = {"batch_size": args.batch_size, "collate_fn": encode}
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device."""
    return load_pretrained(AutoModelForSeq2SeqLM, args, AutoConfig.from_pretrained(args.base))


def compute_loss(model, batch, args):
    """Return the mean loss of each target's tokens, and their number as its weight. In evaluations,
    "outputs" are the tokens that the model generates, and the true text."""
    labels = batch["labels"]
    logits = model(**{name: x for name, x in batch.items() if name != "texts"}).logits
    losses = F.cross_entropy(logits.mT, labels, reduction="none")  # 0 at -100
    number = (labels != -100).sum(1)
    values = {"loss": losses.sum(1) / number, "weight": number}
    if not torch.is_grad_enabled():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": args.new_tokens, "num_beams": args.beams, "do_sample": False}
        tokens = generate(model, **inputs, **options)
        values["outputs"] = list(zip(tokens.tolist(), batch["texts"], strict=True))
    return values


def test_metrics(outputs, args):
    """Return BLEU, or ROUGE-1, ROUGE-2 and ROUGE-L, of the whole test set."""
    tokens, targets = zip(*outputs, strict=True)
    decode = AutoTokenizer.from_pretrained(args.base).batch_decode
    found = decode(tokens, skip_special_tokens=True)
    if args.score == "bleu":
        return {"bleu": corpus_bleu(found, [targets]).score}
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(target, text) for target, text in zip(targets, found, strict=True)]
    return {x: 100 * sum(score[x].fmeasure for score in scores) / len(scores) for x in names}
