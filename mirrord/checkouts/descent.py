"""The way down into a tree that belongs to somebody else: open directories, none of them reached through a link.

Owns the descriptors on the way to the path that was looked at last, so that neighbours cost no second opening. Reads and changes
nothing.
"""

from __future__ import annotations

import errno
import os

from ..errors import CheckoutBusyError
from ..host.files import open_child, shown_path

_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Descent:
    """Directories below `root`, a descriptor that stays the caller's."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stack: list[tuple[bytes, int]] = []
        self._here, self._here_fd = b"", root

    def locate(self, path: bytes) -> tuple[int, bytes]:
        """The open directory of a path, and the name in it; CheckoutBusyError where it is not in a directory."""
        above, _, name = path.rpartition(b"/")
        if above != self._here:
            self._go(above)
        return self._here_fd, name

    def leave(self, path: bytes) -> None:
        """Close what is open at and below `path`, which goes away."""
        if self._here == path or self._here.startswith(path + b"/"):
            self._pop_to(path.count(b"/"))

    def close(self) -> None:
        self._pop_to(0)

    def _go(self, above: bytes) -> None:
        """Make `above` the current directory, reusing what is open."""
        parts = above.split(b"/") if above else []
        shared = 0
        while shared < min(len(parts), len(self._stack)) and self._stack[shared][0] == parts[shared]:
            shared += 1
        self._pop_to(shared)
        for depth in range(shared, len(parts)):
            here = b"/".join(parts[: depth + 1])
            fd = enter(self._here_fd, here, parts[depth])
            self._stack.append((parts[depth], fd))
            self._here, self._here_fd = here, fd

    def _pop_to(self, depth: int) -> None:
        while len(self._stack) > depth:
            os.close(self._stack.pop()[1])
        self._here = b"/".join(name for name, _ in self._stack)
        self._here_fd = self._stack[-1][1] if self._stack else self._root


def enter(directory: int, path: bytes, name: bytes) -> int:
    """Open the directory `name`, which is at `path` in the tree."""
    try:
        return open_child(directory, name)
    except OSError as error:
        if error.errno in _REPLACED:
            raise busy(path) from error
        raise


def busy(path: bytes) -> CheckoutBusyError:
    return CheckoutBusyError(
        f"cannot write below {shown_path(path)}: it is not the directory it was",
        hint="stop what runs in the checkout, then reset it",
    )
