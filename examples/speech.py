# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer with CTC to transcribe speech: wav files, and a list of their texts.

    python -c "import numpy, os, wave; from random import randint, sample; [(
        file.setparams((1, 2, 16000, 0, 'NONE', '')), file.writeframes(tones.astype('<i2')),
        file.close(), print(f'{part}/{i}.wav', text, sep=chr(9), file=texts, flush=True))
        for part, n in [('train', 480), ('test', 48)] for _ in [os.mkdir(part)]
        for texts in [open(f'{part}.tsv', 'w')] for i in range(n)
        for text in [' '.join(''.join(sample('abcde', randint(1, 4))) for _ in range(randint(1, 3)))]
        for phases in [[numpy.arange(1600) * ' abcde'.index(x) / 9 for x in text]]
        for tones in [9999 * numpy.sin(numpy.concatenate(phases))]
        for file in [wave.open(f'{part}/{i}.wav', 'wb')]]"
    torchrun --nproc_per_node 2 mine.py --epochs 12 --batch-size 8 --layers 2 --width 128

The first command makes tones for letters. Files have 16 bits and 16 kHz, which ffmpeg makes of any
others. A line of a list has the path of a file, from the list's folder, a tab, and the text, all of
whose characters are in --characters. An utterance has the same loss in any batch: what is padded is
masked. The loss is per character. test_wer is of all words of the test set, and test_cer of all
characters, read greedily. On GPUs the gradient of torch's CTC is not deterministic: there a resumed
run is the uninterrupted one up to rounding.

Group: speech. Recipes: ddp, amp, sharded.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from language_model import make_optimizer
from lib.order import Ordered, by_length
from lib.utterances import MELS, Utterances, padded, read_list, wrong_and_all


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--train", default="train.tsv", help="list: path, tab, text in each line (train.tsv)")
    add("--test", default="test.tsv", help="a list for evaluation (test.tsv)")
    add("--characters", default=" 'abcdefghijklmnopqrstuvwxyz", help="of the texts (default: a-z)")
    add("--width", type=int, default=256, help="of the model (256)")
    add("--layers", type=int, default=8, help="of the model (8)")
    parser.set_defaults(lr=1e-3)


def load_data(args, accelerator):
    """Return the DataLoaders of (spectra, their lengths, characters, their numbers) for training
    and test, in batches of similar lengths."""
    train, test = (read_list(path, args.characters) for path in (args.train, args.test))
    lengths = torch.tensor([samples for _, _, samples in train])
    train_set = Utterances(train, args.characters)
    train_set = Ordered(train_set, args.seed, by_length, lengths, args.global_batch_size)
    test_set = Utterances(sorted(test, key=lambda row: row[2]), args.characters)
    options = {"batch_size": args.batch_size, "num_workers": 2, "collate_fn": padded}
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


class Recognizer(nn.Module):
    """Two convolutions, each with a stride of 2, one over positions (Baevski et al. 2020,
    arXiv:2006.11477), and a transformer. What is behind the end of an utterance has no effect."""

    def __init__(self, width, layers, outputs):
        super().__init__()
        self.first = nn.Conv1d(MELS, width, 3, stride=2, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.position = nn.Conv1d(width, width, 31, padding=15, groups=16)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, 4, **options) for _ in range(layers)]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, spectra, lengths):
        """Return logits every 40 ms, (B, T / 4, outputs), and their numbers, (B,)."""
        x = spectra.mT
        for convolution in (self.first, self.second):
            x = F.gelu(convolution(x))
            lengths = (lengths + 1) // 2
            behind = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
            x = x.masked_fill(behind[:, None], 0)
        x = (x + F.gelu(self.position(x))).mT
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=behind)
        return self.last(x), lengths


def build_model(args):
    """Return the model."""
    return Recognizer(args.width, args.layers, 1 + len(args.characters))


def compute_loss(model, batch, args):
    """Return the loss of each utterance per character, and the number of its characters. In
    evaluations "outputs" are (B, 4): wrong words, all words, wrong characters, all characters."""
    spectra, lengths, texts, sizes = batch
    logits, lengths = model(spectra, lengths)
    scores = logits.float().log_softmax(2)
    options = {"reduction": "none", "zero_infinity": True}  # infinite: a text that is too long
    loss = F.ctc_loss(scores.transpose(0, 1), texts, lengths, sizes, **options)
    weight = sizes.clamp(min=1)
    values = {"loss": loss / weight, "weight": weight}
    if torch.is_grad_enabled():
        return values
    said = [x[:n].unique_consecutive() for x, n in zip(logits.argmax(2), lengths, strict=True)]
    read = [x[:n] for x, n in zip(texts, sizes, strict=True)]
    return {**values, "outputs": wrong_and_all(said, read, args.characters)}


def test_metrics(outputs, args):
    """Return {"wer": the share of wrong words, "cer": of wrong characters}, of the test set."""
    wrong_words, words, wrong, characters = torch.stack(outputs).sum(0).tolist()
    return {"wer": wrong_words / max(1, words), "cer": wrong / max(1, characters)}
