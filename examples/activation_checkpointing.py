# Parts of a copy, not a program: make new COPY=../mine.py WITH=activation_checkpointing
# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: blocks keep their inputs, and compute their activations twice.

It takes less memory and a second forward pass, and changes no result. Blocks are the elements of
each nn.Sequential and nn.ModuleList: edit `shard_units` if yours are elsewhere. sharded_cifar.py
has a flag for it, --activation-checkpointing.

Group: additions. Recipes: ddp, amp.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from sharded_cifar import checkpoint_activations, shard_units
