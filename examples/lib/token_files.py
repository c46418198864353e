# SPDX-License-Identifier: Apache-2.0
"""Files of tokens, as nanoGPT, llm.c, modded-nanogpt and Megatron write them."""

import struct
from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset

HEADER = 256  # numbers of 32 bits: a magic number, a version, the number of tokens, and zeros
OF_HEADER = {20240520: "<u2", 20240801: "<u4"}  # llm.c's files for GPT-2 and for Llama 3
OF_INDEX = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's


def layout(path, vocabulary):
    """Return the type of a file's tokens, at which byte they begin, and how many there are as its
    header says, or the .idx beside it, or None. Raise OSError if it is in no known format."""
    index = Path(path).with_suffix(".idx")
    if index.exists():
        with open(index, "rb") as file:
            magic, kind, sequences = struct.unpack("<9s8xBQ8x", file.read(34).ljust(34))
        if magic != b"MMIDIDX\0\0" or kind not in OF_INDEX:
            raise OSError(f"{index} is no index of Megatron's: move it away if it is of another")
        lengths = numpy.memmap(index, "<i4", "r", 34, (sequences,))
        return OF_INDEX[kind], 0, int(lengths.sum(dtype="int64"))
    header = numpy.fromfile(path, "<i4", HEADER)
    if len(header) == HEADER and int(header[0]) in OF_HEADER:
        return OF_HEADER[int(header[0])], 4 * HEADER, int(header[2])
    if len(header) == HEADER and not header[3:].any():
        known = ", ".join(map(str, OF_HEADER))
        raise OSError(f"{path}: its header has the magic number {header[0]}, none of {known}")
    kind = "<u2" if vocabulary <= 2**16 else "<u4"
    check_tokens(path, kind)
    return kind, 0, None


def check_tokens(path, kind):
    """Raise OSError unless a file without a header begins with tokens of this type."""
    begin = numpy.fromfile(path, "u1", 4096)
    if begin[:6].tobytes() == b"\x93NUMPY":
        remedy = f'write its numbers alone: numpy.load(...).astype("{kind}").tofile("new.bin")'
        raise OSError(f"{path} is of numpy.save: {remedy}")
    controls = [x for x in range(32) if chr(x) not in "\t\n\f\r"]  # high bytes of usual tokens
    if len(begin) and not numpy.isin(begin, controls).any():
        raise OSError(f"{path} is a text: make tokens of it first, or use language_model")
    tokens = begin[: len(begin) // 4 * 4].view(kind)
    if len(tokens) > 1 and not (tokens[::2].any() and tokens[1::2].any()):
        width = 8 * numpy.dtype(kind).itemsize
        raise OSError(f"{path}: every second number of {width} bits is 0: save tokens with as many")


def map_tokens(path, vocabulary):
    """Return the tokens of a file, which stay on the disk: (N,) of a type of integers. Raise an
    error if it was cut off."""
    kind, begin, said = layout(path, vocabulary)
    width = numpy.dtype(kind).itemsize
    count, rest = divmod(Path(path).stat().st_size - begin, width)
    if rest or said not in (None, count):
        expected = f"{said} tokens of" if said else "a multiple of"
        remedy = "it was cut off, or has tokens of another type"
        raise OSError(f"{path} has {count * width + rest} bytes, not {expected} {width}: {remedy}")
    return numpy.memmap(path, kind, "r", begin, (count,))


class Windows(Dataset):
    """The tokens of a file in windows, (length + 1,) int64. The next one begins with the last token
    of the one before, which had no target yet. What is left at the end is no window."""

    def __init__(self, path, length, vocabulary):
        self.path = path
        self.length = length
        self.vocabulary = vocabulary
        try:
            self.tokens = map_tokens(path, vocabulary)
        except ValueError as error:  # NumPy's, if a file is empty, or an index was cut off
            raise OSError(f"{path}: {error}") from None
        if len(self) < 1:
            raise OSError(f"{path} has less than --length + 1 tokens")

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        begin = index * self.length
        window = torch.tensor(self.tokens[begin : begin + self.length + 1].astype("int64"))
        wrong = (window < 0) | (window >= self.vocabulary)
        if wrong.any():
            place = begin + int(wrong.int().argmax())
            found = f"{self.path}: token {place} is {self.tokens[place]}"
            remedy = "set a larger --vocabulary, or else the file is in another format"
            raise OSError(f"{found}, outside of the {self.vocabulary} words: {remedy}")
        return window
