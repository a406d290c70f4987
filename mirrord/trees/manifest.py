"""The private record of a tree and its control files (below `.git`) as the daemon left them.

It is stored outside the checkout, so its user can neither read nor forge it. A torn one fails its
checksum, and the checkout is made again. A manifest of an earlier boot proves nothing: trees are
not flushed, and after a power failure a file can have its old size without its old bytes. Never
touches the tree.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from bisect import bisect_left
from collections.abc import (
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    ValuesView,
)
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

from ..errors import ProofFailedError
from ..git.modes import DIRECTORY, SUBMODULE
from ..host.files import exchange, open_plain, read_plain
from ..host.processes import Owner, boot_id

DIRECTORIES = (DIRECTORY, SUBMODULE)  # a submodule is an empty directory on disk
NO_OBJECT = bytes(20)
SECOND_NS = 10**9
_MAGIC = b"mirrord manifest 5\n"
# SHA-1 of what is before it, which tells a torn file
_CHECKSUM_BYTES = 20
_COARSE_RACY_NS = 2 * 10**9  # ext4 with inodes of 128 bytes keeps whole seconds
# the clock of ctimes, which moves on every 1 to 10 ms (CONFIG_HZ)
_CLOCK_REALTIME_COARSE = 5  # linux/time.h
_COUNT = struct.Struct("<I")

# mode, size, inode, mtime, ctime, uid, gid: `entry[3:]`
StatTuple = tuple[int, int, int, int, int, int, int]

stat_tuple = attrgetter(
    "st_mode", "st_size", "st_ino", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid"
)


def clock_ns() -> int:
    """Return the time of the clock for ctimes, which Linux advances tick by tick.

    A change after this call has this ctime or a later one (Linux 6.13 has finer ones, all later).
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def blob_id(data: bytes) -> bytes:
    """Return git's id of a blob, as bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


class Entry(NamedTuple):
    """The record of a path; the last seven fields are its `StatTuple`.

    `mode` is git's, with the type bits. `oid` is the blob, tree or submodule commit in git's tree;
    zero for control files. `content` is the blob id of the bytes on disk, or of a link's target: it
    differs from `oid` where a file was converted, and is zero for directories.
    """

    mode: int
    oid: bytes
    content: bytes
    st_mode: int = 0
    size: int = 0
    ino: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    uid: int = 0
    gid: int = 0

    @property
    def is_directory(self) -> bool:
        return self.mode in DIRECTORIES

    @property
    def seen_by_git(self) -> tuple[int, ...]:
        """What git compares of a file's stat; nothing of a directory's."""
        return () if self.is_directory else (self.st_mode, self.size, self.mtime_ns // SECOND_NS)

    def with_stat(self, st: object) -> Entry:
        """Return the entry with the stat of its file."""
        return Entry(self.mode, self.oid, self.content, *stat_tuple(st))


# mode, oid, content and the stat; `_STAT` skips the first three, which a scan does not need
_FIXED = struct.Struct("<I20s20sIQQQQII")
_STAT = struct.Struct("<44xIQQQQII")
_FIRST, _AFTER_SLASH = b"\1", b"0"  # sort after b"" (the root), and after all names in a directory


class Entries(MutableMapping[bytes, Entry]):
    """Entries by path, kept as the sorted bytes of the manifest's file and decoded on access.

    A scan of thousands of paths decodes none; a move decodes and encodes those that differ. `copy`
    and `|` share the bytes.
    """

    __slots__ = ("_changed", "_fixed", "_names")

    def __init__(
        self,
        entries: Mapping[bytes, Entry | None],
        names: list[bytes] | None = None,
        fixed: bytes | memoryview = b"",
    ) -> None:
        """`names` and `fixed` are from a file; `entries` are changes since, None where removed."""
        self._names = names or []
        self._fixed = fixed
        self._changed = dict(entries)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _FIXED.size
        return cls({}, bytes(data[end:]).split(b"\0")[:count], memoryview(data)[_COUNT.size : end])

    def pieces(self) -> list[bytes | memoryview]:
        """Return the bytes for a file: a count, the fixed parts, and the paths, ended by NUL."""
        names: list[bytes] = []
        fixed: list[bytes | memoryview] = []
        size, done = _FIXED.size, 0
        for name in sorted(self._changed):
            entry, place = self._changed[name], bisect_left(self._names, name)
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
        other = copy(self)
        other._changed = self._changed.copy()  # noqa: SLF001  (its own class)
        return other

    def __or__(self, other: Mapping[bytes, Entry]) -> Self:
        both = self.copy()
        both.update(other)
        return both

    def __getitem__(self, path: bytes) -> Entry:
        entry = self._changed.get(path)
        if entry is None and path not in self._changed:
            place = bisect_left(self._names, path)
            if self._is_at(place, path):
                return Entry._make(_FIXED.unpack_from(self._fixed, place * _FIXED.size))
        if entry is None:
            raise KeyError(path)
        return entry

    def __setitem__(self, path: bytes, entry: Entry) -> None:
        self._changed[path] = entry

    def __delitem__(self, path: bytes) -> None:
        if path not in self:
            raise KeyError(path)
        if self._was_read(path):
            self._changed[path] = None
        else:
            del self._changed[path]

    def __contains__(self, path: object) -> bool:
        if path in self._changed:
            return self._changed[path] is not None
        return isinstance(path, bytes) and self._was_read(path)

    def decoded(self) -> dict[bytes, Entry]:
        entries = map(Entry._make, _FIXED.iter_unpack(self._fixed))
        read = dict(zip(self._names, entries, strict=True))
        for name, entry in self._changed.items():
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
        if not self._changed:
            return iter(self._names)
        kept = filterfalse(self._changed.__contains__, self._names)
        return chain(kept, [name for name, entry in self._changed.items() if entry is not None])

    def __len__(self) -> int:
        gone = sum(entry is None for entry in self._changed.values())
        return len(self._names) + sum(not self._was_read(name) for name in self._changed) - gone

    def iter_stats(self) -> Iterator[tuple[bytes, StatTuple]]:
        read = zip(self._names, _STAT.iter_unpack(self._fixed), strict=True)
        if not self._changed:
            return read
        kept = (pair for pair in read if pair[0] not in self._changed)
        changed = [(name, entry[3:]) for name, entry in self._changed.items() if entry is not None]
        return chain(kept, changed)

    def recorded_since(self, before: Entries) -> list[bytes]:
        """Return the paths recorded since this was copied from `before`; all, if it was not."""
        if self._names is not before._names:
            return [*self]
        old, new = before._changed, self._changed
        return [path for path, entry in new.items() if entry and entry is not old.get(path)]

    def select(self, paths: Iterable[bytes]) -> dict[bytes, Entry]:
        """Return the entries of some paths."""
        return {path: self[path] for path in paths}

    def children(self, entries: Mapping[bytes, Entry]) -> dict[bytes, list[bytes]]:
        """Return the paths directly below each directory among some entries."""
        below: dict[bytes, list[bytes]] = {}
        names = self._names
        for above, entry in entries.items():
            if entry.mode not in DIRECTORIES:
                continue
            inside = below[above] = []
            prefix = above + b"/" if above else b""
            place = bisect_left(names, prefix or _FIRST)
            while place < len(names) and names[place].startswith(prefix):
                name, is_deeper, _ = names[place][len(prefix) :].partition(b"/")
                if is_deeper:  # skip this directory: `a.b` sorts between `a` and `a/b`
                    place = bisect_left(names, prefix + name + _AFTER_SLASH, place)
                    continue
                if names[place] not in self._changed:
                    inside.append(names[place])
                place += 1
        for path, changed in self._changed.items():
            above = path.rpartition(b"/")[0]
            if path and changed is not None and above in below:
                below[above].append(path)
        return below

    def _is_at(self, place: int, path: bytes) -> bool:
        return place < len(self._names) and self._names[place] == path

    def _was_read(self, path: bytes) -> bool:
        return self._is_at(bisect_left(self._names, path), path)


def without(entries: Mapping[bytes, Entry], removed: Collection[bytes]) -> dict[bytes, Entry]:
    """Return the entries that are at or below none of the removed paths."""
    gone, inside = set(removed), tuple(path + b"/" for path in removed)
    if not gone:
        return dict(entries)
    return {
        path: entry
        for path, entry in entries.items()
        if path not in gone and not path.startswith(inside)
    }


@dataclass(frozen=True)
class Manifest:
    """A manifest.

    `files` are the paths of the tree, with its directories and the root (`b""`); `control` those
    from `.git` down. `recorded_ns` is a `clock_ns` before the first stat: a file whose ctime is not
    older may have changed later in the same tick, so a scan reads it. `index` is the checksum of
    the index written from `files`.
    """

    commit: str
    tree: str
    recorded_ns: int
    files: Entries
    control: dict[bytes, Entry] = field(default_factory=dict)
    index: str = ""

    @property
    def owner(self) -> Owner:
        top = self.files[b""]
        return top.uid, top.gid

    @property
    def racy_from_ns(self) -> int:
        """The first ctime that proves nothing."""
        return self.recorded_ns - self.slack_ns

    @property
    def slack_ns(self) -> int:
        """By how much a ctime may lie before the time of the change."""
        has_fractions = any(seen[4] % 10**9 for _, seen in self.files.iter_stats())
        return 0 if has_fractions else _COARSE_RACY_NS

    @property
    def control_files(self) -> int:
        return sum(not entry.is_directory for entry in self.control.values())

    def is_same_to_git(self, before: Manifest) -> bool:
        """Return whether an index of `before` is one of this, copied from it.

        A file that was written again has another inode and ctime, which git does not compare here
        (core.checkStat and core.trustctime in the store's configuration).
        """
        new, old = self.files, before.files
        paths = new.recorded_since(old)
        return self.commit == before.commit and all(
            new[path].seen_by_git == old[path].seen_by_git for path in paths
        )

    def with_stats(self, stats: Mapping[bytes, os.stat_result]) -> Manifest:
        """Return the manifest with new stats of some of its paths."""
        if not stats:
            return self
        files, control = self.files.copy(), dict(self.control)
        for path, st in stats.items():
            entries: MutableMapping[bytes, Entry] = control if path in control else files
            entries[path] = entries[path].with_stat(st)
        return replace(self, files=files, control=control)

    def settled(self, at_ns: int) -> Manifest:
        """Return the manifest with all stats taken after `at_ns`: fewer files are racy."""
        return replace(self, recorded_ns=at_ns)

    def save(self, path: Path) -> None:
        """Replace the file at `path` in one step; only the daemon can read it.

        The old file stays beside it and is overwritten the next time: freeing its blocks would wait
        for the disk, and so would ext4 before a rename over a file.
        """
        spare = path.with_name(f"{path.name}.spare")
        # no O_TRUNC, which would free the blocks; the rest of a longer file is cut off below
        fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.writelines(self.pieces())
            file.truncate()
        try:
            exchange(spare, path)
        except OSError:  # no file yet, or no RENAME_EXCHANGE on this file system
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
        """Read a manifest; raises ProofFailedError where torn, FileNotFoundError where absent."""
        return cls.from_bytes(read_plain(path), path.name)

    @staticmethod
    def is_current(path: Path) -> bool:
        """Return whether there is a manifest of this version; does not read its content."""
        try:
            with open_plain(path) as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except FileNotFoundError:
            return False

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> Manifest:
        body = memoryview(data)[:-_CHECKSUM_BYTES]
        if not data.startswith(_MAGIC) or hashlib.sha1(body).digest() != data[-_CHECKSUM_BYTES:]:
            raise ProofFailedError(
                f"cannot read manifest {name}: it is damaged",
                hint="release the checkout and make another",
            )
        header_end = data.index(b"\n", len(_MAGIC))
        header = json.loads(data[len(_MAGIC) : header_end])
        files_end = header_end + 1 + header.pop("sections")[0]
        if header.pop("boot") != boot_id():
            # every ctime is racy then, so a scan reads each file
            header["recorded_ns"] = 0
        files = Entries.from_bytes(body[header_end + 1 : files_end])
        control = Entries.from_bytes(body[files_end:])
        return cls(**header, files=files, control=control.decoded())
