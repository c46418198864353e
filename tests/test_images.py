"""Image files in each example that reads some: as they were meant, or an error with their name.
What detection and vit compute, against torchvision, formulas and a calculation by hand."""

from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
import torchvision
from composed import make, of_coco, write_photos
from conftest import ROUNDING_FLOAT32, Exit
from lazy import datasets, detection, lora, photos, segmentation, tar_shards, vit
from PIL import Image
from processes import ROOT, train_forked
from torch.nn.functional import avg_pool2d
from torchvision.models.detection.fcos import FCOS, FCOSHead, fcos_resnet50_fpn
from torchvision.transforms import v2

from ddp_cifar import SeededSamples
from lib import coco, fcos
from lib.images import read_image
from lib.mixed import Mixed

pytestmark = pytest.mark.slow


# ----------------------------------------------------------------------------- images in each task
def of_photos(path):
    for part in ("train", "test"):
        folder = path.parent / part / "only"
        folder.mkdir(parents=True)
        (folder / path.name).symlink_to(path)
    _, dataset = photos.photo_folders(SimpleNamespace(photos=path.parent, size=8, test=None))
    return dataset[0][0]


def of_rows(path):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["only"]))
    rows = datasets.Dataset.from_dict({"image": [str(path)], "label": [0]}, features)
    rows.save_to_disk(f"{path}.rows")
    args = {"photos": f"{path}.rows", "test": f"{path}.rows", "image": "image", "label": "label"}
    _, dataset = photos.photo_folders(SimpleNamespace(size=8, **args))
    return dataset[0][0]


def of_segmentation(path):
    Image.new("L", (8, 12)).save(path.with_suffix(".png"))
    return segmentation.Masks([path], 4, v2.Identity())[0][0]


def of_shards(path):
    sample = {"webp": path.read_bytes(), "cls": b"0"}
    args = SimpleNamespace(members=["webp", "cls"], classes=1)
    return tar_shards.decode(args, v2.Identity(), sample)[0]


def test_one_function_opens_the_images_of_all_tasks_but_masks():
    texts = {x.name: x.read_text() for x in (ROOT / "examples").rglob("*.py")}
    assert [name for name, text in texts.items() if "Image.open" in text] == ["images.py"]
    others = {name for name, text in texts.items() if "read_pixels" in text}
    assert others == {"images.py", "segmentation.py"}


def picture(seed=0):
    return numpy.random.default_rng(seed).integers(256, size=(12, 8, 3), dtype="uint8")


@pytest.mark.parametrize("read", [of_photos, of_rows, of_segmentation, of_shards])
def test_a_photo_is_turned_as_its_camera_says_and_what_is_transparent_is_white(read, tmp_path):
    """The pixels of b are saved as a sensor has them, a quarter turn to the left. The range of
    values is that of a model."""
    shown = picture()
    shown[:, 4:] = 255
    transparent = numpy.dstack((picture(), numpy.zeros((12, 8), "uint8")))
    transparent[:, :4, 3] = 255
    turned = Image.Exif()
    turned[0x0112] = 6  # EXIF's tag of the orientation: to be shown turned to the right
    found = []
    for name, pixels, exif in (("a", shown, Image.Exif()), ("b", numpy.rot90(transparent), turned)):
        path = tmp_path / name / "a.webp"
        path.parent.mkdir()
        Image.fromarray(pixels).save(path, lossless=True, exif=exif)
        found.append(read(path))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    spread = found[0].float().max() - found[0].float().min()
    assert spread > 200 if found[0].dtype == torch.uint8 else 0.8 < spread < 5  # normalised


