"""Parses patches as `git apply` does: names, modes, hunks.

Follows apply.c of git 2.39. Raises NeedsGitError for patches that it refuses, binary patches, and
those that versions of git read differently: git itself then decides. Pure; names and lines are
bytes.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import NamedTuple

from ..git.modes import SYMLINK
from ..model import TREE_PATH_LIMIT_BYTES
from ..quoting import unquoted

CONTEXT, REMOVED, ADDED = b" -+"

LIMIT_BYTES = 8 * 1024**2  # parsed lines can take a hundred times as much memory
_GIT = b"diff --git "
_BINARY = b"GIT binary patch"
_NAME = re.compile(  # a line that names a path, and maybe one of a hunk
    rb"(?m)^(diff --git |--- |\+\+\+ |copy (?:from|to) |rename (?:old|new|from|to) )(.*)$"
)
# at most the digits of SHA-1 on each side (gitdiff_index)
_INDEX = re.compile(rb"[^. ]{1,40}\.\.[^ ]{1,40}(?: (.*))?$", re.DOTALL)
_NO_NEWLINE = b"\\ "
_NO_NEWLINE_BYTES = 11  # without its newline; no translation of git has a shorter one
_SLASH, _TAB = b"/\t"
# blank lines at the end of a patch that GNU patch takes for cut off (pch.c)
_MAX_CUT_LINES = 3
_SWAPPED = {CONTEXT: CONTEXT, REMOVED: ADDED, ADDED: REMOVED}


class Hunk(NamedTuple):
    """A hunk; `lines` are pairs of a kind (CONTEXT, REMOVED, ADDED) and bytes with newline."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: list[tuple[int, bytes]]

    @property
    def before(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != ADDED]

    @property
    def after(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != REMOVED]

    @property
    def leading(self) -> int:
        """The number of lines of context before the first change."""
        return _context(self.lines)

    @property
    def trailing(self) -> int:
        return _context(reversed(self.lines))

    def with_lines(self, change: Callable[[bytes], bytes]) -> "Hunk":
        return self._replace(lines=[(kind, change(line)) for kind, line in self.lines])

    def reversed(self) -> "Hunk":
        lines = [(_SWAPPED[kind], line) for kind, line in self.lines]
        return Hunk(self.new_start, self.new_count, self.old_start, self.old_count, lines)


def _context(lines: Iterable[tuple[int, bytes]]) -> int:
    return sum(1 for _ in takewhile(lambda line: line[0] == CONTEXT, lines))


@dataclass(slots=True)
class FilePatch:
    """The part of a patch for one file. A mode that it does not name is 0.

    `is_new` and `is_delete` are None where the tree decides, as in a traditional patch.
    """

    old: bytes | None = None
    new: bytes | None = None
    old_mode: int = 0
    new_mode: int = 0
    is_new: bool | None = False
    is_delete: bool | None = False
    is_rename: bool = False
    is_copy: bool = False
    hunks: list[Hunk] = field(default_factory=list)

    def reversed(self) -> "FilePatch":
        return replace(
            self,
            old=self.new,
            new=self.old,
            old_mode=self.new_mode,
            new_mode=self.old_mode,
            is_new=self.is_delete,
            is_delete=self.is_new,
            hunks=[hunk.reversed() for hunk in self.hunks],
        )


def parse(patch: bytes, *, as_patch: bool = False) -> list[FilePatch]:
    """Parse a patch that ends with a newline; returns the part of each file in order.

    `as_patch` reads it as `patch -p1` (GNU 2.7): skips hunks without a header, believes a
    `/dev/null`, and restores up to three empty lines that an editor cut off the end.
    """
    if len(patch) > LIMIT_BYTES:
        raise NeedsGitError("a large patch")
    return _Parser(patch.split(b"\n")[:-1], as_patch=as_patch).parse()


_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_EPOCH = re.compile(rb"\t(?:1969-12-31|1970-01-01) ")  # `diff -N` of an absent file


