"""On the PYTHONPATH of a launcher: its ranks are forks of it, so that what they import is imported
once. Python runs this file at its start."""

import os
import subprocess
import sys
from pathlib import Path

plain_fork_exec = subprocess._fork_exec


def first_fork_exec(words, *more):
    """In the place of the function that `subprocess` calls."""
    if os.fsdecode(words[0]) != sys.executable:
        return plain_fork_exec(words, *more)
    subprocess._fork_exec = plain_fork_exec
    programs = str(Path(__file__).parents[1])
    sys.path.append(programs)
    import accelerate  # noqa: F401
    import torchvision  # noqa: F401
    from forks import fork_instead_of_exec

    sys.path.remove(programs)
    subprocess._fork_exec = fork_instead_of_exec
    return fork_instead_of_exec(words, *more)


subprocess._fork_exec = first_fork_exec
