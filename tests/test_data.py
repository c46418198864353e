"""The data path: torchvision's pixels, drawn from seed, epoch and index alone, each sample once."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
import torchvision.transforms.functional as TF
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from conftest import REAL_DATA, ROUNDING_FLOAT32, load, needs_real_data
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as T

recipe = load("recipes/ddp_cifar.py")
NORMALIZE = T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@pytest.fixture(scope="module")
def images_and_labels():
    return recipe.synthetic_images(64, seed=3)


def augmented(images_and_labels, seed, epoch):
    dataset = recipe.ImageTensors(*images_and_labels, torch.device("cpu"), augmentation_seed=seed)
    dataset.set_epoch(epoch)
    return dataset


@pytest.mark.parametrize("seed", [5, None])
def test_pixels_are_those_of_torchvisions_transforms(images_and_labels, seed):
    """Without a seed, as for the test, they are only normalised."""
    images, labels = images_and_labels
    dataset = augmented(images_and_labels, seed, epoch=2)
    indices = torch.randperm(64).tolist()
    batch, batch_labels = dataset.__getitems__(indices)
    assert batch.is_contiguous(memory_format=torch.channels_last) and not batch.is_contiguous()
    assert batch_labels.tolist() == labels[indices].tolist()
    flips, places = 0, set()
    for pixels, index in zip(batch, indices, strict=True):
        top, left, flip = dataset.augmentation[:, index].tolist()
        image = T.Pad(4 if seed else 0)(T.ToPILImage()(images[index].permute(2, 0, 1)))
        image = TF.crop(image, top, left, 32, 32)
        image = TF.hflip(image) if flip else image
        torch.testing.assert_close(
            pixels, NORMALIZE(T.ToTensor()(image)), rtol=0, atol=ROUNDING_FLOAT32
        )
        flips += flip
        places |= {top, left}
    assert 16 < flips < 48 if seed else flips == 0
    assert places == ({*range(9)} if seed else {0}), "all that a RandomCrop can draw"


def test_augmentation_depends_on_seed_epoch_and_index_alone(images_and_labels):
    def pixels(seed, epoch, indices):
        torch.rand(epoch)  # whatever else draws from the global generator
        return augmented(images_and_labels, seed, epoch).__getitems__(indices)[0]

    reference = pixels(0, 3, [5, 9, 11])
    assert torch.equal(reference, pixels(0, 3, [11, 9, 5]).flip(0))
    assert not torch.equal(reference, pixels(0, 4, [5, 9, 11]))
    assert not torch.equal(reference, pixels(1, 3, [5, 9, 11]))
    assert not torch.equal(pixels(0, 1, [5, 9, 11]), pixels(1, 0, [5, 9, 11]))
    args = SimpleNamespace(data="synthetic", batch_size=8, seed=5)
    train_loader, _ = recipe.load_data(args, SimpleNamespace(device=torch.device("cpu")))
    assert train_loader.dataset.seed == 5


def test_a_persistent_worker_has_the_augmentation_of_each_epoch(images_and_labels):
    dataset = augmented(images_and_labels, 0, epoch=0)
    loader = DataLoader(dataset, 64, collate_fn=tuple, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        [(pixels, _)] = loader
        assert torch.equal(pixels, dataset.__getitems__(list(range(64)))[0])


class Draws(Dataset):
    """Of every generator that a transform may draw from."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, torch.rand(()).item(), numpy.random.rand(), random.random()


def test_each_seed_and_epoch_has_its_own_order_and_its_own_random_numbers():
    """Also the second epoch of a seed and the first one of the next seed."""
    epochs = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 1)):
        args = SimpleNamespace(seed=seed, batch_size=8, tracker=None, output_dir=None)
        loader = DataLoader(Draws(), 8, shuffle=True, drop_last=True, collate_fn=list)
        loader, _ = recipe.make_reproducible((loader, DataLoader(Draws())), args)
        loader = recipe.make_accelerator(args, 0, "fp32", (), 1).prepare(loader)
        loader.set_epoch(epoch)
        loader.dataset.set_epoch(epoch)
        epochs.append([sample for batch in loader for sample in batch])
        assert sorted(sample[0] for sample in epochs[-1]) == list(range(40))
    assert epochs.pop() == epochs[-1]
    assert len({tuple(sample[0] for sample in samples) for samples in epochs}) == 4
    for generator in (1, 2, 3):
        assert len({sample[generator] for samples in epochs for sample in samples}) == 160


