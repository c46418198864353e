"""The examples detection and speech against independent references. That their copies train:
test_adapting.py."""

import itertools
import json
import math
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from composed import write_wav
from conftest import ROUNDING_FLOAT32
from lazy import detection, speech, transformers
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F
from torchvision.models.detection.fcos import FCOS, FCOSHead, fcos_resnet50_fpn
from torchvision.transforms import v2

from lib import coco, fcos, utterances

pytestmark = pytest.mark.slow


# -------------------------------------------------------------------------------------- detection
def labelled(size, *boxes):
    """An image, and a target with these boxes."""
    target = {"boxes": torch.tensor(boxes).float().view(-1, 4), "image": torch.tensor(7)}
    target["labels"] = torch.arange(len(boxes)) % 3 + 1
    return torch.rand(3, *size), target


SHAPE = 64, 1, 4, 1  # of a head: channels, anchors, classes, convolutions


class Maps(torch.nn.Module):
    """A backbone with maps of five sizes."""

    out_channels = 64

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 64, 8, 8)

    def forward(self, x):
        return {i: F.avg_pool2d(self.first(x), 2**i) for i in range(5)}


def both_models():
    """The example's model, and torchvision's with the same weights, for a smaller backbone."""
    torch.manual_seed(0)
    size = {"min_size": 128, "max_size": 128, "size_divisible": 128, "score_thresh": 0.05}
    model = fcos.Detector(Maps(), 4, head=fcos.Head(*SHAPE), **size)
    reference = FCOS(model.backbone, 4, head=FCOSHead(*SHAPE), **size)
    reference.load_state_dict(model.state_dict())
    return model, reference


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=ROUNDING_FLOAT32, atol=ROUNDING_FLOAT32)


def test_losses_of_images_make_torchvisions_loss_of_their_batch():
    """Also its gradient; and they depend on no other image of the batch, nor on its size."""
    model, reference = both_models()
    batch = [
        labelled((50, 64), (3, 4, 30, 40), (20, 1, 44, 33)),
        labelled((64, 31), (0, 0, 31, 60)),
        labelled((40, 40), (2, 5, 12, 15), (20, 20, 40, 40), (1, 1, 39, 39)),
        labelled((30, 60)),
    ]
    columns = coco.images_and_targets(batch)
    values = detection.compute_loss(model, columns, None)
    for i, one in enumerate(batch):
        alone = detection.compute_loss(model, coco.images_and_targets([one]), None)
        expected = reference(*map(list, coco.images_and_targets([one])))
        assert values["weight"][i] == alone["weight"]
        assert_close(values["loss"][i], alone["loss"][0])
        assert_close(alone["loss"][0], sum(expected.values()))
    assert values["weight"][3] == 1 and values["weight"][:3].sum() > 5
    values = detection.compute_loss(model, coco.images_and_targets(batch[:3]), None)
    loss = (values["loss"] * values["weight"]).sum() / values["weight"].sum()
    expected = sum(reference(*map(list, coco.images_and_targets(batch[:3]))).values())
    assert_close(loss, expected)
    shared = [*model.backbone.parameters()]
    gradients = (torch.autograd.grad(x, shared) for x in (loss, expected))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_an_evaluation_has_torchvisions_detections_and_the_loss_of_training():
    model, reference = both_models()
    batch = coco.images_and_targets([labelled((50, 64), (3, 4, 30, 40)), labelled((64, 31))])
    torch.nn.init.constant_(model.head.regression_head.bbox_reg.bias, 1.0)  # boxes have an area
    reference.load_state_dict(model.state_dict())
    trained = detection.compute_loss(model, batch, None)
    with torch.no_grad():
        values = detection.compute_loss(model.eval(), batch, None)
        expected = reference.eval()(list(batch[0]))
    found = values.pop("outputs")
    for name, value in values.items():
        assert_close(value, trained[name].detach())
    for rows, one in zip(found, expected, strict=True):
        assert len(rows) == len(one["boxes"]) > 0 and (rows[:, 0] == 7).all()
        assert_close(rows[:, 1:3].float(), one["boxes"][:, :2])
        assert_close((rows[:, 1:3] + rows[:, 3:5]).float(), one["boxes"][:, 2:])
        assert_close(rows[:, 5].float(), one["scores"])
        assert rows[:, 6].tolist() == one["labels"].tolist()


