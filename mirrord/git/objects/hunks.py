"""The hunks between two texts, as git prints them.

libgit2's xdiff is git's. The text behind `@@` is found here: libgit2 cuts it in another way, and
takes a driver from the attributes of a repository alone.
"""

import re
from collections.abc import Iterator

import pygit2
from pygit2.enums import DiffOption

_FLAGS = DiffOption.FORCE_TEXT | DiffOption.INDENT_HEURISTIC
_HEADER = re.compile(rb"\n@@ -(\d+)(?:,(\d+))? (\S+) @@[^\n]*")
_NAME_BYTES = 80
# def_ff of xdiff, and userdiff.c; other drivers have lists of rules, some of them negative
_NAMES = {
    None: re.compile(rb"([A-Za-z_$].*)"),
    "python": re.compile(rb"[ \t]*((?:class|(?:async[ \t]+)?def)[ \t].*)"),
}
DRIVERS = frozenset(_NAMES)
"""The values of the attribute `diff` that `hunks` knows; None is any text."""


def hunks(old: bytes, new: bytes, driver: str | None = None) -> bytes:
    """The hunks, without any header; empty where the texts are equal."""
    if not old or not new:
        return _whole(old or new, b"-" if old else b"+")
    text = pygit2.Patch.create_from(old, new, flag=_FLAGS).data
    begin = text.find(b"\n@@ ")
    return b"".join(_named(text[begin:], old, driver)) if begin >= 0 else b""


def _named(text: bytes, old: bytes, driver: str | None) -> Iterator[bytes]:
    """The hunks with git's text behind `@@`: of the lines above one, the last that is a name.

    The expression of a driver matches no line that is not UTF-8, where that is git's locale.
    """
    lines, names = old.split(b"\n"), _NAMES[driver]
    name, above, at = b"", -1, 1
    for header in _HEADER.finditer(text):
        start, count, new = header.groups()
        first = int(start) - (count != b"0")  # xdl_emit_hunk_hdr
        for line in range(first - 1, above, -1):
            found = names.match(lines[line])
            if found and (driver is None or _utf8_part(lines[line]) == lines[line]):
                name = b" " + _utf8_part(found[1][:_NAME_BYTES].rstrip(b" \t\r"))
                break
        above = first - 1
        span = start if count is None else start + b"," + count
        yield b"%s@@ -%s %s @@%s" % (text[at : header.start() + 1], span, new, name)
        at = header.end()
    yield text[at:]


def _utf8_part(text: bytes) -> bytes:
    """What stands before the first byte that is not UTF-8 (sane_truncate_line of diff.c)."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def count_lines(old: bytes, new: bytes) -> tuple[int, int]:
    """How many lines are added and removed."""
    if not old or not new:
        return _lines(new), _lines(old)
    _, added, removed = pygit2.Patch.create_from(old, new, flag=_FLAGS).line_stats
    return added, removed


def _whole(text: bytes, sign: bytes) -> bytes:
    """The hunk of a text that comes or goes: large ones are common, and need no search."""
    if not text:
        return b""
    count = _lines(text)
    span = b"1" if count == 1 else b"1,%d" % count
    head = b"@@ -%s +0,0 @@\n" % span if sign == b"-" else b"@@ -0,0 +%s @@\n" % span
    end = b"\n" if text.endswith(b"\n") else b"\n\\ No newline at end of file\n"
    body = text.removesuffix(b"\n").replace(b"\n", b"\n" + sign)
    return b"".join((head, sign, body, end))


def _lines(text: bytes) -> int:
    return text.count(b"\n") + (bool(text) and not text.endswith(b"\n"))
