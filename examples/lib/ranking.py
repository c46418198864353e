# SPDX-License-Identifier: Apache-2.0
"""Queries with documents that are relevant or not, and how well scores rank these."""

from collections import defaultdict

import torch
from sklearn.metrics import ndcg_score
from torch.utils.data import Dataset

from ddp_cifar import exit_with_error


def relevance(value):
    """Return a label as a number from 0 to 1."""
    if not 0 <= float(value) <= 1:
        raise ValueError(f"the label {value} is not from 0 to 1")
    return float(value)


class WithNegatives(Dataset):
    """(query, document, 1.0) of each pair, and as many times (query, other document, 0.0) as there
    are `negatives`. The others are drawn from the documents of other queries, by torch's global
    generator, which the recipe seeds for each sample."""

    def __init__(self, pairs, negatives):
        self.pairs = pairs
        self.each = 1 + negatives
        self.documents = sorted({document for _, document in pairs})
        self.relevant = defaultdict(set)
        for query, document in pairs:
            self.relevant[query].add(document)
        for query, documents in self.relevant.items():
            if len(documents) == len(self.documents):
                exit_with_error(f"argument --negatives: all documents belong to {query!r:.80}")

    def __len__(self):
        return self.each * len(self.pairs)

    def __getitem__(self, index):
        query, document = self.pairs[index // self.each]
        if index % self.each == 0:
            return query, document, 1.0
        while document in self.relevant[query]:
            document = self.documents[torch.randint(len(self.documents), ())]
        return query, document, 0.0


def ranking_scores(rows):
    """Return the means of NDCG@10 (Jarvelin and Kekalainen 2002), and of the reciprocal rank of the
    first relevant document, over all queries that have one and another document. `rows` are
    (query, label, score). Of equal scores NDCG takes the mean of all orders; for the reciprocal
    rank the less relevant document ranks first."""
    documents = defaultdict(list)
    for query, label, score in rows:
        documents[query].append((score, label))
    gains, ranks = [], []
    for ranked in documents.values():
        scores, labels = zip(*sorted(ranked, key=lambda x: (-x[0], x[1])), strict=True)
        if any(labels) and len(labels) > 1:
            gains.append(float(ndcg_score([labels], [scores], k=10)))
            ranks.append(1 / (1 + next(i for i, label in enumerate(labels) if label)))
    queries = max(len(ranks), 1)
    return {"ndcg_at_10": sum(gains) / queries, "mrr": sum(ranks) / queries}
