"""Where the socket of the fork server lies: a private directory that goes with the daemon, or at the next start.

Owns `mirrord-workers-*` in the runtime directory, or in that for temporary files. Each is locked by the daemon whose it is, and
the kernel drops the lock however that ends: what is not locked is of a daemon that was killed, and is removed. Imports next to
nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

_AFTER_ITS_OWN = (
    -101
)  # multiprocessing (3.11) removes its directory in there at -100, and complains where that is gone
_PREFIX = "mirrord-workers-"
_PLACES = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "TMPDIR")
_USUAL = ("/tmp", "/dev/shm")  # noqa: S108  (the last is memory: no disk can be full there)


def make_nest() -> Path:
    """A directory of our own until we end, in the first place that takes one; raises OSError where none does."""
    failure = OSError("no directory for temporary files")
    for place in _iter_places():
        try:
            _clear(place)
            return _make(place)
        except OSError as error:
            failure = error
    raise failure


def _iter_places() -> Iterator[Path]:
    named = (os.environ.get(name, "").partition(":")[0] for name in _PLACES)
    return map(Path, filter(None, (*named, *_USUAL)))


def _make(place: Path) -> Path:
    path = place / f"{_PREFIX}{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    Finalize(None, shutil.rmtree, (path, True), exitpriority=_AFTER_ITS_OWN)
    _lock(path)  # kept open
    return path


def _clear(place: Path) -> None:
    """Remove those of daemons of ours that were killed."""
    for path in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = _lock(path)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
