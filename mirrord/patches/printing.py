"""Changes as `git diff --cached --binary --full-index -M` prints them after `git add --all`.

Headers, added and deleted binary files and exact renames are printed here; libgit2 makes the hunks.
git prints the modified files that are binary (its delta), or have a diff driver such as `diff=rust`
whose rules choose the text after `@@`. NeedsGitError leaves all to git: where a deletion and an
addition may be a rename with changes, and files over LARGE_BYTES. Sync; runs in workers.
"""

import base64
import re
import stat
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..git.objects.repository import Objects
from ..git.objects.text import DRIVERS, hunks
from ..git.objects.trees import TreeEntry
from ..git.patterns import Attributes, State
from .fit import Change
from .parse import NeedsGitError

LARGE_BYTES = 64 * 1024**2
_CANDIDATES = 100  # of one blob, that find_identical_files looks at
# git writes binary patches in lines of 52 bytes, each of 65 characters of base 85 (diff.c)
_LINE_BYTES = 52
_ENTRY = re.compile(rb"(?m)^(?=diff --git )")  # no line of a hunk or of base 85 begins so


def find_renames(objects: Objects, changes: Sequence[Change]) -> list[Change]:
    """Return the entries of the diff: an exact rename is a change whose `old` has another path.

    Raises NeedsGitError where a rename may have to be found by content.
    """
    removed = [change.old for change in changes if change.old and change.mode is None]
    added = [change for change in changes if not change.old]
    if not removed or not added:
        return list(changes)
    sources = _exact_renames(removed, added)
    used = {source.path for source in sources.values()}
    sizes = sorted(
        len(new.data) for new in added if stat.S_ISREG(new.mode or 0) and new.path not in sources
    )
    for old in removed:
        is_candidate = stat.S_ISREG(old.mode) and old.path not in used
        if is_candidate and _may_match(objects.blob_size(old.oid), sizes):
            raise NeedsGitError("renames")
    return [
        change._replace(old=sources.get(change.path, change.old))
        for change in changes
        if change.mode is not None or change.path not in used
    ]


def _exact_renames(removed: Sequence[TreeEntry], added: Sequence[Change]) -> dict[bytes, TreeEntry]:
    """Return the source of each new path: of the removed files with its blob the first of the same
    name, else the first (find_identical_files).
    """
    by_blob: defaultdict[tuple[str, int], list[TreeEntry]] = defaultdict(list)
    for old in removed:
        by_blob[old.oid, stat.S_IFMT(old.mode)].append(old)
    renames = {}
    for new in added:
        if same := by_blob.get((new.oid, stat.S_IFMT(new.mode or 0))):
            name = new.path.rpartition(b"/")[2]
            named = (old for old in same[:_CANDIDATES] if old.path.rpartition(b"/")[2] == name)
            renames[new.path] = chosen = next(named, same[0])
            same.remove(chosen)
    return renames


