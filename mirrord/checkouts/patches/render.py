"""Changes as git prints them: `git diff --cached --binary --full-index -M` after `git add --all`.

Prints headers, added and deleted binary files and exact renames; libgit2 makes the hunks. Raises
NeedsGitError for the rest: a modified binary file (git's delta), a deletion and an addition that
may be a rename with changes, a diff driver such as `diff=rust` whose rules choose the text after
`@@`, and files over LARGE_BYTES.
"""

import base64
import re
import stat
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...git.objects.repository import Objects
from ...git.objects.text import DRIVERS, hunks
from ...git.objects.trees import TreeEntry
from ...git.patterns import Attributes, State
from ..files.manifest import blob_id
from .fit import Change
from .parse import NeedsGitError

LARGE_BYTES = 64 * 1024**2

_NO_ID = b"0" * 40
_NO_FILE = b"/dev/null"
_BINARY_LOOK_BYTES = 8000  # buffer_is_binary
_CANDIDATES = 100  # of one blob, that find_identical_files looks at
_LINE_BYTES = 52


class New(NamedTuple):
    """The new side of an entry of a diff; the first three fields are those of the old side."""

    path: bytes
    mode: int
    oid: str
    data: bytes


class Pair(NamedTuple):
    """An entry of a diff. Both sides of a rename have a path of their own."""

    old: TreeEntry | None
    new: New | None

    @property
    def status(self) -> str:
        if not (self.old and self.new):
            return "D" if self.old else "A"
        if self.old.path != self.new.path:
            return "R100"
        return "T" if _kind(self.old) != _kind(self.new) else "M"


def pair_up(objects: Objects, changes: Sequence[Change]) -> list[Pair]:
    """The entries of the diff, by path, with exact renames.

    Raises NeedsGitError where a rename may have to be found by content.
    """
    pairs = [
        Pair(old, None if mode is None else New(path, mode, blob_id(data).hex(), data))
        for path, mode, data, old in changes
    ]
    gone = [pair.old for pair in pairs if pair.old and not pair.new]
    come = [pair.new for pair in pairs if pair.new and not pair.old]
    if not gone or not come:
        return pairs
    sources = _exact_renames(gone, come)
    used = {source.path for source in sources.values()}
    left = [new for new in come if stat.S_ISREG(new.mode) and new.path not in sources]
    sizes = sorted(len(new.data) for new in left)
    for old in gone:
        is_left = stat.S_ISREG(old.mode) and old.path not in used
        if is_left and _may_match(objects.blob_size(old.oid), sizes):
            raise NeedsGitError("renames")
    return [
        Pair(sources.get(new.path, old), new) if new else Pair(old, None)
        for old, new in pairs
        if new or (old and old.path not in used)
    ]


def _exact_renames(gone: Sequence[TreeEntry], come: Sequence[New]) -> dict[bytes, TreeEntry]:
    """The source of each new path (find_identical_files): of the removed files with its blob, the
    first of the same name, or else the first.
    """
    by_oid: defaultdict[tuple[str, int], list[TreeEntry]] = defaultdict(list)
    for old in gone:
        by_oid[old.oid, _kind(old)].append(old)
    found = {}
    for new in come:
        if same := by_oid.get((new.oid, _kind(new))):
            name = new.path.rpartition(b"/")[2]
            named = (old for old in same[:_CANDIDATES] if old.path.rpartition(b"/")[2] == name)
            found[new.path] = chosen = next(named, same[0])
            same.remove(chosen)
    return found


