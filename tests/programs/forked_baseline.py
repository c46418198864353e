"""plain_ddp.py, whose processes are forks: an interpreter and its imports take seconds each."""

from functools import partial

import plain_ddp

plain_ddp.mp.spawn = partial(plain_ddp.mp.start_processes, start_method="fork")
plain_ddp.main()
