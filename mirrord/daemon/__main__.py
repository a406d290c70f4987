"""`python -m mirrord.daemon`: umask, limits and the fork server, before the daemon is loaded."""

import gc
import os
import resource
import sys

gc.disable()  # what an import makes is no garbage, and looking for some is a tenth of the start

# structlog 26 imports all of rich where it finds it: 0.1 s and 10 MB that no daemon needs
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from ..git.workers import FORK_SERVER

# 1,000 clients and their checkouts need more than the 1,024 descriptors of a login
_FILES = 65536
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

os.umask(0o022)  # a checkout's files are as git would make them; private files say so themselves

# it loads on another processor meanwhile, and is ready when the sockets are
FORK_SERVER.start(
    [
        "mirrord.checkouts.templates.layers",
        "mirrord.checkouts.changes",
        "mirrord.checkouts.patches.diff",
        "mirrord.checkouts.grading.prepare",
    ]
)

from .main import main

gc.freeze()  # no collection need ever look at it again
gc.enable()

sys.exit(main())
