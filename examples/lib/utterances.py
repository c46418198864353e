# SPDX-License-Identifier: Apache-2.0
"""Speech: wav files as spectra, texts as characters, and how many of their words are wrong."""

import math
import shlex
import struct
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein
from scipy.io import wavfile
from torch import nn
from torch.utils.data import Dataset

from ddp_cifar import RANK, exit_with_error, log_line
from lib.rows import is_dataset, nonempty_text, read_rows, stored

RATE = 16000  # samples per second
WINDOW, HOP, MELS = 400, 160, 80  # samples of 25 ms and of 10 ms; bands
SHORTENED = 4  # spectra for one output of the model


def read_list(path, names=("audio", "text")):
    """Return [(path of a wav file, its text, its number of samples)] of a file with a line for
    each: the path, from the folder of the list, a tab, and the text. Of a dataset with columns of
    these names, what is `Stored` is in place of a path."""
    if is_dataset(path):
        rows = read_rows(path, *zip(names, (stored, nonempty_text), strict=True))
        return [(sound, text, stored_samples(sound)) for sound, text in rows]
    rows = []
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except ValueError as error:
        exit_with_error(f"{path}: {error}")
    for number, line in enumerate(lines, 1):
        columns = line.strip("\r").split("\t")
        if len(columns) == 2:
            file = Path(path).parent / columns[0]
            rows.append((file, columns[1], samples_in(file)))
        elif line.strip():
            found = f"{path}, line {number}: {line!r:.80}"
            exit_with_error(f"{found}. Each line needs a path, a tab and a text")
    return rows


def samples_in(path):
    """Return the number of samples of a wav file. Exit with an error if it has another format."""
    try:
        rate, samples = wavfile.read(path, mmap=True)  # an error if the file was cut off
        found = f"{samples.dtype}, {rate} Hz"
    except (ValueError, struct.error) as error:
        found, samples = error, ()
    if found != f"int16, {RATE} Hz" or not len(samples):
        remedy = f"ffmpeg -i {shlex.quote(str(path))} -ar {RATE} -c:a pcm_s16le new.wav"
        found = f"{found}, {len(samples)} samples"
        exit_with_error(f"{path} is not a wav file of 16 bits and {RATE} Hz: {found}: {remedy}")
    return len(samples)