def test_the_model_takes_torchvisions_weights_and_trains_those_that_it_does():
    """All images become squares; BatchNorm is frozen, in training mode too."""
    args = SimpleNamespace(classes=91, size=96, resnet=50, norm="batch")
    with torch.device("meta"):
        model = detection.build_model(args)
        reference = fcos_resnet50_fpn(weights=None, weights_backbone=None)
    shapes = ({k: x.shape for k, x in m.state_dict().items()} for m in (model, reference))
    assert next(shapes) == next(shapes)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = "backbone.body.conv1", "backbone.body.layer1", "backbone.body.bn1"
    norms = [name for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 53 and not any(model.get_submodule(name).training for name in norms)
    left_out = (*frozen, *(f"{name}." for name in norms))
    assert trained == {k for k, _ in model.named_parameters() if not k.startswith(left_out)}
    with torch.device("meta"):
        from_scratch = detection.build_model(SimpleNamespace(**{**vars(args), "norm": "group"}))
    assert all(parameter.requires_grad for parameter in from_scratch.parameters())
    images = [torch.rand(3, 30, 64), torch.rand(3, 10, 30)]
    assert model.transform(images)[0].tensors.shape == (2, 3, 96, 96)


def test_in_bf16_the_same_points_belong_to_an_object():
    """Where bf16 would round the positions of points."""
    size = {"min_size": 2048, "max_size": 2048, "size_divisible": 128}
    model = fcos.Detector(Maps(), 4, head=fcos.Head(*SHAPE), **size)
    boxes = [[1900 + 9 * i, 10, 1930 + 9 * i, 40 + i] for i in range(12)]
    image, target = labelled((128, 2048), *boxes)
    exact = model([image], lambda: [target])[0]["weight"]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model([image], lambda: [target])[0]["weight"]
    assert exact.item() == rounded.item() > 12


def in_coco(path, images, annotations, **more):
    content = {"images": images, "annotations": annotations}
    content |= {"categories": [{"id": 1}, {"id": 2}], **more}
    path.write_text(json.dumps(content))
    return path


def test_the_average_precision_is_that_of_a_calculation_by_hand(tmp_path):
    """COCO interpolates the precision at 101 recalls. The first object has number 0, which COCOeval
    would take for none; a crowd may be found any number of times."""
    annotations = [
        {"id": 0, "image_id": 3, "category_id": 1, "bbox": [0, 0, 10, 10]},
        {"id": 1, "image_id": 3, "category_id": 1, "bbox": [20, 0, 10, 10], "area": None},
        {"id": 2, "image_id": 4, "category_id": 1, "bbox": [0, 0, 10, 10]},
        {"id": 3, "image_id": 4, "category_id": 1, "bbox": [50, 0, 40, 40], "iscrowd": 1},
    ]
    path = in_coco(tmp_path / "a.json", [{"id": 3}, {"id": 4}], annotations)
    rows = [
        [3, 0, 0, 10, 10, 0.9, 1],  # right at all thresholds
        [4, 30, 30, 10, 10, 0.8, 1],  # wrong
        [4, 60, 10, 9, 9, 0.75, 1],  # in the crowd: it does not count
        [4, 0, 0, 10, 7.2, 0.7, 1],  # right at 0.5, 0.55, 0.6, 0.65 and 0.7: its IoU is 0.72
    ]
    # Of three objects: precision 1 up to a recall of 1/3, then 2/3 up to 2/3, or none.
    above, below = 34 / 101, (34 + 33 * 2 / 3) / 101
    rows = torch.tensor(rows, dtype=torch.float64)
    args = SimpleNamespace(train=None, test=[tmp_path, path], classes=3)
    assert detection.test_metrics([rows[:2], rows[2:]], args) == {
        "map": pytest.approx((5 * above + 5 * below) / 10),
        "map50": pytest.approx(below),
    }
    assert detection.test_metrics([rows[:0]], args) == {"map": 0.0, "map50": 0.0}


def test_a_dataset_has_boxes_as_corners_which_are_flipped_with_the_image(tmp_path):
    picture = Image.new("RGB", (20, 10))
    picture.paste((255, 255, 255), (2, 3, 6, 8))
    picture.save(tmp_path / "a.png")
    common = {"image_id": 5, "category_id": 2}
    annotations = [
        {**common, "bbox": [2, 3, 4, 5]},
        {**common, "bbox": [15, 5, 9, 4]},  # partly outside
        {**common, "bbox": [3, 3, 0, 5]},  # no area
        {**common, "bbox": [1, 1, 9, 9], "iscrowd": 1},
    ]
    images = [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "a.png"}]
    path = in_coco(tmp_path / "a.json", images, annotations)
    plain = coco.Objects(tmp_path, path, 3)
    flipped = coco.Objects(tmp_path, path, 3, v2.RandomHorizontalFlip(1))
    for dataset, x in ((plain, [2, 6]), (flipped, [14, 18])):
        image, target = dataset[0]
        assert target["boxes"].dtype == torch.float32
        assert target["boxes"][0].tolist() == [x[0], 3, x[1], 8]
        assert image[:, 3:8, x[0] : x[1]].min() == 1 and image.sum() == 3 * 20
        assert target["labels"].tolist() == [2, 2] and target["image"].item() == 5
    assert plain[0][1]["boxes"][1].tolist() == [15, 5, 20, 9]
    image, target = plain[1]
    assert target["boxes"].shape == (0, 4) and target["labels"].shape == (0,)


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
            assert_close(together[i, : count.item()], alone[0])


