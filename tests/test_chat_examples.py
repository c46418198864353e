"""What sft and preferences compute, against independent references. That their copies train:
test_adapting.py. Which tokens are trained: test_chat_targets.py."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import loss_of_step, make, train
from conftest import ROUNDING_FLOAT32, Exit, exit_by_exception
from lazy import lib, lora, peft, preferences, sft, transformers
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

CHATS = [
    [("user", "Hi"), ("assistant", " Hello, grüß dich 🙂 ")],
    [("user", "1 + 1"), ("assistant", "2"), ("user", "sure?\n"), ("assistant", "Yes,\n\nI am")],
    [("user", "a longer question, of many words"), ("assistant", "no")],
    [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "a longer answer than all")],
]
CHATS = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
ARGS = SimpleNamespace(length=1000, beta=0.3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny Llama, in bf16, and its tokenizer."""
    path = tmp_path_factory.mktemp("base")
    toy.make("chats", path)
    return path / "llama"


@pytest.fixture
def tokenizer(base):
    lib.chat.say.cache_clear()
    return transformers.AutoTokenizer.from_pretrained(base)


@pytest.fixture
def model(base):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return lib.token_losses.with_token_losses(model)


def tokenized(tokenizer, messages, first=0):
    """The only sample of a conversation."""
    (sample,) = lib.chat.samples_of(tokenizer, messages, ARGS, first=first)
    return sample


def trained(tokenizer, messages, tools=None):
    """The text of the targets of a conversation."""
    (sample,) = lib.chat.samples_of(tokenizer, messages, ARGS, tools)
    targets = sample[:, 1]
    return tokenizer.decode(targets[targets != -100])


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


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (chat("a", {"content": "b", "weight": 0.5}), "the weight of a message is 0.5"),
        (chat("a", {"content": "b", "refusal": "No."}), "'refusal' would be ignored: remove it"),
        (chat("a", {"content": "b", "role": "gpt"}), "no message has the role assistant, but user"),
        (chat("a", "b")[1:], "nothing comes before the answer"),
        (chat({"content": None}, "b"), "the content of a message is None, which is no text"),
        (chat({"content": [{"type": "image", "url": "a.png"}]}, "b"), "'text'"),
        (chat("ob", "ject"), "message 2 shares a token with another one"),
    ],
)
def test_a_chat_that_cannot_be_trained_as_it_is_meant_is_an_error(messages, said, tokenizer):
    tokenizer.chat_template = "{% for x in messages %}{{ x.content }}{% endfor %}"
    with pytest.raises((KeyError, ValueError), match=said):
        trained(tokenizer, messages)


def test_keys_that_the_template_reads_or_that_are_harmless_and_parts_are_no_error(tokenizer):
    tokenizer.chat_template = writing("{{ x.get('refusal', '') }}{{ x.content }}")
    parts = [{"type": "text", "text": text} for text in ("b", " c")]
    answer = {"refusal": "No.", "content": parts, "function_call": None, "id": 3, "model_name": "m"}
    assert trained(tokenizer, chat("a", answer)) == "No.b c<|end|>"
    harmless = {"system": None, "prompt_id": 3, "score-chosen": 1, "messages": []}
    lib.turns.check_keys(harmless, ["messages"])


TEXT = '{"city":"Köln","days":[3]}'


@pytest.mark.parametrize(
    ("arguments", "of_object", "of_text"),
    [
        ("{{ y.arguments.city }}{{ y.arguments.days }}", "Köln[3]", "Köln[3]"),
        ("{{ y.arguments }}", '{"city": "Köln", "days": [3]}', TEXT),
    ],
)
def test_arguments_of_calls_are_as_a_template_wants_them(arguments, of_object, of_text, tokenizer):
    """An object or a text. A template wants a text if it writes an object as Python does."""
    calls = "{% for y in x.tool_calls | default([]) | map(attribute='function') %}"
    tokenizer.chat_template = writing(f"{calls}{{{{ y.name }}}} {arguments}{{% endfor %}}")
    question = {"role": "user", "content": "", "tool_calls": None}  # as in a row of a table
    for given, expected in ((json.loads(TEXT), of_object), (TEXT, of_text)):
        messages = [question, {"role": "assistant", **calling(given)}]
        for tools in (None, '[{"type": "function", "function": {"name": "weather"}}]'):
            assert trained(tokenizer, messages, tools) == f"weather {expected}<|end|>"


