"""What a checkout's user did: the tree and the control files on disk, compared with the private manifest.

Owns the judgement "unchanged". One lstat of every known path decides where to look closer: an ordinary user can forge mtime, size
and the index, but not ctime, and no name appears in a directory or leaves it without changing the directory's. Looking closer
opens no link, no pipe and no device, goes only into directories that the manifest knows, and lists or reads what stat cannot
prove.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..errors import CheckoutBusyError
from ..host.files import find_stat, is_locked, names_in, open_child, open_directory, open_regular, opened
from .descent import Descent
from .manifest import Manifest, clock_ns
from .records import Entry, Records, look

_CHUNK_BYTES = 1 << 20
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
        return [path for path in (*self.modified, *self.missing, *self.extra) if not is_control(path)]


def is_control(path: bytes) -> bool:
    return path == _CONTROL or path.startswith(_CONTROL + b"/")


def scan(root: Path, manifest: Manifest, *, rehash: bool | None = None) -> Changes:
    """Compare everything below `root` with the manifest.

    `rehash` reads every file, whatever its stat says; by default when the checkout belongs to root, who can set the clock.
    """
    every = manifest.owner_uid == 0 if rehash is None else rehash
    found = Changes(began_ns=clock_ns())
    with opened(open_directory(root)) as fd:
        entries = manifest.files | manifest.control
        paths = entries.keys() if every else _suspects(fd, manifest, found)
        _examine(fd, manifest, entries, paths, every, found)
    found.looked_at = len(entries) - 1
    return found


def examine(root: Path, manifest: Manifest, paths: Collection[bytes]) -> Changes:
    """Look closer at some of the paths, whatever their stat says: what was just written is read back."""
    found = Changes(began_ns=clock_ns(), looked_at=len(paths))
    with opened(open_directory(root)) as fd:
        _examine(fd, manifest, manifest.files | manifest.control, paths, True, found)
    return found


def _suspects(root: int, manifest: Manifest, found: Changes) -> list[bytes]:
    """The paths whose stat is not what it was, or too young to prove anything.

    A directory above a path may have become a link, and the stat then be of another file. That directory is a suspect itself,
    and what is in it is lost to whoever looks closer.
    """
    suspects = []
    racy_from_ns = manifest.racy_from_ns
    lstat = os.lstat
    control = [(path, entry[3:]) for path, entry in manifest.control.items()]
    for path, was in chain(manifest.files.iter_seen(), control):
        try:
            now = look(lstat(path or b".", dir_fd=root))
        except OSError:
            suspects.append(path)
            continue
        if now != was:
            suspects.append(path)
        elif was[4] >= racy_from_ns:
            suspects.append(path)
            found.unsettled = True
            found.youngest_ns = max(found.youngest_ns, was[4])
    return suspects


def _examine(root: int, manifest: Manifest, entries: Records, paths: Collection[bytes], every: bool, found: Changes) -> None:
    if paths:
        with _Examination(root, manifest, entries, every, found) as examination:
            examination.judge(paths)


def content_id(directory: int, name: bytes, found: os.stat_result) -> bytes:
    """git's blob id of a file's bytes, or of a symbolic link's target; OSError where it is neither."""
    if stat.S_ISLNK(found.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=directory))
        return hashlib.sha1(b"blob %d\0" % len(target) + target).digest()
    return _read(open_regular(directory, name), found.st_size)


def _read(fd: int, size: int) -> bytes:
    """The blob id of an open file that should have `size` bytes; closes it."""
    with opened(fd):
        digest = hashlib.sha1(b"blob %d\0" % size)
        left = size + 1  # one more than there should be: one read is enough for most
        while left > 0 and (data := os.read(fd, min(_CHUNK_BYTES, left))):
            digest.update(data)
            left -= len(data)
            if left == 1:  # a read that got less than it asked for was at the end
                break
        return digest.digest()