class _Parser:
    def __init__(self, lines: list[bytes], *, as_patch: bool) -> None:
        self._lines = lines
        self._as_patch = as_patch
        self._at = 0
        # how many directories to strip from names; None until a name decides
        self._strip: int | None = 1 if as_patch else None

    def parse(self) -> list[FilePatch]:
        files = []
        while (patch := self._next_header()) is not None:
            while self._line(0).startswith(b"@@ -"):
                patch.hunks.append(self._hunk())
            if self._is_binary():  # also after a header that would make an empty file
                raise NeedsGitError("a binary file")
            if _is_whole(patch):
                files.append(patch)
            elif not self._as_patch:
                raise NeedsGitError("a header without hunks")
        if not files:
            raise NeedsGitError("a text without a patch")
        return files

    def _is_binary(self) -> bool:
        """Return whether a binary file begins here: its data, or the line that it differs."""
        line = self._line(0)
        differs = line.startswith((b"Binary files ", b"Files ")) and line.endswith(b" differ")
        return line.startswith(_BINARY) or (differs and not self._as_patch)

    def _line(self, ahead: int) -> bytes:
        index = self._at + ahead
        return self._lines[index] if index < len(self._lines) else b""

    # -- headers -----------------------------------------------------------------------------------

    def _next_header(self) -> FilePatch | None:
        while self._at < len(self._lines):
            line = self._line(0)
            if line.startswith(_GIT) and not (self._as_patch and self._is_traditional()):
                return self._git_header(line)
            if line.startswith(b"@@ -") and _HUNK.match(line) and not self._as_patch:
                raise NeedsGitError("a hunk without a header")
            is_header = line.startswith(b"--- ") and self._line(1).startswith(b"+++ ")
            if is_header and self._line(2).startswith(b"@@ -"):
                self._at += 2
                return self._traditional_header(line[4:], self._lines[self._at - 1][4:])
            self._at += 1
        return None

    def _is_traditional(self) -> bool:
        """Return whether a git header adds nothing to the two name lines at its end."""
        ahead = 2 if self._line(1).startswith(b"index ") else 1
        return self._line(ahead).startswith(b"--- ")

    def _traditional_header(self, first: bytes, second: bytes) -> FilePatch:
        if _EPOCH.search(first) or _EPOCH.search(second):
            raise NeedsGitError("a timestamp that may mean an absent file")
        if self._strip is None:
            bare = None if NULL.match(second) else traditional_name(second, 0)
            # guess_p_value: a name without a directory has no `a/` to strip
            if bare and b"/" not in bare:
                self._strip = 0
        strip = 1 if self._strip is None else self._strip
        patch = FilePatch(is_new=None, is_delete=None)
        if NULL.match(first):
            patch.new = traditional_name(second, strip)
            patch.is_new, patch.is_delete = True, False
        elif NULL.match(second):
            patch.old = traditional_name(first, strip)
            patch.is_new, patch.is_delete = False, True
        else:
            short = traditional_name(first, strip)
            name = traditional_name(second, strip) or short
            if short and name and name.startswith(short) and not second.startswith(b'"'):
                name = short  # the other one is `file.orig` or similar
            patch.old = patch.new = name
        if not (patch.old or patch.new):
            raise NeedsGitError("a header without a name")
        return patch

    def _git_header(self, line: bytes) -> FilePatch:
        strip = 1 if self._strip is None else self._strip
        patch, default = FilePatch(), header_name(line[len(_GIT) :], strip)
        self._at += 1
        began = self._at
        while self._at < len(self._lines) and not self._line(0).startswith(b"@@ -"):
            if not _read_extended(patch, self._line(0), default, strip):
                break
            if [patch.is_new, patch.is_delete, patch.is_rename, patch.is_copy].count(True) > 1:
                raise NeedsGitError("two kinds of change in one header")
            self._at += 1
        if self._at == began:
            raise NeedsGitError("a header of one line")
        if patch.old is None and patch.new is None:
            patch.old = patch.new = default
        if (patch.new is None and not patch.is_delete) or (patch.old is None and not patch.is_new):
            raise NeedsGitError("a header without a name")
        return patch

    # -- hunks -------------------------------------------------------------------------------------

    def _hunk(self) -> Hunk:
        match = _HUNK.match(self._line(0))
        if not match:
            raise NeedsGitError("a hunk without numbers")
        old_start, old_count, new_start, new_count = (
            1 if number is None else int(number) for number in match.groups()
        )
        old, new = old_count, new_count
        lines: list[tuple[int, bytes]] = []
        self._at += 1
        while (old > 0 or new > 0) and self._at < len(self._lines):
            line = self._lines[self._at]
            kind = line[0] if line else CONTEXT  # GNU diff omits the blank of an empty line
            if kind in _SWAPPED or (kind == _TAB and self._as_patch):
                lines.append((kind, line[1:] + b"\n") if kind != _TAB else (CONTEXT, line + b"\n"))
                old -= kind != ADDED
                new -= kind != REMOVED
            else:
                self._drop_newline(lines, line)
            self._at += 1
        if self._as_patch and self._at == len(self._lines) and new <= _MAX_CUT_LINES:
            lines += [(CONTEXT, b"\n")] * new
            old, new = old - new, 0
        is_empty = all(kind == CONTEXT for kind, _ in lines) and not self._as_patch
        if old or new or is_empty:
            raise NeedsGitError("a hunk with wrong numbers")
        if self._line(0).startswith(_NO_NEWLINE) and len(self._line(0)) >= _NO_NEWLINE_BYTES:
            self._drop_newline(lines, self._line(0))
            self._at += 1
        hunk = Hunk(old_start, old_count, new_start, new_count, lines)
        for side in (hunk.before, hunk.after):
            if any(not line.endswith(b"\n") for line in side[:-1]) or b"" in side:
                raise NeedsGitError("a line without a newline before another")
        return hunk

    @staticmethod
    def _drop_newline(lines: list[tuple[int, bytes]], line: bytes) -> None:
        is_marker = line.startswith(_NO_NEWLINE) and len(line) >= _NO_NEWLINE_BYTES
        if not is_marker or not lines or not lines[-1][1].endswith(b"\n"):
            raise NeedsGitError("a line that is not part of a hunk")
        kind, last = lines[-1]
        lines[-1] = kind, last[:-1]


