"""What sft and preferences compute, against independent references. That their copies train:
test_adapting.py."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import assert_one_line, make
from conftest import ROUNDING_FLOAT32
from lazy import lib, lora, peft, preferences, sft, tokenizers, transformers
from processes import train_forked
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SPECIAL = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
PLAIN = (
    "{% for x in messages %}<|{{ x.role }}|>\n{{ x.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As if the question were another one when an answer follows.
FORGETS = PLAIN.replace("<|{{", "{{ 'Ask. ' if loop.last }}<|{{")
CHATS = [
    [("user", "Hi"), ("assistant", " Hello, grüß dich 🙂 ")],
    [("user", "1 + 1"), ("assistant", "2"), ("user", "sure?\n"), ("assistant", "Yes,\n\nI am")],
    [("user", "a longer question, of many words"), ("assistant", "no")],
    [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "a longer answer than all")],
]
CHATS = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny model, in bf16, and its tokenizer."""
    path = tmp_path_factory.mktemp("base")
    (path / "text.txt").write_text(json.dumps(CHATS, ensure_ascii=False) * 9)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(str(path / "text.txt"), 320, special_tokens=SPECIAL)
    options = {"tokenizer_object": tokenizer, "eos_token": "<|end|>", "chat_template": PLAIN}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(path)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(intermediate_size=16, vocab_size=320, **size)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(base):
    return transformers.AutoTokenizer.from_pretrained(base)


@pytest.fixture
def model(base):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return lib.token_losses.with_token_losses(model)


ARGS = SimpleNamespace(length=1000, beta=0.3)


def tokenized(tokenizer, messages, args, first=0):
    """The only sample of a conversation."""
    (sample,) = lib.chat.samples_of(tokenizer, messages, args, first=first)
    return sample


def writing(content, prompt=""):
    """A template that writes a content in this way, and begins an answer by a prompt."""
    template = "{% for x in messages %}<|{{ x.role }}|>" + content + "<|end|>{% endfor %}"
    return template + "{% if add_generation_prompt %}<|assistant|>" + prompt + "{% endif %}"


def chat(*turns):
    """Messages of a user and, in turns, an assistant: a text is a content."""
    roles = ("user", "assistant") * len(turns)
    given = [{"content": x} if isinstance(x, str) else x for x in turns]
    return [{"role": role, **turn} for role, turn in zip(roles, given, strict=False)]


