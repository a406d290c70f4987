"""What a checkout's user did: the tree and the control files on disk, compared with the private manifest.

Owns the judgement "unchanged". One lstat of every known path decides where to look closer: an ordinary user can forge mtime, size
and the index, but not ctime, and no name appears in a directory or leaves it without changing the directory's. Looking closer
opens no link, no pipe and no device, goes only into directories that the manifest knows, and lists or reads what stat cannot
prove. All of it is done as the owner of the tree: what that user may not see has changed. A mount in the tree ends it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ...host.credentials import ActingAs
from ...host.files import (
    is_locked,
    mounted_on,
    names_in,
    open_beneath,
    open_regular,
    opened,
)
from .manifest import Manifest, Records, clock_ns, look
from .reader import Descent, content_id, enter, open_top, read_id

_LARGE_BYTES = 4 << 20
_CONTROL = b".git"


@dataclass
class Changes:
    """Paths from the root of the tree; control files begin with `.git`.

    Of an extra directory only its own path is listed; of a missing one everything that was in it. `proven` are directories whose
    stat changed, but nothing in them; `unsettled` says that something had to be read because its ctime was too young, and
    `youngest_ns` is the youngest ctime of what was found to be unchanged by looking closer.
    """

    modified: list[bytes] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)
    proven: dict[bytes, os.stat_result] = field(default_factory=dict)
    unsettled: bool = False
    youngest_ns: int = 0
    looked_at: int = 0
    hashed: int = 0
    began_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.modified or self.missing or self.extra)

    def in_tree(self) -> list[bytes]:
        """All that differs outside `.git`."""
        return [
            path for path in (*self.modified, *self.missing, *self.extra) if not is_control(path)
        ]


def is_control(path: bytes) -> bool:
    return path == _CONTROL or path.startswith(_CONTROL + b"/")


def scan(root: Path, manifest: Manifest, *, rehash: bool | None = None) -> Changes:
    """Compare everything below `root` with the manifest.

    `rehash` reads every file, whatever its stat says; by default when the checkout belongs to root, who can set the clock.
    """
    every = manifest.owner_uid == 0 if rehash is None else rehash
    found = Changes(began_ns=clock_ns())
    with opened(open_top(root)) as fd, ActingAs(manifest.owner) as owner:
        entries = manifest.files | manifest.control
        paths = entries.keys() if every else _suspects(fd, owner, manifest, found)
        _examine(fd, owner, manifest, entries, paths, every, found)
    found.looked_at = len(entries) - 1
    return found


def examine(root: Path, manifest: Manifest, paths: Collection[bytes]) -> Changes:
    """Look closer at some of the paths, whatever their stat says: what was just written is read back."""
    found = Changes(began_ns=clock_ns(), looked_at=len(paths))
    with opened(open_top(root)) as fd, ActingAs(manifest.owner) as owner:
        _examine(fd, owner, manifest, manifest.files | manifest.control, paths, True, found)
    return found


def _suspects(root: int, owner: ActingAs, manifest: Manifest, found: Changes) -> list[bytes]:
    """The paths whose stat is not what it was, or too young to prove anything.

    Those in a directory that has become something else are suspects too, and lost to the closer look.
    """
    suspects = []
    racy_from_ns = manifest.racy_from_ns
    lstat = os.lstat
    control = [(path, entry[3:]) for path, entry in manifest.control.items()]
    here, directory = b"", root
    with Descent(root, owner) as descent:
        for path, was in chain(manifest.files.iter_seen(), control):
            above, _, name = path.rpartition(b"/")
            try:
                if above != here:
                    directory, here = descent.locate(path)[0], above
                now = look(lstat(name or b".", dir_fd=directory))
            except OSError:
                here = b"/"  # that of no path: what was open may be closed now
                suspects.append(path)
                continue
            if now != was:
                suspects.append(path)
            elif was[4] >= racy_from_ns:
                suspects.append(path)
                found.unsettled = True
                found.youngest_ns = max(found.youngest_ns, was[4])
    return suspects


def _examine(
    root: int, owner: ActingAs, manifest: Manifest, entries: Records, paths: Collection[bytes],
    every: bool, found: Changes,
) -> None:  # fmt: skip
    if paths:
        with _Examination(root, owner, manifest, entries, every, found) as examination:
            examination.judge(paths)


class _Examination:
    """One closer look. A path is judged after the directories above it; `_lost` is what cannot be there any more."""

    def __init__(
        self,
        root: int,
        owner: ActingAs,
        manifest: Manifest,
        entries: Records,
        every: bool,
        found: Changes,
    ) -> None:
        self._root = root
        self._entries = entries
        self._every = every
        self._racy_from_ns = manifest.racy_from_ns
        self._found = found
        self._owner = owner
        self._descent = Descent(root, owner)
        self._children: dict[bytes, list[bytes]] = {}
        self._lost: set[bytes] = set()
        self._large: dict[bytes, Future[bytes]] = {}
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash")
        self._held = ExitStack()

    def __enter__(self) -> _Examination:
        self._held.callback(self._descent.close)
        self._held.enter_context(self._readers)
        return self

    def __exit__(self, *failure: object) -> None:
        with self._held:
            for path, content in self._large.items():
                if content.exception() or content.result() != self._entries[path].content:
                    self._found.modified.append(path)

    def judge(self, paths: Collection[bytes]) -> None:
        self._children = self._entries.children(
            [path for path in paths if self._entries[path].is_directory]
        )
        for path in sorted(paths):
            if path not in self._lost:
                self._judge(path)

    def _judge(self, path: bytes) -> None:
        entry = self._entries[path]
        try:
            seen = self._descent.find_stat(path)
            directory, name = self._descent.locate(path) if path else (self._root, b".")
        except OSError:
            seen = None
        if seen is None:
            self._miss(path)
        elif entry.is_directory:
            self._judge_directory(directory, name, path, seen)
        elif not self._is_same_file(directory, name, path, seen):
            self._found.modified.append(path)

    def _judge_directory(
        self, directory: int, name: bytes, path: bytes, seen: os.stat_result
    ) -> None:
        entry = self._entries[path]
        fd = -1
        if stat.S_ISDIR(seen.st_mode) and (seen.st_uid, seen.st_gid) == (entry.uid, entry.gid):
            fd = self._try_open(directory, path, name)
        if fd < 0:
            self._found.modified.append(path)
            self._miss_below(path)
            return
        with opened(fd):
            sound = (
                stat.S_IMODE(seen.st_mode) == entry.permissions
                and not os.listxattr(fd)
                and not is_locked(fd)
            )
            if not sound:
                self._found.modified.append(path)
            if self._has_names(fd, path) and sound and look(seen) != entry[3:]:
                self._found.proven[path] = seen
                self._found.youngest_ns = max(self._found.youngest_ns, seen.st_ctime_ns)

    def _has_names(self, fd: int, path: bytes) -> bool:
        """Compare the names in a directory with those that were; which of them are what they were is judged one by one."""
        expected = {child.rpartition(b"/")[2]: child for child in self._children_of(path)}
        names = names_in(fd)
        prefix = path + b"/" if path else b""
        extra = [prefix + name for name in names if name not in expected]
        self._found.extra += extra
        gone = (
            [] if len(names) - len(extra) == len(expected) else sorted(expected.keys() - set(names))
        )
        for name in gone:
            self._miss(expected[name])
        return not extra and not gone

    def _is_same_file(self, directory: int, name: bytes, path: bytes, seen: os.stat_result) -> bool:
        entry = self._entries[path]
        if entry.with_stat(seen) != entry:
            self._refuse_mount(directory, path, name)
            return False
        if not (self._every or entry.ctime_ns >= self._racy_from_ns):
            return True
        return self._has_content(directory, name, path, seen)

    def _has_content(self, directory: int, name: bytes, path: bytes, seen: os.stat_result) -> bool:
        self._found.hashed += 1
        try:
            if seen.st_size >= _LARGE_BYTES:
                self._large[path] = self._readers.submit(
                    read_id, open_regular(directory, name), seen.st_size
                )
                return True
            return content_id(directory, name, seen) == self._entries[path].content
        except OSError:
            return False

    def _try_open(self, directory: int, path: bytes, name: bytes) -> int:
        """Open a directory; -1 where it is none any more."""
        try:
            return enter(self._owner, directory, path, name)
        except OSError:
            return -1

    def _refuse_mount(self, directory: int, path: bytes, name: bytes) -> None:
        """Raise CheckoutBusyError where a file is mounted on: its lstat is of the file that covers it."""
        try:
            os.close(open_beneath(directory, name, os.O_PATH | os.O_NOFOLLOW))
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise mounted_on(path) from error

    def _miss(self, path: bytes) -> None:
        if path not in self._lost:
            self._lost.add(path)
            self._found.missing.append(path)
        if self._entries[path].is_directory:
            self._miss_below(path)

    def _miss_below(self, path: bytes) -> None:
        for child in self._children_of(path):
            self._miss(child)

    def _children_of(self, path: bytes) -> list[bytes]:
        """The paths that were in a directory."""
        if path not in self._children:
            self._children |= self._entries.children([path])
        return self._children[path]
