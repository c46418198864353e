"""What grpo computes, against independent references. That its copies train the same in every way:
test_adapting.py."""

import shutil
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import loss_of_step, make, train
from conftest import Exit, exit_by_exception
from lazy import grpo, lib, lora, transformers

pytestmark = pytest.mark.slow

PROMPTS = ["1 + 1", "a longer prompt, of many words", "x", "Why?"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny model and its tokenizer, with prompts beside it."""
    path = tmp_path_factory.mktemp("toy")
    toy.make("prompts", path)
    return path / "llama"


@pytest.fixture
def args(base):
    sizes = {"length": 1000, "new_tokens": 9, "group": 2, "temperature": 1.3}
    options = {"chat_template": None, "beta": 0.0, "mean_over": "completions"}
    return SimpleNamespace(base=str(base), **options, **sizes)


@pytest.fixture
def model(base):
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


@pytest.fixture
def batch(args):
    """That of four prompts, of several lengths."""
    tokenizer, _ = lib.completions.tokenizer_and_ends(args.base, None)
    lines = [{"prompt": text, "pattern": ".*"} for text in PROMPTS]
    rows = [(lib.completions.prompt_tokens(tokenizer, line, args), line) for line in lines]
    torch.manual_seed(0)
    return lib.completions.collate([*lib.completions.Prompts(rows, args)])


def by_hand(model, prompt, completion, temperature):
    """Return the log-probabilities of a completion's tokens, without padding."""
    prompt, completion = prompt[prompt != -100], completion[completion != -100]
    logits = model(torch.cat((prompt, completion))[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(1).gather(1, completion[:, None])[:, 0]


def test_a_random_number_draws_a_token_as_often_as_it_is_probable():
    scores, count = 2 * torch.randn(7), 10000
    numbers = (torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count
    chosen = lib.completions.Draw(numbers, 1.7)(None, scores.expand(count, 7)).argmax(1)
    shares = chosen.bincount(minlength=7) / count
    torch.testing.assert_close(shares, (scores / 1.7).softmax(0), rtol=0, atol=1.1 / count)


def test_a_completion_is_the_same_in_any_batch_and_greedy_is_that_of_transformers(
    model, args, batch
):
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
    """Return the losses, and the divergences, of the tokens of each completion."""
    losses, divergences = [], []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        group = rewards[i // 2 * 2 :][:2].double()
        advantage = (rewards[i] - group.mean()) / (group.std() + 1e-4)
        found = by_hand(model, prompt, completion, 1.3)
        with torch.no_grad():
            of_base = by_hand(reference, prompt, completion, 1.3)
        ratio = torch.exp(found) / torch.exp(found).detach()
        divergence = torch.exp(of_base) / torch.exp(found) - (of_base - found) - 1
        losses.append(-(ratio * advantage - beta * divergence))
        divergences.append(divergence)
    return losses, divergences


@pytest.mark.parametrize(("mean_over", "beta"), [("completions", 0.7), ("tokens", 0.0)])
def test_the_gradient_is_that_of_the_papers_formula_in_any_microbatches(
    mean_over, beta, args, tmp_path
):
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
    prompts = batch[0]
    inputs = prompts, torch.randint(3, 999, (4, 5)), 1.0
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


@pytest.mark.parametrize(
    ("completion", "line", "expected"),
    [
        ("3 and 4 make -1,007.50", {"answer": "#### -1007.5"}, 1),
        ("", {"answer": 7}, 0),
        ("ab\nc", {"pattern": "a.*c"}, 1),
        ("abcd", {"pattern": "a.*c"}, 0),
    ],
)
def test_a_reward_is_for_the_last_number_or_for_a_pattern(completion, line, expected):
    assert grpo.reward(completion, line) == expected


def test_a_model_learns_what_is_rewarded(base, tmp_path):
    """Of random completions a fifth is rewarded."""
    script = make(tmp_path / "mine.py", "ddp", "grpo")
    flags = ["--cpu", "--base", base, "--prompts", base.parent / "prompts.jsonl", "--lr", 1e-2]
    flags += ["--new-tokens", 4, "--batch-size", 8, "--max-steps", 20]
    (run,) = train(tmp_path, (1, script, flags))
    rewards = [line["reward"] for line in run.train]
    assert sum(rewards[:4]) / 4 < 0.3 and sum(rewards[-4:]) / 4 > 0.6
    assert run.summary["test_reward"] > 0.9 and run.summary["test_loss"] < -0.9


def test_a_prompt_that_is_too_long_and_a_group_of_one_are_errors(args, monkeypatch):
    tokenizer, _ = lib.completions.tokenizer_and_ends(args.base, None)
    with pytest.raises(ValueError, match="tokens, more than --length"):
        lib.completions.prompt_tokens(tokenizer, {"prompt": "a " * 3000}, args)
    monkeypatch.setattr("grpo.exit_with_error", exit_by_exception)
    with pytest.raises(Exit, match="argument --group: choose 2 or more"):
        grpo.load_data(SimpleNamespace(group=1), None)
