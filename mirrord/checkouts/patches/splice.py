"""Hunks into the lines of a file: where `git apply` finds them, and where GNU patch does.

Pure. A line is bytes with its newline, which the last of a file may lack.
"""

from collections.abc import Callable, Iterable, Iterator

from .names import NotPlainError
from .parse import ADDED, CONTEXT, REMOVED, Hunk

_FUZZ = 5  # as SWE-bench calls patch
_LIMIT_BYTES = 16 * 1024**2  # as lines in Python it may take thirty times as much
_Key = Callable[[bytes], bytes]


class MisfitError(Exception):
    """A patch that the files do not fit."""


def splice(
    data: bytes, hunks: Iterable[Hunk], key: _Key | None = None, *, rejects: bool = False
) -> bytes:
    """Apply hunks as `git apply` does.

    With `key`, lines are equal where it makes them equal, and context stays as the file has it.
    With `rejects`, a hunk that does not fit is left out.
    """
    lines = split_lines(data)
    keys = [key(line) for line in lines] if key else lines
    patched = bytearray(len(lines))  # lines that a hunk left: no other may match them
    for hunk in hunks:
        before = [key(line) for line in hunk.before] if key else hunk.before
        try:
            at = _find(keys, patched, hunk, before)
        except MisfitError:
            if rejects:
                continue
            raise
        end = at + len(before)
        after = _merged(hunk, lines, at) if key else hunk.after
        lines[at:end] = after
        patched[at:end] = b"\1" * len(after)
        if key:
            keys[at:end] = [key(line) for line in after]
    return b"".join(lines)


def split_lines(data: bytes) -> list[bytes]:
    """Lines that end with a newline: `splitlines` would end them at a carriage return as well."""
    if len(data) > _LIMIT_BYTES:
        raise NotPlainError("a large file")
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _find(lines: list[bytes], patched: bytearray, hunk: Hunk, before: list[bytes]) -> int:
    """The index nearest to the hunk's number where its lines are.

    A hunk of line 0 or 1 fits only at the beginning, one without context at its end only at the
    end: its maker would have shown what is around it.
    """
    count, last = len(before), len(lines) - len(before)
    at_end = not hunk.trailing
    starts: Iterable[int]
    if hunk.old_start <= 1:
        starts = (0,)
    elif at_end:
        starts = (last,)
    else:
        starts = _outward(min(max(hunk.new_start - 1, 0), len(lines)), len(lines))
    has_ragged_end = count > 0 and not at_end and not before[-1].endswith(b"\n")
    for at in starts:
        is_possible = at == last if at_end else at <= last
        if is_possible and lines[at : at + count] == before and 1 not in patched[at : at + count]:
            return at
        if has_ragged_end and 0 <= at <= last and lines[at + count - 1].startswith(before[-1]):
            raise NotPlainError("half a line, which git takes for a whole one")
    raise MisfitError


def _outward(start: int, end: int) -> Iterator[int]:
    """From `start` to 0 and `end`: one step forwards, one back."""
    yield start
    for distance in range(1, max(start, end - start) + 1):
        if start + distance <= end:
            yield start + distance
        if start >= distance:
            yield start - distance


def _merged(hunk: Hunk, lines: list[bytes], at: int) -> list[bytes]:
    """What a hunk leaves, with the file's own lines of context."""
    merged = []
    for kind, line in hunk.lines:
        if kind != REMOVED:
            merged.append(lines[at] if kind == CONTEXT else line)
        at += kind != ADDED
    return merged


# -- GNU patch -------------------------------------------------------------------------------------


def splice_fuzzily(data: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Apply hunks as `patch --batch --forward --fuzz=5` (2.7) does: the outer context may differ.

    A patch that was applied already is a misfit.
    """
    file = _Fuzzy(split_lines(data))
    for number, hunk in enumerate(hunks):
        for fuzz in range(min(_FUZZ, max(hunk.leading, hunk.trailing)) + 1):
            where = file.find(hunk, fuzz)
            if where is not None:
                file.apply(hunk, where)
                break
            if number == 0 and file.find(hunk.reversed(), fuzz) is not None:
                raise MisfitError
        else:
            raise MisfitError
    return file.finish()


class _Fuzzy:
    """What GNU patch knows of a file on its way through the hunks. Lines count from 1, as there."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self._done: list[bytes] = []
        self._frozen = 0  # lines that are done
        self._offset = 0  # of the hunk before: the next is looked for as far from its number

    def find(self, hunk: Hunk, fuzz: int) -> int | None:
        """The line of a hunk whose outermost `fuzz` lines of context may differ. (locate_hunk)"""
        before = hunk.before
        number = hunk.old_start + (not before)
        first = number + self._offset
        if not before:
            return first
        leading, trailing, total = hunk.leading, hunk.trailing, len(self._lines)
        skip = fuzz + leading - max(leading, trailing)
        drop = fuzz + trailing - max(leading, trailing)
        lowest = max(self._frozen + 1 - (leading - skip), 1)
        highest = total - (len(before) - drop) + 1
        starts: Iterable[int]
        if skip < 0 and number <= 1:  # less context before than after: at the start of the file
            starts = (1,) if self._frozen <= leading and highest >= 1 else ()
        elif drop < 0:  # at its end
            starts = (at,) if (at := total - len(before) + 1) >= lowest else ()
        else:
            starts = _spread(first, lowest, highest)
        skip = max(skip, 0)
        wanted = before[skip : len(before) - max(drop, 0)]
        for start in starts:
            begin = start - 1 + skip
            fits = begin >= 0 and self._lines[begin : begin + len(wanted)] == wanted
            if fits or not wanted:
                self._offset += start - first
                return start or None  # 0 is what it answers for nothing found, too
        return None

    def apply(self, hunk: Hunk, where: int) -> None:
        at, end = where - 1, where - 1 + len(hunk.before)
        for kind, line in hunk.lines:
            if kind != CONTEXT:
                self._copy_to(at)
            if kind != ADDED:
                self._frozen += kind == REMOVED
                at += 1
            elif at == end:
                self._write(line)
            else:  # without a look at the line before: patch joins them where that has no newline
                self._done.append(line)

    def finish(self) -> bytes:
        self._copy_to(max(self._frozen, len(self._lines)))
        return b"".join(self._done)

    def _copy_to(self, line: int) -> None:
        if self._frozen > line:
            raise MisfitError
        for each in self._lines[self._frozen : line]:
            self._write(each)
        self._frozen = line

    def _write(self, line: bytes) -> None:
        if self._done and not self._done[-1].endswith(b"\n"):
            self._done.append(b"\n")
        self._done.append(line)


def _spread(first: int, lowest: int, highest: int) -> Iterator[int]:
    """Lines from `first` outwards, as patch walks them."""
    below, above = first - lowest, highest - first
    nearest = -above if above < 0 else min(below, 0)
    for distance in range(nearest, max(below, above) + 1):
        if distance <= above:
            yield first + distance
        if distance <= below:
            yield first - distance
