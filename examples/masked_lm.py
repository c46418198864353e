# Parts of a copy, not a program: make new COPY=../mine.py WITH=masked_lm
# SPDX-License-Identifier: Apache-2.0
"""Train a masked language model such as BERT on text files (Devlin et al. 2019, arXiv:1810.04805).

    python tools/toy.py lines
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/bert \\
        --train toy/lines/train.txt --test toy/lines/test.txt --epochs 4 --batch-size 16 --lr 1e-3

With a model of the Hub and your own train.txt and test.txt:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base google-bert/bert-base-uncased

The toy model has random weights: --lr is higher for it. The tokens of all lines, with those that
the tokenizer adds, are cut into sequences of --length; a shorter last one is left out. Of the
tokens, --masked are to be predicted: 80% of these are replaced by the mask, 10% by a random token.
A sequence's masks are a function of (seed, epoch, sequence), and in evaluations of the sequence
alone. Every masked token counts once. Without lora, `transformers.pipeline("fill-mask",
"runs/mine")` fills masks.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from ddp_cifar import exit_with_error
from lib.fine_tuning import make_optimizer
from lib.once import text_once
from lib.pretrained import load_pretrained, save_beside_weights


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.txt", help="a text file, or a dataset (train.txt)")
    add("--test", default="test.txt", help="a text file, or a dataset (test.txt)")
    add("--column", default="text", help="of a dataset (text)")
    add("--length", type=int, default=128, help="tokens of a sequence (128)")
    add("--masked", type=float, default=0.15, help="share of the tokens to predict (0.15)")
    parser.set_defaults(lr=5e-5, batch_size=32, epochs=3, clip_norm=1.0)


class Masked(Dataset):
    """Sequences as (tokens with masks, tokens to predict, or -100): both (length,) int64. The masks
    are drawn from torch's global generator, which the recipe seeds for each sample."""

    def __init__(self, path, tokenizer, args):
        tokens = text_once(args, path, tokenizer, str.splitlines)
        if len(tokens) < args.length:
            exit_with_error(f"argument --length: {path} has {len(tokens)} tokens")
        self.sequences = tokens.unfold(0, args.length, args.length)
        self.tokenizer = tokenizer
        self.special = torch.tensor(tokenizer.all_special_ids)
        self.share = args.masked

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        tokens = self.sequences[index].long()
        chosen = (torch.rand(tokens.shape) < self.share) & ~torch.isin(tokens, self.special)
        kind = torch.rand(tokens.shape)
        others = torch.randint(len(self.tokenizer), tokens.shape)
        inputs = tokens.where(~chosen | (kind >= 0.8), self.tokenizer.mask_token_id)
        inputs = inputs.where(~chosen | (kind < 0.9), others)
        return inputs, tokens.where(chosen, -100)


def load_data(args, accelerator):
    """Return the DataLoaders of (tokens with masks, targets) for training and test."""
    config = AutoConfig.from_pretrained(args.base)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    save_beside_weights(accelerator, args, AutoModelForMaskedLM, config, tokenizer)
    train_set, test_set = (Masked(path, tokenizer, args) for path in (args.train, args.test))
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device."""
    return load_pretrained(AutoModelForMaskedLM, args, AutoConfig.from_pretrained(args.base))


def compute_loss(model, batch, args):
    """Return the mean loss and accuracy of each sequence's masked tokens, and their number as its
    weight."""
    inputs, targets = batch
    logits = model(inputs).logits
    losses = F.cross_entropy(logits.mT, targets, reduction="none")  # 0 at -100
    number = (targets != -100).sum(1)
    right = (logits.argmax(2) == targets).sum(1)
    values = {"loss": losses.sum(1), "accuracy": right}
    return {k: x / number.clamp(min=1) for k, x in values.items()} | {"weight": number}
