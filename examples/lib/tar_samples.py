# SPDX-License-Identifier: Apache-2.0
"""Samples of tar files, as webdataset writes them, for tar_shards.py: no iterable dataset.

Their index is in memory: 24 bytes per sample, which processes share if they map its file.
"""

import io
import os
import tarfile
from functools import lru_cache
from itertools import groupby

import torch
from torch.utils.data import Dataset


def tar_index(paths):
    """Return (N, 3) int64: shard, offset and size of each sample. The files of a sample are
    neighbours, with the same name up to its first dot, as webdataset writes them."""
    shards = []
    for shard, path in enumerate(paths):
        samples = []
        with tarfile.open(path) as tar:
            files = filter(tarfile.TarInfo.isfile, tar)
            for _, sample in groupby(files, key=lambda file: name_and_type(file)[0]):
                first, *_, last = 2 * list(sample)
                blocks = -(-last.size // tarfile.BLOCKSIZE)
                end = last.offset_data + blocks * tarfile.BLOCKSIZE
                samples.append((shard, first.offset, end - first.offset))
        shards.append(torch.tensor(samples))
    return torch.cat(shards)


def name_and_type(file):
    """Return "shard/0001", "jpg" for shard/0001.jpg."""
    folder, slash, name = file.name.rpartition("/")
    name, _, ending = name.partition(".")
    return folder + slash + name, ending


@lru_cache(100)  # that many stay open
def open_file(path):
    return open(path, "rb", buffering=0)


class TarSamples(Dataset):
    """`decode` of the samples of tar files, in one read each: {"jpg": bytes, "cls": bytes,
    "__key__": the common part of the files' names}."""

    def __init__(self, paths, index, decode):
        self.paths = paths
        self.index = index
        self.decode = decode

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        shard, offset, size = self.index[index].tolist()
        content = os.pread(open_file(self.paths[shard]).fileno(), size, offset)
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            files = list(filter(tarfile.TarInfo.isfile, tar))
            sample = {name_and_type(x)[1]: tar.extractfile(x).read() for x in files}
        keys = sorted({name_and_type(x)[0] for x in files})
        if len(keys) != 1:
            raise OSError(f"{self.paths[shard]} is not as indexed: delete the index")
        return self.decode(sample | {"__key__": keys[0]})
