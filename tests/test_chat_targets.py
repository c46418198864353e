"""Of any chat that any chat template writes, the right tokens are trained, or it is an error.

Templates and chats are drawn with random traits. By these the oracle marks what is to be trained in
the template, and transformers tells where that is in a chat."""

import json
import random
import re
from itertools import accumulate
from types import SimpleNamespace

import pytest
from lazy import lib, tokenizers, transformers

pytestmark = pytest.mark.slow

ARGS = SimpleNamespace(length=10**6)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
WORDS = "one a A USER ASS <b> </b> <answer> <thing> thought : 4.2 Köln \\nabla 🙂 {'x'} \n \n\n -"
SPECIAL = "<s> <|end|> <|user|> <|assistant|> <|system|> <|tool|> <think> </think> <tool_call>"
TRAITS = {
    # What is before an answer, before another message, and behind that.
    "headers": [
        ("<|assistant|>", "<|{}|>", "<|end|>"),
        ("<|assistant|>\n", "<|{}|>\n", "<|end|>\n"),
        ("ASSISTANT: ", "{}: ", "\n"),
        ("ASSISTANT:", "{}: ", " "),
        ("### ASSISTANT\n", "### {}\n", "\n\n"),
        ("", "[INST] {} ", "[/INST]"),
        ("", "", "<|end|>"),
    ],
    "prompt": ["header", "header", "header unless behind an answer", "nothing", "header always"],
    "end": ["<|end|>", "<|end|>\n", "</s>", " </s>\n", "", " ", "\n\n"],
    "end_of_whole": ["", "", "", "<s>"],  # behind an answer that is the last message
    "thought": [
        ("<think>\n", "\n</think>\n\n"),
        ("<thinking>", "</thinking>"),
        ("thought: ", "\n"),
    ],
    "opens": ["nothing", "thought", "empty thought"],  # in a prompt, behind the header
    "without": ["nothing", "nothing", "end", "empty", "empty if last"],  # reasoning: an answer has
    "reasoning": ["all", "all", "all", "last", "last", "none"],
    "marked": ["nothing"] * 4 + ["answer", "answer without its end"],
    "strip": [False, True],
    "beside_call": [True, True, False],
    "tools": ["if any"] * 9 + ["needed"],
    "system": [True] * 9 + [False],
}


def draw_text(rng):
    words = rng.choices(WORDS.split(" "), k=rng.randint(1, 5))
    return rng.choice(["", " ", "\n"]) + " ".join(words) + rng.choice(["", "", " "])


def draw_chat(rng):
    """Return messages, and the tools or None."""
    system = {"role": "system", "content": f"Be brief. {draw_text(rng)}"}
    messages = [system] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": draw_text(rng)})
        if rng.random() < 0.2:
            arguments = {"city": draw_text(rng), "days": rng.randint(1, 9)}
            call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            calls = {"content": rng.choice([None, draw_text(rng)]), "tool_calls": [call]}
            messages.append({"role": "assistant", **calls})
            messages.append({"role": "tool", "content": draw_text(rng)})
        for _ in range(rng.choice([1, 1, 2])):
            messages.append({"role": "assistant", "content": draw_text(rng)})
            if rng.random() < 0.3:
                messages[-1]["reasoning_content"] = draw_text(rng).strip() + "!"
            if rng.random() < 0.1:
                messages[-1]["weight"] = 0
    return messages, rng.choice([None, TOOLS])


# A form's template: f is the form, ¦ is on both sides of what is trained.
TEMPLATE = """{% set f = FORM %}
{% for y in (tools if f.tools == "needed" else tools or []) %}{{ y.function.name }}{% endfor %}
{% for x in messages %}
    {% set content = x.content | trim if f.strip else x.content %}
    {% if x.role == "assistant" %}
        {{ f.header }}TAG0
        {% if x.reasoning_content and f.reasoning in ("all", "last" if loop.last) %}
            {{ f.opening }}¦{{ x.reasoning_content }}{{ f.thought[1] }}¦
        {% elif loop.last or f.without != "empty if last" %}
            {{ f.no_reasoning }}
        {% endif %}
        ¦{% if f.beside_call or not x.tool_calls %}{{ content }}{% endif %}
        {% for y in x.tool_calls or [] %}<tool_call>{{ y.function | tojson }}{% endfor %}TAG1
        {{ f.end }}{% if loop.last %}{{ f.end_of_whole }}{% endif %}TAG2
    {% elif f.system or x.role != "system" %}
        {{ f.headers[1].replace("{}", x.role if "|" in f.headers[1] else x.role | upper) }}
        {{ content }}{{ f.headers[2] }}
    {% endif %}
{% endfor %}
{% if f.prompt == "header always" %}{{ f.headers[0] }}{% endif %}
{% if add_generation_prompt %}
    {% if f.prompt != "header unless behind an answer" or messages[-1].role != "assistant" %}
        {{ f.generated_behind }}
    {% endif %}
{% endif %}
"""
TAGS = {
    "nothing": ("", "", "¦"),
    "answer": ("{% generation %}", "", "¦{% endgeneration %}"),
    "answer without its end": ("{% generation %}", "¦{% endgeneration %}", ""),
}


def template_of(form):
    """Return the chat template of a form, which writes ¦, too."""
    header, (opening, closing) = form["headers"][0], form["thought"]
    has_prompt, opens = form["prompt"] != "nothing", form["opens"]
    prompt = {"nothing": "", "thought": opening, "empty thought": opening + closing}[opens]
    begin = opening if has_prompt and prompt else f"¦{opening}¦"
    end = closing if has_prompt and opens == "empty thought" else f"¦{closing}¦"
    without = {"nothing": "", "end": f"¦{closing.strip()}¦"}.get(form["without"], begin + end)
    own_header = not has_prompt and form["marked"] == "nothing"
    names = {"header": f"¦{header}¦" if own_header else header, "no_reasoning": without}
    names |= {"opening": begin, "generated_behind": header + prompt if has_prompt else ""}
    template = re.sub(r"\n *", "", TEMPLATE)
    for number, tag in enumerate(TAGS[form["marked"]]):
        template = template.replace(f"TAG{number}", tag)
    return template.replace("FORM", json.dumps({**form, **names}, ensure_ascii=False))