def calling(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {"content": None, "tool_calls": [{"type": "function", "function": function}]}


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
INNER = "<think>\nIt is late.</think>\nNo."
ODD = """ "Ä" \t\\nabla\n\n{'a': [1]} </b> & \\\\ \U0001f642\n"""


@pytest.mark.parametrize(
    ("content", "messages", "left_out"),
    [
        ("{{ tools if loop.first }}{{ x.content }}", chat("a", calling({})), "tool calls of mes"),
        ("{{ x.content.split('</think>')[-1] }}", chat("a", INNER), "reasoning of message 2"),
        ("{{ x.content[:3] }}", chat("a", "of four"), "content of message 2, of the assistant"),
        ("{{ x.content | trim | tojson }}", chat(ODD, ODD, ODD, ODD), None),
        ("{{ x.content if loop.last else x.content.split('>')[-1] }}", chat("a", INNER) * 2, None),
        ("{{ x.content.replace('think>', 'thought>') }}", chat("a", INNER), None),
    ],
)
def test_what_a_template_leaves_out_is_an_error(content, messages, left_out, tokenizer):
    """Not what it strips, or writes as JSON, nor the reasoning of earlier turns."""
    tokenizer.chat_template = writing(content)
    if not left_out:
        assert lib.chat.samples_of(tokenizer, messages, ARGS, TOOLS)
        return
    with pytest.raises(ValueError, match=f"the chat template leaves out the {left_out}"):
        lib.chat.samples_of(tokenizer, messages, ARGS, TOOLS)


TEXT = '{"city":"Köln","days":[3]}'


@pytest.mark.parametrize(
    ("arguments", "of_object", "of_text"),
    [
        ("{{ y.arguments | tojson }}", '{"city": "Köln", "days": [3]}', None),
        ("{{ y.arguments.city }}{{ y.arguments.days }}", "Köln[3]", None),
        ("{{ '' + y.arguments }}", '{"city": "Köln", "days": [3]}', TEXT),
        ("{{ y.arguments }}", '{"city": "Köln", "days": [3]}', TEXT),
    ],
)
def test_arguments_of_calls_are_as_a_template_wants_them(arguments, of_object, of_text, tokenizer):
    """An object or a text. A template wants a text if it writes an object as Python does."""
    calls = "{% for y in x.tool_calls | default([]) | map(attribute='function') %}"
    tokenizer.chat_template = writing(f"{calls}{{{{ y.name }}}} {arguments}{{% endfor %}}")
    question = {"role": "user", "content": "", "tool_calls": None}  # as in a row of a table
    for given, expected in ((json.loads(TEXT), of_object), (TEXT, of_text or of_object)):
        messages = [question, {"role": "assistant", **calling(given)}]
        for tools in (None, TOOLS, json.dumps(TOOLS)):
            (sample,) = lib.chat.samples_of(tokenizer, messages, ARGS, tools)
            targets = sample[:, 1]
            assert tokenizer.decode(targets[targets != -100]) == f"weather {expected}<|end|>"


@pytest.mark.parametrize(
    ("content", "answer", "error"),
    [
        ("{{ x.content }}", {"weight": 0.5}, "the weight of a message is 0.5"),
        ("{{ x.content }}", {"refusal": "No."}, "'refusal' would be ignored: remove it"),
        ("{{ x.content }}", {"function_call": {"name": "f"}}, "'function_call' would be ignored"),
        ("{{ x.get('refusal', '') }}{{ x.content }}", {"refusal": "No."}, None),
        ("{{ x.content }}", {"function_call": None, "id": 3, "model_name": "m"}, None),
        ("{% for y in tools %}{{ y }}{% endfor %}{{ x.content }}", {}, 'needs "tools" in each row'),
        ("<|{{ x.content }}", {"tool_calls": []}, None),
    ],
)
def test_a_key_of_a_message_is_used_or_refused(content, answer, error, tokenizer):
    tokenizer.chat_template = writing(content)
    messages = chat("a", {"content": "b", **answer})
    if not error:
        assert lib.chat.samples_of(tokenizer, messages, ARGS)
        return
    with pytest.raises(ValueError, match=error):
        lib.chat.samples_of(tokenizer, messages, ARGS)


@pytest.mark.parametrize("key", ["system", "functions", "answer", "image"])
def test_a_key_of_a_row_is_used_or_harmless(key):
    lib.turns.check_keys(
        {key: None, "prompt_id": 3, "score-chosen": 1, "messages": []}, ["messages"]
    )
    with pytest.raises(ValueError, match=f"'{key}' would be ignored"):
        lib.turns.check_keys({key: "a", "messages": []}, ["messages"])


def test_notes_are_said_once(tokenizer, capsys):
    lib.chat.say.cache_clear()
    beside = {**calling({}), "content": "I look."}
    tokenizer.chat_template = writing("{{ x.content if not x.tool_calls }}{{ x.tool_calls }}")
    for _ in range(2):
        assert not lib.chat.samples_of(tokenizer, chat("a", beside, "b", "c"), ARGS)
        assert lib.chat.samples_of(tokenizer, chat("a <|end|>", "c"), ARGS)
    lines = capsys.readouterr().err.splitlines()
    assert ["leaves out texts beside tool calls" in x for x in lines] == [True, False]
    assert "'<|end|>' in the text of a message becomes a token" in lines[1]


def test_texts_of_others_take_linear_time(tokenizer):
    """They took minutes."""
    assert lib.turns.squeezed("\\" * 10**6 + "a") == "a"
    date = """{{ strftime_now('%d %b %Y') }}{{ strftime_now( "%Y-%m-%d") }}{#"""
    tokenizer.chat_template = date + "strftime_now('" * 10**5 + "#}" + PLAIN
    text = tokenizer.decode(tokenized(tokenizer, CHATS[0], ARGS)[:, 0])
    assert text.startswith("26 Jul 20242024-07-26<|user|>")


def test_an_answer_that_does_not_follow_its_prompt_is_said_once(tokenizer, capsys):
    """It counts from its first token, if that begins as the prompt goes on."""
    tokenizer.add_tokens(["<think>", "<tool>"])
    tokenizer.chat_template = writing("{{ x.content }}", prompt="<think>")
    for _ in range(2):
        targets = tokenized(tokenizer, chat("a", "<tool>b", "c", "d"), ARGS)[:, 1]
        assert tokenizer.decode(targets[targets != -100]) == "<tool>b<|end|>d<|end|>"
    [line] = capsys.readouterr().err.splitlines()
    assert "are generated behind '<|assistant|><think>', but some are trained without it" in line
    tokenized(tokenizer, chat("a", "<think>b"), ARGS)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("answer", ["<answer>4</answer>", "</think>4"])
def test_an_answer_that_begins_like_its_prompt_loses_nothing(answer, tokenizer):
    """Whether the message or the template writes what is alike."""
    for content, given in (("{{ x.content }}", answer), (f"{answer[:-1]}{{{{ x.content }}}}", "4")):
        tokenizer.chat_template = writing(content, prompt="<think>\n")
        targets = tokenized(tokenizer, chat("a", given), ARGS)[:, 1]
        trained = tokenizer.decode(targets[targets != -100])
        assert trained in (f"{answer}<|end|>", f"{answer[:-1]}4<|end|>")


def test_a_token_of_two_messages_is_an_error(tokenizer):
    tokenizer.chat_template = "{% for x in messages %}{{ x.content }}{% endfor %}"
    with pytest.raises(ValueError, match="message 2 shares a token with another one"):
        lib.chat.samples_of(tokenizer, chat("us", "er"), ARGS)


ENDS = {  # a template, the tokens of generation_config.json, those saved, what is said
    "an eos": (PLAIN, 4, [4], None),
    "one of several": (PLAIN, [2, 4], [2, 4], None),
    "none": (PLAIN, [0], [0, 4], "generation_config.json gets <|end|>, in which answers end here"),
    "no token": (
        "{% for x in messages %}{{ x.content }}{% endfor %}",
        4,
        [4],
        "learns no end",
    ),
    "another form": ("{{ messages[3].content }}", [0], [0], None),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_an_answer_is_an_eos_of_what_is_saved(case, base, tmp_path, monkeypatch):
    template, eos, expected, said = ENDS[case]
    args = SimpleNamespace(base=tmp_path / "base", output_dir=tmp_path / "run")
    shutil.copytree(base, args.base)
    args.chat_template = tmp_path / "mine.jinja"
    args.chat_template.write_text(template)
    config = {"eos_token_id": eos, "temperature": 0.5, "do_sample": False}  # as some bases have
    (args.base / "generation_config.json").write_text(json.dumps(config))
    lines = []
    monkeypatch.setattr("lib.chat.log_line", lines.append)
    lib.chat.say.cache_clear()
    lib.chat.chat_tokenizer(args, SimpleNamespace(is_main_process=True))
    saved = json.loads((args.output_dir / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["temperature"]) == (expected, 0.5)
    found = [line for line in lines if "answer" in line or "learns no end" in line]
    assert [said in line for line in found] == [True] if said else found == []


def test_contents_are_texts_or_an_error():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert lib.chat.with_text({"role": "user", "content": parts})["content"] == "a b"
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert lib.chat.with_text(call) == {**call, "content": ""}
    for content in (None, 3, {"text": "a"}):
        with pytest.raises(ValueError, match="which is no text"):
            lib.chat.with_text({"role": "user", "content": content})
    with pytest.raises(KeyError):
        lib.chat.with_text({"role": "user", "content": [{"type": "image", "url": "a.png"}]})


def by_hand(model, sample):
    """Return the log-probabilities of a sample's targets in float64, without padding."""
    tokens, targets = sample.T
    probable = model(tokens[None]).logits[0].double().log_softmax(1)
    return torch.stack([probable[i, x] for i, x in enumerate(targets.tolist()) if x != -100])


def gradient(model, loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*model.parameters()])])


