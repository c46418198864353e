"""Copies composed of a recipe and examples, which take less time."""

import json
import re
import sys
import tomllib
import wave
from functools import cache, partial
from importlib import metadata

import new
import numpy
import pytest
import torch
from conftest import FEW_IMAGES, ROUNDING_FLOAT32
from PIL import Image
from processes import ROOT, train_forked

RESNET = "torchvision.models.resnet18(num_classes="
OURS = "(lambda classes: nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), "
OURS += "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)))("
# Before Python 3.11.10, a worker's fork can deadlock: docs/failures.md.
WITHOUT_WORKERS = [(', "persistent_workers": True', ""), ('"num_workers": 2', '"num_workers": 0')]
LLAMA = [('size": 128, "', 'size": 32, "'), ('layers": 4', 'layers": 1')]
# Maps of five sizes, without a pyramid.
PYRAMID = "list(self.backbone(images.tensors).values())"
MAPS = "[nn.functional.avg_pool2d(self.backbone(images.tensors), 2**i) for i in range(5)]"
BACKBONE = 'resnet_fpn_backbone(backbone_name=f"resnet{args.resnet}",'
PATCHES = "(lambda **_: nn.Conv2d(3, 64, 8, 8))("
FCOS = [(BACKBONE, PATCHES), ("Head(256,", "Head(64,"), (PYRAMID, MAPS)]
SMALLER = {
    **dict.fromkeys(("language_model", "by_length", "mixture", "tokens"), LLAMA),
    **{task: [(RESNET, OURS)] for task in ("photos", "balanced", "tar_shards")},
    "contrastive": [("(64, 128, 256)", "(8, 16, 32)"), ("256 * 16, 256", "32 * 16, 256")],
    "diffusion": [("width=64", "width=16"), ("steps=50", "steps=5")],
    "gan": [("width=32", "width=8")],
    "text_to_image": [('output_type="pt"', 'output_type="pt", num_inference_steps=2')],
    "detection": FCOS,
    "segmentation": [("[3, 32, 64, 128]", "[3, 32, 32, 32]")],
}
# What copies import: the process that their ranks are forks of imports it once.
MODELS = "bert", "clip", "llama", "qwen2_5_vl", "t5", "wav2vec2", "whisper"
IMPORTS = [
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    *(f"pyarrow.{name}" for name in ("dataset", "json", "parquet")),
    *("peft", "rouge_score.rouge_scorer", "sacrebleu", "torch.profiler"),
    "transformers.models.clip.tokenization_clip",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
]
train = partial(train_forked, imports=IMPORTS)
close = partial(pytest.approx, rel=ROUNDING_FLOAT32, abs=ROUNDING_FLOAT32)


def make(path, recipe, *examples, replaced=()):
    """Write a copy with texts replaced, each of which is in it once. Return its path."""
    text = new.compose(new.RECIPES[recipe], path.name, recipe, examples)
    for larger, smaller in [FEW_IMAGES, *WITHOUT_WORKERS, *SMALLER.get(examples[0], [])]:
        text = text.replace(larger, smaller)
    for before, after in replaced:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)
    return path


distributions = cache(metadata.packages_distributions)  # {module: packages that have it}


def brought(package):
    """The packages that a package installs with it."""
    lines = metadata.requires(package) or []
    return {re.match(r"[\w-]+", line)[0] for line in lines if "extra ==" not in line}


def assert_lists_its_packages(script, imported=""):
    """The inline metadata of a script (PEP 723) has the bounds of pyproject.toml, in its order. It
    lists the packages that the script and another text import, unless one of them brings these."""
    head = script.partition("\n# ///\n")[0].partition("# /// script\n")[2]
    head = tomllib.loads(re.sub("^# ", "", head, flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    bounds = [x.replace(" ", "") for x in bounds]
    listed = [x for x in bounds if x in head["dependencies"]]
    assert head == {"requires-python": project["requires-python"], "dependencies": listed}
    found = re.findall(r"^ *(?:from (\w+)\S* import|import (\w+))", script + imported, re.MULTILINE)
    modules = {one or other for one, other in found}
    modules = {"torchvision" if name == "PIL" else name for name in modules}  # which brings it
    modules -= {*sys.stdlib_module_names, "infrastructure"}
    packages = {distributions()[x][0].lower().replace("_", "-") for x in modules}
    names = {re.match(r"[\w-]+", x)[0] for x in listed}
    assert names <= packages <= names.union(*map(brought, names))


def loss_of_step(microbatches):
    """The loss whose gradient a recipe's `train_step` has, of the values of its microbatches."""
    weights = [x.get("weight", torch.ones(len(x["loss"]))).double() for x in microbatches]
    losses = [(x["loss"] * y).mean() for x, y in zip(microbatches, weights, strict=True)]
    return torch.stack(losses).mean() / torch.stack([x.mean() for x in weights]).mean()


def write_wav(path, samples, rate=16000, width=2):
    """A wav file of (N, channels) integers."""
    with wave.open(str(path), "wb") as file:
        file.setparams((samples.shape[1], width, rate, 0, "NONE", ""))
        file.writeframes(samples.astype(f"<i{width}").tobytes())


def of_coco(*boxes, **changed):
    """A file of COCO with an image, a.png, two categories, and such annotations, each of which has
    a category, an image and a box; or with other lists in place of these."""
    common = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9]}
    content = {"images": [{"id": 1, "file_name": "a.png"}]}
    content["annotations"] = [common | box for box in boxes]
    content["categories"] = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    return json.dumps({**content, **changed}).encode()


def rates_of(optimizer, schedule, steps):
    """The learning rates of the groups of parameters in each step."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return rates


def write_photos(directory, count):
    """Write photos of noise in three classes, of which a quarter is for the test."""
    for index in range(count):
        path = directory / ("train" if index % 4 else "test") / f"class{index % 3}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = numpy.random.default_rng(index).integers(256, size=(40, 50, 3), dtype="uint8")
        Image.fromarray(noise).save(path)
    return directory
