# SPDX-License-Identifier: Apache-2.0
"""Orders of the samples in each epoch: shards, similar lengths, mixtures, balanced classes.

Each order depends on (seed, epoch) alone. So a run resumes exactly, and any number of processes
trains on the same global batches: each microbatch of each rank is a part of the next
`args.global_batch_size` samples.
"""

import random

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


def by_shard(generator, shard, buffer):
    """Shard after shard, shuffled within `buffer` samples. `shard`: (N,) int64, of each sample."""
    place = torch.randperm(int(shard.max()) + 1, generator=generator)
    indices = place[shard].argsort(stable=True)
    parts = indices.split(buffer)
    return torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts])


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
