# Parts of a copy, not a program: make new COPY=../mine.py WITH=speech
# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer with CTC to transcribe speech: wav files, and a list of their texts.

    python tools/toy.py speech
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --train toy/speech/train.tsv --test toy/speech/test.tsv --epochs 4 --batch-size 8 \\
        --layers 2 --width 128

Wav files have 16 bits and 16 kHz; the toy ones have a tone for each letter. A line of a list has
the path of a file, relative to the list's folder, a tab, and the text. --train and --test can be
datasets, also of FLAC or MP3 at any rate, which torchcodec decodes. An utterance has the same loss
in any batch. Those that are too short for their text have none; they are counted at the start.
test_wer and test_cer are the shares of wrong words and characters of the whole test set, by greedy
decoding. On GPUs, the gradient of torch's CTC is not deterministic: a resumed run differs by
rounding. `python mine.py --transcribe a.wav`, with the flags of a run that has ended, prints the
text of that file.

Group: speech. Recipes: ddp, amp, sharded.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_cifar import exit_with_error
from language_model import make_optimizer
from lib.order import Ordered, by_length
from lib.utterances import (
    MELS,
    Utterances,
    log_mel,
    pad_utterances,
    read_wav,
    samples_in,
    text_of,
    wrong_and_all,
)


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--train", default="train.tsv", help="lines of path, tab, text, or a dataset (train.tsv)")
    add("--test", default="test.tsv", help="a list or dataset for evaluation (test.tsv)")
    add("--audio", default="audio", help="the column of sounds in a dataset (audio)")
    add("--text", default="text", help="the column of texts in a dataset (text)")
    add("--characters", default=" 'abcdefghijklmnopqrstuvwxyz", help="default: a-z, space and '")
    add("--transcribe", metavar="PATH", help="print a wav file's text by the trained weights, exit")
    add("--width", type=int, default=256, help="of the model (256)")
    add("--layers", type=int, default=8, help="of the model (8)")
    parser.set_defaults(lr=5e-4)


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of batches of similar lengths."""
    if args.transcribe:
        print(transcribe(args))
        sys.exit()
    sources, names = (args.train, args.test), (args.audio, args.text)
    train_set, test_set = (Utterances(x, args.characters, names) for x in sources)
    train_set = Ordered(train_set, args.seed, by_length, train_set.lengths, args.global_batch_size)
    options = {"batch_size": args.batch_size, "num_workers": 2, "collate_fn": pad_utterances}
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


class Recognizer(nn.Module):
    """Convolutions, and a transformer. What is behind the end of an utterance has no effect."""

    def __init__(self, width, layers, outputs):
        super().__init__()
        halves = [nn.Conv1d(inputs, width, 3, stride=2, padding=1) for inputs in (MELS, width)]
        self.halves = nn.ModuleList(halves)
        # In place of an encoding of positions (Baevski et al. 2020, arXiv:2006.11477).
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        options = {"dim_feedforward": 4 * width, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, 4, **options) for _ in range(layers)]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, spectra, lengths):
        """Return logits, one every 40 ms: (B, T / 4, outputs), and their numbers, (B,)."""
        x = spectra.mT
        for half in self.halves:
            x = F.gelu(half(x))
            lengths = (lengths + 1) // 2
            behind = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
            x = x.masked_fill(behind[:, None], 0)
        x = (x + F.gelu(self.position(x))).mT
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=behind)
        return self.last(x), lengths


@torch.no_grad()
def transcribe(args):
    """Return the text of the wav file --transcribe, by the weights in --output-dir."""
    samples_in(args.transcribe)  # exits with an error if it is another format
    model = build_model(args).eval()
    model.load_state_dict(load_file(Path(args.output_dir, "model.safetensors")))
    spectra = log_mel(read_wav(args.transcribe))
    logits, _ = model(spectra[None], torch.tensor([len(spectra)]))
    return text_of(logits[0].argmax(1), args.characters)


def build_model(args):
    if args.width % 16:
        exit_with_error("argument --width: choose a multiple of 16")
    return Recognizer(args.width, args.layers, 1 + len(args.characters))


def compute_loss(model, batch, args):
    """Return the loss per character of each utterance, 0 if it is too short for its text, and the
    number of its characters. In evaluations, "outputs" are those of `wrong_and_all`."""
    spectra, lengths, texts, sizes = batch
    logits, lengths = model(spectra, lengths)
    scores = logits.float().log_softmax(2).transpose(0, 1)
    loss = F.ctc_loss(scores, texts, lengths, sizes, reduction="none", zero_infinity=True)
    weight = sizes.clamp(min=1)
    values = {"loss": loss / weight, "weight": weight}
    if not torch.is_grad_enabled():
        values["outputs"] = wrong_and_all(logits.argmax(2), lengths, texts, sizes, args.characters)
    return values


def test_metrics(outputs, args):
    """Return {"wer": the share of wrong words, "cer": of wrong characters}."""
    wrong_words, words, wrong, characters = torch.stack(outputs).sum(0).tolist()
    return {"wer": wrong_words / max(1, words), "cer": wrong / max(1, characters)}