def expected_samples(form, tokenizer, messages, tools, first):
    """Return [[tokens, targets or -100]], each of the same length."""
    trained = [i for i in range(first, len(messages)) if messages[i].get("weight") != 0]
    answers = [i for i in trained if messages[i]["role"] == "assistant"]
    if form["tools"] == "needed" and tools is None:
        raise ValueError("needs tools")
    beside = [x["content"] for x in messages if x.get("tool_calls") and x["content"]]
    if not form["beside_call"] and any(text.strip() for text in beside):
        return []
    if not form["system"] and messages[0]["role"] == "system":
        raise ValueError("drops the system's message")
    if form["reasoning"] == "none" and any("reasoning_content" in messages[i] for i in answers):
        raise ValueError("drops the reasoning")
    if form["prompt"] == "header always" and form["headers"][0] and answers:
        raise ValueError("writes the header of an answer behind an answer")
    messages = [{**message, "content": message["content"] or ""} for message in messages]
    # Of the first messages: the text, and the (begin, end) of what is trained.
    firsts = [messages[:count] for count in range(len(messages) + 1)]
    render = transformers.utils.chat_template_utils.render_jinja_template
    texts = [*map(unmarked, render(firsts, chat_template=template_of(form), tools=tools)[0])]
    parts = []
    for i in answers:
        (earlier, _), (part, spans) = texts[i : i + 2]
        if not part.startswith(earlier):
            raise ValueError("changes the answer before, if another one is behind it")
        parts.append((part, spans, [(len(earlier), len(part))]))
    whole, spans = texts[-1]
    if parts and all(whole.startswith(part) for part, *_ in parts):
        parts = [(whole, spans, [place for *_, [place] in parts])]
    samples = [targets_of(tokenizer, *part) for part in parts]
    return [x for x in samples if {*x[1]} != {-100}]


def unmarked(text):
    """Return a text without its marks, and the (begin, end) of what is between two."""
    parts = text.split("¦")
    ends = [*accumulate(map(len, parts))]
    return "".join(parts), [*zip(ends[:-1:2], ends[1::2], strict=True)]


def targets_of(tokenizer, text, spans, answers):
    """Return the tokens of a text, and those that are targets, or else -100: what the spans of
    these (begin, end) have. A token in two messages is an error if it has more than blanks of
    both."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    targets = []
    for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        target = False
        for first, last in answers:
            if all(max(begin, first, x) >= min(end, last, y) for x, y in spans):
                continue
            before, own, behind = text[begin:first], text[max(begin, first) : last], text[last:end]
            if before.strip() or (behind and own.strip()):
                raise ValueError("a token of two messages")
            target |= not behind
        targets.append(token if target else -100)
    return [found["input_ids"][:-1], targets[1:]]


@pytest.fixture(scope="module")
def both_tokenizers():
    """One of bytes, which does not join words, and one of characters, which joins all."""
    traits = json.dumps(TRAITS, ensure_ascii=False).replace("\\n", "\n").replace("{}", "user")
    rng = random.Random(0)
    corpus = [f"{draw_text(rng)}{text}" for text in traits.split('"') for _ in range(9)]
    corpus += [WORDS, "TOOL: SYSTEM: weather! Be brief. city: days: 0123456789", json.dumps(TOOLS)]
    options = {"vocab_size": 500, "special_tokens": SPECIAL.split(), "show_progress": False}
    bytewise = tokenizers.ByteLevelBPETokenizer()
    bytewise.train_from_iterator(corpus, **options)
    joining = tokenizers.Tokenizer(tokenizers.models.BPE())
    joining.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    decoders = tokenizers.decoders
    joining.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    joining.train_from_iterator(corpus, tokenizers.trainers.BpeTrainer(**options))
    kind = transformers.PreTrainedTokenizerFast
    return [kind(tokenizer_object=x, eos_token="<|end|>") for x in (bytewise, joining)]


def is_right(form, tokenizer, messages, tools, first):
    """Return whether the right tokens are trained. If not, it has to be an error."""
    tokenizer.chat_template = template_of(form).replace("¦", "")
    try:
        found = lib.chat.samples_of(tokenizer, messages, ARGS, tools, first)
        found = [sample.T.tolist() for sample in found]
    except ValueError as error:
        found = error
    may_fail = form["marked"] == "answer without its end" and "</" in form["end"]
    try:
        expected = expected_samples(form, tokenizer, messages, tools, first)
    except ValueError as fault:
        expected, may_fail = fault, True
    if may_fail and isinstance(found, ValueError):
        return False
    assert found == expected, f"{form}\n{messages}\n{tools}\n{tokenizer.chat_template}"
    return True


def test_of_500_random_chats_and_templates_the_right_tokens_are_trained(both_tokenizers, seed=3):
    """With this seed, some chat needs each line that finds where an answer begins."""
    rng = random.Random(seed)
    right = 0
    for _ in range(125):
        form = {name: rng.choice(values) for name, values in TRAITS.items()}
        for _ in range(4):
            messages, tools = draw_chat(rng)
            first = rng.choice([0, 0, 0, len(messages) - 1])
            right += is_right(form, rng.choice(both_tokenizers), messages, tools, first)
    assert right > 250
