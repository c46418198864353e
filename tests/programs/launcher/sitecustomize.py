"""On the PYTHONPATH of a launcher: its ranks are forks of it, so that what they import is imported
once. Python runs this file at its start."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

plain_fork_exec = subprocess._fork_exec


def first_fork_exec(words, *more):
    """In the place of the function that `subprocess` calls."""
    names = list(map(os.fsdecode, words))
    if names[0] != sys.executable:
        return plain_fork_exec(words, *more)
    subprocess._fork_exec = plain_fork_exec
    script = Path(next(name for name in names if name.endswith(".py")))
    programs = str(Path(__file__).parents[1])
    sys.path[:0] = [str(script.parent), programs]
    for name in re.findall(r"^import (accelerate|torchvision)$", script.read_text(), re.MULTILINE):
        importlib.import_module(name)
    from forks import fork_instead_of_exec

    del sys.path[:2]
    subprocess._fork_exec = fork_instead_of_exec
    return fork_instead_of_exec(words, *more)


subprocess._fork_exec = first_fork_exec
