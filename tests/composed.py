"""Copies composed of a recipe and examples, which take less time."""

import new
from conftest import LITTLE_DATA

RESNET = "torchvision.models.resnet18(num_classes="
OURS = "(lambda classes: nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), "
OURS += "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)))("
# Before Python 3.11.10, a worker's fork can deadlock: docs/failures.md.
WITHOUT_WORKERS = [(', "persistent_workers": True', ""), ('"num_workers": 2', '"num_workers": 0')]
LLAMA = [('size": 128, "', 'size": 32, "'), ('layers": 4', 'layers": 1')]
# Maps of five sizes, without a pyramid.
PYRAMID = "list(self.backbone(images.tensors).values())"
MAPS = "[nn.functional.avg_pool2d(self.backbone(images.tensors), 2**i) for i in range(5)]"
FCOS = [
    (
        'resnet_fpn_backbone(backbone_name=f"resnet{args.resnet}",',
        "(lambda **_: nn.Conv2d(3, 64, 8, 8))(",
    )
]
FCOS += [("Head(256,", "Head(64,"), (PYRAMID, MAPS)]
SMALLER = {
    **dict.fromkeys(("language_model", "by_length", "mixture"), LLAMA),
    **{task: [(RESNET, OURS)] for task in ("photos", "balanced", "tar_shards")},
    "contrastive": [("(64, 128, 256)", "(8, 16, 32)"), ("256 * 16, 256", "32 * 16, 256")],
    "diffusion": [("width=64", "width=16"), ("steps=50", "steps=5")],
    "gan": [("width=32", "width=8")],
    "text_to_image": [('output_type="pt"', 'output_type="pt", num_inference_steps=2')],
    "detection": FCOS,
    "segmentation": [("[3, 32, 64, 128]", "[3, 32, 32, 32]")],
}


def make(path, recipe, *examples):
    """Write a copy."""
    text = new.compose(new.RECIPES[recipe], path.name, recipe, examples)
    for larger, smaller in [LITTLE_DATA, *WITHOUT_WORKERS, *SMALLER.get(examples[0], [])]:
        text = text.replace(larger, smaller)
    path.write_text(text)
