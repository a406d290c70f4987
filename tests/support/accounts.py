"""Users, groups and subordinate ids of this machine for the time of a test."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path("/run/lock/mirrord-tests-accounts")


@contextmanager
def accounts(**files: str) -> Iterator[None]:
    """Add lines to files of /etc (`passwd=`, `group=`, `subuid=`, `subgid=`), and take them out again.

    Tests run side by side: the lock is held for the edits alone, so lines are a test's own.
    """
    texts = {Path("/etc", name): lines.removesuffix("\n") + "\n" for name, lines in files.items()}
    with _locked():
        for path, text in texts.items():
            with path.open("a") as file:
                file.write(text)
    try:
        yield
    finally:
        with _locked():
            for path, text in texts.items():
                path.write_text(path.read_text().replace(text, "", 1))


@contextmanager
def _locked() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
