"""Shared files of layers: one file, many links, for the same bytes and permissions."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ..host.trash import try_to_remove
from ..presence import exists
from .reader import content_id
from .writer import TreeWriter

_MODES = {False: 0o644, True: 0o755}


class SharedFiles:
    """The shared files of one mirror's layers; safe for concurrent processes.

    Owns `templates/<mirror>/blobs`, with a link to each regular file of the deltas, named by the
    blob id of its bytes and its mode. A file is hashed again before a layer links it. A crash
    leaves files of no layer, which `collect` removes. A link changes the ctime of a file that other
    layers show already; so git is told not to compare it (`stores/store.py:CONFIG`).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, content: str, *, executable: bool) -> bool:
        """Return whether there is a file with these bytes, given by their blob id."""
        return exists(self._path(content, executable=executable))

    def link(
        self, content: str, writer: TreeWriter, path: bytes, *, executable: bool
    ) -> os.stat_result | None:
        """Link a shared file at `path` of a layer; None where there is no sound one."""
        source = self._path(content, executable=executable)
        try:
            st = writer.link_file(path, source)
        except OSError as error:
            # nobody shared it yet, or it has no room for a link: ext4 allows 65,000
            if error.errno not in (errno.ENOENT, errno.EMLINK):
                raise
            return None
        has_mode = stat.S_IMODE(st.st_mode) == _MODES[executable]
        if has_mode and content_id(*writer.locate(path), st).hex() == content:
            return st
        writer.remove(path)
        # its bytes or its mode changed: the next file of this content takes its place
        source.unlink(missing_ok=True)
        return None

    def add(
        self, content: str, writer: TreeWriter, path: bytes, *, executable: bool
    ) -> os.stat_result:
        """Share a file that was just written; returns its stat, whose ctime this changes."""
        shared = self._path(content, executable=executable)
        with suppress(FileExistsError):
            try:
                writer.share_file(path, shared)
            except FileNotFoundError:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                writer.share_file(path, shared)
        return writer.get_stat(path)

    def collect(self) -> tuple[int, bool]:
        """Remove files of no layer; returns the bytes of the others, and whether all went."""
        total, is_clean = 0, True
        with suppress(FileNotFoundError), os.scandir(self._directory) as listed:
            for item in listed:
                st = item.stat(follow_symlinks=False)
                if st.st_nlink > 1:
                    total += st.st_blocks * 512
                else:
                    is_clean &= try_to_remove(Path(item.path))
        return total, is_clean

    def _path(self, content: str, *, executable: bool) -> Path:
        return self._directory / f"{content}.{_MODES[executable]:o}"
