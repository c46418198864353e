# SPDX-License-Identifier: Apache-2.0
"""How the vectors of tokens become the embedding of a text: files of sentence-transformers."""

import json
import shutil
from functools import partial
from pathlib import Path

import torch
from transformers.utils import cached_file

from ddp_cifar import exit_with_error

MODES = {  # their former names in the files, and their present ones
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooling_files(base):
    """Return {name: path} of the files by which sentence-transformers pools, none if there are
    none. Exit with an error if it would do more."""
    find = partial(cached_file, base, _raise_exceptions_for_missing_entries=False)
    if not (path := find("modules.json")):
        return {}
    listed = json.loads(Path(path).read_text("utf-8"))
    modules = {module["type"].rpartition(".")[2]: module["path"] for module in listed}
    if modules.keys() - {"Normalize"} != {"Transformer", "Pooling"}:
        known = "this example trains Transformer, Pooling and Normalize alone"
        exit_with_error(f"--base {base} has the modules {', '.join(modules)}: {known}")
    pooling = f"{modules['Pooling']}/config.json"
    return {"modules.json": path, pooling: find(pooling)}


def pooling_of(base):
    """Return the pooling of a model, "mean" if it has no files of sentence-transformers."""
    *_, path = [None, *pooling_files(base).values()]
    if not path:
        return "mean"
    config = json.loads(Path(path).read_text("utf-8"))
    former = [name for name, value in config.items() if name in MODES and value]
    named = config.get("pooling_mode", former)
    mode = named if isinstance(named, str) else " and ".join(MODES.get(x, x) for x in named)
    if mode not in MODES.values():
        exit_with_error(f"{path}: this example has no pooling but {', '.join(MODES.values())}")
    return mode


def save_pooling(args):
    """Copy these files beside what is trained."""
    for name, path in pooling_files(args.base).items():
        copy = Path(args.output_dir, name)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def pooled(hidden, mask, mode):
    """Return the embeddings of texts: (B, N, D) and (B, N) bool in, (B, D) out."""
    if mode == "mean":
        return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    place = mask.sum(1) - 1 if mode == "lasttoken" else 0
    return hidden[torch.arange(len(hidden), device=hidden.device), place]
