"""Paths with what is recorded of each, as they lie in a manifest's file: an entry is decoded when somebody asks for it.

Owns the bytes of that form, and what was recorded since they were read. A scan of thousands of paths decodes none of them; moving
a tree on decodes and encodes those that differ. Pure.
"""

from __future__ import annotations

import stat
import struct
from bisect import bisect_left
from collections.abc import Collection, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from copy import copy
from itertools import chain, filterfalse
from operator import attrgetter
from typing import NamedTuple, Self

DIRECTORY = 0o040000
SYMLINK = 0o120000
SUBMODULE = 0o160000
NO_OBJECT = bytes(20)

_FIRST, _AFTER_SLASH = b"\1", b"0"

_COUNT = struct.Struct("<I")
_FIXED = struct.Struct("<I20s20sIQQQQII")
_SEEN = struct.Struct("<44xIQQQQII")

Seen = tuple[int, int, int, int, int, int, int]

look = attrgetter("st_mode", "st_size", "st_ino", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid")
"""The part of a stat that an `Entry` keeps: `entry[3:]` is equal to it where nothing changed."""


class Entry(NamedTuple):
    """One path. `mode` is git's (with the type bits); `oid` is what git's tree names (a blob, a tree, or a submodule's commit;
    zero for control files), `content` the blob id of the bytes on disk, which differs from `oid` where a file was converted (line
    ends, encoding); for a symlink the bytes are its target. Zero for directories. The rest is what lstat said, as `look` has it.
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

    @property
    def is_symlink(self) -> bool:
        return self.mode == SYMLINK

    def with_stat(self, found: object) -> Entry:
        """The same object with the stat data of the file that now holds it."""
        return Entry(self.mode, self.oid, self.content, *look(found))


class Records(MutableMapping[bytes, Entry]):
    """A mapping of paths to entries; `copy` and `|` share what was read from the file, where the paths are in order."""

    __slots__ = ("_fixed", "_fresh", "_names")

    def __init__(
        self,
        entries: Mapping[bytes, Entry | None],
        names: list[bytes] | None = None,
        fixed: bytes | memoryview = b"",
    ) -> None:
        """`names` and `fixed` as they were read; of `entries`, which come later, None is one that is gone."""
        self._names = names or []
        self._fixed = fixed
        self._fresh = dict(entries)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _FIXED.size
        return cls({}, bytes(data[end:]).split(b"\0")[:count], memoryview(data)[_COUNT.size : end])

    def pieces(self) -> list[bytes | memoryview]:
        """Its bytes: a count, the fixed parts, and the paths, each ended by NUL, which no path can hold."""
        names: list[bytes] = []
        fixed: list[bytes | memoryview] = []
        size, done = _FIXED.size, 0
        for name in sorted(self._fresh):
            entry, place = self._fresh[name], self._place(name)
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
        if path in self._fresh:
            entry = self._fresh[path]
        else:
            place = self._place(path)
            entry = (
                Entry._make(_FIXED.unpack_from(self._fixed, place * _FIXED.size))
                if self._is_at(place, path)
                else None
            )
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
        """All of it at once, for those who go through all."""
        read = dict(
            zip(self._names, map(Entry._make, _FIXED.iter_unpack(self._fixed)), strict=True)
        )
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
        gone = sum(1 for entry in self._fresh.values() if entry is None)
        return len(self._names) + sum(1 for name in self._fresh if not self._was_read(name)) - gone

    def iter_seen(self) -> Iterator[tuple[bytes, Seen]]:
        """Each path with what lstat said of it, as `look` has it."""
        read = zip(self._names, _SEEN.iter_unpack(self._fixed), strict=True)
        if not self._fresh:
            return read
        kept = (each for each in read if each[0] not in self._fresh)
        return chain(
            kept, [(name, entry[3:]) for name, entry in self._fresh.items() if entry is not None]
        )

    def changed_since(self, before: Records) -> list[bytes]:
        """The paths that were recorded or removed after `before`, of which these are a copy; all of both, where they are not."""
        if self._names is not before._names:
            return [*self, *(path for path in before if path not in self)]
        old, new = before._fresh, self._fresh
        changed = [path for path, entry in new.items() if path not in old or entry is not old[path]]
        return changed + [path for path in old if path not in new]

    def recorded_since(self, before: Records) -> list[bytes]:
        """Of those the ones that are there."""
        return [path for path in self.changed_since(before) if path in self]

    def children(self, directories: Collection[bytes]) -> dict[bytes, list[bytes]]:
        """The paths directly below each of some directories."""
        below = {
            above: [path for path in self._read_below(above) if path not in self._fresh]
            for above in directories
        }
        for path, entry in self._fresh.items():
            above = path.rpartition(b"/")[0]
            if path and entry is not None and above in below:
                below[above].append(path)
        return below

    def _read_below(self, directory: bytes) -> Iterator[bytes]:
        """Of what was read. What is deeper is passed over by the directory that it is in: after `a` comes `a.b`, then `a/b`."""
        names, prefix = self._names, directory + b"/" if directory else b""
        place = self._place(prefix or _FIRST)
        while place < len(names) and names[place].startswith(prefix):
            name, is_deeper, _ = names[place][len(prefix) :].partition(b"/")
            if is_deeper:
                place = bisect_left(names, prefix + name + _AFTER_SLASH, place)
            else:
                yield names[place]
                place += 1

    def _place(self, path: bytes) -> int:
        """Where a path is among those that were read, or would be."""
        return bisect_left(self._names, path)

    def _is_at(self, place: int, path: bytes) -> bool:
        return place < len(self._names) and self._names[place] == path

    def _was_read(self, path: bytes) -> bool:
        return self._is_at(self._place(path), path)
