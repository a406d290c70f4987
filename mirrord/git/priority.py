"""Which git children give way: those of work that nobody waits for.

Owns the mark that says so, which goes with the task or the call it was set in, and what it puts before git's command line. Never
asks for the idle class of the disk: a child that holds a lock must end some time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_GIVE_WAY = (
    "ionice",
    "--class",
    "best-effort",
    "--classdata",
    "7",
    "--ignore",
    "nice",
    "--adjustment",
    "10",
)

_gives_way: ContextVar[bool] = ContextVar("git_gives_way", default=False)


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Every git that is started inside gets processors and disks after everybody else."""
    token = _gives_way.set(True)
    try:
        yield
    finally:
        _gives_way.reset(token)


def before_git() -> tuple[str, ...]:
    """The words to put before a child's command."""
    return _GIVE_WAY if _gives_way.get() else ()
