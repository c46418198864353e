# SPDX-License-Identifier: Apache-2.0
"""The memory that is left to a process."""

import re
from pathlib import Path

import psutil


def available_memory():
    """Return the bytes that this machine, and the container or job in it, can still give."""
    available = [psutil.virtual_memory().available]
    own = Path("/proc/self/cgroup")  # of Linux
    group = own.read_text().rpartition("::/")[2].strip() if own.exists() else ""
    for folder in (Path("/sys/fs/cgroup", group), *Path("/sys/fs/cgroup", group).parents):
        limit = folder / "memory.max"
        if limit.exists() and limit.read_text() != "max\n":
            statistics = (folder / "memory.stat").read_text()
            cache = re.search(r"^inactive_file (\d+)", statistics, re.MULTILINE)[1]
            used = int((folder / "memory.current").read_text()) - int(cache)
            available.append(int(limit.read_text()) - used)
    return min(available)
