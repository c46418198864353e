# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, by the chat template of a pretrained model's tokenizer."""

import json
import re
from bisect import bisect_left
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import get_worker_info
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template

from ddp_cifar import RANK, exit_with_error, log_line
from lib.pretrained import save_card
from lib.turns import REMEDY, answers_in, calls_in, check_text, known, squeezed, texts_of, with_text

DATE = datetime(2024, 7, 26)  # for templates that tell the model today's
OPENED = re.compile(r"[<\[][^<>\[\]]*$")  # a tag that is not closed
PLAIN = "\ue000"  # the content of an answer: what no template and no chat has
TODAY = re.compile(r"""strftime_now\(\s*(['"])([^'"]*)\1\s*\)""")
TARGETS = Counter()  # tokens of all answers, of these the ones within --length, and each `note`


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
        [sample] = chat.samples([1])
    except Exception:  # templates raise many types; the rows will tell
        return []
    targets = [token for token in sample[:, 1].tolist() if token != -100]
    return [token for token in targets if tokenizer.decode(token).strip()]


def read_chats(source, args, read):
    """Return the samples of a source for training, and those of --test, or of the last tenth of its
    rows, for the test. `read` returns what `made_once` does: rows without samples are left out."""

    def samples_of_rows(source):
        samples, per_row = read(source)
        kept = per_row[per_row > 0]
        if len(kept) < len(per_row):
            found = f"{source}: {len(kept)} of {len(per_row)} rows have an answer within --length"
            note(f"{found}, the others are left out")
        return samples, kept

    train, per_row = samples_of_rows(source)
    rows = len(per_row)
    if args.test:
        test, _ = samples_of_rows(args.test)
    else:
        rows = rows * 9 // 10
        first = int(per_row[:rows].sum())
        test, train = train.chosen(slice(first, None)), train.chosen(slice(first))
    for line in TARGETS.keys() - {"all", "within"}:
        say(line)
    if rows < args.global_batch_size:
        exit_with_error(f"{source}: {rows} rows for training do not fill one batch")
    if TARGETS["within"] < TARGETS["all"]:
        share = 1 - TARGETS["within"] / TARGETS["all"]
        note(f"{source}: --length cuts off {share:.2%} of the tokens of answers")
    return train, test


def note(line):
    """Print a line, once. A worker counts it alone: see `made_once`."""
    TARGETS[line] += 1
    if not get_worker_info():
        say(line)


@cache
def say(line):
    if RANK == 0:
        log_line(line)


def in_common(one, other):
    """Return how many characters two texts have in common, up to their first difference."""
    both = range(min(len(one), len(other)))
    return bisect_left(both, True, key=lambda last: one[: last + 1] != other[: last + 1])


@cache
def special_tokens(tokenizer):
    """Return a regular expression of a tokenizer's special tokens."""
    tokens = [x.content for x in tokenizer.added_tokens_decoder.values() if x.special]
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


