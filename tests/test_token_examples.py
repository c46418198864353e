"""Losses of targets in chunks of logits, and files of tokens, against independent references. That
copies with them train: test_adapting.py."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from composed import make
from conftest import ROUNDING_FLOAT32
from lazy import lib, lora, tokens, transformers
from processes import train_forked
from test_files import header, index
from torch.nn import functional as F

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
SIZES |= {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
OF_OPT = {"ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 30}
CASES = {
    "compiled, tied": ("Llama", {"tie_word_embeddings": True}),
    "an adapted head": ("Llama", {"tie_word_embeddings": False}),
    "capped logits": ("Gemma2", {"final_logit_softcapping": 0.5}),
    "a decoder in the model": ("OPT", OF_OPT),
}


def language_model(case):
    kind, options = CASES[case]
    model = getattr(transformers, f"{kind}ForCausalLM")
    model = model(getattr(transformers, f"{kind}Config")(**SIZES, **options)).train()
    for module in model.modules():
        module.p = module.dropout = 0.0  # OPT's
    if case == "an adapted head":
        model = lora.with_lora(model)
        for name, parameter in model.named_parameters():
            parameter.data += 0.1 * ("lora_B" in name)
    return model


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_logits_have_the_losses_and_gradients_of_all(case, monkeypatch):
    """Logits of the counted targets alone, of three at a time; the last ones once."""
    monkeypatch.setattr(lib.token_losses, "LOGITS", 3 * 50 + 7)
    model = language_model(case)
    trained = [x for x in model.parameters() if x.requires_grad]
    inputs, targets = torch.randint(50, (2, 3, 9)).unbind(1)[:2]
    targets[0, ::2] = targets[1, 1:7] = -100
    logits = model(inputs, use_cache=False).logits.double()
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 9)
    weights = torch.rand(2, 9)
    expected = torch.autograd.grad((exact * weights).sum(), trained)

    model = lib.token_losses.with_token_losses(model)
    if "compiled" in case:
        model.compile(backend="eager")
    rows = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, given, out: rows.append(out.numel() // 50))
    losses = model(inputs, targets=targets, use_cache=False)
    assert losses.dtype == torch.float32 and rows == [3, 3, 1]
    torch.testing.assert_close(losses.double(), exact, rtol=ROUNDING_FLOAT32, atol=1e-6)
    found = torch.autograd.grad((losses * weights).sum(), trained)
    assert rows == [3, 3, 1, 3, 3]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=ROUNDING_FLOAT32)
    assert model(inputs, use_cache=False).logits.shape == (2, 9, 50), "without targets"
    assert model.bfloat16()(inputs, targets=targets, use_cache=False).dtype == torch.float32


def test_chunks_train_as_one_in_sharded(tmp_path):
    content = numpy.random.default_rng(0).integers(50, size=2000).astype("<u2")
    content.tofile(tmp_path / "a.bin")
    flags = ["--cpu", "--train", tmp_path / "a.bin", "--vocabulary", 50, "--length", 16]
    flags += ["--global-batch-size", 8, "--max-steps", 3, "--epochs", 1]
    whole = make(tmp_path / "whole.py", "ddp", "tokens")
    chunked = [("LOGITS = 2**27", "LOGITS = 50 * 7")]
    chunked = make(tmp_path / "chunked.py", "sharded", "tokens", replaced=chunked)
    exact, run = train_forked(tmp_path, (1, whole, flags), (2, chunked, flags))
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in exact.train]
        assert [line[name] for line in run.train] == pytest.approx(expected, rel=1e-4)


def files_of(kind, content):
    """{ending: bytes} of an array of tokens."""
    short, long = content.astype("<u2").tobytes(), content.astype("<u4").tobytes()
    return {
        "no header": {".bin": short},
        "no header, long": {".bin": long},
        "llm.c": {".bin": header(20240520, len(content)) + short},
        "llm.c, long": {".bin": header(20240801, len(content)) + long},
        "Megatron": {".bin": short, ".idx": index(8, [3, len(content) - 3])},
        "Megatron, long": {".bin": long, ".idx": index(4, [len(content)])},
    }[kind]


def args_of(directory, **options):
    options = {"length": 8, "batch_size": 4, "test": None, "vocabulary": 60000} | options
    return SimpleNamespace(train=sorted(map(str, directory.glob("*.bin"))), **options)


@pytest.mark.parametrize("kind", ["no header", "llm.c", "Megatron"])
@pytest.mark.parametrize("long", [False, True])
def test_windows_of_files_of_tokens_lie_one_after_the_other(kind, long, tmp_path):
    top = 100000 if long else 60000
    generator = numpy.random.default_rng(0)
    parts = [generator.integers(top, size=size) for size in (30, 9, 416)]
    for number, part in enumerate(parts):
        for ending, content in files_of(kind + ", long" * long, part).items():
            (tmp_path / f"{number}{ending}").write_bytes(content)
    args = args_of(tmp_path, vocabulary=top)
    train, test = (loader.dataset for loader in tokens.load_data(args, None))
    expected = [part[i : i + 9].tolist() for part in parts for i in range(0, len(part) - 8, 8)]
    assert [x.tolist() for x in [*train, *test]] == expected and len(test) == 1
    args.test = args.train[1:2]
    train, test = (loader.dataset for loader in tokens.load_data(args, None))
    assert len(train) == len(expected) and [x.tolist() for x in test] == [parts[1].tolist()]
