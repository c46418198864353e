"""What `--compile` hands to inductor for CUDA graphs: graph_partitions.py ANSWER.json

One gloo rank trains a model with BatchNorm in DDP, with buckets so small that its graph is divided
into several. Writes for each partition that updates buffers, in the order of their compilation,
how many of those inputs there are, and how many are not static: a partition that has any of the
latter gets no CUDA graph ("skipping cudagraphs due to mutated inputs"). Nothing is generated.
Run by test_gpu.py, as a process of forked.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

partitions = []


def note_mutations(graph, inputs, static_input_idxs=(), **options):
    """Stand for inductor: note which inputs the graph copies something into."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    mutated = [
        placeholders.index(node.args[0])
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.copy_.default and node.args[0] in placeholders
    ]
    backward = any(node.name.startswith("tangents") for node in placeholders)
    not_static = len(set(mutated) - set(static_input_idxs))
    kind = "backward" if backward else "forward"
    partitions.append({"kind": kind, "mutated": len(mutated), "not static": not_static})
    return make_boxed_func(graph.forward)


def block(channels):
    return nn.Sequential(nn.Conv2d(channels, 256, 3), nn.BatchNorm2d(256), nn.ReLU())


accelerator = Accelerator(
    cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)]
)
pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
model = nn.Sequential(block(3), block(256), block(256), block(256), pool)
model.compile(backend=partial(compile_fx, inner_compile=note_mutations))
model = accelerator.prepare(model)
assert isinstance(model, nn.parallel.DistributedDataParallel)
model.broadcast_buffers = False  # as in the recipes
before = [buffer.clone() for buffer in model.buffers()]
for _ in range(2):
    model(torch.randn(2, 3, 12, 12)).sum().backward()
changed = sum(not torch.equal(x, y) for x, y in zip(before, model.buffers(), strict=True))
Path(sys.argv[1]).write_text(json.dumps({"partitions": partitions, "changed": changed}))
accelerator.free_memory()
accelerator.end_training()
