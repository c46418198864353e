# SPDX-License-Identifier: Apache-2.0
"""Orders of the samples in each epoch: shards, similar lengths, mixtures, balanced classes.

Each order depends on (seed, epoch) alone. So a run resumes exactly, and any number of processes
trains on the same global batches: each microbatch of each rank is a part of the next
`args.global_batch_size` samples.
"""

import random
from functools import lru_cache

import torch
from torch.utils.data import Dataset


class Ordered(Dataset):
    """A dataset in the order that `order(generator, *arguments)` returns for each epoch: (N,) int64
    indices, the same N in all epochs. For a DataLoader without shuffle. The recipe also calls the
    `set_epoch` of `dataset`, if it has one."""

    def __init__(self, dataset, seed, order, *arguments):
        self.dataset = dataset
        self.seed = seed
        self.order = order
        self.arguments = arguments
        self.indices = order(torch.Generator(), *arguments).share_memory_()

    def set_epoch(self, epoch):
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        self.indices[:] = self.order(generator, *self.arguments)  # persistent workers see it

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.dataset[int(self.indices[index])]


class ByLane(Dataset):
    """A dataset of groups, such as shards or row groups, in lanes side by side, of which an epoch
    takes `block` samples in turn. A lane has one group after the other, each shuffled. So a worker
    whose samples are in a few lanes opens each group once. `sizes`: (G,) int64, samples of each
    group. Less than `lanes * block` samples are left out, in each epoch others. The place of a
    sample is computed: there is no memory for each."""

    def __init__(self, dataset, seed, sizes, lanes, block):
        self.dataset = dataset
        self.seed = seed
        self.sizes = sizes
        self.begins = sizes.cumsum(0) - sizes
        self.lanes = lanes
        self.block = block
        self.length = int(sizes.sum()) // (lanes * block) * block  # of a lane
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # for persistent workers

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __len__(self):
        return self.lanes * self.length

    def place(self, position):
        """Return the lane, the group and the index of the sample at a position of the epoch."""
        if position >= len(self):
            raise IndexError(position)  # an iteration ends with it
        epoch = self.epoch.item()
        turn, rest = divmod(position, self.lanes * self.block)
        lane, number = divmod(rest, self.block)
        at = lane * self.length + turn * self.block + number
        groups = shuffled(self.seed, epoch, "groups", len(self.sizes))
        ends = group_ends(self.seed, epoch, self.sizes)
        nth = int(torch.searchsorted(ends, at, right=True))
        group = int(groups[nth])
        size = int(self.sizes[group])
        row = shuffled(self.seed, epoch, group, size)[at - int(ends[nth]) + size]
        return lane, group, int(self.begins[group] + row)

    def __getitem__(self, position):
        return self.dataset[self.place(position)[2]]


@lru_cache(256)
def shuffled(seed, epoch, name, size):
    """Return (size,) int32, an order that is a function of the other arguments."""
    generator = torch.Generator().manual_seed(
        random.Random(f"{seed}/{epoch}/{name}").getrandbits(32)
    )
    return torch.randperm(size, dtype=torch.int32, generator=generator)


@lru_cache(4)
def group_ends(seed, epoch, sizes):
    """Return where the groups of a size end, (G,) int64, in the order of an epoch."""
    return sizes[shuffled(seed, epoch, "groups", len(sizes))].cumsum(0)


def by_length(generator, lengths, batch):
    """Batches of similar lengths, in a random order. `lengths`: (N,); `batch`: the global batch.
    Less than a batch is left out, in each epoch another part."""
    whole = len(lengths) // batch * batch
    pools = torch.randperm(len(lengths), generator=generator)[:whole].split(100 * batch)
    batches = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    batches = batches.view(-1, batch)
    return batches[torch.randperm(len(batches), generator=generator)].flatten()


def mixture(generator, sizes, weights, samples):
    """The K datasets of a ConcatDataset, of these sizes, by their weights: `samples` in all. Any
    window has the share of each, to within K samples."""
    indices, places = [], []
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        count = round(samples * weight / sum(weights))
        passes = [torch.randperm(size, generator=generator) for _ in range(count // size + 1)]
        indices.append(sum(sizes[:index]) + torch.cat(passes)[:count])
        places.append(torch.arange(0.5, count, dtype=torch.float64) / count)
    return torch.cat(indices)[torch.cat(places).argsort(stable=True)]


def balanced(generator, labels):
    """Each class as often as any other. `labels`: (N,) int64."""
    weights = 1 / labels.bincount()[labels]
    return torch.multinomial(weights, len(labels), replacement=True, generator=generator)
