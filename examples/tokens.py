# Parts of a copy, not a program: make new COPY=../mine.py WITH=tokens
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on files of tokens: of nanoGPT, llm.c, modded-nanogpt, or Megatron.

    python tools/toy.py tokens
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --train toy/tokens/plain.bin toy/tokens/header.bin toy/tokens/megatron.bin \\
        --vocabulary 999 --length 64 --epochs 1 --batch-size 16

With files of your own, of tokens of GPT-2:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --train fineweb_train_*.bin --test fineweb_val_000000.bin

The files are mapped, not read into memory. Of Megatron's name the .bin; its .idx lies beside it. A
file without a header has tokens of 16 bits, or of 32 if --vocabulary is above 65,536. A sample is a
window of --length tokens and their targets. Windows lie one after the other in a file, and go
across its documents. Their order is a function of (seed, epoch), so a run resumes exactly, also on
another number of processes. Without --test the last hundredth of the windows is the test set.

Group: language. Recipes: ddp, amp, sharded.
"""

from torch.utils.data import ConcatDataset, DataLoader, Subset
from transformers import AutoModelForCausalLM, LlamaConfig

from ddp_cifar import exit_with_error, positive
from fine_tune import compute_loss
from language_model import make_optimizer
from lib.token_files import Windows
from lib.token_losses import with_token_losses


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--train", nargs="+", required=True, metavar="PATH", help="files of tokens")
    add("--test", nargs="+", metavar="PATH", help="others (the last windows of --train)")
    add("--vocabulary", type=positive(int), default=50304, help="tokens that there are (50304)")
    add("--length", type=positive(int), default=1024, help="tokens of a window (1024)")
    parser.set_defaults(lr=3e-3, batch_size=8, clip_norm=1.0)


def read_windows(paths, args):
    """Return the windows of some files, one file after the other."""
    try:
        return ConcatDataset([Windows(path, args.length, args.vocabulary) for path in paths])
    except OSError as error:
        exit_with_error(error)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of (B, length + 1) int64."""
    train = read_windows(args.train, args)
    if args.test:
        test = read_windows(args.test, args)
    else:
        first = len(train) - -(-len(train) // 100)
        train, test = (Subset(train, x) for x in (range(first), range(first, len(train))))
    train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test, args.batch_size)


def build_model(args):
    """Return the model, on the CPU."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": args.length}
    config = LlamaConfig(vocab_size=args.vocabulary, tie_word_embeddings=True, **sizes)
    return with_token_losses(AutoModelForCausalLM.from_config(config))
