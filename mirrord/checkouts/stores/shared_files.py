"""Control files that many sealed stores have alike: each version of one is on disk once.

Owns `.shared-<id>` beside the stores of a mirror, a further link of each such file. Nothing writes to a store: overlays copy what
their users write to, pooled checkouts get files of their own. A file that is not what its name says is lent to nobody. A crash
leaves files that no store has, which the next start removes.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from ...host.trash import Remains

SHARED = ".shared-"
_ALONE = 1


def write_shared(directory: Path, file: Path, content: bytes) -> None:
    """Write a file of a store; as a link, where a store in `directory` has the same."""
    kept = _path(directory, content)
    try:
        os.link(kept, file)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.EPERM}:
            raise
    else:
        if file.read_bytes() == content:
            return
        file.unlink()
        kept.unlink(missing_ok=True)
    file.write_bytes(content)
    with suppress(OSError):  # then it is not shared
        os.link(file, kept)


def let_go(directory: Path, file: Path) -> None:
    """Forget what only this file of a store, which is removed next, has."""
    with suppress(FileNotFoundError):
        found, kept = file.stat(), _path(directory, file.read_bytes())
        if found.st_nlink == _ALONE + 1 and kept.stat().st_ino == found.st_ino:
            kept.unlink()


def remove_unused(directory: Path, remains: Remains) -> int:
    """Remove what no store has."""
    unused = [file for file in directory.glob(f"{SHARED}*") if file.stat().st_nlink == _ALONE]
    for file in unused:
        remains.remove(file)
    return len(unused)


def _path(directory: Path, content: bytes) -> Path:
    return directory / f"{SHARED}{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"
