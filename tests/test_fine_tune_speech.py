"""What fine_tune_speech computes and saves, against transformers and nltk. That its copies train
the same in every way: test_adapting.py."""

from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
import toy
from composed import make, write_wav
from conftest import ROUNDING_FLOAT32, Exit, exit_by_exception
from lazy import fine_tune_speech, lib, sacrebleu, transformers
from processes import train_forked
from torch.nn import functional as F

from lib import utterances

pytestmark = pytest.mark.slow

IMPORTS = ["transformers.models.wav2vec2.modeling_wav2vec2"]
IMPORTS += ["transformers.models.whisper.modeling_whisper"]
KINDS = ["wav2vec2", "whisper"]
close = partial(pytest.approx, rel=ROUNDING_FLOAT32, abs=ROUNDING_FLOAT32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of toy data: 7 test utterances do not fill the last batch. One is too short for
    CTC: equal letters need a blank between them."""
    path = tmp_path_factory.mktemp("toy")
    toy.make("recognizers", path)
    for part, count in (("train", 32), ("test", 6)):
        rows = (path / f"speech/{part}.tsv").read_text().splitlines()[:count]
        (path / f"speech/{part}.tsv").write_text("\n".join(rows))
    with open(path / "speech/test.tsv", "a") as file:
        file.write("\ntest/0.wav\t" + 24 * "a")
    model = transformers.AutoModelForCTC.from_pretrained(path / "wav2vec2")
    model.lm_head.weight.data *= 100  # or it would predict blanks alone
    model.save_pretrained(path / "wav2vec2")
    return path


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{kind of model: the outputs of its training}, on two processes."""
    path = tmp_path_factory.mktemp("runs")
    script = make(path / "mine.py", "ddp", "fine_tune_speech")
    lists = ["--train", data / "speech/train.tsv", "--test", data / "speech/test.tsv"]
    flags = [*lists, "--cpu", "--batch-size", 4, "--max-steps", 2, "--lr", 1e-3]
    described = [
        (2, script, [*flags, "--base", data / kind, *language])
        for kind, language in zip(KINDS, ([], ["--language", "english"]), strict=True)
    ]
    return dict(zip(KINDS, train_forked(path, *described, imports=IMPORTS), strict=True))


def utterances_of(data):
    """(text, samples) of the test utterances."""
    rows = utterances.read_list(data / "speech/test.tsv")
    return [(text, utterances.read_wav(file).numpy()) for file, text, _ in rows]


def loaded(directory):
    """The model and the processor that transformers loads."""
    is_whisper = transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder
    auto = transformers.AutoModelForSpeechSeq2Seq if is_whisper else transformers.AutoModelForCTC
    processor = transformers.AutoProcessor.from_pretrained(directory)
    return auto.from_pretrained(directory).eval(), processor


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers_for_each_utterance_alone(kind, data, runs):
    model, processor = loaded(runs[kind].directory)
    model.config.ctc_loss_reduction, model.config.ctc_zero_infinity = "sum", True
    total = tokens = 0
    for text, samples in utterances_of(data):
        labels = processor.tokenizer(text, return_tensors="pt")["input_ids"]
        if kind == "whisper":
            start, *prompt = processor.tokenizer.convert_ids_to_tokens(labels[0, :4])
            assert start == "<|startoftranscript|>"
            assert prompt == ["<|en|>", "<|transcribe|>", "<|notimestamps|>"]
            labels = labels[:, 1:]
        inputs = processor.feature_extractor(samples, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            loss = model(**inputs, labels=labels).loss.double().item()
        total += loss * (labels.numel() if kind == "whisper" else 1)
        tokens += labels.numel()
    assert runs[kind].summary["test_loss"] == close(total / tokens)
    if kind == "wav2vec2":
        assert runs[kind].summary["test_too_short"] == close(24 / tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pipeline_of_transformers_transcribes_with_the_errors_of_the_run(kind, data, runs):
    texts = utterances_of(data)
    task = "automatic-speech-recognition"
    trained, base = (
        transformers.pipeline(task, str(x)) for x in (runs[kind].directory, data / kind)
    )
    greedy = {"generate_kwargs": {"num_beams": 1}} if kind == "whisper" else {}
    found = [trained(samples, **greedy)["text"] for _, samples in texts]
    assert found[0] != base(texts[0][1], **greedy)["text"] and any(found)
    if kind == "wav2vec2":
        assert len({*found}) > 4, "or it would be no test"
    else:
        assert trained.model.generation_config.language == "english"
    for name, parts in (("wer", str.split), ("cer", list)):
        truth = [parts(text) for text, _ in texts]
        pairs = zip(truth, map(parts, found), strict=True)
        edits = sacrebleu.metrics.lib_ter.BeamEditDistance
        wrong = sum(edits(text)(other)[0] for text, other in pairs)
        assert runs[kind].summary[f"test_{name}"] == close(wrong / sum(map(len, truth)))


def test_utterances_are_too_short_if_no_path_has_their_tokens():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 3, (200, 6), generator=generator)
    sizes = torch.randint(7, (200,), generator=generator)
    labels[torch.arange(6) >= sizes[:, None]] = -100
    lengths = torch.randint(9, (200,), generator=generator)
    scores = torch.randn(200, 8, 3, generator=generator)
    loss, too_short, best = lib.recognition.ctc(scores, lengths, labels, 0)
    exact = F.ctc_loss(
        scores.log_softmax(2).transpose(0, 1), labels.clamp(min=0), lengths, sizes, reduction="none"
    )
    assert torch.equal(too_short, exact.isinf()) and 0 < too_short.sum() < 200
    assert torch.equal(loss, exact.masked_fill(too_short, 0))
    for tokens, length, of_all in zip(best, lengths, scores.argmax(2), strict=True):
        assert torch.equal(tokens[:length], of_all[:length]) and not tokens[length:].any()


WRONG = {
    "unknown": ("wav2vec2", "a B-aA", 1, r"the tokenizer of --base has no '-AB', in 'a B-aA'"),
    "short": ("wav2vec2", "a", 0.01, r"reads 0.025 to inf s, .*, not 0.01 s, and 1 tokens"),
    "long": ("whisper", "a", 3.5, r"reads 0.025 to 3 s, .* most 32 tokens, not 3.5 s"),
    "text": ("whisper", 33 * "a", 1, r"at most 32 tokens, not 1 s, and 3. tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_utterance_is_one_line_with_file_and_row(case, data, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.recognition.exit_with_error", exit_by_exception)
    kind, text, seconds, error = WRONG[case]
    write_wav(tmp_path / "good.wav", numpy.zeros((16000, 1)))
    write_wav(tmp_path / "wrong.wav", numpy.zeros((round(16000 * seconds), 1)))
    (tmp_path / "a.tsv").write_text(f"good.wav\ta b\nwrong.wav\t{text}\n")
    model, processor = loaded(data / kind)
    with pytest.raises(Exit, match=r"a.tsv, row 2: .*" + error):
        lib.recognition.Transcribed(tmp_path / "a.tsv", processor, model.config)


@pytest.mark.parametrize(("kind", "language"), [("wav2vec2", "english"), ("whisper", None)])
def test_a_language_is_for_a_whisper_of_many_languages(kind, language, data, monkeypatch):
    monkeypatch.setattr("fine_tune_speech.exit_with_error", exit_by_exception)
    with pytest.raises(Exit, match="argument --language: a Whisper of many languages needs it"):
        fine_tune_speech.build_model(SimpleNamespace(base=str(data / kind), language=language))


def test_convolutions_are_frozen_and_no_layer_is_skipped(data, tmp_path):
    model = transformers.AutoModelForCTC.from_pretrained(data / "wav2vec2", layerdrop=0.1)
    model.save_pretrained(tmp_path)
    args = SimpleNamespace(base=str(tmp_path), language=None)
    model = fine_tune_speech.build_model(args)
    convolutions = [*model.wav2vec2.feature_extractor.parameters()]
    assert {x for x in model.parameters() if not x.requires_grad} == {*convolutions}
    assert convolutions and model.config.layerdrop == 0
