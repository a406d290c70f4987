"""Changes as git prints them: `git diff --cached --binary --full-index -M` after `git add --all`.

Headers, binary files that come or go, and exact renames are made here, hunks by libgit2. What
neither can do raises NeedsGit with the reason: a modified binary file (git's delta), a deletion and
an addition whose sizes leave room for a rename by content, a diff driver such as `diff=python`
(whose text stands behind `@@`), and files over LARGE_BYTES.
"""

from __future__ import annotations

import base64
import re
import stat
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...git.attributes import Attributes
from ...git.objects.hunks import count_lines, hunks
from ...git.objects.repository import Objects
from ..files.manifest import SUBMODULE, blob_id
from .change import Change
from .stat_table import FileStat, quoted, stat_name, stat_table

LARGE_BYTES = 64 * 1024**2

_NO_ID = "0" * 40
_BINARY_LOOK_BYTES = 8000  # buffer_is_binary
_CANDIDATES = 100  # of one blob, that find_identical_files looks at
_LINE_BYTES = 52
# xdiff's def_ff keeps a form feed at the end of the line behind `@@`, libgit2 does not
_ODD_LINE_END = re.compile(rb"^[A-Za-z_$][^\n]*[\v\f][ \t\r]*$", re.MULTILINE)


class NeedsGit(Exception):
    """`reason` names what only git can do, in one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Side(NamedTuple):
    """One side of an entry of a diff; `data` is None until it is needed."""

    path: bytes
    mode: int
    oid: str
    data: bytes | None

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class Pair(NamedTuple):
    """An entry of a diff. Both sides of a rename have a path of their own."""

    old: Side | None
    new: Side | None

    @property
    def path(self) -> bytes:
        side = self.new or self.old
        assert side
        return side.path

    @property
    def status(self) -> str:
        if not (self.old and self.new):
            return "D" if self.old else "A"
        if self.old.path != self.new.path:
            return "R"
        return "T" if stat.S_IFMT(self.old.mode ^ self.new.mode) else "M"


def pair_up(objects: Objects, changes: Sequence[Change]) -> list[Pair]:
    """The entries of the diff, by path, with exact renames.

    Raises NeedsGit where a rename may have to be found by content.
    """
    pairs = []
    for change in changes:
        old = new = None
        if change.old:
            old = Side(change.path, change.old.mode, change.old.oid, None)
        if change.mode is not None:
            new = Side(change.path, change.mode, blob_id(change.data).hex(), change.data)
        pairs.append(Pair(old, new))
    gone = [pair.old for pair in pairs if pair.old and not pair.new]
    come = [pair.new for pair in pairs if pair.new and not pair.old]
    if not gone or not come:
        return pairs
    sources = _exact_renames(gone, come)
    used = {source.path for source in sources.values()}
    sizes = sorted(len(new.data or b"") for new in come if new.is_file and new.path not in sources)
    for old in gone:
        if old.is_file and old.path not in used and _may_match(objects.blob_size(old.oid), sizes):
            raise NeedsGit("renames")
    return [
        Pair(sources[pair.path], pair.new) if pair.path in sources else pair
        for pair in pairs
        if pair.path not in used or pair.new
    ]


def _exact_renames(gone: Sequence[Side], come: Sequence[Side]) -> dict[bytes, Side]:
    """The source of each new path (find_identical_files): of the removed files with its blob, the
    first of the same name, or else the first.
    """
    by_oid: defaultdict[tuple[str, int], list[Side]] = defaultdict(list)
    for old in gone:
        by_oid[old.oid, stat.S_IFMT(old.mode)].append(old)
    found = {}
    for new in come:
        if same := by_oid.get((new.oid, stat.S_IFMT(new.mode))):
            name = new.path.rpartition(b"/")[2]
            named = (old for old in same[:_CANDIDATES] if old.path.rpartition(b"/")[2] == name)
            found[new.path] = chosen = next(named, same[0])
            same.remove(chosen)
    return found


def _may_match(size: int, sizes: list[int]) -> bool:
    """Whether one of the sorted sizes is near enough to be half the same (estimate_similarity)."""
    at = bisect_left(sizes, max(1, (size + 1) // 2))
    return size > 0 and at < len(sizes) and sizes[at] <= 2 * size


class Renderer:
    """Prints pairs; reads the old blobs one at a time."""

    def __init__(self, objects: Objects, attributes: Attributes) -> None:
        self._objects = objects
        self._attributes = attributes

    def patch(self, pairs: Sequence[Pair]) -> Iterator[bytes]:
        """The patch, entry by entry."""
        for pair in pairs:
            if pair.status == "T":
                yield self._entry(Pair(pair.old, None))
                yield self._entry(Pair(None, pair.new))
            else:
                yield self._entry(pair)

    def name_status(self, pairs: Sequence[Pair]) -> Iterator[bytes]:
        """As `--name-status` prints it."""
        for pair in pairs:
            names = [quoted(pair.path)]
            if pair.old and pair.status == "R":
                names.insert(0, quoted(pair.old.path))
            status = "R100" if pair.status == "R" else pair.status
            yield b"\t".join([status.encode(), *names]) + b"\n"

    def stat(self, pairs: Sequence[Pair]) -> bytes:
        """As `--stat` prints it, 80 columns wide."""
        return stat_table([self._measure(pair) for pair in pairs])

    def _measure(self, pair: Pair) -> FileStat:
        old, new = self._read(pair.old), self._read(pair.new)
        path = pair.old.path if pair.old else None
        if self._is_binary(pair.old, old) or self._is_binary(pair.new, new):
            sizes = (0, 0) if old == new else (len(new), len(old))
            return FileStat(stat_name(path, pair.path), True, *sizes)
        return FileStat(stat_name(path, pair.path), False, *count_lines(old, new))

    def _entry(self, pair: Pair) -> bytes:
        old, new = pair.old, pair.new
        head = _header(pair)
        if old and new and old.oid == new.oid:
            return head
        before, after = self._read(old), self._read(new)
        if self._is_binary(old, before) or self._is_binary(new, after):
            return head + _binary(before, after)
        if before and after:
            if isinstance(self._attributes.find(pair.path).get("diff"), str):
                raise NeedsGit("driver")
            if _ODD_LINE_END.search(before):
                raise NeedsGit("form-feed")
        if not (text := hunks(before, after)):  # an empty file
            return head
        return head + _label(b"---", b"a/", old) + _label(b"+++", b"b/", new) + text

    def _is_binary(self, side: Side | None, data: bytes) -> bool:
        if side and side.is_file:
            state = self._attributes.find(side.path).get("diff")
            if isinstance(state, bool):
                return not state
        return b"\0" in data[:_BINARY_LOOK_BYTES]

    def _read(self, side: Side | None) -> bytes:
        if side is None:
            return b""
        if side.mode == SUBMODULE:
            return f"Subproject commit {side.oid}\n".encode()
        if side.data is not None:
            return side.data
        if self._objects.blob_size(side.oid) > LARGE_BYTES:
            raise NeedsGit("size")
        return self._objects.read_blob(side.oid)


def _header(pair: Pair) -> bytes:
    """From `diff --git` to `index` (builtin_diff and fill_metainfo)."""
    old, new = pair.old, pair.new
    names = [
        quoted(side.path, prefix)
        for side, prefix in ((old or new, b"a/"), (new or old, b"b/"))
        if side
    ]
    lines = [b"diff --git " + b" ".join(names)]
    if old is None and new:
        lines.append(b"new file mode %06o" % new.mode)
    elif new is None and old:
        lines.append(b"deleted file mode %06o" % old.mode)
    elif old and new:
        if old.mode != new.mode:
            lines += [b"old mode %06o" % old.mode, b"new mode %06o" % new.mode]
        if old.path != new.path:
            lines.append(b"similarity index 100%")
            lines += [b"rename from " + quoted(old.path), b"rename to " + quoted(new.path)]
    before, after = (side.oid if side else _NO_ID for side in (old, new))
    if before != after:
        is_same_mode = old and new and old.mode == new.mode
        mode = b" %06o" % old.mode if old and is_same_mode else b""
        lines.append(b"index %s..%s%s" % (before.encode(), after.encode(), mode))
    return b"\n".join(lines) + b"\n"


def _label(sign: bytes, prefix: bytes, side: Side | None) -> bytes:
    name = quoted(side.path, prefix) if side else b"/dev/null"
    return b"%s %s%s\n" % (sign, name, b"\t" if b" " in name else b"")


def _binary(before: bytes, after: bytes) -> bytes:
    """git deflates at a level of its own (1), and tries no delta where one side is empty."""
    if before and after:
        raise NeedsGit("binary")
    return b"GIT binary patch\n" + _literal(after) + _literal(before)


def _literal(data: bytes) -> bytes:
    """Deflated, in base 85, in lines of 52 bytes whose first letter says how many."""
    deflated = zlib.compress(data, 1)
    lines = [b"literal %d\n" % len(data)]
    for at in range(0, len(deflated), _LINE_BYTES):
        piece = deflated[at : at + _LINE_BYTES]
        letter = len(piece) + (ord("A") - 1 if len(piece) <= 26 else ord("a") - 27)
        lines.append(b"%c%s\n" % (letter, base64.b85encode(piece, pad=True)))
    return b"".join([*lines, b"\n"])
