"""For copies in test_check.py: a small model with dropout and a random loss, and mistakes."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_cifar import compute_loss, make_optimizer, synthetic_images

plain_loss, plain_optimizer = compute_loss, make_optimizer
steps, samples = [], {}


def small_model(args):  # starting processes is the most of what a check of it takes
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 10)),
    )


def model_with_statistics(args):
    model = small_model(args)
    model[0].append(nn.BatchNorm2d(8))
    return model


def random_loss(model, batch, args):
    values = plain_loss(model, batch, args)
    noise = torch.rand_like(values["loss"])
    return {**values, "loss": values["loss"] * (0.5 + noise), "noise": noise}


build_model, compute_loss = small_model, random_loss


def plain_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def loss_with_a_slow_first_step(model, batch, args):
    if not steps:
        time.sleep(3)
        steps.append(0)
    return plain_loss(model, batch, args)


def chaotic_model(args):
    layers = [nn.Linear(64, 64) for _ in range(8)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=1.5 / 8)
    layers = [x for layer in layers for x in (layer, nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), *layers, nn.Linear(64, 10))


def optimizer_with_a_fixed_rate(model, args, total_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


class Cached(torch.utils.data.TensorDataset):
    """It keeps each sample as it was at the first look."""

    def __getitem__(self, index):
        if index not in samples:
            image, label = super().__getitem__(index)
            samples[index] = image + torch.rand(()), label
        return samples[index]


def data_cached_in_memory(args, accelerator):
    images, labels = synthetic_images(256, seed=1)
    dataset = Cached(images.permute(0, 3, 1, 2) / 255, labels)
    train_loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    test_set = torch.utils.data.Subset(dataset, range(64))
    return train_loader, DataLoader(test_set, args.batch_size)


def loss_of_noise(seed, model, batch, args):
    images, labels = batch
    if model.training:
        torch.manual_seed(seed)
        images = images + 0.1 * torch.randn(images.shape)
    return random_loss(model, (images, labels), args)


def loss_by_the_clock(model, batch, args):
    values = random_loss(model, batch, args)
    return {**values, "loss": values["loss"] * (1 + time.time() % 1000 * 1e-6)}


def loss_by_step(model, batch, args):
    values = random_loss(model, batch, args)
    return {**values, "loss": values["loss"] * (1 + len(steps))}


def optimizer_that_counts(model, args, total_steps):
    optimizer, scheduler = plain_optimizer(model, args, total_steps)
    optimizer.register_step_post_hook(lambda *_: steps.append(0))
    return optimizer, scheduler