def test_images_of_any_ending_are_read_and_other_files_are_counted(tmp_path, capsys):
    for part in ("train", "test"):
        folder = tmp_path / part / "only"
        folder.mkdir(parents=True)
        for name, kind in {"a.GIF": "gif", "b.jfif": "jpeg", "c.AVIF": "avif"}.items():
            Image.fromarray(picture()).save(folder / name, kind)
        for name in ("e.heic", "f.eps", "._d.png"):
            (folder / name).touch()
        for name in (".ipynb_checkpoints/a.png", "only/@eaDir/a.png/b.png"):
            (tmp_path / part / name).parent.mkdir(parents=True)
            (tmp_path / part / name).touch()
    args = SimpleNamespace(photos=tmp_path, size=8, test=None)
    assert len(photos.photo_folders(args)[0]) == 3
    assert "8 files are left out, such as" in capsys.readouterr().err
    (tmp_path / "test/only").rename(tmp_path / "test/others")
    with pytest.raises(Exit, match="train/ and test/ have other folders"):
        photos.photo_folders(args)


@pytest.mark.parametrize("read", [read_image, of_rows])
@pytest.mark.parametrize("wrong", ["truncated", "16 bits", "an EPS file"])
def test_an_image_that_cannot_be_read_as_it_was_meant_is_an_error_with_its_name(
    wrong, read, tmp_path
):
    """Nor is a file of EPS, for which PIL would start a Ghostscript."""
    pixels = picture()[:, :, 0].astype("uint16") * 257 if wrong == "16 bits" else picture()
    path = tmp_path / "a.tif"
    Image.fromarray(pixels).save(path, "EPS" if wrong == "an EPS file" else "TIFF")
    if wrong == "truncated":
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(OSError, match=r"a\.tif") as error:
        read(path)
    assert "\n" not in str(error.value)


def masks(directory, *values):
    """Photos, and masks with one value in each corner."""
    paths = []
    for index, corners in enumerate(values):
        mask = numpy.zeros((12, 8), "uint8")
        mask[::11, ::7] = numpy.reshape(corners, (2, 2))
        paths.append(directory / f"{index}.jpg")
        Image.fromarray(picture()).save(paths[-1])
        Image.fromarray(mask).save(directory / f"{index}.png")
    return paths


def test_masks_whose_classes_do_not_fit_are_an_error_with_their_name(tmp_path):
    paths = masks(tmp_path, [0, 1, 3, 255], [0, 1, 1, 4], [255, 255, 0, 0])
    data = segmentation.Masks(paths, 4, v2.Identity())
    assert data[0][1].unique().tolist() == [0, 1, 3, 255]
    assert data[2][1].unique().tolist() == [0, 255], "an image without an object"
    coloured = Image.open(tmp_path / "0.png")
    coloured.putpalette([0, 0, 0, 9, 0, 0])
    data.palette = [0, 0, 0, 0, 0, 0]
    for mask, said in (
        (Image.new("L", (9, 12)), r"its mask has \(9, 12\) pixels, not \(8, 12\)"),
        (Image.new("RGB", (8, 12)), "its mask has pixels of type RGB"),
        (coloured, "its mask has other colours than the first"),
        (Image.open(tmp_path / "1.png"), "its mask has class 4: set --classes 5"),
    ):
        mask.save(tmp_path / "0.png")
        with pytest.raises(OSError, match=rf"0\.jpg: {said}"):
            data[0]
    Image.fromarray(picture()[:, :, 0] > 99).save(tmp_path / "0.png")
    assert segmentation.highest_class(segmentation.read_mask(paths[0])) == 1, "of one bit"

    masks(tmp_path, *[[0, 255, 0, 255]] * 3)
    (tmp_path / "._0.jpg").touch()
    with pytest.raises(Exit, match="all masks have 0 and 255 alone"):
        segmentation.load_data(SimpleNamespace(images=tmp_path), None)


# -------------------------------------------------------------------------------------- detection
def labelled(size, *boxes):
    """An image, and a target with these boxes."""
    target = {"boxes": torch.tensor(boxes).float().view(-1, 4), "image": torch.tensor(7)}
    target["labels"] = torch.arange(len(boxes)) % 3 + 1
    return torch.rand(3, *size), target


BATCH = [
    labelled((50, 64), (3, 4, 30, 40), (20, 1, 44, 33)),
    labelled((64, 31), (0, 0, 31, 60)),
    labelled((40, 40), (2, 5, 12, 15), (20, 20, 40, 40), (1, 1, 39, 39)),
    labelled((30, 60)),
]
SHAPE = 64, 1, 4, 1  # of a head: channels, anchors, classes, convolutions


