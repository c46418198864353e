"""Image files in each example that reads some: as they were meant, or an error with their name."""

import json
import tarfile
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import Exit, exit_by_exception
from lazy import datasets, lib, photos, segmentation, tar_shards
from PIL import Image
from torchvision.transforms.v2 import Identity
from torchvision.transforms.v2.functional import to_image

from lib.images import read_image, stored_size

pytestmark = pytest.mark.slow


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
    source = f"{path}.rows"
    rows.save_to_disk(source)
    named = {"photos": source, "test": source, "image": "image", "label": "label"}
    _, dataset = photos.photo_folders(SimpleNamespace(size=8, **named))
    return dataset[0][0]


def of_detection(path):
    content = {"images": [{"id": 1, "file_name": path.name}], "categories": [{"id": 1}]}
    content["annotations"] = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9]}]
    path.with_suffix(".json").write_text(json.dumps(content))
    return lib.coco.Objects(path.parent, path.with_suffix(".json"), 2)[0][0]


def of_clip(path):
    def tokenize(caption):
        return {"input_ids": [1]}

    return lib.captions.Captioned([(path, "")], tokenize, Identity())[0][0]


def of_segmentation(path):
    Image.new("L", (8, 12)).save(path.with_suffix(".png"))
    return segmentation.Masks([path], 4, Identity())[0][0]


def of_shards(path):
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        tar.add(path, path.name)
        (path.parent / "a.cls").write_text("0")
        tar.add(path.parent / "a.cls", "a.cls")
    kind = path.suffix[1:]
    places = lib.tar_samples.tar_index([path.with_suffix(".tar")], [kind, "cls"])
    args = SimpleNamespace(members=[kind, "cls"], classes=1)
    decode = partial(tar_shards.decode, args, Identity())
    return lib.tar_samples.TarSamples([path.with_suffix(".tar")], places, decode)[0][0]


def of_vision_chat(path):
    sample = lib.image_chat.packed(("", [], [path], "a row", 1))
    places = torch.tensor([0]), torch.tensor([len(sample)])
    return to_image(lib.image_chat.ImageChats(sample, *places)[0][2][0])


READERS = [of_photos, of_rows, of_detection, of_clip, of_segmentation, of_shards, of_vision_chat]


def picture(seed=0):
    return numpy.random.default_rng(seed).integers(256, size=(12, 8, 3), dtype="uint8")


@pytest.mark.parametrize("read", READERS)
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


def test_images_of_any_ending_are_read_and_other_files_are_counted(tmp_path, capsys, monkeypatch):
    for part in ("train", "test"):
        folder = tmp_path / part / "only"
        folder.mkdir(parents=True)
        for name in ("a.GIF", "b.jfif", "c.AVIF", "d.png"):
            kind = {"jfif": "JPEG"}.get(name[2:], name[2:].upper())
            Image.fromarray(picture()).save(folder / name, kind)
        for name in ("e.heic", "f.eps"):
            (folder / name).touch()
        for name in (".ipynb_checkpoints/a.png", "only/@eaDir/a.png/b.png", "only/._d.png"):
            (tmp_path / part / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / part / name).touch()
    train, _ = photos.photo_folders(SimpleNamespace(photos=tmp_path, size=8, test=None))
    assert len(train) == 4
    assert "8 files are left out, such as" in capsys.readouterr().err
    (tmp_path / "test/only").rename(tmp_path / "test/others")
    monkeypatch.setattr("photos.exit_with_error", exit_by_exception)
    with pytest.raises(Exit, match="train/ and test/ have other folders"):
        photos.photo_folders(SimpleNamespace(photos=tmp_path, size=8, test=None))


WRONG = {
    "truncated": [of_rows, of_shards, read_image],
    "16 bits": [read_image, stored_size],
    "a text": [read_image],
    "an EPS file": [read_image],  # for which PIL would start a Ghostscript
}


@pytest.mark.parametrize(("wrong", "read"), [(x, read) for x in WRONG for read in WRONG[x]])
def test_an_image_that_cannot_be_read_as_it_was_meant_is_an_error_with_its_name(
    wrong, read, tmp_path
):
    path = tmp_path / "a.tif"
    kind = {"an EPS file": "EPS"}.get(wrong, "TIFF")
    pixels = picture()[:, :, 0].astype("uint16") * 257 if wrong == "16 bits" else picture()
    Image.fromarray(pixels).save(path, kind)
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:200], "a text": b"text"}.get(wrong, content))
    with pytest.raises(OSError, match=r"a\.tif|a\.tar, sample a: tif") as error:
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


def test_masks_whose_classes_do_not_fit_are_an_error_with_their_name(tmp_path, monkeypatch):
    paths = masks(tmp_path, [0, 1, 3, 255], [0, 1, 1, 4], [255, 255, 0, 0])
    data = segmentation.Masks(paths, 4, Identity())
    assert data[0][1].unique().tolist() == [0, 1, 3, 255]
    assert data[2][1].unique().tolist() == [0, 255], "an image without an object"
    with pytest.raises(OSError, match=r"1\.jpg: its mask has class 4: set --classes 5"):
        data[1]
    coloured = Image.open(tmp_path / "0.png")
    coloured.putpalette([0, 0, 0, 9, 0, 0])
    data.palette = [0, 0, 0, 0, 0, 0]
    for mask, said in (
        (Image.new("L", (9, 12)), r"its mask has \(9, 12\) pixels, not \(8, 12\)"),
        (Image.new("RGB", (8, 12)), "its mask has pixels of type RGB"),
        (coloured, "its mask has other colours than the first"),
    ):
        mask.save(tmp_path / "0.png")
        with pytest.raises(OSError, match=rf"0\.jpg: {said}"):
            data[0]
    Image.fromarray(picture()[:, :, 0] > 99).save(tmp_path / "0.png")
    assert segmentation.highest_class(segmentation.read_mask(paths[0])) == 1, "of one bit"

    monkeypatch.setattr("segmentation.exit_with_error", exit_by_exception)
    masks(tmp_path, *[[0, 255, 0, 255]] * 3)
    (tmp_path / "._0.jpg").touch()
    with pytest.raises(Exit, match="all masks have 0 and 255 alone"):
        segmentation.load_data(SimpleNamespace(images=tmp_path), None)