def _may_match(size: int, sizes: list[int]) -> bool:
    """Return whether one of the sorted sizes is near enough for similarity 50 %
    (estimate_similarity).
    """
    index = bisect_left(sizes, max(1, (size + 1) // 2))
    return size > 0 and index < len(sizes) and sizes[index] <= 2 * size


_NO_ID = b"0" * 40
_NO_FILE = b"/dev/null"


@dataclass(eq=False, repr=False)
class Renderer:
    """Prints changes; reads the old blobs one at a time. `reason` is why git printed some."""

    objects: Objects
    attributes: Attributes
    reason: str | None = None

    def patch(
        self, changes: Sequence[Change], by_git: Callable[[list[Change]], bytes | None]
    ) -> Iterator[bytes]:
        """Yield the patch entry by entry; `by_git` prints those that only git can, all at once."""
        theirs: Iterator[bytes] | None = None
        for number, change in enumerate(changes):
            try:
                yield self._printed(change)
            except NeedsGitError as error:
                if theirs is None:
                    self.reason = error.reason
                    theirs = self._by_git(changes[number:], by_git)
                yield next(theirs)

    def _by_git(
        self, changes: Sequence[Change], by_git: Callable[[list[Change]], bytes | None]
    ) -> Iterator[bytes]:
        """Return git's entries; raises NeedsGitError where it has to print all others, too."""
        left = [change for change in changes if self._needs_git(change)]
        entries = _ENTRY.split(by_git(left) or b"")[1:]
        if len(entries) != len(left):  # a long answer, or a change of kind
            raise NeedsGitError(self.reason or "size")
        return iter(entries)

    def _needs_git(self, change: Change) -> bool:
        try:
            self._printed(change)
        except NeedsGitError:
            return True
        return False

    def _printed(self, change: Change) -> bytes:
        """Return the entry of a change; git splits one that changes its kind."""
        old, new = change.old, None if change.mode is None else change
        if old and new and _changes_kind(change):
            return self._entry(change.path, old, None) + self._entry(change.path, None, new)
        return self._entry(change.path, old, new)

    def name_status(self, changes: Sequence[Change]) -> Iterator[bytes]:
        for change in changes:
            paths = dict.fromkeys([change.old.path if change.old else change.path, change.path])
            if change.old is None:
                status = b"A"
            elif change.mode is None:
                status = b"D"
            elif change.old.path != change.path:
                status = b"R100"
            else:
                status = b"T" if _changes_kind(change) else b"M"
            yield b"\t".join([status, *map(quoted, paths)]) + b"\n"

    def _entry(self, path: bytes, old: TreeEntry | None, new: Change | None) -> bytes:
        """Return one entry from `diff --git` on (builtin_diff)."""
        a_name, b_name = quoted(old.path if old else path, b"a/"), quoted(path, b"b/")
        old_mode, new_mode = old.mode if old else 0, (new.mode or 0) if new else 0
        old_id, new_id = old.oid.encode() if old else _NO_ID, new.oid.encode() if new else _NO_ID
        lines = [b"diff --git %s %s" % (a_name, b_name)]
        same_mode = b""
        if not old_mode:
            lines.append(b"new file mode %06o" % new_mode)
        elif not new_mode:
            lines.append(b"deleted file mode %06o" % old_mode)
        else:
            if old_mode == new_mode:
                same_mode = b" %06o" % old_mode
            else:
                lines += [b"old mode %06o" % old_mode, b"new mode %06o" % new_mode]
            if old and old.path != path:
                lines.append(b"similarity index 100%")
                lines += [b"rename from " + quoted(old.path), b"rename to " + quoted(path)]
            if old_id == new_id:
                return b"\n".join([*lines, b""])
        lines.append(b"index %s..%s%s\n" % (old_id, new_id, same_mode))
        before, after = self._read(old), new.data if new else b""
        if before == after:  # an empty file
            return b"\n".join(lines)
        is_regular = stat.S_ISREG(new_mode or old_mode)  # links and submodules have no attributes
        state = self.attributes.find(path).get("diff") if is_regular else None
        if _is_binary(state, before) or _is_binary(state, after):
            return b"\n".join(lines) + _binary(before, after)
        driver = state if isinstance(state, str) else None
        if driver not in DRIVERS and before and after:
            raise NeedsGitError("driver")
        a_label, b_label = _label(a_name) if old else _NO_FILE, _label(b_name) if new else _NO_FILE
        head = b"%s--- %s\n+++ %s\n" % (b"\n".join(lines), a_label, b_label)
        return head + hunks(before, after, driver)

    def _read(self, old: TreeEntry | None) -> bytes:
        if old is None:
            return b""
        if old.is_submodule:
            return f"Subproject commit {old.oid}\n".encode()
        if self.objects.blob_size(old.oid) > LARGE_BYTES:
            raise NeedsGitError("size")
        return self.objects.read_base_blob(old.oid)


def _changes_kind(change: Change) -> bool:
    return change.old is not None and stat.S_IFMT(change.old.mode) != stat.S_IFMT(change.mode or 0)


_BINARY_LOOK_BYTES = 8000  # buffer_is_binary


def _is_binary(state: State, data: bytes) -> bool:
    if isinstance(state, bool):
        return not state
    return data.find(b"\0", 0, _BINARY_LOOK_BYTES) >= 0


def _label(name: bytes) -> bytes:
    # for GNU patch, which would read what follows a blank as a timestamp
    return name + b"\t" if b" " in name else name


def _binary(before: bytes, after: bytes) -> bytes:
    """Return a binary patch; git tries a delta unless one side is empty."""
    if before and after:
        raise NeedsGitError("binary")
    return b"GIT binary patch\n" + _literal(after) + _literal(before)


def _literal(data: bytes) -> bytes:
    """Return data deflated at git's level 1 in base 85; the letter of a line gives its length."""
    deflated = zlib.compress(data, 1)
    lines = [b"literal %d\n" % len(data)]
    for start in range(0, len(deflated), _LINE_BYTES):
        piece = deflated[start : start + _LINE_BYTES]
        # A to Z for 1 to 26 bytes, a to z for 27 to 52
        letter = len(piece) + (ord("A") - 1 if len(piece) <= 26 else ord("a") - 27)
        lines.append(b"%c%s\n" % (letter, base64.b85encode(piece, pad=True)))
    return b"".join([*lines, b"\n"])


# bytes that quote_c_style escapes: controls, the quote, the backslash, and all above ASCII
_QUOTED = re.compile(rb'[\x00-\x1f"\\\x7f-\xff]')
_ESCAPES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


def quoted(path: bytes, prefix: bytes = b"") -> bytes:
    """Return a name as `core.quotePath` prints it: in quotes if a byte is special or not ASCII."""

    def escaped(match: re.Match[bytes]) -> bytes:
        byte = match[0][0]
        return b"\\%c" % _ESCAPES[byte] if byte in _ESCAPES else b"\\%03o" % byte

    if not _QUOTED.search(path):
        return prefix + path
    return b'"%s%s"' % (prefix, _QUOTED.sub(escaped, path))
