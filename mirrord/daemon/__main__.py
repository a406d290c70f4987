"""`python -m mirrord.daemon`: set umask and limits, start the fork server, run the daemon."""

import gc
import os
import resource
import sys

gc.disable()  # imports make no garbage; collecting takes a tenth of the start

# structlog 26 imports rich if it is installed: 0.1 s and 10 MB that the daemon does not need
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from .start import enter_home, read_options

options = read_options()
settings = enter_home(options)

from ..host.processes import share_arenas
from ..workers.pool import FORK_SERVER

# 1,000 clients and their checkouts need more than a login's 1,024 descriptors
_FILES = 65536
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
soft = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

share_arenas()  # before there are threads
os.umask(0o022)  # as git expects for a checkout's files; private files set their own mode

# it loads these modules on another processor while the daemon loads
FORK_SERVER.preload = (
    "mirrord.templates.layers",
    "mirrord.changes.pools",
    "mirrord.git.objects.increments",
    "mirrord.changes.survey",
    "mirrord.mirrors.survey",
    "mirrord.patches.diff",
    "mirrord.grading.prepare",
    "mirrord.checkouts.closures",
    "mirrord.audit.examine",
)
FORK_SERVER.start()

from .main import main

gc.freeze()  # collections skip imported objects from now on
gc.enable()

sys.exit(main(options, settings))
