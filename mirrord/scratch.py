"""Directories of sandboxes among the temporary files, each locked for as long as it is used.

A client that is killed leaves its directory behind, but no lock. So the next sandbox of the same
user removes it, or `mirrord doctor --fix`.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "mirrord-sandbox-"
_NEW_S = 60.0  # a younger one may not have its lock yet
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchDirectory:
    """A directory that others may pass but not list."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        os.chmod(self.path, 0o711)  # noqa: S103
        self._lock = os.open(self.path, _OPEN)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Must be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(*, dry_run: bool = False) -> list[str]:
    """Remove those that no process holds, of this user, or of all for root; answers which."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _unheld(path):
            found.append(str(path))
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
    return found


@contextmanager
def _unheld(path: Path) -> Iterator[None]:
    """Holds it meanwhile; raises OSError where it is another user's, new, or held."""
    fd = os.open(path, _OPEN)
    try:
        found = os.fstat(fd)
        if os.geteuid() not in (0, found.st_uid) or found.st_mtime > time.time() - _NEW_S:
            raise PermissionError
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
