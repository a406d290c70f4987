"""What a checkout's user did: the tree and the control files on disk, compared with the private manifest.

Owns the judgement "unchanged". It opens no link, no pipe and no device, goes into no directory that the manifest does not know,
and reads a file only where its stat cannot prove it: an ordinary user can forge mtime, size and the index, but not ctime.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..host.files import find_stat, is_locked, names_in, open_child, open_directory, open_regular, opened
from .manifest import SUBMODULE, Entry, Manifest

_CHUNK_BYTES = 1 << 20
_CONTROL = b".git"
_GIT_KINDS = {stat.S_IFREG: 0o100000, stat.S_IFLNK: 0o120000, stat.S_IFDIR: 0o040000}


@dataclass
class Changes:
    """Paths from the root of the tree; control files begin with `.git`.

    Of an extra directory only its own path is listed; of a missing one everything that was in it.
    """

    modified: list[bytes] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)
    looked_at: int = 0
    hashed: int = 0
    began_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.modified or self.missing or self.extra)

    def in_control(self) -> list[bytes]:
        """All that differs below `.git`."""
        return [path for path in (*self.modified, *self.missing, *self.extra) if is_control(path)]

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
    found = Changes(began_ns=time.time_ns())
    with opened(open_directory(root)) as fd:
        _Scan(manifest, every, found).run(fd)
    return found


def record_control(root: Path, manifest: Manifest) -> Manifest:
    """Add to the manifest everything below `.git`, as it is now; nobody but the daemon may have had access yet."""
    control: dict[bytes, Entry] = {}
    with opened(open_directory(root)) as fd:
        if find_stat(fd, _CONTROL) is not None:
            control[_CONTROL] = _observe(fd, _CONTROL)
            if control[_CONTROL].is_directory:
                _record_below(fd, _CONTROL, b"", control)
    files = manifest.files | {b"": manifest.files[b""].with_stat(os.stat(root))}  # `.git` was made in it
    return replace(manifest, files=files, control=control, recorded_ns=time.time_ns())


def _record_below(directory: int, name: bytes, above: bytes, control: dict[bytes, Entry]) -> None:
    path = above + name
    with opened(open_child(directory, name)) as fd:
        for child in sorted(names_in(fd)):
            entry = control[path + b"/" + child] = _observe(fd, child)
            if entry.is_directory:
                _record_below(fd, child, path + b"/", control)


def _observe(directory: int, name: bytes) -> Entry:
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    mode = _GIT_KINDS.get(stat.S_IFMT(found.st_mode), 0)
    content = content_id(directory, name) if mode in (0o100000, 0o120000) else bytes(20)
    return Entry(mode, 0, bytes(20), content, 0, 0, 0, 0, 0, 0).with_stat(found)


def content_id(directory: int, name: bytes) -> bytes:
    """git's blob id of a file's bytes, or of a symbolic link's target; OSError where it is neither."""
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=directory))
        return hashlib.sha1(b"blob %d\0" % len(target) + target).digest()
    with opened(open_regular(directory, name)) as fd:
        size = os.fstat(fd).st_size
        digest = hashlib.sha1(b"blob %d\0" % size)
        while data := os.read(fd, min(_CHUNK_BYTES, size + 1)):
            digest.update(data)
        return digest.digest()


class _Scan:
    def __init__(self, manifest: Manifest, rehash: bool, found: Changes) -> None:
        self._manifest = manifest
        self._rehash = rehash
        self._found = found
        self._entries = manifest.files | manifest.control
        self._owner = (manifest.owner_uid, manifest.owner_gid)
        self._children: dict[bytes, dict[bytes, bytes]] = {}
        for path in self._entries:
            if path:
                above, _, name = path.rpartition(b"/")
                self._children.setdefault(above, {})[name] = path

    def run(self, root: int) -> None:
        if not self._is_same_directory(root, b".", self._entries[b""]):
            self._found.modified.append(b"")
        self._enter(root, b"")

    def _enter(self, fd: int, path: bytes) -> None:
        """Compare what is in an open directory with what was. Depth is bounded: only known directories are entered."""
        expected = self._children.get(path, {})
        prefix = path + b"/" if path else b""
        names = names_in(fd)
        for name in names:
            known = expected.get(name)
            if known is None:
                self._found.extra.append(prefix + name)
            else:
                self._compare(fd, name, known)
        if len(names) < len(expected) or not expected.keys() <= set(names):
            for name in expected.keys() - set(names):
                self._miss(expected[name])

    def _compare(self, directory: int, name: bytes, path: bytes) -> None:
        entry = self._entries[path]
        self._found.looked_at += 1
        if entry.mode in (0o040000, SUBMODULE):
            self._compare_directory(directory, name, path, entry)
        elif not self._is_same_file(directory, name, entry):
            self._found.modified.append(path)

    def _compare_directory(self, directory: int, name: bytes, path: bytes, entry: Entry) -> None:
        found = find_stat(directory, name)
        if found is None:
            self._miss(path)
            return
        if not stat.S_ISDIR(found.st_mode) or (found.st_uid, found.st_gid) != (entry.uid, entry.gid):
            self._found.modified.append(path)
            self._miss_below(path)
            return
        if not self._is_same_directory(directory, name, entry):
            self._found.modified.append(path)
        try:
            fd = open_child(directory, name)
        except OSError:
            self._miss_below(path)
            return
        with opened(fd):
            self._enter(fd, path)

    def _is_same_directory(self, directory: int, name: bytes, entry: Entry) -> bool:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) != (entry.permissions, entry.uid, entry.gid):
            return False
        if found.st_ctime_ns == entry.ctime_ns and not self._rehash and not self._manifest.is_racy(entry):
            return True
        with opened(open_child(directory, name)) as fd:
            return not os.listxattr(fd) and not is_locked(fd)

    def _is_same_file(self, directory: int, name: bytes, entry: Entry) -> bool:
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return False
        same = (
            found.st_ino == entry.ino
            and found.st_mtime_ns == entry.mtime_ns
            and found.st_size == entry.size
            and (found.st_ctime_ns == entry.ctime_ns or self._is_out_of_reach(entry))
            and found.st_uid == entry.uid
            and found.st_gid == entry.gid
            and stat.S_IMODE(found.st_mode) == entry.permissions
            and _GIT_KINDS.get(stat.S_IFMT(found.st_mode)) == entry.mode & 0o170000
        )
        if not same or self._is_proven_by_stat(entry):
            return same
        return self._has_content(directory, name, entry)

    def _is_out_of_reach(self, entry: Entry) -> bool:
        """A pack of the daemon's, hard-linked into `.git`: each new link changes its ctime, but no client can change it."""
        return entry.uid != self._owner[0] and not entry.permissions & 0o222 and entry.mode == 0o100000

    def _is_proven_by_stat(self, entry: Entry) -> bool:
        if self._is_out_of_reach(entry):
            return True
        return not self._rehash and not self._manifest.is_racy(entry)

    def _has_content(self, directory: int, name: bytes, entry: Entry) -> bool:
        self._found.hashed += 1
        try:
            return content_id(directory, name) == entry.content
        except OSError:
            return False

    def _miss(self, path: bytes) -> None:
        self._found.missing.append(path)
        self._miss_below(path)

    def _miss_below(self, path: bytes) -> None:
        for child in self._children.get(path, {}).values():
            self._miss(child)


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
