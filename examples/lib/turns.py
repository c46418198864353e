# SPDX-License-Identifier: Apache-2.0
"""The messages of a conversation, as data sets have them, and whether a text has them, too."""

import json
import re
import unicodedata
from copy import deepcopy

REASONING = "reasoning_content", "reasoning", "thinking"  # its names in a message
KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING}
# Words in names of columns that describe a row, and change nothing in what it says.
HARMLESS = {
    *("id", "ids", "idx", "index", "uuid", "hash", "key", "url", "date", "timestamp", "version"),
    *("source", "dataset", "subset", "split", "origin", "license", "model", "generator"),
    *("category", "topic", "domain", "task", "type", "tags", "language", "lang", "metadata"),
    *("score", "rating", "quality", "difficulty", "num", "count", "length", "tokens", "turns"),
    *("prompt", "question"),  # the messages have them, too: an answer alone is an error
}
REMEDY = "name a file of another one by --chat-template"


def check_keys(row, used, template=""):
    """Raise an error if a row has a key that may mean something, and which is not used, nor read by
    a chat template. Null is as no key."""
    for name, value in row.items():
        harmless = name in used or HARMLESS & {*re.split(r"[\W_]+", name.lower())}
        read = rf"""(\.|\[['"]|get\(['"]){re.escape(name)}\b"""
        if not (value is None or harmless or re.search(read, template)):
            raise ValueError(f"{name!r} would be ignored: remove it, or write null")


def known(messages, template):
    """Return copies of messages. Raise an error if one has a key that nothing reads. Data sets that
    have the same keys in all rows write null for what a message has not."""
    for message in messages:
        check_keys(message, KEYS, template)
    return [
        {name: value for name, value in message.items() if value is not None}
        for message in deepcopy(messages)
    ]


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


def calls_in(messages):
    """Return the functions that messages call: a list of {"name": ..., "arguments": ...}."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [call.get("function", call) for call in calls]


def texts_in(value):
    """Return the texts and whole numbers in a value of JSON, as texts."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [text for x in parts for text in texts_in(x)]
    return [str(value)] if type(value) in (str, int) else []


def texts_of(message):
    """Return the texts of a message, lists by kind. A content may have the reasoning, too."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    *thoughts, last = [x for part in parts for x in re.split("</?think>", part.get("text", ""))]
    thoughts = [message[name] for name in REASONING if name in message] + thoughts
    calls = calls_in([message])
    given = [x.get("arguments") or {} for x in calls]
    return {
        "reasoning": [*dict.fromkeys(thoughts)],
        "content": [last],
        "tool calls": [x["name"] for x in calls],
        "arguments": texts_in([json.loads(x) if isinstance(x, str) else x for x in given]),
    }


def squeezed(text):
    """Return a text without what a template may strip, or write as JSON: blanks and escapes."""
    return re.sub(r"\\+[nrtbf]?|\s", "", unicodedata.normalize("NFKC", text))


def check_text(message, index, written, reasoning=True):
    """Raise an error if a squeezed text leaves out a text of a message, with or without its
    reasoning, or has another order. Calls may be in any."""
    place = 0
    for kind, texts in texts_of(message).items():
        for text in map(squeezed, texts if reasoning or kind != "reasoning" else []):
            place = written.find(text, place if kind in ("reasoning", "content") else 0)
            if place < 0:
                of = f"the {kind} of message {index + 1}, of the {message['role']}"
                raise ValueError(f"the chat template leaves out {of}: {REMEDY}")
            place += len(text)