class Chat:
    """A conversation, as its chat template writes it."""

    def __init__(self, tokenizer, messages, tools):
        self.tokenizer = tokenizer
        tools = json.loads(tools or "null") if isinstance(tools, str) else tools
        # Where it names today's date, in any form: a resumed run has to have the same tokens.
        template = tokenizer.get_chat_template(tools=tools)
        template = TODAY.sub(lambda found: repr(DATE.strftime(found[2])), template)
        self.options = {"chat_template": template, "tools": tools}
        self.marks = re.search(r"\{%-?\s*generation\s*-?%\}", template)
        self.messages = known(messages, template)
        self.set_arguments()
        self.other_prompts = set()

    def set_arguments(self):
        """Make the arguments of tool calls objects, or texts if the template wants these."""
        calls = calls_in(self.messages)
        given = [call.get("arguments") or {} for call in calls]
        for call, x in zip(calls, given, strict=True):
            call["arguments"] = json.loads(x) if isinstance(x, str) else x
        if calls and not self.takes_objects(calls):
            for call, x in zip(calls, given, strict=True):
                call["arguments"] = x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)

    def takes_objects(self, calls):
        try:
            text = self.text(self.messages)
        except Exception:  # templates raise many types
            return False
        return not any(str(x["arguments"]) in text for x in calls if x["arguments"])

    def text(self, messages, prompt=False):
        """Return the text of messages, with a `prompt` to go on."""
        options = {**self.options, "tokenize": False, "add_generation_prompt": prompt}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except TypeError as error:  # such as of a loop over no tools
            if options["tools"] is not None:
                raise
            self.tokenizer.apply_chat_template(messages, **{**options, "tools": []})
            raise ValueError('the chat template needs "tools" in each row, if only []') from error

    def check_messages(self, text):
        """Raise an error if a text leaves out a message. It may leave out earlier reasoning."""
        written = squeezed(text)
        for index, message in enumerate(self.messages):
            check_text(message, index, written, reasoning=message["role"] != "assistant")
            if found := special_tokens(self.tokenizer).search(str(texts_of(message))):
                note(f"{found[0]!r} in the text of a message becomes a token of its own")

    def plain(self, index, **kept):
        """Return the messages up to an answer with PLAIN as its content, and what else is kept."""
        parts = isinstance(self.messages[index]["content"], list)
        content = [{"type": "text", "text": PLAIN}] if parts else PLAIN
        return [*self.messages[:index], {"role": "assistant", **kept, "content": content}]

    def learn_turns(self):
        """Learn from a plain answer in place of the first what is before answers and what ends
        them. Raise an error if the template begins the next one there."""
        index = next(i for i, x in enumerate(self.messages) if i and x["role"] == "assistant")
        before = self.text(self.messages[:index])
        self.header = self.text(self.messages[:index], prompt=True).removeprefix(before)
        plain = self.plain(index)
        text, longer = self.text(plain), self.text([*plain, {**plain[-1], "role": "user"}])
        ends = [x.partition(PLAIN)[2] for x in (text, longer)]
        other = ends[0][in_common(*ends) :]  # than before a question
        header = other[len(other) - in_common(other[::-1], before[::-1]) :].strip()
        is_eos = (self.tokenizer.eos_token or "").endswith(header)  # or a part, behind "<|"
        if re.search(r"\w", header) and not is_eos:
            raise ValueError(f"the chat template writes {header!r} behind each answer: {REMEDY}")
        spans = self.marked_spans(plain) if self.marks else [(0, len(text))]
        self.ending = squeezed(text[: max(end for _, end in spans)].partition(PLAIN)[2])

    def answer(self, index):
        """Return the index of an answer, the text up to its end, and in that where its turn begins
        and the (begin, end) of what is the answer's: where it is no longer the prompt's, or what
        the template marks behind that. A prompt may open a thought that the answer has not."""
        before, prompt = (self.text(self.messages[:index], prompt=x) for x in (False, True))
        text = self.text(self.messages[: index + 1])
        if prompt == before:  # as some are behind an answer
            prompt += self.header
        turn, begin = in_common(before, prompt), in_common(prompt, text)
        if begin < turn:
            raise ValueError(f"the chat template changes what comes before an answer: {REMEDY}")
        if begin < len(prompt):  # an answer may begin as the prompt goes on
            self.other_prompts.add(prompt[turn:])
            plain = self.text(self.plain(index, **self.messages[index]))
            begin = min(begin, max(turn, in_common(prompt, plain)))
            begin = max(turn, len(OPENED.sub("", prompt[:begin])))
        spans = [(begin, len(text))]
        if self.marks:
            marked = self.marked_spans(self.messages[: index + 1])
            spans = [(max(begin, first), end) for first, end in marked if end > begin]
        return index, text, turn, spans

    def marked_spans(self, messages):
        """Return the (begin, end) that the template marks in messages."""
        options = {**self.tokenizer.special_tokens_map, **self.options}
        options["return_assistant_tokens_mask"] = True
        _, [spans] = render_jinja_template([messages], **options)
        return spans

    def samples(self, answers):
        """Return the samples with these answers."""
        for index, message in enumerate(self.messages):
            beside_call = message.get("tool_calls") and texts_of(message)["content"][0].strip()
            if beside_call and PLAIN not in self.text(self.plain(index, **message)):
                note("the chat template leaves out texts beside tool calls: so are these chats")
                return []
        whole = self.text(self.messages)
        self.check_messages(whole)
        if not answers:
            return []
        self.learn_turns()
        found = [self.answer(index) for index in answers]
        for prompt in self.other_prompts:
            note(f"answers are generated behind {prompt!r}, but some are trained without it")
        if all(whole.startswith(text) for _, text, *_ in found):
            return [self.sample(whole, found)]
        return [self.sample(answer[1], [answer]) for answer in found]

    def sample(self, text, answers):
        """Return the sample of a text with the targets of these `answer`s."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = (torch.tensor(encoded[x]) for x in ("input_ids", "offset_mapping"))
        spans = [x for answer in answers for x in self.checked(*answer, tokens, offsets)]
        return self.sample_of(text, spans, tokens, offsets)

    def sample_of(self, text, spans, tokens, offsets):
        """Return tokens, and those of these (begin, end) as targets: (N, 2) int32."""
        targets = tokens.where(tokens_in(offsets, spans), -100)
        return torch.stack([tokens[:-1], targets[1:]], dim=1).int()

    def checked(self, index, text, turn, spans, tokens, offsets):
        """Return the spans of an answer, without a token that goes on in the next message. Raise an
        error unless their tokens, decoded, are what the row says: its reasoning, content and calls,
        whole and in order, and behind these what ends a turn."""
        begins, ends = offsets[tokens_in(offsets, spans)].T.tolist()
        in_next = [begin for begin in begins[-1:] if ends[-1] > len(text)]
        in_both = [text[begin:turn] for begin in begins[:1]] + [text[begin:] for begin in in_next]
        if any(part.strip() for part in in_both):
            raise ValueError(f"message {index + 1} shares a token with another one: {REMEDY}")
        spans = [(begin, min([end, *in_next])) for begin, end in spans]
        own, message = tokens[tokens_in(offsets, spans)], self.messages[index]
        written = squeezed(self.tokenizer.decode(own))
        check_text(message, index, written)
        content = squeezed(*texts_of(message)["content"])
        calls = message.get("tool_calls")  # they may have another end
        stops = calls and int(own[-1]) in self.tokenizer.added_tokens_decoder
        if not (stops or written.endswith(self.ending if calls else content + self.ending)):
            end = f"in {written[-50:]!r}, not in its text and {self.ending!r}"
            raise ValueError(f"message {index + 1} ends {end}: {REMEDY}")
        return spans


def tokens_in(offsets, spans):
    """Return which tokens lie in one of these (begin, end), if only in part: (N,) bool."""
    begins, ends = torch.as_tensor(offsets).T
    inside = [(begins < end) & (begin < ends) for begin, end in spans]
    return torch.stack([begins < 0, *inside]).any(0)


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
