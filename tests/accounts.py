"""Users, groups and subordinate ids of this machine for the time of a test."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path("/run/lock/mirrord-tests-accounts")


@contextmanager
def accounts(**files: str) -> Iterator[None]:
    """Add a line to files of /etc (`passwd=`, `group=`, `subuid=`, `subgid=`), one test at a time, and take them out again."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = {Path("/etc", name): line.removesuffix("\n") + "\n" for name, line in files.items()}
        for path, text in paths.items():
            with path.open("a") as file:
                file.write(text)
        try:
            yield
        finally:
            for path, text in paths.items():
                path.write_text(path.read_text().replace(text, "", 1))