class Maps(torch.nn.Module):
    """A backbone with maps of five sizes."""

    out_channels = 64

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 64, 8, 8)

    def forward(self, x):
        return {i: avg_pool2d(self.first(x), 2**i) for i in range(5)}


def options(side):
    """Those of a model that makes squares of all images."""
    sizes = {"min_size": side, "max_size": side, "size_divisible": 128}
    return {"backbone": Maps(), "num_classes": 4, "score_thresh": 0.05, **sizes}


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=ROUNDING_FLOAT32, atol=ROUNDING_FLOAT32)


def columns(*batch):
    return coco.images_and_targets(batch)


def test_losses_of_images_make_torchvisions_loss_of_their_batch_and_its_detections_are_found():
    """Also its gradient; and they depend on no other image of the batch, nor on its size. In an
    evaluation the loss is that of training."""
    torch.manual_seed(0)
    model = fcos.Detector(**options(128), head=fcos.Head(*SHAPE))
    torch.nn.init.constant_(model.head.regression_head.bbox_reg.bias, 1.0)  # boxes have an area
    reference = FCOS(**options(128), head=FCOSHead(*SHAPE))
    reference.load_state_dict(model.state_dict())
    values = detection.compute_loss(model, columns(*BATCH), None)
    for i, one in enumerate(BATCH):
        alone = detection.compute_loss(model, columns(one), None)
        assert values["weight"][i] == alone["weight"]
        assert_close(values["loss"][i], alone["loss"][0])
        assert_close(alone["loss"][0], sum(reference(*map(list, columns(one))).values()))
    assert values["weight"][3] == 1 and values["weight"][:3].sum() > 5
    loss = (values["loss"] * values["weight"])[:3].sum() / values["weight"][:3].sum()
    expected = sum(reference(*map(list, columns(*BATCH[:3]))).values())
    assert_close(loss, expected)
    pairs = ((loss, model), (expected, reference))
    gradients = (torch.autograd.grad(x, [*one.backbone.parameters()]) for x, one in pairs)
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()

    with torch.no_grad():
        evaluated = detection.compute_loss(model.eval(), columns(*BATCH), None)
        expected = reference.eval()([image for image, _ in BATCH])
    found = evaluated.pop("outputs")
    for name, value in evaluated.items():
        assert_close(value, values[name].detach())
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
        from_scratch = detection.build_model(SimpleNamespace(**{**vars(args), "norm": "group"}))
    shapes = ({k: x.shape for k, x in m.state_dict().items()} for m in (model, reference))
    assert next(shapes) == next(shapes)
    norms = [name for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 53 and not any(model.get_submodule(name).training for name in norms)
    frozen = "backbone.body.conv1", "backbone.body.layer1", *(f"{name}." for name in norms)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen), name
    assert all(parameter.requires_grad for parameter in from_scratch.parameters())
    images = [torch.rand(3, 30, 64), torch.rand(3, 10, 30)]
    assert model.transform(images)[0].tensors.shape == (2, 3, 96, 96)


def test_in_bf16_the_same_points_belong_to_an_object():
    """Where bf16 would round the positions of points."""
    model = fcos.Detector(**options(2048), head=fcos.Head(*SHAPE))
    boxes = [[1900 + 9 * i, 10, 1930 + 9 * i, 40 + i] for i in range(12)]
    image, target = labelled((128, 2048), *boxes)
    exact = model([image], lambda: [target])[0]["weight"]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model([image], lambda: [target])[0]["weight"]
    assert exact.item() == rounded.item() > 12


