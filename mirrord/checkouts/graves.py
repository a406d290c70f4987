"""Where a reset puts what shall go: moved away at once, deleted later by whoever asked for the reset.

Owns one private directory beside a checkout's tree, made when it is needed first. A rename costs the same for a file and for
a directory with thousands; deleting waits for the disk. What cannot be moved is deleted there and then. A crash leaves the
directory, whose name says that it is rubbish.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..host.files import GRAVE, open_directory, remove

OLD = ".old-"


def new_grave(directory: Path) -> Path:
    """A name in a checkout's directory for what shall go; nothing is there yet."""
    return directory / f"{OLD}{secrets.token_hex(8)}"


def find_graves(directory: Path) -> list[Path]:
    """What a crash left in a checkout's directory of things that had to go; a removal that it ended is one of them."""
    return [*directory.glob(f"{OLD}*"), *directory.glob(f"{GRAVE}*")]


class Graves:
    """Takes names out of directories that belong to somebody else. To be closed."""

    def __init__(self, path: Path, *, has_room: bool = True) -> None:
        """Without room nothing is kept: what shall go is deleted at once."""
        self._path = path
        self._has_room = has_room
        self._fd: int | None = None
        self._count = 0

    def bury(self, directory: int, name: bytes) -> None:
        """Take away whatever `name` is; nothing there is fine."""
        if not self._has_room:
            remove(directory, name)
            return
        try:
            grave = self._opened()
            os.rename(name, b"%d" % self._count, src_dir_fd=directory, dst_dir_fd=grave)
        except FileNotFoundError:
            return
        except OSError:  # a flag or mode that keeps it, something mounted, a full disk
            remove(directory, name)
        self._count += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        if self._fd is None:
            with suppress(FileExistsError):  # an attempt before this one
                os.mkdir(self._path, 0o700)
            self._fd = open_directory(self._path)
            self._count = len(os.listdir(self._fd))
        return self._fd
