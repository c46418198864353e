# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers, and their probabilities under a reference: the model before its first step."""

import torch
from torch.utils.data import DataLoader, Dataset

from ddp_cifar import datasets_in
from lib.token_losses import token_losses


class Pairs(Dataset):
    """Tokens and targets of a chosen and a rejected answer, (N, 2, 2), with -100 behind the shorter
    one, and the log-probabilities of both under the reference, (2,)."""

    def __init__(self, pairs):
        self.pairs = pairs
        self.reference = torch.zeros(len(pairs), 2).share_memory_()  # persistent workers see it

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index], self.reference[index]


def conversation(prompt, answer):
    """Return the messages of a prompt and an answer, each a text or a list of messages. The answer
    may repeat the prompt, or its end."""
    prompt, answer = messages_of(prompt, "user"), messages_of(answer, "assistant")
    size = len(prompt)
    if any(answer[i : i + size] == prompt for i in range(len(answer))):
        return answer
    repeated = next(n for n in range(size, -1, -1) if prompt[size - n :] == answer[:n])
    if answer[repeated : repeated + 1] and answer[repeated]["role"] == "assistant":
        return [*prompt, *answer[repeated:]]
    raise ValueError("an answer begins with no message of the prompt, nor of the assistant")


def messages_of(given, role):
    messages = [{"role": role, "content": given}] if isinstance(given, str) else given
    if not (isinstance(messages, list) and all(isinstance(x, dict) for x in messages)):
        raise ValueError(f"{given!r:.80} is no text, and no list of messages")
    return messages


def log_probabilities(model, sequences):
    """Return those of answers: (B, 2, N, 2) in, (B, 2) out, both of a pair in one pass."""
    losses = token_losses(model, sequences.flatten(0, 1))
    return -losses.sum(1).unflatten(0, (-1, 2))


class Reference:
    """The log-probabilities of all pairs' answers under the model before its first step."""

    def __init__(self, *loaders):
        self.loaders = loaders
        self.pairs = [[*datasets_in(loader.dataset)][-1] for loader in loaders]

    def state_dict(self):
        return {"of": [pairs.reference for pairs in self.pairs]}

    def load_state_dict(self, state):
        for pairs, saved in zip(self.pairs, state["of"], strict=True):
            pairs.reference.copy_(saved)

    @torch.no_grad()
    def compute(self, run, model):
        """Pass over all pairs, each once. A signal ends the run after a batch."""
        for pairs, of_pairs in zip(self.pairs, self.loaders, strict=True):
            rows = []
            loader = DataLoader(pairs, run.args.batch_size, collate_fn=of_pairs.collate_fn)
            for (sequences, _), _ in run.test_batches(model, run.accelerator.prepare(loader)):
                found = log_probabilities(model, sequences)
                rows.append(run.accelerator.gather_for_metrics(found))
            pairs.reference.copy_(torch.cat(rows))
        if hasattr(model, "reshard"):  # FSDP keeps the root's parameters for a backward pass
            model.reshard()
