"""What the owner of an overlay checkout changed, read from its upper layer. Sync; runs in workers.

Owns the meaning of an upper layer: a file there was written, character device 0/0 hides a name, a directory may be marked opaque
or renamed. Costs as much as was changed. Follows no link; the layer belongs to the checkout's owner, who may be changing it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..git.objects import tree_entries
from ..host.files import names_in, open_child, open_directory, opened
from .scan import iter_extra

_MARKS = ("trusted.overlay.opaque", "trusted.overlay.redirect")
_CONTROL = b".git"


def changed_paths(upper: Path, root: Path, mirror: Path, tree: str) -> list[bytes]:
    """Every path that may differ from `tree`; a new directory stands for all in it. `root` is where the overlay is mounted."""
    walk = _Walk(root, {entry.path: entry.is_tree for entry in tree_entries(mirror, tree)})
    with opened(open_directory(upper)) as fd:
        return sorted(set(walk.below(fd, b"")))


class _Walk:
    def __init__(self, root: Path, base: dict[bytes, bool]) -> None:
        self._root = root
        self._base = base
        self._sorted = sorted(base)

    def below(self, directory: int, above: bytes) -> Iterator[bytes]:
        for name in names_in(directory):
            path = above + name
            if path != _CONTROL:
                yield from self._at(directory, name, path)

    def _at(self, directory: int, name: bytes, path: bytes) -> Iterator[bytes]:
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode):
            yield path
            yield from self._base_below(path)
        elif self._base.get(path) is not True:
            yield path
        else:
            with opened(open_child(directory, name)) as fd:
                yield from self._replaced(path) if _is_marked(fd) else self.below(fd, path + b"/")

    def _replaced(self, path: bytes) -> Iterator[bytes]:
        """A directory that hides what was below it, or shows another one's files: all of both."""
        yield from self._base_below(path)
        for seen, _ in iter_extra(self._root, path):
            if seen not in self._base:
                yield seen

    def _base_below(self, path: bytes) -> Iterator[bytes]:
        if self._base.get(path) is True:
            yield from (each for each in self._sorted if each.startswith(path + b"/"))


def _is_marked(fd: int) -> bool:
    """Whether overlayfs hides or redirects what is below. Only CAP_SYS_ADMIN may see the marks; without it, assume them."""
    if os.geteuid() != 0:
        return True
    return any(mark in _MARKS for mark in os.listxattr(fd))
