# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, by the chat template of a pretrained model's tokenizer."""

import json
import re
from collections import Counter
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template

from ddp_cifar import RANK, exit_with_error, log_line
from lib.pretrained import save_card
from lib.rows import divided

DATE = datetime(2024, 7, 26)  # for templates that tell the model today's
REASONING = "reasoning_content", "reasoning", "thinking"  # its names in a message
REMEDY = "name a file of another one by --chat-template"
TARGETS = Counter()  # tokens of all answers, and of these the ones within --length


def add_chat_flags(parser):
    """Add the flags of a pretrained model and its chat template."""
    parser.add_argument("--base", required=True, help="a directory, or a model's name on the Hub")
    precisions = {"choices": ("float32", "bfloat16"), "default": "float32"}
    parser.add_argument("--base-dtype", help="bfloat16: with lora (float32)", **precisions)
    parser.add_argument("--chat-template", metavar="PATH", help="(that of --base)")
    parser.add_argument("--length", type=int, default=1024, help="most tokens of a chat (1024)")
    parser.add_argument("--test", help="other rows for the test (the last tenth)")
    parser.set_defaults(clip_norm=1.0)


def load_tokenizer(base, chat_template, kind=AutoTokenizer):
    """Return the tokenizer of --base, or its processor, if that is the `kind`, with its chat
    template, or that of a file."""
    tokenizer = kind.from_pretrained(base)
    if chat_template:
        tokenizer.chat_template = Path(chat_template).read_text("utf-8")
    if not tokenizer.chat_template:
        exit_with_error(f"{base} has no chat template: name a file of one by --chat-template")
    return tokenizer


def chat_tokenizer(args, accelerator, kind=AutoTokenizer):
    """Return the same by the flags. Save it beside what is trained, and how that generates."""
    tokenizer = load_tokenizer(args.base, args.chat_template, kind)
    config, remark = generation_of(args.base, tokenizer)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        AutoConfig.from_pretrained(args.base).save_pretrained(args.output_dir)
        save_card(args)
        config.to_json_file(Path(args.output_dir, "generation_config.json"))
    if remark:
        note(remark)
    return tokenizer


def generation_of(base, tokenizer):
    """Return how a base generates, a GenerationConfig with a list of the tokens at which it stops;
    and a remark, or None. An answer has to stop at the token in which the chat template ends it: if
    none of its tokens is in the list, that one is added."""
    try:
        config = GenerationConfig.from_pretrained(base)
    except OSError:  # there is no such file
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(base))
    eos = config.eos_token_id
    config.eos_token_id = eos if isinstance(eos, list) else [eos] * (eos is not None)
    targets = targets_of_an_answer(tokenizer)
    if not targets or {*targets} & {*config.eos_token_id}:
        return config, None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if targets[-1] not in tokenizer.added_tokens_decoder:
        return config, "the chat template ends an answer in no token: the model learns no end of it"
    config.eos_token_id.append(targets[-1])
    end = tokenizer.decode(targets[-1])
    return config, f"generation_config.json gets {end}, in which answers end here, as an eos"


def targets_of_an_answer(tokenizer):
    """Return the targets, without blank ones, of a chat of a question and an answer: a list, which
    is empty if the chat template needs more than that."""
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    if hasattr(tokenizer, "tokenizer"):  # that of a processor
        tokenizer.tokenizer.chat_template = tokenizer.chat_template
        tokenizer = tokenizer.tokenizer
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    chat = Chat(tokenizer, messages, None)
    try:
        targets = chat.sample(*chat.answer(1))[:, 1]
    except Exception:  # templates raise many types; the rows will tell
        return []
    targets = targets[targets != -100].tolist()
    return [token for token in targets if tokenizer.decode(token).strip()]


def read_chats(source, args, samples_of_rows):
    """Return the samples of a source for training, and those of --test, or of the last tenth of its
    rows, for the test. `samples_of_rows` of a source returns a list for each row: rows without
    samples are left out."""

    def read(source):
        rows = samples_of_rows(source)
        kept = [samples for samples in rows if samples]
        if len(kept) < len(rows):
            found = f"{source}: {len(kept)} of {len(rows)} rows have an answer within --length"
            note(f"{found}, the others are left out")
        return kept

    train, test = divided(read, source, args.test)
    if len(train) < args.global_batch_size:
        exit_with_error(f"{source}: {len(train)} rows for training do not fill one batch")
    if TARGETS["within"] < TARGETS["all"]:
        share = 1 - TARGETS["within"] / TARGETS["all"]
        note(f"{source}: --length cuts off {share:.2%} of the tokens of answers")
    return [[sample for samples in part for sample in samples] for part in (train, test)]


