"""What speech and fine_tune_speech compute and save, against transformers and an independent count
of errors. That their copies train the same in every way: test_adapting.py."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
import toy
from composed import close, make, train, write_wav
from conftest import ROUNDING_FLOAT32, Exit
from lazy import fine_tune_speech, lib, sacrebleu, speech, transformers
from safetensors.torch import save_file
from torch.nn import functional as F

from lib import utterances

pytestmark = pytest.mark.slow


# ----------------------------------------------------------------------------------------- speech
def test_spectra_are_those_of_transformers(tmp_path):
    integers = numpy.random.default_rng(0).integers(-9999, 9999, (2000, 2))
    write_wav(tmp_path / "a.wav", integers)
    samples = integers.mean(1) / 32768
    numpy.testing.assert_allclose(utterances.read_wav(tmp_path / "a.wav"), samples, atol=1e-7)
    options = {"fft_length": 512, "power": 2.0, "pad_mode": "constant", "mel_floor": 0}
    options["mel_filters"] = transformers.audio_utils.mel_filter_bank(257, 80, 0, 8000, 16000)
    window = transformers.audio_utils.window_function(400, "hann")
    bands = transformers.audio_utils.spectrogram(samples, window, 400, 160, **options).T
    assert (bands > 1e-10).all(), "no triangle is between two frequencies"
    bands = numpy.log(bands)
    bands = (bands - bands.mean(0)) / numpy.sqrt(bands.var(0) + 1e-5)
    found = utterances.log_mel(torch.tensor(samples).float())
    assert found.shape == bands.shape == (1 + 2000 // 160, 80)
    numpy.testing.assert_allclose(found, bands, atol=1e-3)
    assert utterances.log_mel(torch.zeros(0)).shape == (1, 80), "an empty file"


@pytest.mark.parametrize("evaluated", [False, True])
def test_an_utterance_has_the_same_scores_in_any_batch(evaluated):
    """As far as it is long, also where torch takes a faster path: in evaluations."""
    torch.manual_seed(0)
    model = speech.Recognizer(32, 2, 5).eval()
    sequences = [(torch.randn(n, 80), torch.arange(1, 3)) for n in (41, 97, 7, 160)]
    with torch.set_grad_enabled(not evaluated):
        spectra, lengths, _, _ = utterances.pad_utterances(sequences)
        together, counts = model(spectra, lengths)
        for i, (one, _) in enumerate(sequences):
            alone, count = model(one[None], torch.tensor([len(one)]))
            assert count.item() == counts[i].item() == alone.shape[1] == math.ceil(len(one) / 4)
            own = together[i, : count.item()]
            torch.testing.assert_close(own, alone[0], rtol=ROUNDING_FLOAT32, atol=ROUNDING_FLOAT32)


def test_losses_and_errors_are_those_of_each_utterance_alone():
    """The loss per character, of a text that does not fit 0; the errors of the text that is read
    greedily. That errors are counted right: below."""
    random.seed(0)
    args = SimpleNamespace(characters=" abc")
    truth = ["aba", "bb", "", "aa", *(random.choices(" abc", k=n) for n in range(6))]
    numbers = [torch.tensor([1 + " abc".index(x) for x in text]).long() for text in truth]
    lengths = torch.tensor([5, 4, 3, 2, *range(3, 9)])
    columns = utterances.pad_utterances([(torch.zeros(1, 80), x) for x in numbers])[2:]
    logits = torch.randn(len(truth), 8, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch = None, lengths, *columns
        values = speech.compute_loss(lambda *_: (logits, lengths), batch, args)
    found = []
    for i, (length, text) in enumerate(zip(lengths.tolist(), numbers, strict=True)):
        scores = logits[i, :length, None].double().log_softmax(2)
        own = scores, text[None], [length], [len(text)]
        exact = F.ctc_loss(*own, reduction="sum", zero_infinity=True) / max(1, len(text))
        assert values["loss"][i].item() == pytest.approx(exact.item(), rel=1e-5)
        assert values["weight"][i] == max(1, len(text))
        best = logits[i, :length].argmax(1).tolist()
        found.append("".join(" abc"[x - 1] for x, _ in itertools.groupby(best) if x))
    assert values["loss"][3] == 0 < values["loss"][:3].min()
    texts = ["".join(text) for text in truth]
    assert torch.equal(values["outputs"], utterances.count_errors(texts, found))


def test_utterances_that_are_too_short_are_those_without_an_alignment(tmp_path, capsys):
    for samples in range(0, 5000, 160):
        outputs = math.ceil(len(utterances.log_mel(torch.zeros(samples))) / 4)
        for text in ("", "a", "ab", "aa", "aab", "abab", "aabb"):
            numbers = torch.tensor([" ab".index(x) for x in text]).long()
            scores = torch.zeros(outputs, 1, 3).log_softmax(2)
            loss = F.ctc_loss(scores, numbers[None], [outputs], [len(text)], reduction="sum")
            assert utterances.is_too_short(text, samples) == math.isinf(loss)
    write_wav(tmp_path / "short.wav", numpy.zeros((1600, 1)))
    write_wav(tmp_path / "long.wav", numpy.zeros((16000, 1)))
    (tmp_path / "list.tsv").write_text("long.wav\tabb\nshort.wav\tabb\n")
    utterances.Utterances(tmp_path / "list.tsv", "ab")
    told = f"1 of 2 are too short for their text: they teach nothing, such as {tmp_path}/short.wav"
    assert f"list.tsv: {told}" in capsys.readouterr().err


def test_a_file_is_transcribed_by_the_saved_weights(tmp_path):
    torch.manual_seed(0)
    args = SimpleNamespace(width=32, layers=1, characters=" abc", output_dir=tmp_path)
    args.transcribe = tmp_path / "a.wav"
    write_wav(args.transcribe, numpy.random.default_rng(0).integers(-9999, 9999, (32000, 1)))
    model = speech.build_model(args).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    spectra = utterances.log_mel(utterances.read_wav(args.transcribe))
    logits, _ = model(spectra[None], torch.tensor([len(spectra)]))
    assert speech.transcribe(args) == utterances.text_of(logits[0].argmax(1), " abc") != ""


# ------------------------------------------------------------------------------- fine_tune_speech
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of toy data: 7 test utterances do not fill the last batch. The last two are of
    0.1 s, 4 outputs of wav2vec2. CTC can write 4 letters, but between equal ones it needs one
    output more."""
    path = tmp_path_factory.mktemp("toy")
    toy.make("recognizers", path)
    for part, count in (("train", 32), ("test", 5)):
        rows = (path / f"speech/{part}.tsv").read_text().splitlines()[:count]
        (path / f"speech/{part}.tsv").write_text("\n".join(rows))
    noise = numpy.random.default_rng(0).integers(-9999, 9999, (1600, 1))
    write_wav(path / "speech/noise.wav", noise)
    with open(path / "speech/test.tsv", "a") as file:
        file.write("\nnoise.wav\tabcd\nnoise.wav\tabcc")
    model = transformers.AutoModelForCTC.from_pretrained(path / "wav2vec2")
    model.lm_head.weight.data *= 100  # or it would predict blanks alone
    model.save_pretrained(path / "wav2vec2")
    return path


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper"])
def test_a_run_has_the_loss_and_errors_of_transformers_for_each_utterance(kind, data, tmp_path):
    """On two processes."""
    script = make(tmp_path / "mine.py", "ddp", "fine_tune_speech")
    lists = ["--train", data / "speech/train.tsv", "--test", data / "speech/test.tsv"]
    flags = [*lists, "--cpu", "--batch-size", 4, "--max-steps", 2, "--lr", 1e-3]
    flags += ["--base", data / kind, *(["--language", "english"] if kind == "whisper" else [])]
    (run,) = train(tmp_path, (2, script, flags))
    trained = transformers.pipeline("automatic-speech-recognition", str(run.directory))
    trained.model.config.ctc_loss_reduction, trained.model.config.ctc_zero_infinity = "sum", True
    greedy = {"generate_kwargs": {"num_beams": 1}} if kind == "whisper" else {}
    total = tokens = 0
    truth, found = [], []
    for file, text, _ in utterances.read_list(data / "speech/test.tsv"):
        samples = utterances.read_wav(file).numpy()
        labels = trained.tokenizer(text, return_tensors="pt")["input_ids"]
        if kind == "whisper":
            start, *prompt = trained.tokenizer.convert_ids_to_tokens(labels[0, :4])
            assert start == "<|startoftranscript|>"
            assert prompt == ["<|en|>", "<|transcribe|>", "<|notimestamps|>"]
            labels = labels[:, 1:]
        inputs = trained.feature_extractor(samples, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            loss = trained.model(**inputs, labels=labels).loss.double().item()
        total += loss * (labels.numel() if kind == "whisper" else 1)
        tokens += labels.numel()
        truth.append(text)
        found.append(trained(samples, **greedy)["text"])
    assert run.summary["test_loss"] == close(total / tokens)
    assert any(found), "or it would be no test"
    if kind == "wav2vec2":
        assert run.summary["test_too_short"] == close(4 / tokens)
        assert len({*found}) > 4, "or it would be no test"
    else:
        assert trained.model.generation_config.language == "english"
    for name, parts in (("wer", str.split), ("cer", list)):
        pairs = zip(map(parts, truth), map(parts, found), strict=True)
        edits = sacrebleu.metrics.lib_ter.BeamEditDistance
        wrong = sum(edits(text)(other)[0] for text, other in pairs)
        assert run.summary[f"test_{name}"] == close(wrong / sum(len(parts(text)) for text in truth))


@pytest.mark.parametrize(
    ("kind", "text", "seconds", "error"),
    [
        ("wav2vec2", "a B-aA", 1, r"the tokenizer of --base has no '-AB', in 'a B-aA'"),
        ("wav2vec2", "a", 0.01, r"reads 0.025 to inf s, .*, not 0.01 s, and 1 tokens"),
        ("whisper", "a", 3.5, r"reads 0.025 to 3 s, .* most 32 tokens, not 3.5 s"),
        ("whisper", 33 * "a", 1, r"at most 32 tokens, not 1 s, and 3. tokens"),
    ],
)
def test_a_wrong_utterance_has_file_and_row(kind, text, seconds, error, data, tmp_path):
    write_wav(tmp_path / "good.wav", numpy.zeros((16000, 1)))
    write_wav(tmp_path / "wrong.wav", numpy.zeros((round(16000 * seconds), 1)))
    (tmp_path / "a.tsv").write_text(f"good.wav\ta b\nwrong.wav\t{text}\n")
    config = transformers.AutoConfig.from_pretrained(data / kind)
    processor = transformers.AutoProcessor.from_pretrained(data / kind)
    with pytest.raises(Exit, match=r"a.tsv, row 2: .*" + error):
        lib.recognition.Transcribed(tmp_path / "a.tsv", processor, config)


def test_a_model_has_frozen_convolutions_all_layers_and_a_language(data, tmp_path):
    model = transformers.AutoModelForCTC.from_pretrained(data / "wav2vec2", layerdrop=0.1)
    model.save_pretrained(tmp_path)
    model = fine_tune_speech.build_model(SimpleNamespace(base=str(tmp_path), language=None))
    convolutions = [*model.wav2vec2.feature_extractor.parameters()]
    assert {x for x in model.parameters() if not x.requires_grad} == {*convolutions}
    assert convolutions and model.config.layerdrop == 0
    for base, language in ((tmp_path, "english"), (data / "whisper", None)):
        with pytest.raises(Exit, match="argument --language: a Whisper of many languages needs it"):
            fine_tune_speech.build_model(SimpleNamespace(base=str(base), language=language))
