# SPDX-License-Identifier: Apache-2.0
"""Images and boxes in COCO's JSON, and the average precision of what is found in them."""

import io
import json
import math
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert
from torchvision.transforms import v2

from ddp_cifar import RANK, exit_with_error, log_line
from lib.images import exit_if_missing, read_image


def read_coco(path, classes):
    """Return the content of a JSON file in COCO's format, with the fields that COCOeval needs."""
    number = 0
    try:
        content = json.loads(Path(path).read_text("utf-8-sig"))  # with or without a BOM
        images, categories = (by_id(content[name]) for name in ("images", "categories"))
        highest = max(categories)
        for number, x in enumerate(content["annotations"], 1):  # 0 would be "none" for COCOeval
            x["id"] = number
            x["iscrowd"] = x.get("iscrowd") or 0
            x["area"] = x.get("area") or x["bbox"][2] * x["bbox"][3]
            for name, known in (("image_id", images), ("category_id", categories)):
                if x[name] not in known:
                    raise ValueError(f"no {name.removesuffix('_id')} has the id {x[name]}")
            check_box(x["bbox"], images[x["image_id"]])
        boxes = [x["bbox"] for x in content["annotations"]]
        if boxes and max(map(max, boxes)) <= 1:
            raise ValueError("all boxes are within [0, 1]: write them in pixels")
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        where = f" in annotation {number}" if number else ""
        exit_with_error(f"{path} is not in COCO's format{where}: {error!r}")
    if not images:
        exit_with_error(f"{path} has no images")
    if highest >= classes:
        exit_with_error(f"{path} has category {highest}: choose --classes {highest + 1} or more")
    return content


def by_id(rows):
    """Return {id: row} of images or categories. Raise ValueError unless each has its own number."""
    found = {row["id"]: row for row in rows}
    if wrong := [x for x in found if not isinstance(x, int) or x < 0]:
        raise ValueError(f"the id {wrong[0]!r} is not a number from 0 on")
    if len(found) < len(rows):
        raise ValueError("two images, or categories, have one id")
    return found


def check_box(box, image):
    """Raise ValueError unless a box is [x, y, width, height] in pixels, a part of which is in the
    image. Without an area, as some of COCO's, it is left out."""
    x, y, width, height = box
    right, bottom = image.get("width", math.inf), image.get("height", math.inf)
    is_inside = x < right and y < bottom and x + width >= 0 and y + height >= 0
    if not (is_inside and width >= 0 and height >= 0):
        raise ValueError(f"box {box} is no box in its image of {right} x {bottom} pixels")


class Objects(Dataset):
    """Images, (3, H, W) float32 in [0, 1], with {"boxes": (N, 4) float32, corners in pixels,
    "labels": (N,) int64, "image": its id}. Crowds are left out, and boxes below one pixel."""

    def __init__(self, folder, path, classes, *transforms):
        content = read_coco(path, classes)
        self.images = content["images"]
        self.names = {x["id"]: x.get("name") for x in content["categories"]}
        self.paths = [Path(folder, x["file_name"]) for x in self.images]
        exit_if_missing(self.paths, path)
        boxes = content["annotations"]
        kept = [x for x in boxes if not x["iscrowd"] and min(x["bbox"][2:]) >= 1]
        left_out = f"{len(boxes) - len(kept)} of {len(boxes)} boxes are crowds, or below one pixel"
        if not kept:
            exit_with_error(f"{path} has no object: {left_out}")
        if len(kept) < len(boxes) and RANK == 0:
            log_line(f"{path}: {left_out}: they are left out")
        objects = defaultdict(list)
        for x in kept:
            objects[x["image_id"]].append([*x["bbox"], x["category_id"]])
        rows = [objects[x["id"]] for x in self.images]
        self.objects = [torch.tensor(x, dtype=torch.float32).view(-1, 5) for x in rows]
        # A box may be outside of its image, or have no area.
        checks = [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes()]
        tensors = [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]
        self.transform = v2.Compose([*transforms, *checks, *tensors])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        path, described = self.paths[index], self.images[index]
        image = read_image(path)
        size = described.get("width", image.width), described.get("height", image.height)
        if image.size != size:
            raise OSError(f"{path} has {image.size} pixels, upright, but by its JSON {size}")
        pixels = tv_tensors.Image(image)
        boxes, labels = self.objects[index].split([4, 1], dim=1)
        size = {"format": "XYXY", "canvas_size": pixels.shape[-2:]}
        boxes = tv_tensors.BoundingBoxes(box_convert(boxes, "xywh", "xyxy"), **size)
        target = {
            "boxes": boxes,
            "labels": labels[:, 0].long(),
            "image": torch.tensor(described["id"]),
        }
        return self.transform(pixels, target)


def images_and_targets(batch):
    """Return a tuple of images, which have different sizes, and one of targets."""
    return tuple(zip(*batch, strict=True))


def result_rows(found, target):
    """Return what is found in an image: (N, 7) float64, rows of the image's id, the box, its score,
    and its class, as COCO's results have them."""
    boxes = box_convert(found["boxes"].double(), "xyxy", "xywh")
    image = target["image"].expand(len(boxes))
    return torch.column_stack((image, boxes, found["scores"], found["labels"]))


def average_precision(rows, path, classes):
    """Return {"map": the mean AP of COCO's ten thresholds, "map50": AP at an IoU of 0.5}, of the
    `result_rows` of all images of a file."""
    if not len(rows):
        return {"map": 0.0, "map50": 0.0}
    truth = COCO()
    truth.dataset = read_coco(path, classes)
    with redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(rows.numpy()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"map": evaluation.stats[0], "map50": evaluation.stats[1]}