class OwnEpoch(Draws):
    """Draws with an epoch of its own, and in whole batches."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitems__(self, indices):
        return [(self.epoch, *self[index]) for index in indices]


@pytest.mark.parametrize("kind", [Draws, OwnEpoch])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_draws_the_same_also_in_its_collate_fn_whatever_was_drawn_before(kind, workers):
    def mixed(samples):
        return samples, torch.rand(()).item(), numpy.random.rand(), random.random()

    whole = Subset(Subset(kind(), range(40)), range(40))
    options = {"collate_fn": mixed, "num_workers": workers, "drop_last": True}
    options["persistent_workers"] = bool(workers) and kind is Draws  # they do not get an own epoch
    args = SimpleNamespace(batch_size=8, seed=0)
    first, _ = recipe.make_reproducible((DataLoader(whole, 8, **options), DataLoader(whole)), args)
    list(first)  # in epoch 0
    first.dataset.set_epoch(3)
    first = list(first)
    torch.rand(5)
    assert len({batch[1] for batch in first}) == len({batch[3] for batch in first}) == 5
    other = recipe.SeededSamples(whole, 0)
    other.set_epoch(3)
    assert mixed(other.__getitems__(range(16, 24))) == first[2]
    assert kind is OwnEpoch or other.__getitems__([18]) == first[2][0][2:3], "in any batch"
    assert kind is Draws or {sample[0] for sample in first[0][0]} == {3}
    other.set_epoch(4)
    assert mixed(other.__getitems__(range(16, 24))) != first[2]


def test_each_part_of_a_dataset_of_datasets_gets_the_epoch():
    parts = [OwnEpoch() for _ in range(4)]
    stacked = torch.utils.data.StackDataset(one=parts[2], other=parts[3])
    whole = torch.utils.data.ConcatDataset([parts[0], stacked])
    whole += Subset(parts[1], range(9))
    recipe.SeededSamples(Subset(whole, range(80)), 0).set_epoch(3)
    assert [part.epoch for part in parts] == [3] * 4


def test_a_dataset_in_both_loaders_has_epoch_0_in_an_evaluation_and_then_that_of_training():
    dataset = OwnEpoch()
    loaders = [DataLoader(recipe.SeededSamples(dataset, 0), 8) for _ in range(2)]
    run = SimpleNamespace(train_loader=loaders[0], data_parallel_size=1, ranks_per_batch=1)
    run.watcher = SimpleNamespace(agreed_signal=lambda: 0)
    run.exit_on, run.steps_per_epoch = lambda _: None, 5
    test_loader = prepare_data_loader(loaders[1])
    for run.step, epoch in ((0, 0), (10, 1), (11, 2)):
        dataset.set_epoch(7)
        batches = [*recipe.Run.test_batches(run, torch.nn.Linear(1, 1), test_loader)]
        assert {x.item() for (epochs, *_), _ in batches for x in epochs} == {0}
        assert dataset.epoch == epoch


@needs_real_data
def test_cifar10_is_read_whole():
    args = SimpleNamespace(data="cifar10", data_dir=REAL_DATA, batch_size=8, seed=0)
    train, test = (x.dataset for x in recipe.load_data(args, Accelerator(cpu=True)))
    images, labels = train.images[:, 4:-4, 4:-4], train.labels
    assert images.shape == (50_000, 32, 32, 3) and images.dtype == torch.uint8
    assert labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    assert labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile
    pixels = images[::50].reshape(-1, 3) / 255
    torch.testing.assert_close(pixels.mean(0), torch.tensor(NORMALIZE.mean), rtol=0, atol=0.01)
    torch.testing.assert_close(pixels.std(0), torch.tensor(NORMALIZE.std), rtol=0, atol=0.01)
