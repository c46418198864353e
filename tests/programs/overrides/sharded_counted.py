"""For a copy in test_sharded.py: each rank writes in which types it has computed and summed."""

import json
from pathlib import Path

from torch import distributed, nn

from sharded_cifar import RANK, build_model, main

uncounted_model, uncounted_main = build_model, main
SCATTER = "reduce_scatter_single"
if not hasattr(distributed, SCATTER):  # before torch 2.15
    SCATTER = "reduce_scatter_tensor"
plain_scatter = getattr(distributed, SCATTER)
reduced, computed, passes = [], set(), []


def build_model(args):
    model = uncounted_model(args)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.InstanceNorm2d):
            module.register_forward_pre_hook(watch)
    return model


def watch(module, *_):
    computed.add(f"{type(module).__name__.removeprefix('FSDP')} {module.weight.dtype}")
    passes.append(module.training)


def reduce_scatter(*arguments, **options):
    reduced.append(str(options["input"].dtype))
    return plain_scatter(*arguments, **options)


def main():
    setattr(distributed, SCATTER, reduce_scatter)
    uncounted_main()
    counted = {"reduced": reduced, "computed": sorted(computed), "passes": sum(passes)}
    Path(f"counted.{RANK}").write_text(json.dumps(counted))