def test_notes_are_said_once(tokenizer, capsys):
    beside = {**calling({}), "content": "I look."}
    content = "{{ x.content if not x.tool_calls }}{{ x.tool_calls }}"
    tokenizer.chat_template = writing(content, prompt="<think>")
    for _ in range(2):
        assert not lib.chat.samples_of(tokenizer, chat("a", beside, "b", "c"), ARGS)
        assert lib.chat.samples_of(tokenizer, chat("a <|end|>", "<tool>c"), ARGS)
    notes = "leaves out texts beside tool calls", "'<|end|>' in the text of a message becomes a tok"
    notes += ("are generated behind '<|assistant|><think>', but some are trained without it",)
    lines = capsys.readouterr().err.splitlines()
    assert [note in line for note, line in zip(notes, lines, strict=True)] == [True] * 3
    lib.chat.say.cache_clear()
    tokenized(tokenizer, chat("a", "<think>b"))
    assert not capsys.readouterr().err


def test_texts_of_others_take_linear_time(tokenizer):
    """They took minutes."""
    assert lib.turns.squeezed("\\" * 10**6 + "a") == "a"
    date = """{{ strftime_now('%d %b %Y') }}{{ strftime_now( "%Y-%m-%d") }}{#"""
    tokenizer.chat_template = date + "strftime_now('" * 10**5 + "#}" + tokenizer.chat_template
    text = tokenizer.decode(tokenized(tokenizer, CHATS[0])[:, 0])
    assert text.startswith("26 Jul 20242024-07-26<|user|>")


WHOLE = writing("{{ x.content }}")
ENDS = {  # a template, the tokens of generation_config.json, those saved, what is said
    "one of several": (WHOLE, [1, 2], [1, 2], None),
    "none": (WHOLE, 0, [0, 2], "generation_config.json gets <|end|>, in which answers end here"),
    "no token": ("{% for x in messages %}{{ x.content }}{% endfor %}", 2, [2], "learns no end"),
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


def by_hand(model, sample):
    """Return the log-probabilities of a sample's targets in float64, without padding."""
    tokens, targets = sample.T
    probable = model(tokens[None]).logits[0].double().log_softmax(1)
    return torch.stack([probable[i, x] for i, x in enumerate(targets.tolist()) if x != -100])


def gradient(model, loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*model.parameters()])])


def test_the_loss_of_sft_is_the_mean_over_all_tokens_of_answers(model, tokenizer):
    """In however many microbatches: their gradients are weighted as in a recipe's `train_step`."""
    samples = [tokenized(tokenizer, messages) for messages in CHATS]
    exact = -torch.cat([by_hand(model, sample) for sample in samples]).mean()
    expected = gradient(model, exact)
    for size in (1, 2, 4):
        batches = [lib.chat.pad_chats(samples[i : i + size]) for i in range(0, 4, size)]
        loss = loss_of_step([sft.compute_loss(model, batch, ARGS) for batch in batches])
        assert loss.item() == pytest.approx(exact.item(), rel=ROUNDING_FLOAT32)
        torch.testing.assert_close(gradient(model, loss), expected, rtol=1e-4, atol=1e-6)


