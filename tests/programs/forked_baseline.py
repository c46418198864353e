"""plain_ddp.py without compilation, whose processes are forks: both take seconds otherwise."""

from functools import partial

import plain_ddp

plain_ddp.mp.spawn = partial(plain_ddp.mp.start_processes, start_method="fork")
plain_ddp.nn.Module.compile = lambda *_, **__: None
plain_ddp.main()
