"""For copies in test_errors.py: mistakes that processes have to tell each other."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_cifar import RANK, build_model, main, train_step

plain_model, plain_step = build_model, train_step
plain_main = main


def draw_weights_by_rank(accelerator, model):
    torch.manual_seed(accelerator.process_index)
    nn.init.normal_(next(model.parameters()))


def model_with_an_unused_layer(args):
    model = plain_model(args)
    model[2].extra = nn.Linear(4, 4)
    model[2].forward = lambda x: model[2][1](model[2][0](x))
    return model


@torch.no_grad()
def step_that_spoils_the_last_stage(run, model, *arguments):
    with torch.enable_grad():
        results = plain_step(run, model, *arguments)
    for parameter in model.parameters() if RANK == 1 else ():
        parameter.fill_(torch.nan)
    return results


class Corrupt(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        raise ValueError("an image\nis corrupt")


def corrupt_data(args, accelerator):
    data = Corrupt(torch.zeros(256))
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=1)
    return loader, loader.__class__(data, args.batch_size)


def loss_that_exits(model, batch, args):
    print("a line that is not flushed")
    sys.exit("bad\ndata")


def main_that_prints():
    plain_main()
    print("a last line that is not flushed")