def _may_match(size: int, sizes: list[int]) -> bool:
    """Whether one of the sorted sizes is near enough to be half the same (estimate_similarity)."""
    at = bisect_left(sizes, max(1, (size + 1) // 2))
    return size > 0 and at < len(sizes) and sizes[at] <= 2 * size


def _kind(side: TreeEntry | New) -> int:
    return stat.S_IFMT(side.mode)


@dataclass(eq=False, repr=False)
class Renderer:
    """Prints pairs; reads the old blobs one at a time."""

    objects: Objects
    attributes: Attributes

    def patch(self, pairs: Sequence[Pair]) -> Iterator[bytes]:
        """The patch, entry by entry; git splits one that changes its kind."""
        for old, new in pairs:
            if old and new and _kind(old) != _kind(new):
                yield self._entry(old, None, old, old)
                yield self._entry(None, new, new, new)
            elif side := new or old:
                yield self._entry(old, new, old or side, side)

    def name_status(self, pairs: Sequence[Pair]) -> Iterator[bytes]:
        """As `--name-status` prints it."""
        for pair in pairs:
            names = dict.fromkeys(quoted(side.path) for side in pair if side)
            yield b"\t".join([pair.status.encode(), *names]) + b"\n"

    def _entry(
        self, old: TreeEntry | None, new: New | None, a: TreeEntry | New, b: TreeEntry | New
    ) -> bytes:
        """From `diff --git` on (builtin_diff); `a` and `b` stand for a side that there is not."""
        a_name, b_name = quoted(a.path, b"a/"), quoted(b.path, b"b/")
        lines = [b"diff --git %s %s" % (a_name, b_name)]
        mode = b""
        if old is None:
            lines.append(b"new file mode %06o" % b.mode)
        elif new is None:
            lines.append(b"deleted file mode %06o" % a.mode)
        else:
            if a.mode == b.mode:
                mode = b" %06o" % a.mode
            else:
                lines += [b"old mode %06o" % a.mode, b"new mode %06o" % b.mode]
            if a.path != b.path:
                lines.append(b"similarity index 100%")
                lines += [b"rename from " + quoted(a.path), b"rename to " + quoted(b.path)]
            if a.oid == b.oid:
                return b"\n".join([*lines, b""])
        ids = [side.oid.encode() if side else _NO_ID for side in (old, new)]
        lines.append(b"index %s..%s%s\n" % (*ids, mode))
        before, after = self._read(old), new.data if new else b""
        if before == after:  # an empty file
            return b"\n".join(lines)
        state = self._state_of(b)  # and of `a`: a rename was exact
        if _is_binary(state, before) or _is_binary(state, after):
            return b"\n".join(lines) + _binary(before, after)
        driver = state if isinstance(state, str) else None
        if driver not in DRIVERS and before and after:
            raise NeedsGitError("driver")
        a_label, b_label = _label(a_name) if old else _NO_FILE, _label(b_name) if new else _NO_FILE
        head = b"%s--- %s\n+++ %s\n" % (b"\n".join(lines), a_label, b_label)
        return head + hunks(before, after, driver)

    def _state_of(self, side: TreeEntry | New | None) -> State:
        """The attribute `diff` of a file; a link or a submodule has none."""
        if side is None or not stat.S_ISREG(side.mode):
            return None
        return self.attributes.find(side.path).get("diff")

    def _read(self, old: TreeEntry | None) -> bytes:
        if old is None:
            return b""
        if old.is_submodule:
            return f"Subproject commit {old.oid}\n".encode()
        if self.objects.blob_size(old.oid) > LARGE_BYTES:
            raise NeedsGitError("size")
        return self.objects.read_blob(old.oid)


def _is_binary(state: State, data: bytes) -> bool:
    if isinstance(state, bool):
        return not state
    return data.find(b"\0", 0, _BINARY_LOOK_BYTES) >= 0


def _label(name: bytes) -> bytes:
    return name + b"\t" if b" " in name else name


def _binary(before: bytes, after: bytes) -> bytes:
    """git deflates at a level of its own (1), and tries no delta where one side is empty."""
    if before and after:
        raise NeedsGitError("binary")
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


# -- names as git quotes them ----------------------------------------------------------------------

_ODD = re.compile(rb'[\x00-\x1f"\\\x7f-\xff]')
_ESCAPES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


def quoted(path: bytes, prefix: bytes = b"") -> bytes:
    """As `core.quotePath` has it: in quotes where a byte is odd or not ASCII."""
    if not _ODD.search(path):
        return prefix + path
    return b'"%s%s"' % (prefix, _ODD.sub(_escaped, path))


def _escaped(found: re.Match[bytes]) -> bytes:
    byte = found[0][0]
    return b"\\%c" % _ESCAPES[byte] if byte in _ESCAPES else b"\\%03o" % byte
