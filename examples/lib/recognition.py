# SPDX-License-Identifier: Apache-2.0
"""Utterances and their texts, as the processor of a pretrained model prepares them; CTC's loss."""

import math
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoProcessor

from ddp_cifar import exit_with_error
from lib.utterances import RATE, read_list, read_sound


def task_of(language):
    """Return the options that a Whisper of many languages needs, or none without a language."""
    return {"language": language, "task": "transcribe"} if language else {}


@lru_cache
def processor_of(base, language):
    return AutoProcessor.from_pretrained(base, **task_of(language))


def label_tokens(text, samples, processor, config, place):
    """Return the tokens of a text, which a model is to predict. Exit with an error that names the
    place if its tokenizer does not know all characters, or the utterance is too short or long."""
    tokenizer = processor.tokenizer

    def is_unknown(text):
        return tokenizer.unk_token_id in tokenizer(text, add_special_tokens=False)["input_ids"]

    if is_unknown(text):
        unknown = "".join(sorted(filter(is_unknown, {*text})))
        exit_with_error(f"{place}: the tokenizer of --base has no {unknown!r}, in {text!r:.80}")
    tokens = tokenizer(text)["input_ids"]
    if config.is_encoder_decoder and tokens[0] == config.decoder_start_token_id:
        del tokens[0]  # the model puts it before the labels
    longest = getattr(processor.feature_extractor, "n_samples", math.inf)
    most = getattr(config, "max_target_positions", math.inf)
    if not RATE / 40 <= samples <= longest or len(tokens) > most:
        found = f"{samples / RATE:g} s, and {len(tokens)} tokens"
        limits = f"0.025 to {longest / RATE:g} s, and at most {most:g} tokens"
        exit_with_error(f"{place}: --base reads {limits}, not {found}")
    return tokens


class Transcribed(Dataset):
    """The utterances of a list or dataset, the shortest first, as {"input_values": (T,) float32,
    ...} or what else the feature extractor returns, the tokens of their texts, and the texts."""

    def __init__(self, path, processor, config, names=("audio", "text")):
        self.extractor = processor.feature_extractor
        self.rows = []
        for number, (file, text, samples) in enumerate(read_list(path, names), 1):
            place = f"{path}, row {number}"
            tokens = label_tokens(text, samples, processor, config, place)
            self.rows.append((samples, file, tokens, text))
        self.rows.sort(key=lambda row: row[0])
        self.lengths = torch.tensor([row[0] for row in self.rows])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        _, file, tokens, text = self.rows[index]
        inputs = self.extractor(read_sound(file).numpy(), sampling_rate=RATE)
        return {name: x[0] for name, x in inputs.items()}, tokens, text

    def collate(self, batch):
        """Return what the feature extractor makes of the inputs, {"input_values": (B, T) float32,
        ...}, their lengths, (B,), the tokens, (B, N) int64 with -100 behind them, and the texts."""
        inputs, tokens, texts = zip(*batch, strict=True)
        name = self.extractor.model_input_names[0]
        lengths = torch.tensor([len(x[name]) for x in inputs])
        padded = self.extractor.pad(inputs, padding=True, return_tensors="pt")
        labels = [torch.tensor(x, dtype=torch.int64) for x in tokens]
        labels = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return dict(padded), lengths, labels, texts


def ctc(logits, lengths, labels, blank):
    """Return the loss of each utterance, (B,) float32, whether it is too short for its tokens, in
    which case the loss is 0, and the tokens with the highest scores, (B, T) int64, with blanks
    behind its end. It has the first `lengths` of its logits, (B, T, tokens)."""
    sizes = (labels != -100).sum(1)
    scores = logits.float().log_softmax(2).transpose(0, 1)
    options = {"blank": blank, "reduction": "none", "zero_infinity": True}
    loss = F.ctc_loss(scores, labels.clamp(min=0), lengths, sizes, **options)
    pairs = (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] != -100)  # need a blank between
    behind = torch.arange(logits.shape[1], device=lengths.device) >= lengths[:, None]
    best = logits.argmax(2).masked_fill(behind, blank)
    return loss, sizes + pairs.sum(1) > lengths, best
