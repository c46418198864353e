# SPDX-License-Identifier: Apache-2.0
"""How far long work is."""

import sys
import time

from rich.console import Console
from rich.progress import Progress

from ddp_cifar import log_line


def with_progress(parts, total, work, size=lambda part: 1):
    """Yield parts, and show how many of `total` are done, in a bar on a terminal, elsewhere in a
    line every 10 seconds. `size` returns how many a part is."""
    plain = not sys.stderr.isatty()
    # Without a thread, and not redirected: a fork would inherit locks that are held.
    bar = Progress(
        console=Console(stderr=True),
        disable=plain,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    began = said = time.monotonic()
    done = 0
    with bar:
        bar.console.show_cursor()  # an error or a signal may end the process here
        task = bar.add_task(work, total=total)
        for part in parts:
            yield part
            done += size(part)
            bar.update(task, completed=done, refresh=True)
            now = time.monotonic()
            if plain and now - said > 10:
                said = now
                left = (now - began) * (total - done) / done
                log_line(f"{work}: {done} of {total}, {left:.0f} s left")
