# SPDX-License-Identifier: Apache-2.0
"""Sentences whose words have tags, and the entities that the tags describe."""

import re
from collections import Counter
from functools import lru_cache, partial

import torch
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from torch.utils.data import Dataset

from ddp_cifar import RANK, exit_with_error, log_line
from lib.once import made_once, tokenizer_key
from lib.rows import list_of_texts, read_rows

ENDINGS = ".conll", ".txt", ".iob", ".iob2", ".bio"  # of CoNLL's columns, in lower or upper case


def read_tagged(path, args):
    """Return [(words, their tags)] for the sentences of a file."""
    if path.lower().endswith(ENDINGS):
        sentences = read_conll(path)
    else:
        sentences = read_rows(path, (args.words, list_of_texts), (args.tags, list_of_texts))
    for number, (words, tags) in enumerate(sentences, 1):
        if len(words) != len(tags):
            exit_with_error(f"{path}, row {number}: {len(words)} words, but {len(tags)} tags")
    tags = {tag for _, tags in sentences for tag in tags}
    if len(tags) < 2:
        exit_with_error(f"{path}: all words have the same tag, {', '.join(tags)}: name others")
    if all(re.fullmatch("[0-9.-]+", word) for words, _ in sentences for word in words):
        exit_with_error(f"{path}: all words are numbers: write each word before its tag")
    return sentences


@lru_cache(2)
def read_conll(path):
    """Return [(words, their tags)] for the sentences of a file in the format of CoNLL 2003: a line
    has a word, other columns and a tag; an empty line ends a sentence. Before the first word of one
    a line that begins with "# " is a comment."""
    sentences, comments, number_of_columns = [([], [])], [], None
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().split("\n")
    except (OSError, ValueError) as error:
        exit_with_error(f"cannot read {path}: {error}")
    for number, line in enumerate(lines, 1):
        columns = re.split("[ \t]+", line.strip(" \t\r"))  # a word may have other spaces
        if len(columns) == 10 and columns[0].isdigit():
            exit_with_error(f"{path}, line {number} is of CoNLL-U: write a word and its tag alone")
        if columns == [""] or columns[0] == "-DOCSTART-":
            sentences.append(([], []))
        elif line.startswith("# ") and not sentences[-1][0]:
            comments.append(line)
        elif len(columns) == 1:
            exit_with_error(f"{path}, line {number}: {line!r:.80} is a word without a tag")
        elif len(columns) != (number_of_columns := number_of_columns or len(columns)):
            found = f"{path}, line {number}: {line!r:.80} has {len(columns)} columns"
            exit_with_error(f"{found}, the first word {number_of_columns}")
        else:
            sentences[-1][0].append(columns[0])
            sentences[-1][1].append(columns[-1])
    if comments and RANK == 0:
        log_line(f"{path}: {len(comments)} lines are comments, such as {comments[0]!r:.80}")
    return [sentence for sentence in sentences if sentence[0]]


class Labelled(Dataset):
    """The tokens of each sentence of a source, {"input_ids": [...], ...}, and "labels": the number
    of a word's tag at its first token, and -100 at all others."""

    def __init__(self, tokenizer, source, config, args):
        self.names = [*tokenizer.model_input_names, "labels"]
        read = partial(read_tagged, args=args)
        make = partial(labelled_tokens, tokenizer, config.label2id, args)
        key = tokenizer_key(tokenizer), config.label2id, args.length, args.words, args.tags
        self.samples, _ = made_once(args, source, "words and tags", make, key, Counter(), read)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return dict(zip(self.names, self.samples[index].T.tolist(), strict=True))


def labelled_tokens(tokenizer, numbers, args, sentence):
    """Return [what the tokenizer makes of a sentence, in its order, and the labels: (N, K) int32].
    Raise ValueError for a tag that has none of the numbers."""
    words, tags = sentence
    if unknown := {*tags} - numbers.keys():
        raise ValueError(f"no word of {args.train} has the tag {min(unknown)}")
    options = {"truncation": True, "max_length": args.length, "return_offsets_mapping": True}
    text = " ".join(words)  # as a pipeline gets it
    encoded = tokenizer(text, **options)
    word_at = [index for index, word in enumerate(words) for _ in f"{word} "]
    labels, last = [], None
    for begin, end in encoded["offset_mapping"]:
        word = word_at[end - 1] if text[begin:end].strip() else last
        labels.append(numbers[tags[word]] if word != last else -100)
        last = word
    columns = *(encoded[name] for name in tokenizer.model_input_names), labels
    return [torch.tensor(columns, dtype=torch.int32).T]


def entity_scores(sentences):
    """Return precision, recall and F1 of entities, over all pairs of true and predicted tags, by
    the rules of conlleval (Tjong Kim Sang and De Meulder 2003, arXiv:cs/0306050), or {} if a tag is
    not of an entity."""
    truth, found = (list(tags) for tags in zip(*sentences, strict=True))
    tags = {tag for sentence in (*truth, *found) for tag in sentence}
    if not all(re.fullmatch("O|[BIES]-.+", tag) for tag in tags):
        return {}
    options = {"average": "micro", "zero_division": 0}
    scores = precision_recall_fscore_support(truth, found, **options)
    return dict(zip(("precision", "recall", "f1"), map(float, scores[:3]), strict=True))
