"""Users, groups and subordinate ids of this machine for the time of a test."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path("/run/lock/mirrord-tests-accounts")


@contextmanager
def accounts(**files: str) -> Iterator[None]:
    """Add lines to files of /etc (`passwd=`, `group=`, `subuid=`, `subgid=`), and take them out again.

    Tests run side by side: the lock is held for the edits alone, so lines are a test's own, and
    uids too, because the first line of one counts. Nobody reads half a file.
    """
    texts = {Path("/etc", name): lines.removesuffix("\n") + "\n" for name, lines in files.items()}
    with _locked():
        for path, text in texts.items():
            _replace(path, path.read_text() + text)
    try:
        yield
    finally:
        with _locked():
            for path, text in texts.items():
                _replace(path, path.read_text().replace(text, "", 1))


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.mirrord-tests")
    new.write_text(text)
    new.chmod(path.stat().st_mode & 0o777)
    os.replace(new, path)


@contextmanager
def _locked() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