def _is_whole(patch: FilePatch) -> bool:
    """Set `is_new` and `is_delete` from the hunks; returns False where the patch does nothing."""
    counts = [(hunk.old_count, hunk.new_count) for hunk in patch.hunks]
    has_old, has_new = any(old for old, _ in counts), any(new for _, new in counts)
    if patch.is_new is None and (has_old or len(counts) > 1):
        patch.is_new = False
    if patch.is_delete is None and (has_new or len(counts) > 1):
        patch.is_delete = False
    if (patch.is_new and has_old) or (patch.is_delete and has_new):
        raise NeedsGitError("a new or removed file with lines of both sides")
    modes = {patch.old_mode, patch.new_mode} - {0}
    if any(mode & 0o170000 not in (0o100000, SYMLINK) for mode in modes):
        raise NeedsGitError("a mode of something else than a file or a link")
    is_more = patch.is_new or patch.is_delete or patch.is_rename or patch.is_copy
    return bool(counts or is_more or len(modes) > 1)


def has_nul_in_name(patch: bytes) -> bool:
    """Return whether a header names a path with a NUL, behind which git (2.39) reads no further."""
    if b"\0" not in patch and b"\\000" not in patch:
        return False
    lines = patch.split(b"\n")
    for line, following in pairwise([*lines, b""]):
        named = bool(_NAME.match(line))
        if line.startswith((b"--- ", b"+++ ")):  # or lines of a hunk
            named, line = line.startswith(b"-") and following.startswith(b"+++ "), line + following
        if named and (b"\0" in line or (b'"' in line and b"\\000" in line)):
            return True
    return False


def named_paths(patch: bytes) -> set[bytes]:
    """Return every path whose content git may read, and their parents."""
    lines = (match.groups() for match in _NAME.finditer(patch))
    paths = {path.strip(b"/") for key, rest in lines for path in _names_in(key, rest)}
    above = {path[:end] for path in paths for end, byte in enumerate(path) if byte == _SLASH}
    return {path for path in paths | above if path}


def _names_in(key: bytes, rest: bytes) -> Iterator[bytes]:
    """Yield the paths that a line of a header may name, with any number of its directories."""
    for strip in (0, 1):
        with suppress(NeedsGitError):
            if key == _GIT:
                yield header_name(rest, strip) or b""
            elif key in (b"--- ", b"+++ "):
                yield name_of(rest, strip) or b""
                yield traditional_name(rest, strip) or b""
            else:
                yield name_of(rest, strip, has_tabs=True) or b""


_FILE = re.compile(rb"(?m)^(?=diff --git )")


