# SPDX-License-Identifier: Apache-2.0
"""Write the weights of a checkpoint of any recipe, also while the run trains:

    python tools/weights.py runs/ddp_cifar/step-00001000.pt weights.safetensors
    python tools/weights.py runs/sharded_cifar/step-00001000 weights.safetensors

A tensor that has several names (tied weights) gets the first one. Of sharded, buffers are among
them that are in no state dict.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from accelerate.utils import save
from torch.distributed import checkpoint as dcp

NAME = "states/model/"


def read_weights(path):
    """Return {name: tensor} of a checkpoint: a file or, of sharded, a folder."""
    file = path / "run.pt" if path.is_dir() else path
    states = torch.load(file, "cpu", weights_only=True, mmap=True)["states"]
    stages = states if isinstance(states, list) else [states]
    weights = {name.replace("/", "."): x for part in stages for name, x in part["model"].items()}
    if path.is_dir():
        reader = dcp.HuggingFaceStorageReader(path)
        saved = reader.read_metadata().state_dict_metadata
        saved = {name: x for name, x in saved.items() if name.startswith(NAME)}
        shards = {k: torch.empty(x.size, dtype=x.properties.dtype) for k, x in saved.items()}
        dcp.load(shards, storage_reader=reader, no_dist=True)
        weights |= {name.removeprefix(NAME): x for name, x in shards.items()}
    return OrderedDict((name, x) for name, x in weights.items() if torch.is_tensor(x))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        weights = read_weights(Path(sys.argv[1]))
    except FileNotFoundError as error:
        sys.exit(f"weights: error: {error}: name step-N.pt or, of sharded, the folder step-N")
    save(weights, sys.argv[2], safe_serialization=True)
