"""What sft, preferences and grpo compute, against independent references. That their copies train:
test_adapting.py. Which tokens of chats are trained: test_chat_targets.py."""

import json
import shutil
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import close, loss_of_step, make, train
from conftest import Exit
from lazy import grpo, lib, lora, peft, preferences, sft, transformers

pytestmark = pytest.mark.slow


def chat(*turns):
    """Messages of a user and, in turns, an assistant: a text is a content."""
    roles = ("user", "assistant") * len(turns)
    given = [{"content": x} if isinstance(x, str) else x for x in turns]
    return [{"role": role, **turn} for role, turn in zip(roles, given, strict=False)]


CHATS = [
    chat("Hi", " Hello, grüß dich 🙂 "),
    chat("1 + 1", "2", "sure?\n", "Yes,\n\nI am"),
    chat("a longer question, of many words", "no"),
    chat("x", "y", "z", "a longer answer than all"),
]
ARGS = SimpleNamespace(length=1000, beta=0.3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny Llama, in bf16, and its tokenizer, with prompts beside it."""
    path = tmp_path_factory.mktemp("base")
    toy.make("prompts", path)
    return path / "llama"


@pytest.fixture
def tokenizer(base):
    lib.chat.say.cache_clear()
    return transformers.AutoTokenizer.from_pretrained(base)


@pytest.fixture
def model(base):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return lib.token_losses.with_token_losses(model)


def tokenized(tokenizer, messages, **options):
    """The only sample of a conversation."""
    (sample,) = lib.chat.samples_of(tokenizer, messages, ARGS, **options)
    return sample


def trained(tokenizer, messages, tools=None):
    """The text of the targets of a conversation."""
    targets = tokenized(tokenizer, messages, tools=tools)[:, 1]
    return tokenizer.decode(targets[targets != -100])


def writing(content, prompt=""):
    """A template that writes a content in this way, and begins an answer by a prompt."""
    template = "{% for x in messages %}<|{{ x.role }}|>" + content + "<|end|>{% endfor %}"
    return template + "{% if add_generation_prompt %}<|assistant|>" + prompt + "{% endif %}"


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


def test_arguments_of_calls_are_as_a_template_wants_them(tokenizer):
    """An object or a text. A template wants a text if it writes an object as Python does."""
    text = '{"city":"Köln","days":[3]}'
    calls = "{% for y in x.tool_calls | default([]) | map(attribute='function') %}"
    question = {"content": "", "tool_calls": None}  # as in a row of a table
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    for written, of_object, of_text in (
        ("{{ y.arguments.city }}{{ y.arguments.days }}", "Köln[3]", "Köln[3]"),
        ("{{ y.arguments }}", '{"city": "Köln", "days": [3]}', text),
    ):
        tokenizer.chat_template = writing(f"{calls}{{{{ y.name }}}} {written}{{% endfor %}}")
        for given, expected in ((json.loads(text), of_object), (text, of_text)):
            found = trained(tokenizer, chat(question, calling(given)), tools)
            assert found == f"weather {expected}<|end|>"


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


def test_an_eos_in_place_of_a_prompt_is_an_end_and_no_header(tokenizer):
    """As in the template of Phi-3."""
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    end = "{% else %}{{ eos_token }}{% endif %}"
    tokenizer.chat_template = writing("{{ x.content }}").replace("{% endif %}", end)
    assert trained(tokenizer, chat("a", "b")) == "b<|end|><|endoftext|>"


def test_texts_of_others_take_linear_time(tokenizer):
    """They took minutes."""
    assert lib.turns.squeezed("\\" * 10**6 + "a") == "a"
    date = """{{ strftime_now('%d %b %Y') }}{{ strftime_now( "%Y-%m-%d") }}{#"""
    tokenizer.chat_template = date + "strftime_now('" * 10**5 + "#}" + tokenizer.chat_template
    text = tokenizer.decode(tokenized(tokenizer, CHATS[0])[:, 0])
    assert text.startswith("26 Jul 20242024-07-26<|user|>")


@pytest.mark.parametrize(
    ("content", "eos", "saved_eos", "said"),
    [
        ("{{ x.content }}<|end|>", [1, 2], [1, 2], ""),
        ("{{ x.content }}<|end|>", 0, [0, 2], "gets <|end|>, in which answers end here"),
        ("{{ x.content }}", 2, [2], "ends an answer in no token: the model learns no end"),
        ("{{ messages[3].content }}", [0], [0], ""),
    ],
)
def test_an_answer_ends_in_a_saved_eos(content, eos, saved_eos, said, base, tmp_path, capsys):
    args = SimpleNamespace(base=tmp_path / "base", output_dir=tmp_path / "run")
    shutil.copytree(base, args.base)
    args.chat_template = tmp_path / "mine.jinja"
    args.chat_template.write_text(f"{{% for x in messages %}}{content}{{% endfor %}}")
    config = {"eos_token_id": eos, "temperature": 0.5, "do_sample": False}  # as some bases have
    (args.base / "generation_config.json").write_text(json.dumps(config))
    lib.chat.say.cache_clear()
    lib.chat.chat_tokenizer(args, SimpleNamespace(is_main_process=True))
    saved = json.loads((args.output_dir / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["temperature"]) == (saved_eos, 0.5)
    lines = capsys.readouterr().err
    assert said in lines and ("answer" in lines) == bool(said)


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
        assert loss.item() == close(exact.item())
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


def test_the_reference_of_a_run_with_lora_is_its_base(base, tokenizer, model, tmp_path):
    """In a checkpoint after some steps, on two processes: of each pair, in the data's order, also
    of a last batch that is padded. A checkpoint has it, so a resumed run computes none. In each
    form of a row the last answers are compared, and a row without a difference is left out."""
    texts = [(f"{i}?", "yes" * (1 + i % 7), "no" * (1 + i % 3)) for i in range(39)]
    rejected = [*CHATS[1][:3], {"role": "assistant", "content": "no"}]
    lines = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": CHATS[1], "rejected": rejected},
        {"prompt": CHATS[1][:3], "chosen": CHATS[1][3]["content"], "rejected": "no"},
        *({"prompt": x, "chosen": y, "rejected": z} for x, y, z in texts),
    ]
    pairs = [(CHATS[1], rejected)] * 2
    pairs += [(chat(x, y), chat(x, z)) for x, y, z in texts]
    toy.write_json_lines(tmp_path / "pairs.jsonl", lines)
    flags = ["--cpu", "--base", base, "--pairs", tmp_path / "pairs.jsonl", "--batch-size", 4]
    flags += ["--max-steps", 3, "--lr", 1e-2, "--checkpoint-every", 3]
    script = make(tmp_path / "mine.py", "ddp", "preferences", "lora")
    (run,) = train(tmp_path, (2, script, flags))
    content = torch.load(run.directory / "step-00000003.pt", weights_only=True)
    found = torch.cat(content["states"]["reference"]["of"])
    samples = [tokenized(tokenizer, x, first=len(x) - 1) for both in pairs for x in both]
    expected = torch.stack([by_hand(model, sample).sum() for sample in samples])
    torch.testing.assert_close(found.flatten(), expected.float(), rtol=1e-5, atol=1e-5)


def test_an_adapter_on_a_base_in_bf16_answers_as_the_run(base, tmp_path):
    """peft loads it onto the base. The base stays in 16 bits, what is trained has 32."""
    toy.write_json_lines(tmp_path / "chats.jsonl", [{"messages": x} for x in CHATS * 5])
    flags = ["--cpu", "--base", base, "--chats", tmp_path / "chats.jsonl", "--batch-size", 4]
    flags += ["--max-steps", 4, "--lr", 1e-1, "--base-dtype", "bfloat16"]
    scripts = [make(tmp_path / f"{x}_mine.py", x, "sft", "lora") for x in ("ddp", "sharded")]
    runs = train(tmp_path, *((2, script, flags) for script in scripts))
    tokens = torch.arange(30)[None]
    for run in runs:
        trained = lora.with_lora(sft.build_model(SimpleNamespace(base=base, base_dtype="bfloat16")))
        found = {(".lora_" in name, x.dtype) for name, x in run.weights.items()}
        assert found == {(True, torch.float32)}
        trained.load_state_dict(run.weights, strict=False)
        expected = trained(tokens).logits
        frozen = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        assert not torch.allclose(expected, frozen(tokens).logits, rtol=0.1)
        loaded = peft.PeftModel.from_pretrained(frozen, run.directory / "adapter")
        assert torch.equal(loaded(tokens).logits, expected)
        for parameter in loaded.parameters():  # as transformers reads them
            parameter.data = parameter.data.bfloat16()
        source = {"model": str(run.directory / "adapter"), "tokenizer": str(run.directory)}
        chat = transformers.pipeline("text-generation", **source, device="cpu").model
        assert torch.equal(chat(tokens).logits, loaded(tokens).logits)
    args = SimpleNamespace(output_dir=run.directory, weights="other.safetensors")
    lora.save_adapter(SimpleNamespace(is_main_process=True), trained, args)
    config = json.loads((run.directory / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None, "they are not those of the base"
    # What bf16 rounds away grows with each step: in the fourth one it is a percent of the loss.
    for name, steps in (("loss", 2), ("grad_norm", 1)):
        one, other = ([line[name] for line in run.train[:steps]] for run in runs)
        assert one == pytest.approx(other, rel=torch.finfo(torch.bfloat16).eps)


def test_chats_that_fill_no_batch_and_weights_of_16_bits_are_errors(base, tmp_path):
    toy.write_json_lines(tmp_path / "a.jsonl", [{"messages": x} for x in CHATS])
    args = SimpleNamespace(base=base, chat_template=None, length=2, output_dir=tmp_path, test=None)
    args.chats, args.global_batch_size, args.base_dtype = tmp_path / "a.jsonl", 3, "bfloat16"
    with pytest.raises(Exit, match=r"a\.jsonl: 0 rows for training do not fill one batch"):
        sft.load_data(args, SimpleNamespace(is_main_process=True))
    with pytest.raises(Exit, match="would train in 16 bits: add lora"):
        sft.make_optimizer(sft.build_model(args), args, 9)


# ------------------------------------------------------------------------------------------- grpo
@pytest.fixture
def args(base):
    sizes = {"length": 1000, "new_tokens": 9, "group": 2, "temperature": 1.3}
    options = {"chat_template": None, "beta": 0.0, "mean_over": "completions"}
    return SimpleNamespace(base=str(base), **options, **sizes)


@pytest.fixture
def batch(args):
    """That of four prompts, of several lengths."""
    tokenizer, _ = lib.completions.tokenizer_and_ends(args.base, None)
    prompts = "1 + 1", "a longer prompt, of many words", "x", "Why?"
    lines = [{"prompt": text, "pattern": ".*"} for text in prompts]
    rows = [(lib.completions.prompt_tokens(tokenizer, line, args), line) for line in lines]
    torch.manual_seed(0)
    return lib.completions.collate([*lib.completions.Prompts(rows, args)])


def test_a_random_number_draws_a_token_as_often_as_it_is_probable():
    scores, count = 2 * torch.randn(7), 10000
    numbers = (torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count
    chosen = lib.completions.Draw(numbers, 1.7)(None, scores.expand(count, 7)).argmax(1)
    shares = chosen.bincount(minlength=7) / count
    torch.testing.assert_close(shares, (scores / 1.7).softmax(0), rtol=0, atol=1.1 / count)


def test_a_completion_is_that_of_any_batch_and_if_greedy_of_transformers(model, args, batch):
    prompts, _, numbers = batch
    plain = deepcopy(model)
    # The base's own, which are left out.
    model.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=1)
    drawn, texts = lib.completions.complete(model, prompts, numbers[:, 0], args)
    other, _ = lib.completions.complete(model, prompts, numbers[:, 1], args)
    greedy, _ = lib.completions.complete(model, prompts, None, args)
    assert not drawn.equal(other) and not drawn.equal(greedy)
    for i, prompt in enumerate(prompts):
        alone = prompt[prompt != -100][None]
        found, text = lib.completions.complete(model, alone, numbers[i : i + 1, 0], args)
        assert drawn[i, : found.shape[1]].equal(found[0]) and texts[i] == text[0]
        exact = plain.generate(alone, max_new_tokens=9, do_sample=False)[0, alone.shape[1] :]
        assert greedy[i, : len(exact)].equal(exact)


def test_the_end_of_a_completion_counts_and_what_is_behind_does_not(model, args, batch, tmp_path):
    """It is the tokenizer's eos_token, or one of generation_config.json."""
    shutil.copytree(args.base, tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": [2, 8]}')
    args.base = str(tmp_path / "base")
    tokenizer, _ = lib.completions.tokenizer_and_ends(args.base, None)
    given = torch.tensor([[5, 2, 7], [5, 6, 7], [2, 2, 2], [5, 8, 2]])
    model.generate = lambda input_ids, **_: torch.cat((input_ids, given), dim=1)
    found, texts = lib.completions.complete(model, batch[0], None, args)
    assert tokenizer.eos_token_id == 2
    assert found.tolist() == [[5, 2, -100], [5, 6, 7], [2, -100, -100], [5, 8, -100]]
    assert texts == [tokenizer.decode(x) for x in ([5], [5, 6, 7], [], [5, 8])]


def losses_by_hand(model, reference, prompts, completions, rewards, beta):
    """Return the losses, and the divergences, of the tokens of each completion, without padding."""
    losses, divergences = [], []
    groups = rewards.view(2, 2).double()
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    rows = zip(prompts, completions, advantages.flatten(), strict=True)
    for prompt, completion, advantage in rows:
        prompt, completion = prompt[prompt != -100], completion[completion != -100]
        tokens, places = torch.cat((prompt, completion))[None], slice(len(prompt) - 1, -1)
        found, of_base = (
            (x(tokens).logits[0, places] / 1.3).log_softmax(1).gather(1, completion[:, None])[:, 0]
            for x in (model, reference)
        )
        ratio = torch.exp(found) / torch.exp(found).detach()
        divergence = torch.exp(of_base) / torch.exp(found) - (of_base - found) - 1
        losses.append(-(ratio * advantage - beta * divergence))
        divergences.append(divergence)
    return losses, divergences


@pytest.mark.parametrize(("mean_over", "beta"), [("completions", 0.7), ("tokens", 0.0)])
def test_any_microbatches_have_the_gradient_of_the_paper(mean_over, beta, args, tmp_path):
    """arXiv:2402.03300, equation 3, and equation 4 for the divergence from another model. Two
    prompts have completions of 100 and of 900 tokens (huggingface/trl#7206). Microbatches are
    weighted as in a recipe's `train_step`."""
    args.beta, args.mean_over, args.base = beta, mean_over, str(tmp_path)
    size = {"vocab_size": 50, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 903}
    dropout = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
    config = transformers.GPT2Config(**size, **dropout)  # its positions are absolute
    model, reference = (transformers.GPT2LMHeadModel(config).double() for _ in range(2))
    reference.save_pretrained(tmp_path)
    prompts = torch.tensor([[-100, 3, 4], [-100, 3, 4], [5, 6, 7], [5, 6, 7]])
    completions = torch.full((4, 900), -100)
    for row, length in zip(completions, (100, 60, 900, 300), strict=True):
        row[:length] = torch.randint(3, 50, (length,))
    rewards = torch.tensor([1.0, 0.0, 0.5, 3.0])
    losses, divergences = losses_by_hand(model, reference, prompts, completions, rewards, beta)
    exact = torch.cat(losses).mean()
    if mean_over == "completions":
        exact = torch.stack([x.mean() for x in losses]).mean()
    exact = torch.autograd.grad(exact, [*model.parameters()], retain_graph=True)
    for size in (1, 2):
        parts = [slice(begin, begin + 2 * size) for begin in range(0, 4, 2 * size)]
        steps = [
            lib.policy.group_loss(model, prompts[part], completions[part], rewards[part], args)
            for part in parts
        ]
        found = torch.autograd.grad(loss_of_step(steps), [*model.parameters()])
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)
    [values] = steps
    assert values["length"].tolist() == [80, 600] and values["reward"].tolist() == [0.5, 1.75]
    assert values["equal_rewards"].tolist() == [False, False]
    if beta:
        means = torch.stack([x.mean() for x in divergences]).view(2, 2).mean(1)
        torch.testing.assert_close(values["kl"], means.detach().float(), rtol=1e-4, atol=1e-6)


def test_with_lora_the_base_is_the_model_without_its_adapter(model, args, batch):
    inputs = batch[0], torch.randint(3, 999, (4, 5)), 1.0
    before = lib.policy.log_probabilities(model, *inputs)
    adapted = lora.with_lora(model)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    assert not torch.allclose(lib.policy.log_probabilities(adapted, *inputs), before)
    after = lib.policy.base_log_probabilities(adapted, *inputs, base="no second model")
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not torch.allclose(lib.policy.log_probabilities(adapted, *inputs), before)


def test_each_prompt_gets_its_own_completions_and_rewards_without_dropout(args, batch, monkeypatch):
    options = {"dtype": torch.float64, "attention_dropout": 0.5}
    model = transformers.AutoModelForCausalLM.from_pretrained(args.base, **options)
    args.new_tokens = 3
    batch = [x[:2] for x in batch]
    prompts, lines, numbers = batch
    expected, found = [], []
    for i, line in enumerate(lines):
        for drawn in numbers[i, :, None]:
            _, [text] = lib.completions.complete(model, prompts[i : i + 1], drawn, args)
            expected.append((text, line))
    monkeypatch.setattr("grpo.reward", lambda *pair: found.append(pair) or float(len(found) % 2))
    one, other = (grpo.compute_loss(model.train(), batch, args)["loss"] for _ in range(2))
    assert found == expected * 2
    assert one.equal(other) and one.all()


def test_a_reward_is_for_the_last_number_or_for_a_pattern():
    assert grpo.reward("3 and 4 make -1,007.50", {"answer": "#### -1007.5"}) == 1
    assert grpo.reward("", {"answer": 7}) == 0
    assert grpo.reward("ab\nc", {"pattern": "a.*c"}) == 1
    assert grpo.reward("abcd", {"pattern": "a.*c"}) == 0


def test_a_model_learns_what_is_rewarded(base, tmp_path):
    """Of random completions a fifth is rewarded."""
    script = make(tmp_path / "mine.py", "ddp", "grpo")
    flags = ["--cpu", "--base", base, "--prompts", base.parent / "prompts.jsonl", "--lr", 1e-2]
    flags += ["--new-tokens", 4, "--batch-size", 8, "--max-steps", 20]
    (run,) = train(tmp_path, (1, script, flags))
    rewards = [line["reward"] for line in run.train]
    assert sum(rewards[:4]) / 4 < 0.3 and sum(rewards[-4:]) / 4 > 0.6
    assert run.summary["test_reward"] > 0.9 and run.summary["test_loss"] < -0.9


def test_a_prompt_that_is_too_long_and_a_group_of_one_are_errors(args):
    tokenizer, _ = lib.completions.tokenizer_and_ends(args.base, None)
    with pytest.raises(ValueError, match="tokens, more than --length"):
        lib.completions.prompt_tokens(tokenizer, {"prompt": "a " * 3000}, args)
    with pytest.raises(Exit, match="argument --group: choose 2 or more"):
        grpo.load_data(SimpleNamespace(group=1), None)
