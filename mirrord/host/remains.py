"""What was to be removed and the disk did not let go, tried again: one that fails for a moment leaves no rubbish until a start.

Owns the list, in memory; whoever owns a directory finds the same by name at a start. Only for names that nobody uses again: what
has a name of its own is renamed first. Any thread may call.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger()


class Remains:
    """Of one directory of the state."""

    def __init__(self) -> None:
        self._stuck: set[Path] = set()

    def remove(self, path: Path) -> None:
        """Remove a file or a tree now, or else whenever the disk lets it go; one that is not there is fine."""
        if not is_removed(path) and path not in self._stuck:
            log.warning("removal.failed", path=path.name)
            self._stuck.add(path)

    def retry(self) -> bool:
        """Try what is left; answers whether nothing is."""
        self._stuck -= {path for path in list(self._stuck) if is_removed(path)}
        return not self._stuck


def is_removed(path: Path) -> bool:
    """Remove a file or a tree, as far as the disk lets; answers whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)