def test_dpo_is_the_papers_loss(model, tokenizer):
    """arXiv:2305.18290, equation 7, of each conversation alone, and its gradient. The prompt of the
    first pair has an answer in it."""
    reference, pairs = -10 * torch.rand(2, 2), []
    for messages in CHATS[1:3]:
        rejected = [*messages[:-1], {"role": "assistant", "content": "I do not want to say"}]
        both = messages, rejected
        pairs.append([tokenized(tokenizer, x, first=len(x) - 1) for x in both])
    ours = [torch.stack([by_hand(model, sample).sum() for sample in pair]) for pair in pairs]
    rewards = ARGS.beta * (torch.stack(ours) - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = torch.log1p(torch.exp(-margins))
    expected = gradient(model, losses.mean())
    sequences = lib.chat.pad_chats([x for pair in pairs for x in pair]).unflatten(0, (2, 2))
    values = preferences.compute_loss(model, (sequences, reference), ARGS)
    torch.testing.assert_close(values["loss"].double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values["margin"].double(), margins, rtol=1e-5, atol=1e-5)
    assert values["accuracy"].tolist() == (margins > 0).tolist()
    actual = gradient(model, values["loss"].mean())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_an_answer_may_repeat_its_prompt_or_an_end_of_it_and_no_message_is_dropped():
    whole = [{"role": "system", "content": "Hi"}, *CHATS[1]]
    for end in (2, 4):
        for begin in range(end + 1):
            assert lib.pairs.conversation(whole[:end], whole[begin:]) == whole
            assert lib.pairs.conversation(whole[begin:end], whole) == whole
    assert lib.pairs.conversation("1 + 1", "2") == CHATS[1][:2]
    for prompt, answer, error in (
        ("a", ["b"], "is no text, and no list of messages"),
        ("a", chat("b", "c"), "begins with no message of the prompt"),
    ):
        with pytest.raises(ValueError, match=error):
            lib.pairs.conversation(prompt, answer)


def test_the_reference_of_a_run_with_lora_is_its_base(base, tokenizer, tmp_path):
    """In a checkpoint after some steps, on two processes: of each pair, in the data's order, also
    of a last batch that is padded. A checkpoint has it, so a resumed run computes none. In each
    form of a row the last answers are compared, and a row without a difference is left out."""
    texts = [(f"{i}?", "yes" * (1 + i % 7), "no" * (1 + i % 3)) for i in range(39)]
    names = "prompt", "chosen", "rejected"
    rejected = [*CHATS[1][:3], {"role": "assistant", "content": "no"}]
    lines = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": CHATS[1], "rejected": rejected},
        {"prompt": CHATS[1][:3], "chosen": CHATS[1][3]["content"], "rejected": "no"},
        *(dict(zip(names, x, strict=True)) for x in texts),
    ]
    pairs = [(CHATS[1], rejected)] * 2
    pairs += [(chat(prompt, one), chat(prompt, other)) for prompt, one, other in texts]
    toy.write_json_lines(tmp_path / "pairs.jsonl", lines)
    flags = ["--cpu", "--base", base, "--pairs", tmp_path / "pairs.jsonl", "--batch-size", 4]
    flags += ["--max-steps", 3, "--lr", 1e-2, "--checkpoint-every", 3]
    script = make(tmp_path / "mine.py", "ddp", "preferences", "lora")
    (run,) = train(tmp_path, (2, script, flags))
    content = torch.load(run.directory / "step-00000003.pt", weights_only=True)
    found = torch.cat(content["states"]["reference"]["of"])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = []
    for both in pairs:
        samples = [tokenized(tokenizer, x, first=len(x) - 1) for x in both]
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
    runs = train(tmp_path, *runs)
    for run in runs:
        trained = lora.with_lora(sft.build_model(SimpleNamespace(base=base, base_dtype="bfloat16")))
        weights = load_file(run.directory / "model.safetensors")
        assert {(".lora_" in k, x.dtype) for k, x in weights.items()} == {(True, torch.float32)}
        trained.load_state_dict(weights, strict=False)
        expected = trained(tokens).logits
        adapter = run.directory / "adapter"
        for weights, named in (("other.safetensors", None), (None, str(base))):
            args = SimpleNamespace(output_dir=run.directory, weights=weights)
            lora.save_adapter(SimpleNamespace(is_main_process=True), trained, args)
            config = json.loads((adapter / "adapter_config.json").read_text())
            assert config["base_model_name_or_path"] == named
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


def test_chats_that_fill_no_batch_and_weights_of_16_bits_are_errors(base, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.chat.exit_with_error", exit_by_exception)
    monkeypatch.setattr("lib.fine_tuning.exit_with_error", exit_by_exception)
    toy.write_json_lines(tmp_path / "a.jsonl", [{"messages": x} for x in CHATS])
    args = SimpleNamespace(base=base, chat_template=None, length=2, output_dir=tmp_path, test=None)
    args.chats, args.global_batch_size, args.base_dtype = tmp_path / "a.jsonl", 3, "bfloat16"
    with pytest.raises(Exit, match=r"a\.jsonl: 0 rows for training do not fill one batch"):
        sft.load_data(args, SimpleNamespace(is_main_process=True))
    with pytest.raises(Exit, match="would train in 16 bits: add lora"):
        sft.make_optimizer(sft.build_model(args), args, 9)
