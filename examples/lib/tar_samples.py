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

from lib.progress import with_progress


def tar_index(paths, members):
    """Return (N, 3) int64: shard, offset and size of each sample. The files of a sample are
    neighbours, with the same name up to its first dot, as webdataset writes them. Raise OSError,
    with shard and sample, unless each sample has one file of each type of `members`."""
    shards = []
    for shard, path in with_progress(enumerate(paths), len(paths), "index of shards"):
        try:
            with tarfile.open(path, "r:") as tar:
                shards.append([(shard, *place) for place in places_of_samples(tar, members)])
        except (tarfile.TarError, ValueError) as error:
            raise OSError(f"{path}: {error}") from None
    return torch.tensor([row for rows in shards for row in rows])


def places_of_samples(tar, members):
    """Yield the (offset, size) of each sample of an open tar file."""
    key = None
    for key, files in groupby(files_in(tar), key=lambda file: name_and_type(file)[0]):
        files = list(files)
        types = [name_and_type(file)[1] for file in files]
        if len(types) > len({*types}) or not {*members} <= {*types}:
            found = f"sample {key} has {', '.join(types)}"
            raise ValueError(f"{found}, not one {' and '.join(members)}: see --members")
        if any(file.issparse() for file in files):  # few bytes that could fill any memory
            raise ValueError(f"sample {key} has a sparse file")
        blocks = -(-files[-1].size // tarfile.BLOCKSIZE)
        end = files[-1].offset_data + blocks * tarfile.BLOCKSIZE
        yield files[0].offset, end - files[0].offset
    tar.fileobj.seek(tar.offset)
    rest = tar.fileobj.read(2 * tarfile.RECORDSIZE)
    if key is None or len(rest) < tarfile.BLOCKSIZE or any(rest):
        raise ValueError(f"it was cut off, or joined with another one, behind sample {key}")


def files_in(tar):
    """Yield the members of a tar file that are files of samples, by webdataset's rule: with a dot
    in their name, which is not the first character."""
    for file in tar:
        if file.isfile() and file.name.rpartition("/")[2].find(".") > 0:
            yield file


def name_and_type(file):
    """Return "shard/0001", "jpg" for shard/0001.JPG."""
    folder, slash, name = file.name.rpartition("/")
    name, _, ending = name.partition(".")
    return folder + slash + name, ending.lower()


@lru_cache(100)  # that many stay open
def open_file(path):
    return open(path, "rb", buffering=0)


class TarSamples(Dataset):
    """`decode` of the samples of tar files, in one read each: {"jpg": bytes, "cls": bytes}."""

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
            files = list(files_in(tar))
            sample = {name_and_type(x)[1]: tar.extractfile(x).read() for x in files}
        keys = sorted({name_and_type(x)[0] for x in files})
        if len(keys) != 1:
            raise OSError(f"{self.paths[shard]} is not as indexed: delete the index")
        try:
            return self.decode(sample)
        except (OSError, ValueError) as error:
            raise OSError(f"{self.paths[shard]}, sample {keys[0]}: {error}") from None
