"""Special files in a repository: git (2.39) and libgit2 wait for ever at a pipe that they open.

Nothing that mirrord makes is one, but people and broken restorations leave them. They are looked
for by the kind that the file system tells with each name, so a look costs some microseconds.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import DamagedMirrorError

_DIRECTORIES = ("", "info", "objects/info", "objects/info/commit-graphs", "objects/pack")


def must_be_plain(git_dir: Path, *, loose: bool = False) -> None:
    """Raise DamagedMirrorError where git could open a pipe or a device.

    Loose objects, in 256 directories, are looked at with `loose` only.
    """
    for where in iter_special(git_dir, loose=loose):
        raise DamagedMirrorError(
            f"cannot read mirror {git_dir.name}: {where} is a special file",
            hint=f"`mirrord heal {git_dir.name}` removes it",
            file=where,
        )


def iter_special(git_dir: Path, *, loose: bool = False) -> Iterator[str]:
    """Find pipes and devices, by their paths in the repository."""
    top = str(git_dir)
    pending = [os.path.join(top, "refs"), *([os.path.join(top, "objects")] if loose else [])]
    listed = [os.path.join(top, name) for name in _DIRECTORIES]
    for directory in listed:
        yield from (os.path.relpath(path, top) for path in _special_in(directory))
    while pending:
        directory = pending.pop()
        yield from (os.path.relpath(path, top) for path in _special_in(directory, pending))


def _special_in(directory: str, below: list[str] | None = None) -> Iterator[str]:
    """Find special files in a directory; adds its directories to `below`."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if below is not None:
                        below.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and _blocks(entry.path):
                    yield entry.path
    except OSError:  # git says what is wrong with it
        return


def _blocks(path: str) -> bool:
    """Return whether opening what a path leads to may block; a socket is an error at once."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
