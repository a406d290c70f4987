"""The private record of a tree as the daemon left it, and of the control files below its `.git`.

It is stored outside the checkout, so that its user can neither read nor forge it. A torn file is
noticed by its checksum and refused: the checkout is then made again. A manifest of another boot is
read as one that proves nothing: trees are not flushed, and a file system may bring a file back in
its old size without its old bytes. Never touches the tree itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import time
from bisect import bisect_left
from collections.abc import Collection, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

from ...errors import ProofFailedError
from ...host.files import exchange
from ...host.processes import boot_id

DIRECTORY = 0o040000
SYMLINK = 0o120000
SUBMODULE = 0o160000
NO_OBJECT = bytes(20)
_MAGIC = b"mirrord manifest 5\n"
_CHECKSUM_BYTES = 20
_COARSE_RACY_NS = 2 * 10**9  # ext4 with inodes of 128 bytes keeps whole seconds
_CLOCK_REALTIME_COARSE = 5  # linux/time.h
_COUNT = struct.Struct("<I")
_FIXED = struct.Struct("<I20s20sIQQQQII")
_STAT = struct.Struct("<44xIQQQQII")
_FIRST, _AFTER_SLASH = b"\1", b"0"

StatTuple = tuple[int, int, int, int, int, int, int]
"""mode, size, inode, mtime, ctime, uid and gid: `entry[3:]`."""

stat_tuple = attrgetter(
    "st_mode", "st_size", "st_ino", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid"
)


def clock_ns() -> int:
    """The time by the clock that Linux stamps ctimes with, which stands still between its ticks.

    What is changed after this call has a ctime that is not before it (from Linux 6.13 on it may be
    finer, and is then later).
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def blob_id(data: bytes) -> bytes:
    """git's id of a blob, as bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


class Entry(NamedTuple):
    """One path; the last seven fields are its `StatTuple`.

    `mode` is git's, with the type bits. `oid` is what git's tree names: a blob, a tree, or a
    submodule's commit; zero for control files. `content` is the blob id of the bytes on disk, which
    differs from `oid` where a file was converted; of a symlink's target; zero for directories.
    """

    mode: int
    oid: bytes
    content: bytes
    st_mode: int
    size: int
    ino: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int

    @property
    def permissions(self) -> int:
        return stat.S_IMODE(self.st_mode)

    @property
    def is_directory(self) -> bool:
        """A directory on disk: a tree, or a submodule, which is an empty directory."""
        return self.mode in (DIRECTORY, SUBMODULE)

    def with_stat(self, found: object) -> Entry:
        """The same object with the stat data of the file that now holds it."""
        return Entry(self.mode, self.oid, self.content, *stat_tuple(found))


class Entries(MutableMapping[bytes, Entry]):
    """Entries by path, as bytes of the manifest's file; one is decoded when it is asked for.

    A scan of thousands of paths decodes none; moving a tree on decodes and encodes those that
    differ. `copy` and `|` share the bytes that were read, where the paths are in order.
    """

    __slots__ = ("_fixed", "_fresh", "_names")

    def __init__(
        self,
        entries: Mapping[bytes, Entry | None],
        names: list[bytes] | None = None,
        fixed: bytes | memoryview = b"",
    ) -> None:
        """`names` and `fixed` were read from a file; `entries` came since, None where removed."""
        self._names = names or []
        self._fixed = fixed
        self._fresh = dict(entries)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _FIXED.size
        return cls({}, bytes(data[end:]).split(b"\0")[:count], memoryview(data)[_COUNT.size : end])

    def pieces(self) -> list[bytes | memoryview]:
        """Its bytes: a count, the fixed parts, and the paths, each ended by NUL."""
        names: list[bytes] = []
        fixed: list[bytes | memoryview] = []
        size, done = _FIXED.size, 0
        for name in sorted(self._fresh):
            entry, place = self._fresh[name], bisect_left(self._names, name)
            names += self._names[done:place]
            fixed.append(self._fixed[done * size : place * size])
            if entry is not None:
                names.append(name)
                fixed.append(_FIXED.pack(*entry))
            done = place + self._is_at(place, name)
        names += self._names[done:]
        names.append(b"")
        return [_COUNT.pack(len(names) - 1), *fixed, self._fixed[done * size :], b"\0".join(names)]

    def copy(self) -> Self:
        twin = copy(self)
        twin._fresh = self._fresh.copy()  # noqa: SLF001  (its own class)
        return twin

    def __or__(self, other: Mapping[bytes, Entry]) -> Self:
        both = self.copy()
        both.update(other)
        return both

    def __getitem__(self, path: bytes) -> Entry:
        entry = self._fresh.get(path)
        if entry is None and path not in self._fresh:
            place = bisect_left(self._names, path)
            if self._is_at(place, path):
                return Entry._make(_FIXED.unpack_from(self._fixed, place * _FIXED.size))
        if entry is None:
            raise KeyError(path)
        return entry

    def __setitem__(self, path: bytes, entry: Entry) -> None:
        self._fresh[path] = entry

    def __delitem__(self, path: bytes) -> None:
        if path not in self:
            raise KeyError(path)
        if self._was_read(path):
            self._fresh[path] = None
        else:
            del self._fresh[path]

    def __contains__(self, path: object) -> bool:
        if path in self._fresh:
            return self._fresh[path] is not None
        return isinstance(path, bytes) and self._was_read(path)

    def decoded(self) -> dict[bytes, Entry]:
        """All entries at once."""
        entries = map(Entry._make, _FIXED.iter_unpack(self._fixed))
        read = dict(zip(self._names, entries, strict=True))
        for name, entry in self._fresh.items():
            if entry is None:
                del read[name]
            else:
                read[name] = entry
        return read

    def items(self) -> ItemsView[bytes, Entry]:
        return self.decoded().items()

    def values(self) -> ValuesView[Entry]:
        return self.decoded().values()

    def __iter__(self) -> Iterator[bytes]:
        if not self._fresh:
            return iter(self._names)
        kept = filterfalse(self._fresh.__contains__, self._names)
        return chain(kept, [name for name, entry in self._fresh.items() if entry is not None])

    def __len__(self) -> int:
        gone = sum(entry is None for entry in self._fresh.values())
        return len(self._names) + sum(not self._was_read(name) for name in self._fresh) - gone

    def iter_stats(self) -> Iterator[tuple[bytes, StatTuple]]:
        read = zip(self._names, _STAT.iter_unpack(self._fixed), strict=True)
        if not self._fresh:
            return read
        kept = (each for each in read if each[0] not in self._fresh)
        fresh = [(name, entry[3:]) for name, entry in self._fresh.items() if entry is not None]
        return chain(kept, fresh)

    def recorded_since(self, before: Entries) -> list[bytes]:
        """The paths recorded since this was a copy of `before`; else all."""
        if self._names is not before._names:
            return [*self]
        old, new = before._fresh, self._fresh
        return [path for path, entry in new.items() if entry and entry is not old.get(path)]

    def children(self, directories: Collection[bytes]) -> dict[bytes, list[bytes]]:
        """The paths directly below each of some directories."""
        below: dict[bytes, list[bytes]] = {}
        names = self._names
        for above in directories:
            found = below[above] = []
            prefix = above + b"/" if above else b""
            place = bisect_left(names, prefix or _FIRST)
            while place < len(names) and names[place].startswith(prefix):
                name, is_deeper, _ = names[place][len(prefix) :].partition(b"/")
                if is_deeper:  # pass over its directory: after `a` comes `a.b`, then `a/b`
                    place = bisect_left(names, prefix + name + _AFTER_SLASH, place)
                    continue
                if names[place] not in self._fresh:
                    found.append(names[place])
                place += 1
        for path, entry in self._fresh.items():
            above = path.rpartition(b"/")[0]
            if path and entry is not None and above in below:
                below[above].append(path)
        return below

    def _is_at(self, place: int, path: bytes) -> bool:
        return place < len(self._names) and self._names[place] == path

    def _was_read(self, path: bytes) -> bool:
        return self._is_at(bisect_left(self._names, path), path)


@dataclass(frozen=True)
class Manifest:
    """`files` are the paths of the tree, its directories and the root (`b""`) included.

    `control` are the paths from `.git` down. `recorded_ns` is a time by `clock_ns` before all was
    looked at: a file whose ctime is not older may have been changed afterwards in the same tick of
    the clock, so a scan reads it. `index` is the checksum of the index written from `files`.
    """

    commit: str
    tree: str
    recorded_ns: int
    files: Entries
    control: dict[bytes, Entry] = field(default_factory=dict)
    index: str = ""

    @property
    def owner(self) -> tuple[int, int]:
        """uid and gid of all files."""
        top = self.files[b""]
        return top.uid, top.gid

    @property
    def racy_from_ns(self) -> int:
        """A ctime from here on proves nothing."""
        return self.recorded_ns - self.slack_ns

    @property
    def slack_ns(self) -> int:
        """By how much a ctime may be older than the clock was when it was stamped."""
        has_fractions = any(seen[4] % 10**9 for _, seen in self.files.iter_stats())
        return 0 if has_fractions else _COARSE_RACY_NS

    def settled(self, at_ns: int) -> Manifest:
        """The same after all was looked at from `at_ns` on: fewer files are racy."""
        return replace(self, recorded_ns=at_ns)

    def save(self, path: Path) -> None:
        """Replace the file at `path`, private to the daemon: whole or not at all.

        The former file stays beside it, to be written over the next time: a disk that must free its
        blocks, or that is to have the new ones before a rename (ext4), is waited for.
        """
        spare = path.with_name(f"{path.name}.spare")
        fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.writelines(self.pieces())
            file.truncate()
        try:
            exchange(spare, path)
        except OSError:  # there was none yet, or the file system cannot
            spare.rename(path)

    def pieces(self) -> list[bytes | memoryview]:
        sections = [self.files.pieces(), Entries(self.control).pieces()]
        header = {
            "commit": self.commit,
            "tree": self.tree,
            "recorded_ns": self.recorded_ns,
            "index": self.index,
            "boot": boot_id(),
            "sections": [sum(map(len, section)) for section in sections],
        }
        pieces = [_MAGIC, json.dumps(header).encode(), b"\n", *chain(*sections)]
        digest = hashlib.sha1()
        for piece in pieces:
            digest.update(piece)
        return [*pieces, digest.digest()]

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a saved manifest; ProofFailedError where torn, FileNotFoundError where absent."""
        return cls.from_bytes(path.read_bytes(), path.name)

    @staticmethod
    def is_current(path: Path) -> bool:
        """Whether there is a manifest in the form of this version; its content is not read."""
        try:
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except OSError:
            return False

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> Manifest:
        body = memoryview(data)[:-_CHECKSUM_BYTES]
        if not data.startswith(_MAGIC) or hashlib.sha1(body).digest() != data[-_CHECKSUM_BYTES:]:
            raise ProofFailedError(
                f"cannot read manifest {name}: it is damaged",
                hint="release the checkout and ask for another",
            )
        header_end = data.index(b"\n", len(_MAGIC))
        header = json.loads(data[len(_MAGIC) : header_end])
        files_end = header_end + 1 + header.pop("sections")[0]
        if header.pop("boot") != boot_id():
            header["recorded_ns"] = 0
        files = Entries.from_bytes(body[header_end + 1 : files_end])
        control = Entries.from_bytes(body[files_end:])
        return cls(**header, files=files, control=control.decoded())
