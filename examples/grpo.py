# Parts of a copy, not a program: make new COPY=../mine.py WITH=grpo
# SPDX-License-Identifier: Apache-2.0
"""Train a chat model by verifiable rewards: GRPO (Shao et al. 2024, arXiv:2402.03300).

    python tools/toy.py prompts
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/llama \\
        --prompts toy/prompts.jsonl --new-tokens 4 --batch-size 8 --epochs 2 --lr 1e-2

With a model of the Hub and your own prompts.jsonl:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base HuggingFaceTB/SmolLM2-135M-Instruct

The toy model has random weights: --lr is higher for it. Each row of --prompts has a "prompt", a
text or messages, and what `reward` reads: replace that function. --test names other rows; without
it the last tenth is the test set, with one completion of a prompt, greedy. Each other prompt gets
--group completions, which are drawn by random numbers of this prompt and epoch. So any number of
processes, any --batch-size and a resumed run train on the same ones. A completion ends with the
tokenizer's eos_token. Dropout is off.

Completions are made in each step by the model of that step (on-policy), so no ratio is clipped. The
loss is the mean over completions, as in the paper, or, by --mean-over tokens, over all tokens
of the global batch, as in Yu et al. 2025, arXiv:2503.14476. Then the other numbers of a step are
weighted by tokens, too, but not those of an evaluation. "equal_rewards" is the share of the groups
in which all rewards are equal: these train nothing. --beta adds the divergence from --base, which
is the model without its adapter. Without lora it is a second model on each process. In sharded, all
ranks generate as long as one of them needs. How to chat with the trained model: see the example
sft.

Group: language. Recipes: ddp, amp, sharded.
"""

import re
from functools import partial

import torch
from torch.utils.data import DataLoader

from ddp_cifar import exit_with_error, positive
from lib.chat import add_chat_flags, chat_tokenizer
from lib.completions import Prompts, collate, complete, prompt_tokens
from lib.policy import group_loss
from lib.rows import divided, read_lines
from sft import build_model, make_optimizer


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add_chat_flags(parser)
    add = parser.add_argument
    add("--prompts", default="prompts.jsonl", help="a file, or a dataset (prompts.jsonl)")
    add("--group", type=positive(int), default=8, help="completions of a prompt (8)")
    add("--new-tokens", type=positive(int), default=256, help="most of a completion (256)")
    add("--temperature", type=positive(float), default=1.0, help="of the completions (1.0)")
    add("--mean-over", choices=("completions", "tokens"), default="completions")
    add("--beta", type=float, default=0.0, help="weight of the KL divergence from --base (0)")
    parser.set_defaults(lr=1e-6, batch_size=2, epochs=1)


def reward(completion, line):
    """Return the reward of a completion, a text, by its prompt's line of JSON. Replace this.

    Here it is 1 if the last number is that of "answer", or if "pattern", a regular expression,
    matches the whole text, and else 0."""
    if "answer" in line:
        number = r"-?\d[\d,]*(?:\.\d+)?"
        (*_, right), said = (re.findall(number, str(x)) for x in (line["answer"], completion))
        same = said and float(said[-1].replace(",", "")) == float(right.replace(",", ""))
    else:
        same = re.fullmatch(line["pattern"], completion, re.DOTALL)
    return float(bool(same))


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of what `collate` returns."""
    if args.group < 2:
        exit_with_error("argument --group: choose 2 or more, which are compared")
    tokenizer = chat_tokenizer(args, accelerator)

    def sample(line):
        reward("", line)  # a line without what it reads is an error now
        return prompt_tokens(tokenizer, line, args), line

    form = '{"prompt": ..., "answer": ...} or {"prompt": ..., "pattern": ...}'
    train, test = divided(partial(read_lines, form=form, make=sample), args.prompts, args.test)
    options = {"batch_size": args.batch_size, "collate_fn": collate}
    train_loader = DataLoader(Prompts(train, args), shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(Prompts(test, args), **options)


def compute_loss(model, batch, args):
    """Return the loss of each prompt's group of completions. In an evaluation, that of the most
    probable completion is its reward, times -1."""
    prompts, lines, numbers = batch
    model.eval()  # no dropout: the completions are those of the policy that is trained
    group = args.group if torch.is_grad_enabled() else 1
    prompts = prompts.repeat_interleave(group, dim=0)
    drawn = numbers.flatten(0, 1) if torch.is_grad_enabled() else None
    completions, texts = complete(model, prompts, drawn, args)
    lines = [line for line in lines for _ in range(group)]
    rewards = [reward(text, line) for text, line in zip(texts, lines, strict=True)]
    rewards = torch.tensor(rewards, device=prompts.device)
    if not torch.is_grad_enabled():
        lengths = (completions != -100).sum(1).float()
        return {"loss": -rewards, "reward": rewards, "length": lengths}
    return group_loss(model, prompts, completions, rewards, args)