def test_the_loss_is_that_of_each_utterance_alone():
    """Per character; of a text that does not fit it is 0."""
    torch.manual_seed(0)
    logits, lengths = torch.randn(4, 5, 3), torch.tensor([5, 4, 3, 2])
    texts = torch.tensor([[1, 2, 1], [2, 2, 0], [1, 0, 0], [1, 1, 0]])
    sizes = torch.tensor([3, 2, 1, 2])
    batch = None, lengths, texts, sizes
    values = speech.compute_loss(lambda *_: (logits, lengths), batch, None)
    for i, (length, size) in enumerate(zip(lengths.tolist(), sizes.tolist(), strict=True)):
        scores = logits[i, :length, None].double().log_softmax(2)
        own = scores, texts[i : i + 1, :size], [length], [size]
        exact = F.ctc_loss(*own, reduction="sum", zero_infinity=True) / size
        assert values["loss"][i].item() == pytest.approx(exact.item(), rel=1e-5)
        assert values["weight"][i] == size
    assert values["loss"][3] == 0 < values["loss"][:3].min()


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
    told = (
        f"list.tsv: 1 of 2 are too short for their text: they teach nothing, such as {tmp_path}/sh"
    )
    assert told in capsys.readouterr().err


def test_a_file_is_transcribed_by_the_saved_weights(tmp_path):
    torch.manual_seed(0)
    args = SimpleNamespace(width=32, layers=1, characters=" abc", output_dir=tmp_path)
    args.transcribe = tmp_path / "a.wav"
    samples = numpy.random.default_rng(0).integers(-9999, 9999, (32000, 1))
    write_wav(args.transcribe, samples)
    model = speech.build_model(args).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    spectra = utterances.log_mel(torch.tensor(samples[:, 0] / 32768).float())
    logits, _ = model(spectra[None], torch.tensor([len(spectra)]))
    assert speech.transcribe(args) == utterances.text_of(logits[0].argmax(1), " abc") != ""


def test_errors_are_those_of_the_texts_that_are_read_greedily():
    """That they are counted right: test_fine_tune_speech.py."""
    random.seed(0)
    args = SimpleNamespace(characters=" abc")
    truth = ["".join(random.choices(" abc", k=random.randint(0, 9))) for _ in range(20)]
    paths = [random.choices(range(5), k=12) for _ in truth]
    lengths = torch.randint(3, 13, (20,))
    numbers = [torch.tensor([1 + " abc".index(x) for x in text]).long() for text in truth]
    rows = [(torch.zeros(1, 80), x) for x in numbers]
    batch = None, lengths, *utterances.pad_utterances(rows)[2:]
    logits = F.one_hot(torch.tensor(paths), 5).float()
    with torch.no_grad():
        values = speech.compute_loss(lambda *_: (logits, lengths), batch, args)
    found = [
        "".join(" abc"[x - 1] for x, _ in itertools.groupby(path[:length]) if x)
        for path, length in zip(paths, lengths, strict=True)
    ]
    assert torch.equal(values["outputs"], utterances.count_errors(truth, found))
