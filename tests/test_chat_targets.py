"""Of any chat that any chat template writes, the right tokens are trained, or it is an error.

Templates and chats are drawn with random traits. By these the oracle marks what is to be trained in
the template, and transformers tells where that is in a chat."""

import json
import random
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
    "end of whole": ["", "", "", "<s>"],  # behind an answer that is the last message
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
    "text beside call": [True, True, False],
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


def template_of(form, is_oracle=False):
    """Return the chat template of a form. The oracle's marks what is trained."""

    def when(condition, text):
        return f"{{% if {condition} %}}{text}{{% endif %}}"

    def written(text):
        return f"{{{{ {json.dumps(text)} }}}}"

    def marked(text):
        return f"{{% generation %}}{text}{{% endgeneration %}}"

    def own(text, is_own=True):
        return marked(text) if is_oracle and is_own else text

    marks = form["marked"] if not is_oracle else "nothing"
    prompts = form["prompt"] != "nothing"
    opened = prompts and form["opens"] != "nothing"
    header, other, end_of_other = map(written, form["headers"])
    role = "x.role" if "|" in other else "x.role | upper"
    other = other.replace("{}", f'" ~ ({role}) ~ "')
    strip = " | trim" if form["strip"] else ""
    opening, closing = map(written, form["thought"])
    empty = own(opening, not opened) + own(closing, not opened or form["opens"] == "thought")
    without = {"nothing": "", "end": own(written(form["thought"][1].strip()))}
    without |= {"empty": empty, "empty if last": when("loop.last", empty)}
    keep = {"all": "", "last": " and loop.last", "none": " and false"}[form["reasoning"]]
    thought = own(opening, not opened) + own(f"{{{{ x.reasoning_content }}}}{closing}")
    answer = f"{{% if x.reasoning_content{keep} %}}{thought}"
    answer += f"{{% else %}}{without[form['without']]}{{% endif %}}"
    content = f"{{{{ x.content{strip} }}}}"
    answer += own(content if form["text beside call"] else when("not x.tool_calls", content))
    call = written("<tool_call>") + "{{ y.function | tojson }}"
    answer += own(f"{{% for y in x.tool_calls or [] %}}{call}{{% endfor %}}")
    end = written(form["end"]) + when("loop.last", written(form["end of whole"]))
    end = own(end, form["marked"] != "answer without its end")
    with_end = {"nothing": answer + end, "answer": marked(answer + end)}
    answer = with_end.get(marks, marked(answer) + end)
    other += content + end_of_other
    other = other if form["system"] else when("x.role != 'system'", other)
    answer = own(header, not prompts and form["marked"] == "nothing") + answer
    turn = f"{{% if x.role == 'assistant' %}}{answer}{{% else %}}{other}{{% endif %}}"
    prompt = {"nothing": "", "thought": opening, "empty thought": opening + closing}[form["opens"]]
    unanswered = "add_generation_prompt and messages[-1].role != 'assistant'"
    prompt = {
        "header": when("add_generation_prompt", header + prompt),
        "header unless behind an answer": when(unanswered, header + prompt),
        "nothing": "",
        "header always": header + when("add_generation_prompt", prompt),
    }[form["prompt"]]
    tools = "{% for y in tools %}{{ y.function.name }}{% endfor %}"
    tools = tools if form["tools"] == "needed" else when("tools", tools)
    return f"{tools}{{% for x in messages %}}{turn}{{% endfor %}}{prompt}"


class Fault(Exception):
    """Of a template, with a chat."""


def expected_samples(form, tokenizer, messages, tools, first):
    """Return [(tokens, targets or -100)], each of the same length."""
    trained = [i for i in range(first, len(messages)) if messages[i].get("weight") != 0]
    answers = [i for i in trained if messages[i]["role"] == "assistant"]
    if form["tools"] == "needed" and tools is None:
        raise Fault("needs tools")
    beside = [x["content"] for x in messages if x.get("tool_calls") and x["content"]]
    if not form["text beside call"] and any(text.strip() for text in beside):
        return []
    if not form["system"] and messages[0]["role"] == "system":
        raise Fault("drops the system's message")
    if form["reasoning"] == "none" and any("reasoning_content" in messages[i] for i in answers):
        raise Fault("drops the reasoning")
    messages = [{**message, "content": message["content"] or ""} for message in messages]
    options = {"chat_template": template_of(form, is_oracle=True), "tools": tools}
    options["return_assistant_tokens_mask"] = True
    render = transformers.utils.chat_template_utils.render_jinja_template
    # Of the first messages: the text, and the (begin, end) of what is trained.
    firsts = [messages[:count] for count in range(len(messages) + 1)]
    texts = [[x for [x] in render([first], **options)] for first in firsts]
    behind = form["headers"][0] if form["prompt"] == "header always" else ""
    parts = []
    for i in answers:
        (earlier, _), (part, spans) = texts[i : i + 2]
        if not part.startswith(earlier):
            raise Fault("changes the answer before, if another one is behind it")
        place = len(earlier) - len(behind), len(part) - len(behind)
        parts.append((part.removesuffix(behind), spans, [place]))
    whole, spans = texts[-1]
    if parts and all(whole.startswith(part) for part, *_ in parts):
        parts = [(whole, spans, [place for *_, [place] in parts])]
    samples = [targets_of(tokenizer, *part) for part in parts]
    return [x for x in samples if {*x[1]} != {-100}]


def targets_of(tokenizer, text, spans, answers):
    """Return the tokens of a text, and those that are targets, or else -100: what the spans of
    these (begin, end) have. A token in two messages is a Fault if it has more than blanks of
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
                raise Fault("a token of two messages")
            target |= not behind
        targets.append(token if target else -100)
    return found["input_ids"][:-1], targets[1:]


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


def outcome(form, tokenizer, messages, tools, first):
    """Return "right", "error" or "fault", or raise an AssertionError."""
    tokenizer.chat_template = template_of(form)
    case = f"{form}\n{messages}\n{tools}\n{tokenizer.chat_template}"
    try:
        samples = lib.chat.samples_of(tokenizer, messages, ARGS, tools, first)
    except Exception as error:
        samples = error
    try:
        expected = expected_samples(form, tokenizer, messages, tools, first)
    except Fault as fault:
        assert isinstance(samples, ValueError), f"{fault}: {samples}\n{case}"
        return "fault"
    may_fail = form["prompt"] == "header always" and form["headers"][0] != ""
    may_fail |= form["marked"] == "answer without its end" and "</" in form["end"]
    if isinstance(samples, Exception):
        assert may_fail and isinstance(samples, ValueError), f"{samples!r}\n{case}"
        return "error"
    assert len(samples) == len(expected), case
    for sample, (tokens, targets) in zip(samples, expected, strict=True):
        assert sample.T.tolist() == [tokens, targets], case
    return "right"


def test_of_500_random_chats_and_templates_the_right_tokens_are_trained(both_tokenizers, seed=3):
    """With this seed, some chat needs each line that finds where an answer begins."""
    rng = random.Random(seed)
    outcomes = []
    for _ in range(125):
        form = {name: rng.choice(values) for name, values in TRAITS.items()}
        for _ in range(4):
            messages, tools = draw_chat(rng)
            first = rng.choice([0, 0, 0, len(messages) - 1])
            tokenizer = rng.choice(both_tokenizers)
            outcomes.append(outcome(form, tokenizer, messages, tools, first))
    counts = {x: outcomes.count(x) for x in {*outcomes}}
    assert counts["right"] > 250, counts
