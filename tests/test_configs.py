"""The config files, and --global-batch-size: how a step is divided into microbatches."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.commands.config.config_args import load_config_from_file
from conftest import CONFIGS, Exit, load

recipe = load("recipes/ddp_cifar.py", exits=True)
NODES = CONFIGS[4].with_name("nodes.yaml")


@pytest.mark.parametrize("path", [*CONFIGS.values(), NODES], ids=lambda path: path.stem)
def test_accelerate_loads_each_config_and_they_differ_only_in_what_must_differ(path):
    loaded, reference = (vars(load_config_from_file(str(x))) for x in (path, CONFIGS[4]))
    assert loaded["mixed_precision"] == "no"
    changes = {name: x for name, x in loaded.items() if x != reference[name]}
    if path == NODES:
        names = {"main_process_ip", "main_process_port", "num_machines", "num_processes"}
        assert changes.keys() == names
        return
    assert loaded["main_process_port"] == 0, "two jobs on one machine would collide"
    assert path == CONFIGS[changes.pop("num_processes", 4)]
    assert changes == ({"distributed_type": "NO"} if path == CONFIGS[1] else {})


def divided(global_batch, batch, replicas, multiple=1):
    """Return (batch size, accumulation), or the error."""
    args = SimpleNamespace(global_batch_size=global_batch, batch_size=batch)
    try:
        accumulation = recipe.set_batch_sizes(args, replicas, multiple)
    except Exit as error:
        return str(error)
    assert args.global_batch_size == args.batch_size * accumulation * replicas
    return args.batch_size, accumulation


def test_a_global_batch_is_divided_into_the_fewest_microbatches_that_fit():
    for batch, replicas, multiple in itertools.product((4, 7, 100), (1, 3, 8), (1, 4)):
        for global_batch in range(1, 200):
            answer = divided(global_batch, batch, replicas, multiple)
            if global_batch % (replicas * multiple):
                assert answer.startswith("argument --global-batch-size: ")
                assert answer.endswith(f"choose a multiple of {replicas * multiple}")
                continue
            share = global_batch // replicas
            sizes = [size for size in range(multiple, batch + 1, multiple) if share % size == 0]
            assert answer == (max(sizes), share // max(sizes))
        whole = batch - batch % multiple
        assert divided(None, whole, replicas, multiple) == (whole, 1), "all their batches"


def test_an_epoch_without_one_whole_global_batch_is_an_error():
    args = SimpleNamespace(global_batch_size=100, epochs=1, max_steps=None)
    loader = torch.utils.data.DataLoader(range(99), batch_size=50, drop_last=True)
    with pytest.raises(Exit, match="does not fill one batch of 100"):
        prepared_run(args, loader, accumulation=2)


def prepared_run(args, loader, accumulation, accelerator=None, prepare=lambda _, *loaders: loaders):
    """Return a `Run` that was not set up, with this loader."""
    run = recipe.Run.__new__(recipe.Run)
    vars(run).update(args=args, accumulation=accumulation, accelerator=accelerator, step=0)
    recipe.make_reproducible = lambda loaders, args: loaders
    run.prepare_data((loader, loader), prepare)
    return run


def test_a_step_that_ignores_a_microbatch_does_not_shift_the_data_and_epochs_have_other_orders():
    """As where `train_step` leaves its loop early. Microbatches come one by one; Accelerate reads
    another one ahead."""
    args = SimpleNamespace(epochs=2, max_steps=None, global_batch_size=6, log_every=1)
    args.evaluate_every = args.checkpoint_every = None
    data = recipe.SeededSamples(range(18), 0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, drop_last=True)
    taken, read = [], []
    loader.collate_fn = lambda x: read.append(x) or torch.tensor(x)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
    run = prepared_run(args, loader, 3, accelerator, Accelerator.prepare)
    run.scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    run.metrics = SimpleNamespace(timed_next=next)
    for microbatches in run.steps():
        taken.append(next(microbatches).tolist())
        assert len(read) <= 3 * len(taken) - 1
    assert taken == read[::3]
    orders = [[x for batch in read[begin:][:9] for x in batch] for begin in (0, 9)]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(18)] and orders[0] != orders[1]
