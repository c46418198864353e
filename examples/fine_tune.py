# Parts of a copy, not a program: make new COPY=../mine.py WITH=fine_tune
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained language model of the Hugging Face Hub, or of a directory, on a text file.

    python tools/toy.py text
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/llama \\
        --text toy/text.txt --epochs 1 --batch-size 16 --lr 3e-3

With a model of the Hub and your own text.txt:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base HuggingFaceTB/SmolLM2-135M

The toy model has random weights: --lr is higher for it. Weights saved in bf16 are trained in fp32,
or small updates would be rounded away. `from_pretrained` loads model.safetensors of a run from a
directory with the other files of --base.

Group: language. Recipes: ddp, amp, sharded.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lib.fine_tuning import make_optimizer
from lib.once import text_once
from lib.token_losses import with_token_losses


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    parser.add_argument("--base", required=True, help="a directory, or a model's name on the Hub")
    parser.add_argument("--text", default="text.txt", help="a file, or a dataset (text.txt)")
    parser.add_argument("--column", default="text", help="of a dataset (text)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (128)")
    # Usual for pretrained weights.
    parser.set_defaults(lr=1e-5, batch_size=8, epochs=3, clip_norm=1.0)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, the last tenth of the text: (B, length + 1)
    int64, the tokens, and -100 behind the end of the text."""
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokens = text_once(args, args.text, tokenizer)
    starts = range(0, len(tokens) - 1, args.length)

    def read(batch):
        sequences = [tokens[i : i + args.length + 1] for i in batch]
        return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100).long()

    train, test = starts[: len(starts) * 9 // 10], starts[len(starts) * 9 // 10 :]
    options = {"batch_size": args.batch_size, "collate_fn": read}
    return DataLoader(train, shuffle=True, drop_last=True, **options), DataLoader(test, **options)


def build_model(args):
    """Return the model, on the CPU. For sharded_cifar.py also on the meta device, which has shapes
    and no weights."""
    if torch.empty(0).is_meta:
        config = AutoConfig.from_pretrained(args.base)
        return with_token_losses(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    return with_token_losses(model.train())


def compute_loss(model, batch, args):
    """Return the mean loss of each sequence's tokens, and their number as its weight."""
    inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
    counted = (targets != -100).sum(1)
    losses = model(inputs, targets=targets, use_cache=False)
    return {"loss": losses.sum(1) / counted, "weight": counted}