def is_too_short(text, samples):
    """Return whether CTC cannot write a text: between equal characters it needs an output more."""
    outputs = math.ceil((1 + samples // HOP) / SHORTENED)
    return outputs < len(text) + sum(one == other for one, other in pairwise(text))


def read_wav(path):
    """Return the mean of a file's channels: (N,) float32, from -1 to 1."""
    _, samples = wavfile.read(path)
    return torch.tensor(samples).float().view(len(samples), -1).mean(1) / 2**15


def opened(sound):
    """Return torchcodec's decoder of what is `Stored` as FLAC, MP3 or another format, or None if it
    is a wav file of 16 bits and RATE. Exit with an error if it cannot be decoded."""
    import datasets  # needed for these alone

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Reached EOF")
            rate, samples = wavfile.read(sound.file())
        if (rate, samples.dtype) == (RATE, "int16"):
            return None
    except wavfile.WavFileWarning as error:
        exit_with_error(f"{sound} was cut off: {error}")
    except (ValueError, struct.error):
        pass  # no wav file
    try:
        return datasets.Audio(RATE, num_channels=1).decode_example(sound.value())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        remedy = f"all but wav files of 16 bits and {RATE} Hz need torchcodec and ffmpeg"
        exit_with_error(f"{sound}: {reason:.200}. To decode it, {remedy}")


def stored_samples(sound):
    """Return the number of samples at RATE of what is `Stored`, by its header."""
    if decoder := opened(sound):
        return round(decoder.metadata.duration_seconds * RATE)
    return len(read_wav(sound.file()))


def read_sound(sound):
    """Return the mean of the channels of a wav file, or of what is `Stored`: (N,) float32, from -1
    to 1. Raise OSError if it was cut off."""
    if isinstance(sound, Path):
        return read_wav(sound)
    decoder = opened(sound)
    if decoder is None:
        return read_wav(sound.file())
    try:
        samples = decoder.get_all_samples().data[0]
    except RuntimeError as error:
        raise OSError(f"{sound}: {error}") from None
    if len(samples) < 0.9 * decoder.metadata.duration_seconds * RATE:  # its header may round
        raise OSError(f"{sound} was cut off: it has {len(samples)} samples")
    return samples


def mel_filters(bins):
    """Return (MELS, bins) float32: triangles, from 0 Hz to half the rate, whose corners are evenly
    spaced in mel = 2595 log10(1 + f / 700) (O'Shaughnessy 1987)."""
    highest = 2595 * math.log10(1 + RATE / 2 / 700)
    mel = torch.linspace(0, highest, MELS + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mel / 2595) - 1)
    left, center, right = (x[:, None] for x in (corners[:-2], corners[1:-1], corners[2:]))
    f = torch.linspace(0, RATE / 2, bins, dtype=torch.float64)
    sides = (f - left) / (center - left), (right - f) / (right - center)
    return torch.minimum(*sides).relu().float()


def log_mel(samples):
    """Return the spectra of (N,) samples, one every 10 ms: (1 + N // HOP, MELS) float32. Each band
    has mean 0 and variance 1."""
    options = {"center": True, "pad_mode": "constant", "return_complex": True}
    window = torch.hann_window(WINDOW)
    spectra = torch.stft(samples, 512, HOP, WINDOW, window, **options).abs() ** 2
    bands = (mel_filters(len(spectra)) @ spectra).clamp(min=1e-10).log().T
    return (bands - bands.mean(0)) / (bands.var(0, unbiased=False) + 1e-5).sqrt()


class Utterances(Dataset):
    """Those of a list or dataset, the shortest first, as (T, MELS) float32 and the numbers of the
    characters: (N,) int64. 0 is CTC's blank."""

    def __init__(self, path, characters, names=("audio", "text")):
        self.rows = sorted(read_list(path, names), key=lambda row: row[2])
        for _, text, _ in self.rows:
            if unknown := "".join(sorted({*text} - {*characters})):
                found = f"{path} also has {unknown!r}, in {text!r:.80}"
                exit_with_error(f"argument --characters: {found}")
        short = [str(file) for file, text, samples in self.rows if is_too_short(text, samples)]
        if short and RANK == 0:
            found = (
                f"{len(short)} of {len(self.rows)} are too short for their text: they teach nothing"
            )
            log_line(f"{path}: {found}, such as {short[0]}")
        self.lengths = torch.tensor([samples for _, _, samples in self.rows])
        self.characters = characters

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        sound, text, _ = self.rows[index]
        numbers = [1 + self.characters.index(x) for x in text]
        return log_mel(read_sound(sound)), torch.tensor(numbers, dtype=torch.int64)


def pad_utterances(batch):
    """Return (B, T, MELS) and (B,), (B, N) and (B,): spectra and texts, and their lengths."""
    columns = zip(*batch, strict=True)
    pad = nn.utils.rnn.pad_sequence
    pairs = [(pad(x, batch_first=True), torch.tensor([*map(len, x)])) for x in columns]
    return *pairs[0], *pairs[1]


def text_of(outputs, characters):
    """Return the text of the outputs with the highest scores, (T,) int64, by greedy decoding."""
    return "".join(characters[i - 1] for i in outputs.unique_consecutive().tolist() if i)


def wrong_and_all(best, lengths, texts, sizes, characters):
    """Return what `count_errors` does. `best` are the outputs with the highest scores, of which
    each utterance has the first `lengths`."""
    best, lengths, texts, sizes = (x.cpu() for x in (best, lengths, texts, sizes))
    truth = [
        "".join(characters[i - 1] for i in numbers[:size].tolist())
        for numbers, size in zip(texts, sizes, strict=True)
    ]
    found = [text_of(x[:n], characters) for x, n in zip(best, lengths, strict=True)]
    return count_errors(truth, found)


def count_errors(truth, found):
    """Return (B, 4) int64: a text's wrong words, all words, wrong characters, and all. Wrong are
    insertions, deletions and replacements (Levenshtein 1966)."""
    rows = []
    for text, other in zip(truth, found, strict=True):
        words = text.split()
        wrong = Levenshtein.distance(words, other.split()), Levenshtein.distance(text, other)
        rows.append([wrong[0], len(words), wrong[1], len(text)])
    return torch.tensor(rows)
