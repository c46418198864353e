"""What sft and preferences compute, against independent references. That their copies train:
test_adapting.py."""

import json
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import assert_one_line, make
from conftest import ROUNDING_FLOAT32, train_forked
from lazy import lib, lora, peft, preferences, sft, tokenizers, transformers
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SPECIAL = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
# MARK and UNTIL: by the marks there transformers finds the tokens of answers.
TEMPLATES = {
    "one form for all roles": "{% for x in messages %}<|{{ x.role }}|>\n"
    "{% if x.role == 'assistant' %}MARK{{ x.content }}<|end|>\nUNTIL"
    "{% else %}{{ x.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "no header of answers": "<s>{% for x in messages %}{% if x.role == 'assistant' %}"
    "MARK {{ x.content }}<|end|>UNTIL{% else %}[INST] {{ x.content }}[/INST]{% endif %}"
    "{% endfor %}",
    "stripped texts, a date": "<s><|system|>{{ strftime_now('%d %b %Y') }}\n\n<|end|>"
    """{{ strftime_now( "%Y-%m-%d") }}"""
    "{% for x in messages %}<|{{ x.role }}|>\n\n{% if x.role == 'assistant' %}"
    "MARK{{ x.content | trim }}<|end|>UNTIL{% else %}{{ x.content | trim }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    "a prompt opens a thought": "{% for x in messages %}<|{{ x.role }}|>"
    "{% if x.role == 'assistant' %}MARK{{ x.content }}<|end|>UNTIL"
    "{% else %}{{ x.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
}
PLAIN = TEMPLATES["one form for all roles"].replace("MARK", "").replace("UNTIL", "")
# In these the last answer is written otherwise than earlier ones.
LAST_TURNS = {
    "reasoning in the last turn alone": TEMPLATES["one form for all roles"].replace(
        "MARK", "MARK{{ 'I think. ' if loop.last }}"
    ),
    "an end of the whole": TEMPLATES["one form for all roles"].replace(
        "UNTIL", "{{ '<s>' if loop.last }}UNTIL"
    ),
}
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
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


ARGS = SimpleNamespace(length=1000, beta=0.3)


def tokenized(tokenizer, messages, args, first=0):
    """The only sample of a conversation."""
    (sample,) = lib.chat.samples_of(tokenizer, messages, args, first=first)
    return sample


def marked(template, before="{% generation %}", after="{% endgeneration %}"):
    for form, date in (("'%d %b %Y'", "26 Jul 2024"), (' "%Y-%m-%d"', "2024-07-26")):
        template = template.replace(f"strftime_now({form})", f"'{date}'")
    return template.replace("MARK", before).replace("UNTIL", after)


def by_marks(tokenizer, template, messages):
    """The tokens of a conversation and, of each answer, those that transformers finds by marks."""
    tokenizer.chat_template = marked(template)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(messages, **options)
    tokens, mask = found["input_ids"], found["assistant_masks"]
    begins = [i for i, own in enumerate(mask) if own and not (i and mask[i - 1])]
    return tokens, mask, begins


