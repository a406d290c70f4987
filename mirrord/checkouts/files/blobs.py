"""Files of layers, kept once: one file with many links for the same bytes and permissions.

Owns `templates/<mirror>/blobs`, which has a link of each regular file of the deltas, named by the
id of its bytes and its mode. The bytes of a file are hashed before it is lent. A crash leaves files
that no layer has, which `weigh` removes.

A link changes the ctime of a file that other layers show already; that is why git is told not to
compare it (`stores/store.py:CONFIG`).
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ...host.trash import try_to_remove
from .reader import content_id
from .writer import TreeWriter

_MODES = {False: 0o644, True: 0o755}
_BLOCK_BYTES = 512
_ALONE = 1


class Blobs:
    """The shared files of one mirror. Any number of processes may use it at the same time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, content: str, *, executable: bool) -> bool:
        """Whether a file with these bytes, by their id, would take no room."""
        return self._path(content, executable=executable).exists()

    def lend(
        self, content: str, writer: TreeWriter, path: bytes, *, executable: bool
    ) -> os.stat_result | None:
        """Link the file at `path` of a layer; None where there is no sound one."""
        source = self._path(content, executable=executable)
        try:
            found = writer.link_file(path, source)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EMLINK):
                raise
            return None
        has_mode = stat.S_IMODE(found.st_mode) == _MODES[executable]
        if has_mode and content_id(*writer.locate(path), found).hex() == content:
            return found
        writer.remove(path)
        source.unlink(missing_ok=True)
        return None

    def keep(
        self, content: str, writer: TreeWriter, path: bytes, *, executable: bool
    ) -> os.stat_result:
        """Share a file that was just written; answers its stat, which this changes."""
        shared = self._path(content, executable=executable)
        with suppress(FileExistsError):
            try:
                writer.share_file(path, shared)
            except FileNotFoundError:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                writer.share_file(path, shared)
        return writer.get_stat(path)

    def weigh(self) -> tuple[int, bool]:
        """Remove files that no layer has; the bytes of the rest, and whether all of those went."""
        total, is_clean = 0, True
        with suppress(FileNotFoundError), os.scandir(self._directory) as listed:
            for item in listed:
                found = item.stat(follow_symlinks=False)
                if found.st_nlink > _ALONE:
                    total += found.st_blocks * _BLOCK_BYTES
                else:
                    is_clean &= try_to_remove(Path(item.path))
        return total, is_clean

    def _path(self, content: str, *, executable: bool) -> Path:
        return self._directory / f"{content}.{_MODES[executable]:o}"
