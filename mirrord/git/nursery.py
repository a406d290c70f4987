"""The fork server that workers come from, made ready to fork: what they need is loaded once, and a new one is there at once.

Loaded first in that process, by multiprocessing, and changes it; so nobody imports this. The server holds no repository and runs
no thread: a fork has nothing half done. It dies with the daemon, and the workers with it.
"""

from __future__ import annotations

import gc
import os
import sys

from ..host.processes import die_with_parent

PID = os.getpid()
"""Of the server, also in what it forked."""

die_with_parent(os.getppid())
gc.disable()  # nothing that an import makes is rubbish; workers collect theirs
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # structlog loads all of it where it finds it
