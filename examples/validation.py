# Parts of a copy, not a program: make new COPY=../mine.py WITH=validation
# SPDX-License-Identifier: Apache-2.0
"""A tenth of the training set is for the evaluations in training, the test set for the end alone.

The tenth is drawn by --seed, and is not trained on. Its metrics are validation_loss and so on, by
which best_weights chooses. After the last step the test set is evaluated once. To test other
weights: `--epochs 0 --weights runs/mine/best.safetensors --output-dir runs/test`.

The validation samples have the transforms of the test set. If your dataset has random ones that are
not in its attribute `transform`, edit `read_as_test`. A training set with an order of its own, as
in by_length, is an error: divide it in `load_data`, before it gets that order.

Group: additions. Recipes: ddp, amp, sharded.
"""

from copy import copy

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from ddp_cifar import exit_with_error

VALIDATION_SHARE = 0.1  # of the training set
# Attributes in which training and test set differ: of torchvision's datasets, and of vit's.
TRANSFORMS = ("transform", "transforms", "target_transform", "share")


class Validation(Subset):
    """The samples of the training set that are not trained on."""


def with_validation(run, loaders):
    """Return three prepared loaders, for the two of `load_data`: of the samples that are trained
    on, of the validation samples, and of the test set."""
    train, test = loaders
    if not isinstance(train.sampler, RandomSampler):
        exit_with_error("load_data: the training set has an order of its own: divide it there")
    data = train.dataset
    generator = torch.Generator().manual_seed(run.args.seed)
    order = torch.randperm(len(data), generator=generator).tolist()
    count = max(1, round(VALIDATION_SHARE * len(data)))
    trained = Subset(data, order[count:])
    validation = Validation(read_as_test(data, test.dataset), order[:count])
    both = (
        DataLoader(trained, shuffle=True, drop_last=True, **options_of(train)),
        DataLoader(validation, **options_of(test)),
    )
    _, test = run.prepare_data(loaders)
    train, validation = run.prepare_data(both)  # the second call counts the steps of an epoch
    run.samples.append(len(test.dataset))
    return train, validation, test


def read_as_test(data, test_set):
    """Return the training set, read as the test set is, without random transforms: a copy, as are
    the datasets in its attributes."""
    if type(data) is not type(test_set):
        types = f"{type(data).__name__} and {type(test_set).__name__}"
        exit_with_error(f"load_data: training and test set are {types}: edit read_as_test")
    if not isinstance(data, Dataset):  # such as a list, of the samples themselves
        return data
    data = copy(data)
    for name, value in vars(test_set).items():
        if isinstance(value, Dataset):
            setattr(data, name, read_as_test(getattr(data, name), value))
        elif name in TRANSFORMS:
            setattr(data, name, value)
    if hasattr(data, "augmentation"):  # ImageTensors: the middle of the padded image
        data.seed = None
        data.augmentation = torch.zeros_like(data.augmentation)
        data.augmentation[:2] = data.padding
    return data


def options_of(loader):
    """Return with which options a DataLoader was made, but for its data and their order."""
    names = "batch_size num_workers collate_fn pin_memory timeout worker_init_fn prefetch_factor"
    return {name: getattr(loader, name) for name in (*names.split(), "persistent_workers")}