def test_the_loss_of_sft_is_the_mean_over_all_tokens_of_answers(model, tokenizer):
    """In however many microbatches: their gradients are weighted as in a recipe's `train_step`."""
    samples = [tokenized(tokenizer, messages, ARGS) for messages in CHATS]
    exact = -torch.cat([by_hand(model, sample) for sample in samples]).mean()
    expected = gradient(model, exact)
    for size in (1, 2, 4):
        losses, weights = [], []
        for begin in range(0, 4, size):
            values = sft.compute_loss(
                model, lib.chat.pad_chats(samples[begin : begin + size]), ARGS
            )
            losses.append((values["loss"] * values["weight"]).mean())
            weights.append(values["weight"].double().mean())
        loss = torch.stack(losses).mean() / torch.stack(weights).mean()
        assert loss.item() == pytest.approx(exact.item(), rel=ROUNDING_FLOAT32)
        torch.testing.assert_close(gradient(model, loss), expected, rtol=1e-4, atol=1e-6)


def pairs_of(tokenizer):
    """Two pairs of samples, of prompts with a common answer in it and without."""
    found = []
    for messages in CHATS[1:3]:
        rejected = [*messages[:-1], {"role": "assistant", "content": "I do not want to say"}]
        first = len(messages) - 1
        both = messages, rejected
        found.append([tokenized(tokenizer, x, ARGS, first=first) for x in both])
    return found