class _Examination:
    """One closer look. A path is judged after the directories above it; `_lost` is what cannot be there any more."""

    def __init__(self, root: int, manifest: Manifest, entries: Records, every: bool, found: Changes) -> None:
        self._root = root
        self._entries = entries
        self._owner_uid = manifest.owner_uid
        self._every = every
        self._racy_from_ns = manifest.racy_from_ns
        self._found = found
        self._descent = Descent(root)
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
        self._children = self._entries.children([path for path in paths if self._entries[path].is_directory])
        for path in sorted(paths):
            if path not in self._lost:
                self._judge(path)

    def _judge(self, path: bytes) -> None:
        entry = self._entries[path]
        try:
            directory, name = self._descent.locate(path) if path else (self._root, b".")
            seen = find_stat(directory, name)
        except (CheckoutBusyError, OSError):
            seen = None
        if seen is None:
            self._miss(path)
        elif entry.is_directory:
            self._judge_directory(directory, name, path, seen)
        elif not self._is_same_file(directory, name, path, seen):
            self._found.modified.append(path)

    def _judge_directory(self, directory: int, name: bytes, path: bytes, seen: os.stat_result) -> None:
        entry = self._entries[path]
        fd = -1
        if stat.S_ISDIR(seen.st_mode) and (seen.st_uid, seen.st_gid) == (entry.uid, entry.gid):
            fd = _try_open(directory, name)
        if fd < 0:
            self._found.modified.append(path)
            self._miss_below(path)
            return
        with opened(fd):
            sound = stat.S_IMODE(seen.st_mode) == entry.permissions and not os.listxattr(fd) and not is_locked(fd)
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
        gone = [] if len(names) - len(extra) == len(expected) else sorted(expected.keys() - set(names))
        for name in gone:
            self._miss(expected[name])
        return not extra and not gone

    def _is_same_file(self, directory: int, name: bytes, path: bytes, seen: os.stat_result) -> bool:
        entry = self._entries[path]
        shared = self._is_out_of_reach(entry)
        now = entry.with_stat(seen)
        if now != (entry._replace(ctime_ns=now.ctime_ns) if shared else entry):
            return False
        if shared or not (self._every or entry.ctime_ns >= self._racy_from_ns):
            return True
        return self._has_content(directory, name, path, seen)

    def _is_out_of_reach(self, entry: Entry) -> bool:
        """A pack of the daemon's, hard-linked into `.git`: each new link changes its ctime, but no client can change it."""
        return entry.uid != self._owner_uid and not entry.permissions & 0o222 and stat.S_ISREG(entry.st_mode)

    def _has_content(self, directory: int, name: bytes, path: bytes, seen: os.stat_result) -> bool:
        self._found.hashed += 1
        try:
            if seen.st_size >= _LARGE_BYTES:
                self._large[path] = self._readers.submit(_read, open_regular(directory, name), seen.st_size)
                return True
            return content_id(directory, name, seen) == self._entries[path].content
        except OSError:
            return False

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


def _try_open(directory: int, name: bytes) -> int:
    """Open a directory; -1 where it is none any more."""
    try:
        return open_child(directory, name)
    except OSError:
        return -1


def iter_extra(root: Path, path: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything at and below an extra path, without following links; directories before what is in them. For patches."""
    with opened(open_directory(root)) as fd:
        yield from _iter_at(fd, b"", path)


def _iter_at(directory: int, above: bytes, path: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    head, _, rest = path.partition(b"/")
    if rest:
        with opened(open_child(directory, head)) as fd:
            yield from _iter_at(fd, above + head + b"/", rest)
        return
    yield from _iter_below(directory, above, head)


def _iter_below(directory: int, above: bytes, name: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    found = find_stat(directory, name)
    if found is None:
        return
    yield above + name, found
    if stat.S_ISDIR(found.st_mode):
        with opened(open_child(directory, name)) as fd:
            for child in sorted(names_in(fd)):
                yield from _iter_below(fd, above + name + b"/", child)
