"""The data path: torchvision's pixels, drawn from seed, epoch and index alone, each sample once."""

import pytest
import torch
import torchvision.transforms.functional as TF
from accelerate import Accelerator
from conftest import REAL_DATA, ROUNDING_FLOAT32, load, needs_real_data
from torchvision import transforms as T

recipe = load("recipes/ddp_cifar.py")
NORMALIZE = T.Normalize(recipe.ImageTensors.mean, recipe.ImageTensors.std)


@pytest.fixture(scope="module")
def images_and_labels():
    return recipe.synthetic_images(64, seed=3)


def augmented(images_and_labels, seed, epoch):
    dataset = recipe.ImageTensors(*images_and_labels, torch.device("cpu"), augmentation_seed=seed)
    dataset.set_epoch(epoch)
    return dataset


def test_training_pixels_are_those_of_torchvisions_transforms(images_and_labels):
    images, labels = images_and_labels
    dataset = augmented(images_and_labels, seed=5, epoch=2)
    indices = torch.randperm(64).tolist()
    batch, batch_labels = dataset.__getitems__(indices)
    assert batch.is_contiguous(memory_format=torch.channels_last) and not batch.is_contiguous()
    assert batch_labels.tolist() == labels[indices].tolist()
    flips = 0
    for pixels, index in zip(batch, indices, strict=True):
        top, left, flip = dataset.augmentation[:, index].tolist()
        image = T.Pad(4)(T.ToPILImage()(images[index].permute(2, 0, 1)))
        image = TF.crop(image, top, left, 32, 32)
        image = TF.hflip(image) if flip else image
        torch.testing.assert_close(
            pixels, NORMALIZE(T.ToTensor()(image)), rtol=0, atol=ROUNDING_FLOAT32
        )
        flips += flip
    assert 16 < flips < 48


def test_crops_are_all_those_that_torchvisions_random_crop_can_draw(images_and_labels):
    drawn = [augmented(images_and_labels, 0, epoch).augmentation[:2] for epoch in range(20)]
    sample = torch.zeros(3, 40, 40)
    torch_drawn = {T.RandomCrop.get_params(sample, (32, 32))[0] for _ in range(1000)}
    assert set(torch.cat(drawn).unique().tolist()) == torch_drawn == set(range(9))


def test_test_images_are_only_normalized(images_and_labels):
    images, _ = images_and_labels
    dataset = recipe.ImageTensors(*images_and_labels, torch.device("cpu"))
    batch, _ = dataset.__getitems__([7, 7, 0])
    expected = NORMALIZE(images[7].permute(2, 0, 1) / 255)
    torch.testing.assert_close(batch[0], expected, rtol=0, atol=ROUNDING_FLOAT32)
    assert torch.equal(batch[0], batch[1]) and not torch.equal(batch[0], batch[2])
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_depends_on_seed_epoch_and_index_alone(images_and_labels):
    def pixels(seed, epoch, indices):
        torch.rand(epoch)  # whatever else draws from the global generator
        return augmented(images_and_labels, seed, epoch).__getitems__(indices)[0]

    reference = pixels(0, 3, [5, 9, 11])
    assert torch.equal(reference, pixels(0, 3, [11, 9, 5]).flip(0))
    assert not torch.equal(reference, pixels(0, 4, [5, 9, 11]))
    assert not torch.equal(reference, pixels(1, 3, [5, 9, 11]))
    assert not torch.equal(pixels(0, 1, [5, 9, 11]), pixels(1, 0, [5, 9, 11]))


def test_synthetic_data_are_made_from_their_seed():
    (images, labels), (again, _), (other, _) = (recipe.synthetic_images(256, x) for x in (1, 1, 2))
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert images.shape == (256, 32, 32, 3) and images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))


@needs_real_data
def test_cifar10_is_read_whole():
    (images, labels), (_, test_labels) = recipe.cifar10(REAL_DATA, Accelerator(cpu=True))
    assert images.shape == (50_000, 32, 32, 3) and images.dtype == torch.uint8
    assert labels.bincount().tolist() == [5000] * 10
    assert test_labels.bincount().tolist() == [1000] * 10
    assert labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile
    pixels = images[::50].reshape(-1, 3) / 255
    torch.testing.assert_close(pixels.mean(0), torch.tensor(NORMALIZE.mean), rtol=0, atol=0.01)
    torch.testing.assert_close(pixels.std(0), torch.tensor(NORMALIZE.std), rtol=0, atol=0.01)