def test_the_average_precision_is_that_of_a_calculation_by_hand(tmp_path):
    """COCO interpolates the precision at 101 recalls. The first object has number 0, which COCOeval
    would take for none; a crowd may be found any number of times."""
    boxes = [
        {"id": 0, "image_id": 3, "bbox": [0, 0, 10, 10]},
        {"id": 1, "image_id": 3, "bbox": [20, 0, 10, 10], "area": None},
        {"id": 2, "image_id": 4, "bbox": [0, 0, 10, 10]},
        {"id": 3, "image_id": 4, "bbox": [50, 0, 40, 40], "iscrowd": 1},
    ]
    (tmp_path / "a.json").write_bytes(of_coco(*boxes, images=[{"id": 3}, {"id": 4}]))
    rows = [
        [3, 0, 0, 10, 10, 0.9, 1],  # right at all thresholds
        [4, 30, 30, 10, 10, 0.8, 1],  # wrong
        [4, 60, 10, 9, 9, 0.75, 1],  # in the crowd: it does not count
        [4, 0, 0, 10, 7.2, 0.7, 1],  # right at 0.5, 0.55, 0.6, 0.65 and 0.7: its IoU is 0.72
    ]
    # Of three objects: precision 1 up to a recall of 1/3, then 2/3 up to 2/3, or none.
    above, below = 34 / 101, (34 + 33 * 2 / 3) / 101
    rows = torch.tensor(rows, dtype=torch.float64)
    args = SimpleNamespace(train=None, test=[tmp_path, tmp_path / "a.json"], classes=3)
    assert detection.test_metrics([rows[:2], rows[2:]], args) == {
        "map": pytest.approx((5 * above + 5 * below) / 10),
        "map50": pytest.approx(below),
    }
    assert detection.test_metrics([rows[:0]], args) == {"map": 0.0, "map50": 0.0}


def test_a_dataset_has_boxes_as_corners_which_are_flipped_with_the_image(tmp_path):
    white = Image.new("RGB", (20, 10))
    white.paste((255, 255, 255), (2, 3, 6, 8))
    white.save(tmp_path / "a.png")
    boxes = [
        {"bbox": [2, 3, 4, 5]},
        {"bbox": [15, 5, 9, 4]},  # partly outside
        {"bbox": [3, 3, 0, 5]},  # no area
        {"bbox": [1, 1, 9, 9], "iscrowd": 1},
    ]
    boxes = [{**box, "image_id": 5, "category_id": 2} for box in boxes]
    images = [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "a.png"}]
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_bytes(of_coco(*boxes, images=images))
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

    other.write_bytes(of_coco({}, categories=[{"id": 1, "name": "b"}]))
    args = SimpleNamespace(train=[tmp_path, path], test=[tmp_path, other], classes=3)
    with pytest.raises(Exit, match=r"b\.json have other categories"):
        detection.load_data(args, None)


# -------------------------------------------------------------------------------------------- vit
@pytest.fixture
def small(tmp_path):
    """The flags of a ViT with two layers, and of 24 photos, 6 of which are for the test."""
    sizes = {"size": 16, "patch": 8, "width": 64, "layers": 2}
    folder = write_photos(tmp_path / "photos", 24)
    return SimpleNamespace(photos=folder, test=None, lr=0.5, layer_decay=0.5, **sizes)


DECAYING = "self_attention.in_proj_weight self_attention.out_proj.weight mlp.0.weight mlp.3.weight"
DECAYING = [f"encoder.layers.encoder_layer_{i}.{x}" for i in (0, 1) for x in DECAYING.split()]
DECAYING += ["conv_proj.weight", "heads.head.weight"]
SHARES = {"class_token": 1 / 8, "conv_proj": 1 / 8, "encoder.pos_embedding": 1 / 8}
SHARES |= {"encoder.layers.encoder_layer_0": 1 / 4, "encoder.layers.encoder_layer_1": 1 / 2}
SHARES |= {"encoder.ln": 1, "heads": 1}


