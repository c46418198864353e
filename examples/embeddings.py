# Parts of a copy, not a program: make new COPY=../mine.py WITH=embeddings
# SPDX-License-Identifier: Apache-2.0
"""Train embeddings of texts for search, on pairs such as a question and its answer.

    python tools/toy.py pairs
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/bert \\
        --pairs toy/pairs.jsonl --epochs 5 --batch-size 64 --lr 3e-3

With a model of the Hub and your own pairs.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base distilbert/distilbert-base-uncased

The toy model has random weights: --lr is higher for it. The names in a row are those of
sentence-transformers: "anchor" and "positive", or --anchor and --positive, and perhaps "negative",
one text or several ("negative_1", ...) that are near and wrong. Texts are taken as they are: if
--base expects a prompt such as "query: ", put it there. Every tenth line, but at most 5,000 of
them, is in the test set.

The loss is symmetric: an anchor has to find its positive among all positives and negatives of the
global batch, on all processes and in all microbatches, and a positive its anchor among all anchors.
Set the batch by --global-batch-size: then any number of processes and any --batch-size train the
same, but microbatches of another size get other masks of dropout. Each text goes through the model
twice for this, unless one process has the batch as one microbatch. Equal texts in two pairs are
negatives, too. The temperature is learned, but with lora constant. "recall_at_1" is the share of
the anchors that find their positive, in the global batch or in the whole test set. The loss grows
with their size: do not compare that of a test with that of a step.

Without lora, `SentenceTransformer("runs/mine").encode(["a text"])` has the trained embeddings, with
the pooling of --base: mean, cls or lasttoken. `AutoModel.from_pretrained` loads it, too.

Group: language. Recipes: ddp, amp, sharded.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, AutoTokenizer

from lib.fine_tuning import make_optimizer
from lib.negatives import info_nce, loss_among_all, means_among_all, with_cached_gradients
from lib.pooling import pooled, pooling_of, save_pooling
from lib.pretrained import save_card
from lib.rows import read_texts


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    parser.add_argument("--base", required=True, help="a directory, or a model's name on the Hub")
    parser.add_argument("--pairs", default="pairs.jsonl", help="a file, or a dataset (pairs.jsonl)")
    parser.add_argument("--anchor", default="anchor", help="the column of anchors (anchor)")
    parser.add_argument("--positive", default="positive", help="that of positives (positive)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text, at most (128)")
    parser.set_defaults(lr=2e-5, epochs=3, clip_norm=1.0)  # usual for pretrained weights


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, longest) int64 each for B anchors, their
    positives, and their negatives if there are any: tokens, and -100 behind the shorter texts."""
    pairs = read_texts(args.pairs, args.anchor, args.positive, more="negative")
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # for sentence-transformers
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        AutoConfig.from_pretrained(args.base).save_pretrained(args.output_dir)
        save_pooling(args)
        save_card(args)

    def tokenize(batch):
        cut = {"truncation": True, "max_length": args.length}
        columns = [tokenizer(list(x), **cut)["input_ids"] for x in zip(*batch, strict=True)]
        columns = [[torch.tensor(tokens) for tokens in column] for column in columns]
        return tuple(nn.utils.rnn.pad_sequence(x, True, padding_value=-100) for x in columns)

    every = max(10, len(pairs) // 5000)  # test pairs are compared with all others
    train = [pair for index, pair in enumerate(pairs) if index % every]
    options = {"batch_size": args.batch_size, "collate_fn": tokenize}
    train_loader = DataLoader(train, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(pairs[::every], **options)


def with_pairs(model, pooling):
    """Let a model of transformers take the tokens of anchors, positives and negatives, and return
    (B, 2 or more, D). A product of two embeddings is their cosine, divided by the temperature. The
    weights keep the names of the base."""
    encode = model.forward
    model.pooler = None  # not used here: DDP would wait for its gradient
    model.log_scale = nn.Parameter(torch.full((1,), math.log(20)))

    def forward(*texts):
        embeddings = []
        for tokens in texts:
            mask = tokens >= 0
            hidden = encode(tokens.clamp(min=0), attention_mask=mask.long()).last_hidden_state
            embeddings.append(pooled(hidden.float(), mask, pooling))
        # The temperature is at least 0.01, as in CLIP (Radford et al. 2021, arXiv:2103.00020).
        scale = model.log_scale.float().clamp(max=math.log(100)).exp()
        return F.normalize(torch.stack(embeddings, dim=1), dim=2) * scale.sqrt()

    model.forward = forward
    return model


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    pooling = pooling_of(args.base)
    if torch.empty(0).is_meta:
        config = AutoConfig.from_pretrained(args.base)
        return with_pairs(AutoModel.from_config(config, dtype=torch.float32), pooling)
    return with_pairs(AutoModel.from_pretrained(args.base, dtype=torch.float32).train(), pooling)


def compute_loss(model, batch, args):
    """Return {"loss": (B,), "recall_at_1": (B,)} of the pairs."""
    return loss_among_all(model, batch, info_nce)


def test_metrics(outputs, args):
    """Return the same of the whole test set, in place of the means over batches."""
    return means_among_all(outputs, info_nce)