def split_binary(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch into its files of text and its binary ones, by their git headers."""
    mark = b"\n" + _BINARY
    parts = _FILE.split(patch) if mark in patch else [patch]
    text, binary = ([part for part in parts if (mark in part) == which] for which in (False, True))
    return b"".join(text), b"".join(binary)


# -- the lines of a git header ---------------------------------------------------------------------


_EXTENDED = re.compile(
    rb"(--- |\+\+\+ |(?:old|new) mode |(?:deleted|new) file mode |copy (?:from|to) "
    rb"|rename (?:old|new|from|to) |(?:dis)?similarity index |index )(.*)",
    re.DOTALL,
)


def _read_extended(patch: FilePatch, line: bytes, default: bytes | None, strip: int) -> bool:
    """Read one line of a git header into `patch`; False where it is not one."""
    if not (match := _EXTENDED.match(line)):
        return False
    key, rest = match.groups()
    match key.split(b" ")[0], key.split(b" ")[1]:
        case b"---", _:
            patch.old = _verified(patch.old, rest, is_null=bool(patch.is_new), strip=strip)
        case b"+++", _:
            patch.new = _verified(patch.new, rest, is_null=bool(patch.is_delete), strip=strip)
        case b"old", _:
            patch.old_mode = _mode(rest)
        case b"new", b"mode":
            patch.new_mode = _mode(rest)
        case b"deleted", _:
            patch.is_delete, patch.old, patch.old_mode = True, default, _mode(rest)
        case b"new", _:
            patch.is_new, patch.new, patch.new_mode = True, default, _mode(rest)
        case b"index", _:
            if (index := _INDEX.match(rest)) and index[1] is not None:
                patch.old_mode = _mode(index[1])
        case b"copy" | b"rename" as kind, side:
            patch.is_copy |= kind == b"copy"
            patch.is_rename |= kind == b"rename"
            name = name_of(rest, max(strip - 1, 0), has_tabs=True)
            if side in (b"from", b"old"):
                patch.old = name
            else:
                patch.new = name
    return True


def _verified(named: bytes | None, rest: bytes, *, is_null: bool, strip: int) -> bytes | None:
    if is_null:
        if named is not None or not NULL.match(rest):
            raise NeedsGitError("a name where /dev/null should be")
        return None
    name = name_of(rest, strip)
    if named is not None and name != named:
        raise NeedsGitError("two names for one side")
    return name


_MODE = re.compile(rb"([0-7]{1,7})(?:[ \t\r]|$)")


def _mode(text: bytes) -> int:
    if not (match := _MODE.match(text)):
        raise NeedsGitError("a mode that is not a number")
    return int(match[1], 8)


# -- names -----------------------------------------------------------------------------------------

_NAME_LIMIT_BYTES = 4 * TREE_PATH_LIMIT_BYTES
# the times that git takes off a name (diff_timestamp_len in apply.c)
_STAMP = re.compile(
    rb"(?:\t| +)(?:\d\d)?\d\d-\d\d-\d\d(?: \d\d:\d\d:\d\d)?(?:\.\d+)?(?: [-+]\d\d:?\d\d)?$"
)
# as is_dev_null of apply.c: with white space after it
NULL = re.compile(rb"/dev/null(?:[ \t\r]|$)")


class NeedsGitError(Exception):
    """Only git can read, apply or print this; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def traditional_name(line: bytes, strip: int) -> bytes | None:
    """Return the name after `--- ` or `+++ ` of a traditional patch, without a timestamp."""
    _must_be_sane(line)
    if not line.startswith(b'"') and (stamp := _STAMP.search(line)):
        return _stripped(line[: stamp.start()], strip)
    return name_of(line, strip)


def name_of(line: bytes, strip: int, *, has_tabs: bool = False) -> bytes | None:
    """Return a name without its first `strip` directories; None where it has fewer."""
    _must_be_sane(line)
    if line.startswith(b'"'):
        quoted, _ = _unquoted(line)
        if (name := _stripped(quoted, strip)) is None:
            raise NeedsGitError("a quoted name without a directory")
        return name
    return _stripped(re.split(rb"\r" if has_tabs else rb"[\t\r]", line, maxsplit=1)[0], strip)


def _must_be_sane(line: bytes) -> None:
    """Refuse very long lines: the regular expressions here take minutes on one of blanks."""
    if b"\0" in line or len(line) > _NAME_LIMIT_BYTES:
        raise NeedsGitError("a name with a NUL, or very long")


def _stripped(name: bytes, strip: int) -> bytes | None:
    parts = name.split(b"/", strip)
    if len(parts) <= strip or not parts[-1]:
        return None
    return re.sub(rb"/+", b"/", parts[-1])


def _unquoted(text: bytes) -> tuple[bytes, bytes]:
    split = unquoted(text)
    if split is None or b"\0" in split[0]:
        raise NeedsGitError("a quote without an end, or with an unknown escape")
    return split


def header_name(rest: bytes, strip: int) -> bytes | None:
    """Return the name on both sides of `diff --git`; None where they differ, as in a rename."""
    _must_be_sane(rest)
    if b'"' in rest:
        if not rest.startswith(b'"'):
            raise NeedsGitError("a quote inside a header")
        first, rest = _unquoted(rest)
        rest = rest.lstrip(b" \t\r")
        second, _ = _unquoted(rest) if rest.startswith(b'"') else (rest, b"")
        names = [_after_slash(name, strip) for name in (first, second)]
        return names[0] if names[0] == names[1] else None
    name = _after_slash(rest, strip)
    if name is None:
        return None
    for blank in (match.start() for match in re.finditer(rb"[\t ]", name)):
        if _after_slash(name[blank + 1 :], strip) == name[:blank]:
            return name[:blank]
    return None


def _after_slash(name: bytes, strip: int) -> bytes | None:
    if strip == 0:
        return None if name.startswith(b"/") else name
    slash = -1
    for _ in range(strip):
        if (slash := name.find(b"/", slash + 1)) < 0:
            return None
    return None if slash == 0 else name[slash + 1 :]