def test_each_layer_has_its_rate_and_only_matrices_decay(small):
    model = vit.build_model(small)
    optimizer, _ = vit.make_optimizer(model, small, 9)
    groups = {x: group for group in optimizer.param_groups for x in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(groups)
    for name, parameter in model.named_parameters():
        (share,) = (share for prefix, share in SHARES.items() if name.startswith(prefix))
        group = groups[parameter]
        assert group["max_lr"] == 0.5 * share, name
        assert group["weight_decay"] == 0.05 * (name in DECAYING), name


def test_all_tensors_of_torchvisions_vit_fit_but_the_heads(small):
    vars(small).update(size=224, patch=16, width=768, layers=12)
    with torch.device("meta"):
        models = vit.build_model(small), torchvision.models.vit_b_16()
    ours, theirs = ({k: x.shape for k, x in model.state_dict().items()} for model in models)
    assert ours.keys() == theirs.keys()
    others = {name for name in ours if ours[name] != theirs[name]}
    assert others == {"heads.head.weight", "heads.head.bias"}
    for sizes in ({"size": 20}, {"width": 80}):
        with pytest.raises(Exit, match="whole patches"):
            vit.build_model(SimpleNamespace(**vars(small) | sizes))


def test_lora_adapts_only_layers_that_the_vit_calls(small):
    """DDP would wait for the gradients of the others."""
    model = lora.with_lora(vit.build_model(small))
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * (1 + 2 * 2 + 1), "convolution, two layers of each MLP, head"
    assert all(x.grad is not None for x in trained.values())


class Photos(list):
    classes = "abcd"


def test_a_share_of_the_photos_is_mixed_and_each_has_the_classes_of_its_pixels():
    """Whatever the order. In another epoch it is another mixture. A photo has one colour: all of
    its pixels are the number of its class."""
    photos = Photos((torch.full((3, 16, 16), float(i % 4)), i % 4) for i in range(40))
    samples, counts = SeededSamples(Mixed(photos, 0.5), seed=0), Counter()
    targets = []
    for epoch in range(5):
        samples.set_epoch(epoch)
        forward = [samples[i] for i in range(40)]
        backward = [samples[i] for i in reversed(range(40))][::-1]
        torch.testing.assert_close(forward, backward, rtol=0, atol=0)
        targets.append([target.tolist() for _, target in forward])
        for image, target in forward:
            assert target.sum().item() == pytest.approx(1)
            mean = (target * torch.arange(4)).sum().item()
            assert image.mean().item() == pytest.approx(mean, abs=1e-5)
            colours = image.unique()
            counts["mixed"] += target.max().item() < 1
            counts["CutMix"] += len(colours) == 2
            counts["MixUp"] += len(colours) == 1 and 1e-3 < colours.item() % 1 < 1 - 1e-3
    # Of 200, half. Of their partners a quarter has the same class: then nothing is seen.
    assert counts["mixed"] == pytest.approx(0.75 * 100, abs=30)
    assert counts["CutMix"] > 10 < counts["MixUp"] and targets[0] != targets[1]


def test_labels_are_smoothed_in_training_only():
    logits, targets = torch.randn(5, 4).double(), torch.rand(5, 4).double().softmax(1)
    smooth = 0.9 * targets + 0.1 / 4
    batch = None, targets
    for grad, exact in ((True, smooth), (False, targets)):
        with torch.set_grad_enabled(grad):
            values = vit.compute_loss(lambda images: logits, batch, None)
        torch.testing.assert_close(values["loss"], -(exact * logits.log_softmax(1)).sum(1))
    assert values["accuracy"].tolist() == (logits.argmax(1) == targets.argmax(1)).tolist()


def test_a_pipeline_computes_what_the_whole_model_does_and_has_its_names(small, tmp_path):
    """And all rates on both stages, though each has a part of the layers."""
    model, images = vit.build_model(small), torch.rand(2, 3, 16, 16)
    torch.nn.init.normal_(model.heads.head.weight)  # or all logits would be 0
    blocks = torch.nn.Sequential(*vit.model_blocks(model).values())
    torch.testing.assert_close(blocks(images), model(images), rtol=0, atol=0)
    script = make(tmp_path / "mine.py", "pipeline", "vit")
    flags = ["--cpu", "--photos", small.photos, "--size", 16, "--patch", 8, "--width", 64]
    flags += ["--layers", 2, "--max-steps", 1, "--lr", 1e-3, "--batch-size", 8]
    (run,) = train_forked(tmp_path, (2, script, flags))
    assert run.weights.keys() == model.state_dict().keys()
    rates = [1e-3 * 0.75**depth for depth in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert run.summary["peak_learning_rate"] == pytest.approx(rates)
