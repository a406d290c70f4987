"""What a first checkout asks of a worker, loaded in the fork server that workers come from (`git/nursery.py`).

Loads libgit2, so the daemon only names it. Fails for nobody: whoever calls what cannot be loaded gets the error.
"""

from __future__ import annotations

from contextlib import suppress

with suppress(Exception):  # pygit2 raises its own kind where it finds no certificates
    from .templates import build, stack

__all__ = ["build", "stack"]