@cache
def note(line):
    """Print a line, once."""
    if RANK == 0:
        log_line(line)


def template_of(tokenizer, tools=None):
    """Return the chat template of a tokenizer. Where it names today's date, in any form, it names a
    fixed one: a resumed run has to have the same tokens."""
    template = tokenizer.get_chat_template(tools=tools)
    call = r"""strftime_now\(\s*(['"])(.*?)\1\s*\)"""
    return re.sub(call, lambda found: repr(DATE.strftime(found[2])), template)


def with_text(message):
    """Return a message whose content is a text: parts are joined. Beside tool calls it may be
    missing. Raise an error for all else: each template would write it in its own way."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {content!r:.80}, which is no text")
    return {**message, "content": content}


def in_common(one, other):
    """Return how many characters two texts have in common, up to their first difference."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def letters(text):
    """Return the letters and digits of a text, which a template may strip or write as JSON."""
    return re.sub(r"\\+[nrtbf]|[\W_]", "", text)


def functions_in(messages):
    """Return the functions that messages call: a list of {"name": ..., "arguments": ...}."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [call.get("function", call) for call in calls]


def texts_of(message):
    """Return the texts of a message, lists by kind. A content may have the reasoning, too."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    *thoughts, last = [x for part in parts for x in re.split("</?think>", part.get("text", ""))]
    thoughts += [message[name] for name in REASONING if name in message]
    names = [function["name"] for function in functions_in([message])]
    return {"content": [last], "reasoning": thoughts, "tool calls": names}


