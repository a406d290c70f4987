"""What all processes of the daemon stand on: umask, limits, and the fork server that workers come from.

Laid before the daemon itself is imported: the fork server loads on another processor meanwhile, and is ready when the sockets
are. Imports next to nothing.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from ..git.forking import prepare_workers
from .nest import make_nest

_UMASK = 0o022  # what must be private says so itself; a checkout's files are as git would make them
_FILES = 65536  # 1,000 clients and their checkouts need more than the 1,024 descriptors that a login gives
_PRELOAD = ("mirrord.checkouts.preloaded",)  # named, not imported: it loads libgit2


def lay_ground() -> None:
    """Once, by the main thread, first of all."""
    os.umask(_UMASK)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with _from_the_root():
        prepare_workers(_PRELOAD, nest=make_nest())


@contextmanager
def _from_the_root() -> Iterator[None]:
    """What is started inside keeps no disk busy by being in one of its directories."""
    here = os.open(".", os.O_PATH | os.O_CLOEXEC)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)
