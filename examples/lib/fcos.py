# SPDX-License-Identifier: Apache-2.0
"""torchvision's FCOS (Tian et al. 2019, arXiv:1904.01355), with losses of each image."""

import torch
from torchvision.models.detection.fcos import FCOS, FCOSHead


class Head(FCOSHead):
    """torchvision's, whose losses are of each image: means over its points inside of objects."""

    def compute_loss(self, targets, outputs, anchors, matched):
        """Return {name: (B,)}: losses, and as "weight" the number of such points, at least 1."""
        rows = []
        for i, point in enumerate(matched):
            one = {name: x[i : i + 1] for name, x in outputs.items()}
            losses = super().compute_loss([targets[i]], one, [anchors[i]], [point])
            rows.append({**losses, "weight": (point >= 0).sum().clamp(min=1)})
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Detector(FCOS):
    """torchvision's FCOS, which returns each image's losses, in evaluations with what it finds."""

    def forward(self, images, targets):
        sizes = [image.shape[-2:] for image in images]
        images, targets = self.transform(images, targets())
        maps = list(self.backbone(images.tensors).values())
        outputs = {name: x.float() for name, x in self.head(maps).items()}
        # They get the type of the maps: bf16 would round positions to 8 bits.
        anchors = self.anchor_generator(images, [x.float() for x in maps])
        points = [x[0, 0].numel() for x in maps]
        losses = self.compute_loss(targets, outputs, anchors, points)
        if self.training:
            return losses, None
        outputs = {name: x.split(points, dim=1) for name, x in outputs.items()}
        anchors = [x.split(points) for x in anchors]
        found = self.postprocess_detections(outputs, anchors, images.image_sizes)
        return losses, self.transform.postprocess(found, images.image_sizes, sizes)