def test_dpo_is_the_papers_loss_and_gradient(model, tokenizer):
    """arXiv:2305.18290, equation 7 and the gradient below it, of each conversation alone."""
    pairs = pairs_of(tokenizer)
    reference = -10 * torch.rand(2, 2)
    ours = [[by_hand(model, sample).sum() for sample in pair] for pair in pairs]
    losses, gradients = [], []
    for (chosen, rejected), theirs in zip(ours, reference.double(), strict=True):
        margin = ARGS.beta * ((chosen - theirs[0]) - (rejected - theirs[1]))
        losses.append(torch.log1p(torch.exp(-margin)))
        share = ARGS.beta / (1 + torch.exp(margin))
        gradients.append(-share * gradient(model, chosen - rejected).detach())
    sequences = lib.chat.pad_chats([x for pair in pairs for x in pair]).unflatten(0, (2, 2))
    ours = [[by_hand(model, sample).sum().item() for sample in pair] for pair in pairs]
    values = preferences.compute_loss(model, (sequences, reference), ARGS)
    torch.testing.assert_close(values["loss"].double(), torch.stack(losses), rtol=1e-5, atol=1e-5)
    ours = torch.tensor(ours, dtype=torch.float64) - reference
    margins = ARGS.beta * (ours[:, 0] - ours[:, 1])
    torch.testing.assert_close(values["margin"].double(), margins, rtol=1e-5, atol=1e-5)
    assert values["accuracy"].tolist() == (ours[:, 0] > ours[:, 1]).tolist()
    expected = torch.stack(gradients).mean(0)
    actual = gradient(model, values["loss"].mean())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


