# SPDX-License-Identifier: Apache-2.0
"""MixUp and CutMix in the dataset, for vit.py: the mixture does not depend on the batch."""

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2


class Mixed(Dataset):
    """The samples of an ImageFolder, with (classes,) float32 as target. A `share` of them is mixed
    with another one, which is drawn like all else: by (seed, epoch, index), whatever the batch."""

    def __init__(self, folder, share):
        self.folder = folder
        self.share = share
        self.classes = len(folder.classes)
        options = {"num_classes": self.classes}
        self.mix = v2.RandomChoice([v2.MixUp(alpha=0.8, **options), v2.CutMix(**options)])

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        image, label = self.folder[index]
        if torch.rand(()) >= self.share:
            return image, F.one_hot(torch.tensor(label), self.classes).float()
        other, other_label = self.folder[int(torch.randint(len(self), ()))]
        both = torch.stack((image, other)), torch.tensor((label, other_label))
        images, targets = self.mix(*both)
        return images[0], targets[0]