@pytest.mark.parametrize("template", LAST_TURNS)
def test_where_the_last_turn_is_another_each_answer_is_a_sample(template, tokenizer):
    """As the model is used: transformers marks the answers of the conversation up to each."""
    for messages in CHATS:
        expected = []
        for end in range(2, len(messages) + 1, 2):
            tokens, _, begins = by_marks(tokenizer, LAST_TURNS[template], messages[:end])
            expected.append((tokens[:-1], [-100] * (begins[-1] - 1) + tokens[begins[-1] :]))
        tokenizer.chat_template = LAST_TURNS[template].replace("MARK", "").replace("UNTIL", "")
        samples = lib.chat.samples_of(tokenizer, messages, ARGS)
        assert [tuple(x.T.tolist()) for x in samples] == expected
        (last,) = lib.chat.samples_of(tokenizer, messages, ARGS, first=len(messages) - 1)
        assert tuple(last.T.tolist()) == expected[-1]
        tokens, mask, _ = by_marks(tokenizer, LAST_TURNS[template], messages)
        targets = tokenized(tokenizer, messages, ARGS)[:, 1].tolist()
        assert targets == [x if own else -100 for x, own in zip(tokens, mask, strict=True)][1:]


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


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_targets_are_the_tokens_that_the_template_marks(template, tokenizer):
    """transformers finds them by marks in the template, the example also without."""
    plain = TEMPLATES[template].replace("MARK", "").replace("UNTIL", "")
    for messages in CHATS:
        expected, mask, begins = by_marks(tokenizer, TEMPLATES[template], messages)
        same = tokenized(tokenizer, messages, ARGS)
        last = tokenized(tokenizer, messages, ARGS, first=len(messages) - 1)
        tokenizer.chat_template = plain
        sample = tokenized(tokenizer, messages, ARGS)
        assert torch.equal(same, sample)
        tokens, targets = sample.T.tolist()
        assert tokens == expected[:-1]
        assert targets == [x if own else -100 for x, own in zip(expected, mask, strict=True)][1:]
        assert last[:, 1].tolist() == [-100] * (begins[-1] - 1) + targets[begins[-1] - 1 :]
        answers = [x["content"] for x in messages if x["role"] == "assistant"]
        trained = tokenizer.decode([x for x in targets if x != -100])
        assert trained.count("<|end|>") == len(answers), "it learns where to end"
        assert all(answer.strip() in trained for answer in answers)
        assert "26 Jul 2024" in tokenizer.decode(tokens) or "date" not in template
        shorter = SimpleNamespace(length=len(tokens) - 1)
        assert tokenized(tokenizer, messages, shorter)[:, 0].tolist() == tokens[:-1]


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
    args = SimpleNamespace(base=base, chat_template=None, output_dir=tmp_path, pairs=path, seed=0)
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
    answers = []
    for run in train_forked(tmp_path, *runs):
        trained = lora.with_lora(sft.build_model(SimpleNamespace(base=base, base_dtype="bfloat16")))
        weights = load_file(run.directory / "model.safetensors")
        assert {x.dtype for name, x in weights.items() if ".lora_" in name} == {torch.float32}
        trained.load_state_dict(weights, strict=False)
        expected = trained(tokens).logits
        answers.append(expected)
        adapter = run.directory / "adapter"
        ends = [path / "generation_config.json" for path in (base, run.directory)]
        assert ends[0].read_text() == ends[1].read_text()
        name = json.loads((adapter / "adapter_config.json").read_text())
        assert name["base_model_name_or_path"] == str(base)
        frozen = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        loaded = peft.PeftModel.from_pretrained(frozen, adapter)
        assert torch.equal(loaded(tokens).logits, expected)
        # transformers reads the matrices in the base's 16 bits.
        options = {"tokenizer": str(run.directory), "device": "cpu"}
        chat = transformers.pipeline("text-generation", str(adapter), **options).model
        torch.testing.assert_close(chat(tokens).logits, expected, rtol=0.05, atol=0.05)
        assert not torch.allclose(expected, before, rtol=0.1)
    torch.testing.assert_close(*answers, rtol=0.05, atol=0.05)


def test_wrong_chats_and_templates_are_one_line(base, tmp_path):
    good = [json.dumps({"messages": x}) for x in CHATS * 5]
    alone = json.dumps({"messages": CHATS[0][1:]})
    human = json.dumps({"messages": [{"role": x, "content": "a"} for x in ("human", "gpt")]})
    files = {
        "human": [human],
        "good": good,
        "alone": [good[0], alone],
    }
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    script = make(tmp_path / "mine.py", "ddp", "sft")
    template = ["--chat-template", tmp_path / "forgets.jinja"]
    cases = {
        "line 2: ValueError('nothing comes before the answer')": ["alone"],
        "line 1: ValueError('no message has the role assistant, but human, g": ["human"],
        "line 1: ValueError('the chat template changes what comes before an": ["good", *template],
        "0 of 20 lines have an answer within --length: the tra": ["good", "--length", 2],
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
    args.chats, args.batch_size, args.global_batch_size = tmp_path / "chats.jsonl", 3, 12
    train, _ = sft.load_data(args, SimpleNamespace(is_main_process=False))
    lengths = [len(x) for x in train.dataset]
    assert len(lengths) == 24 and len({*lengths}) > 9
    assert lengths == sorted(lengths[:12]) + sorted(lengths[12:])