PROMPT, OTHER = CHATS[1][:3], {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    "line",
    [
        {"chosen": CHATS[1], "rejected": [*PROMPT, OTHER]},
        {"prompt": PROMPT, "chosen": "Yes,\n\nI am", "rejected": "no"},
    ],
)
def test_pairs_in_the_forms_of_data_sets(line, base, tokenizer, tmp_path):
    """Targets are of the last answer alone, and pairs without a difference are left out."""
    path = tmp_path / "pairs.jsonl"
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    path.write_text("\n".join(map(json.dumps, [line, line, same, *[line] * 8])))
    lib.chat.TARGETS.clear()
    args = SimpleNamespace(base=base, chat_template=None, output_dir=tmp_path, pairs=path, seed=0)
    args.test, args.prompt, args.chosen, args.rejected = None, "prompt", "chosen", "rejected"
    args.length, args.batch_size, args.global_batch_size = 1000, 3, 6
    train, test = preferences.load_data(args, SimpleNamespace(is_main_process=True))
    assert (len(train.dataset), len(test.dataset)) == (6, 1), "whole global batches"
    sequences, reference = next(iter(test))
    assert reference.shape == (1, 2)
    both = CHATS[1], [*PROMPT, OTHER]
    expected = lib.chat.pad_chats([tokenized(tokenizer, x, ARGS, first=3) for x in both])
    assert torch.equal(sequences[0], expected)
    trained = [tokenizer.decode(x[x != -100]) for x in sequences[0, :, :, 1]]
    assert trained == ["Yes,\n\nI am<|end|>\n", "no<|end|>\n"]


SYSTEM, USER, ANSWER = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([SYSTEM, USER], [ANSWER]),
        ([SYSTEM, USER], "a"),
        ([SYSTEM, USER], [USER, ANSWER]),
        ([SYSTEM, USER], [SYSTEM, USER, ANSWER]),
        ("a", [SYSTEM, USER, ANSWER]),
        ([], [SYSTEM, USER, ANSWER]),
    ],
)
def test_no_message_of_a_prompt_is_dropped(prompt, answer):
    assert lib.pairs.conversation(prompt, answer) == [SYSTEM, USER, ANSWER]


@pytest.mark.parametrize(
    ("prompt", "answer", "error"),
    [
        ({"role": "user"}, "a", "is no text, and no list of messages"),
        ([USER], {"content": "a"}, "is no text, and no list of messages"),
        ([USER], [], "begins with no message of the prompt, nor of the assistant"),
        ([USER], [{**USER, "content": "b"}, ANSWER], "begins with no message of the prompt"),
    ],
)
def test_pairs_in_no_known_form_are_an_error(prompt, answer, error):
    with pytest.raises(ValueError, match=error):
        lib.pairs.conversation(prompt, answer)


def test_the_reference_of_a_run_with_lora_is_its_base(base, tokenizer, tmp_path):
    """In a checkpoint after some steps, on two processes: of each pair, in the data's order, also
    of a last batch that is padded. A checkpoint has it, so a resumed run computes none."""
    answers = [(f"{i}?", "yes" * (1 + i % 7), "no" * (1 + i % 3)) for i in range(41)]
    lines = [dict(zip(("prompt", "chosen", "rejected"), x, strict=True)) for x in answers]
    toy.write_json_lines(tmp_path / "pairs.jsonl", lines)
    flags = ["--cpu", "--base", base, "--pairs", tmp_path / "pairs.jsonl", "--batch-size", 4]
    flags += ["--max-steps", 3, "--lr", 1e-2, "--checkpoint-every", 3]
    script = make(tmp_path / "mine.py", "ddp", "preferences", "lora")
    (run,) = train_forked(tmp_path, (2, script, flags))
    content = torch.load(run.directory / "step-00000003.pt", weights_only=True)
    found = torch.cat(content["states"]["reference"]["of"])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = []
    for line in lines:
        both = [lib.pairs.conversation(line["prompt"], line[x]) for x in ("chosen", "rejected")]
        samples = [tokenized(tokenizer, x, ARGS, first=1) for x in both]
        expected.append([by_hand(model, sample).sum().item() for sample in samples])
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_an_adapter_on_a_base_in_bf16_answers_as_the_run(base, tmp_path):
    """peft loads it onto the base. The base stays in 16 bits, what is trained has 32."""
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": x}) for x in CHATS * 5))
    flags = ["--cpu", "--base", base, "--chats", tmp_path / "chats.jsonl", "--batch-size", 4]
    flags += ["--max-steps", 4, "--lr", 1e-1, "--base-dtype", "bfloat16"]
    runs = []
    for recipe in ("ddp", "sharded"):
        script = make(tmp_path / f"{recipe}_mine.py", recipe, "sft", "lora")
        runs.append((2, script, flags))
    tokens = torch.arange(30)[None]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    before = plain(tokens).logits
    runs = train_forked(tmp_path, *runs)
    for run in runs:
        trained = lora.with_lora(sft.build_model(SimpleNamespace(base=base, base_dtype="bfloat16")))
        weights = load_file(run.directory / "model.safetensors")
        assert {x.dtype for name, x in weights.items() if ".lora_" in name} == {torch.float32}
        trained.load_state_dict(weights, strict=False)
        expected = trained(tokens).logits
        adapter = run.directory / "adapter"
        name = json.loads((adapter / "adapter_config.json").read_text())
        assert name["base_model_name_or_path"] == str(base)
        frozen = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        loaded = peft.PeftModel.from_pretrained(frozen, adapter)
        assert torch.equal(loaded(tokens).logits, expected)
        assert not torch.allclose(expected, before, rtol=0.1)
        # transformers reads the matrices in the base's 16 bits.
        for parameter in loaded.parameters():
            parameter.data = parameter.data.bfloat16()
        options = {"tokenizer": str(run.directory), "device": "cpu"}
        chat = transformers.pipeline("text-generation", str(adapter), **options).model
        assert torch.equal(chat(tokens).logits, loaded(tokens).logits)
    # What bf16 rounds away grows with each step: in the fourth one it is a percent of the loss.
    for name, steps in (("loss", 2), ("grad_norm", 1)):
        one, other = ([line[name] for line in run.train[:steps]] for run in runs)
        assert one == pytest.approx(other, rel=torch.finfo(torch.bfloat16).eps)