class Chat:
    """A conversation, as its chat template writes it."""

    def __init__(self, tokenizer, messages, tools):
        self.tokenizer = tokenizer
        tools = json.loads(tools) if isinstance(tools, str) else tools
        self.options = {"chat_template": template_of(tokenizer, tools), "tools": tools}
        self.marks = re.search(r"\{%-?\s*generation\s*-?%\}", self.options["chat_template"])
        # Data sets that have the same keys in all rows write null for what a message has not.
        self.messages = [
            {name: value for name, value in message.items() if value is not None}
            for message in deepcopy(messages)
        ]
        self.set_arguments()
        self.other_prompts = set()

    def set_arguments(self):
        """Make the arguments of tool calls objects, or texts if the template wants these."""
        functions = functions_in(self.messages)
        given = [function.get("arguments") or {} for function in functions]
        for function, x in zip(functions, given, strict=True):
            function["arguments"] = json.loads(x) if isinstance(x, str) else x
        if functions and not self.takes_objects(functions):
            for function, x in zip(functions, given, strict=True):
                text = x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
                function["arguments"] = text

    def takes_objects(self, functions):
        try:
            text = self.text()
        except Exception:  # templates raise many types
            return False
        return not any(str(x["arguments"]) in text for x in functions if x["arguments"])

    def text(self, end=None, prompt=False):
        """Return the text of the messages before `end`, with a `prompt` to go on."""
        options = {**self.options, "tokenize": False, "add_generation_prompt": prompt}
        return self.tokenizer.apply_chat_template(self.messages[:end], **options)

    def prompt(self):
        """Return the text of all messages, up to where an answer begins."""
        text = self.text(prompt=True)
        self.check_messages(text)
        return text

    def check_messages(self, text):
        """Raise an error if a text leaves out a message. It may leave out earlier reasoning."""
        written = letters(text)
        for index, message in enumerate(self.messages):
            self.check(index, written, reasoning=message["role"] != "assistant")

    def check(self, index, written, reasoning):
        """Raise an error if the letters of a text leave out a message's, with or without its
        reasoning."""
        message = self.messages[index]
        for kind, texts in texts_of(message).items():
            if kind == "reasoning" and not reasoning:
                continue
            if not all(letters(text) in written for text in texts):
                of = f"the {kind} of message {index + 1}, of the {message['role']}"
                raise ValueError(f"the chat template leaves out {of}: {REMEDY}")

    def answer(self, index):
        """Return the text up to the end of an answer, and the (begin, end) in it of what is the
        answer's: where it is no longer the prompt's, or what the template marks behind that. A
        prompt may open a thought that the answer has not."""
        before, prompt, text = self.text(index), self.text(index, prompt=True), self.text(index + 1)
        turn, begin = in_common(before, prompt), in_common(prompt, text)
        if begin < turn and not self.marks:
            raise ValueError(f"the chat template changes what comes before an answer: {REMEDY}")
        if begin < len(prompt):
            self.other_prompts.add(prompt[turn:])
        self.check(index, letters(text[min(turn, begin) :]), reasoning=True)
        spans = self.marked_spans(index + 1) if self.marks else [(begin, len(text))]
        return text, [(max(begin, first), end) for first, end in spans if end > begin]

    def marked_spans(self, end):
        """Return the (begin, end) that the template marks in the messages before `end`."""
        options = {**self.tokenizer.special_tokens_map, **self.options}
        options["return_assistant_tokens_mask"] = True
        _, [spans] = render_jinja_template([self.messages[:end]], **options)
        return spans

    def samples(self, answers):
        """Return the samples with these answers."""
        whole = self.text()
        self.check_messages(whole)
        found = [self.answer(index) for index in answers]
        for prompt in self.other_prompts:
            note(f"answers are generated behind {prompt!r}, but some are trained without it")
        if found and all(whole.startswith(text) for text, _ in found):
            return [self.sample(whole, [span for _, spans in found for span in spans])]
        return [self.sample(text, spans) for text, spans in found]

    def sample(self, text, spans):
        """Return the tokens of a text, and those of these (begin, end) as targets: (N, 2) int32."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        own = tokens_in(encoded["offset_mapping"], spans)
        return shifted(encoded["input_ids"], own)


def tokens_in(offsets, spans):
    """Return which tokens lie in one of these (begin, end), if only in part: (N,) bool."""
    begins, ends = torch.as_tensor(offsets).T
    inside = [(begins < end) & (begin < ends) for begin, end in spans]
    return torch.stack([begins < 0, *inside]).any(0)


def shifted(tokens, own):
    """Return tokens, and the next one of each if that is its `own`, or else -100: (N, 2) int32."""
    tokens = torch.tensor(tokens)
    return torch.stack([tokens[:-1], tokens.where(own, -100)[1:]], dim=1).int()


def answers_in(messages, first=0):
    """Return the indices of the assistant's messages, from message `first` on, without those that
    have "weight": 0."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[first:]:
        raise ValueError(f"no message has the role assistant, but {', '.join(roles[first:])}")
    weights = [message.get("weight") for message in messages]
    if others := {*weights} - {None, 0, 1}:
        raise ValueError(f"the weight of a message is {others.pop()}, neither 0 nor 1")
    trained = range(first, len(messages))
    answers = [i for i in trained if roles[i] == "assistant" and weights[i] != 0]
    if answers[:1] == [0]:
        raise ValueError("nothing comes before the answer")
    return answers


def samples_of(tokenizer, messages, args, tools=None, first=0):
    """Return a list of (N, 2) int32: each token of a conversation, and its target, which is the
    next token if that is of an answer (of message `first` or later) or of what ends it, or else
    -100. Samples that have no target within --length are left out.

    A template may mark answers, by {% generation %}. If what follows an answer changes it, such as
    where the reasoning of earlier turns is left out, each answer is a sample of its own, with the
    turns before it: as the model is used."""
    chat = Chat(tokenizer, [with_text(message) for message in messages], tools)
    whole = chat.samples(answers_in(messages, first))
    cut = [sample[: args.length] for sample in whole]
    for name, samples in (("all", whole), ("within", cut)):
        TARGETS[name] += sum(int((sample[:, 1] != -100).sum()) for sample in samples)
    return [sample for sample in cut if (sample[:, 1] != -100).any()]


def pad_chats(samples):
    """Return (B, longest, 2) int64, with -100 behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100).long()


def token_losses(model, samples):
    """Return the loss of each target in float32: (B, N, 2) in, (B, N) out, with 0 at -100."""
    tokens, targets = samples.unbind(-1)
    return model(tokens.clamp(min=0), targets=targets, use_cache=False)
