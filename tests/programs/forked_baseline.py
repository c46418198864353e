"""plain_ddp.py without compilation, which takes seconds."""

import plain_ddp

plain_ddp.nn.Module.compile = lambda *_, **__: None
plain_ddp.main()