def test_wrong_chats_and_templates_are_one_line(base, tmp_path):
    good = [json.dumps({"messages": x}) for x in CHATS * 5]
    alone = json.dumps({"messages": CHATS[0][1:]})
    human = json.dumps({"messages": [{"role": x, "content": "a"} for x in ("human", "gpt")]})
    files = {
        "human": [human],
        "good": good,
        "alone": [good[0], alone],
        "calls": [json.dumps({"messages": chat("a", calling("{}"))})],
    }
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    script = make(tmp_path / "mine.py", "ddp", "sft")
    template = ["--chat-template", tmp_path / "forgets.jinja"]
    cases = {
        "row 1: ValueError('the chat template leaves out the tool calls of me": ["calls"],
        "row 2: ValueError('nothing comes before the answer')": ["alone"],
        "row 1: ValueError('no message has the role assistant, but human, g": ["human"],
        "row 1: ValueError('the chat template changes what comes before an": ["good", *template],
        "good.jsonl: 0 rows for training do not fill one batch": ["good", "--length", 2],
        "would train in 16 bits: add lora": ["good", "--base-dtype", "bfloat16"],
    }
    for text, (name, *flags) in cases.items():
        cases[text] = [script, "--chats", tmp_path / f"{name}.jsonl", *flags, "--base", base]
    assert_one_line(cases, tmp_path, imports=["transformers.models.llama"])


def test_chats_of_similar_lengths_make_a_global_batch(base, tmp_path):
    question = {"role": "user", "content": "Hi"}
    answers = [{"role": "assistant", "content": i * "a"} for i in range(30)]
    lines = [{"messages": [question, answer]} for answer in answers]
    toy.write_json_lines(tmp_path / "chats.jsonl", lines)
    args = SimpleNamespace(base=base, chat_template=None, length=1000, output_dir=tmp_path, seed=0)
    args.test = None
    args.chats, args.batch_size, args.global_batch_size = tmp_path / "chats.jsonl", 3, 12
    train, _ = sft.load_data(args, SimpleNamespace(is_main_process=False))
    lengths = [len(x) for x in train.dataset]
    assert len(lengths) == 24 and len({*lengths}) > 9
    assert lengths == sorted(lengths[:12]) + sorted(lengths[12:])
