"""The hunks between two texts, as git prints them.

libgit2's xdiff is git's. What differs: libgit2 cuts the text behind `@@` at 80 bytes and leaves a
blank there that git takes away.
"""

from __future__ import annotations

import re

import pygit2
from pygit2.enums import DiffOption

_FLAGS = DiffOption.FORCE_TEXT | DiffOption.INDENT_HEURISTIC
_TRAILING_BLANKS = re.compile(rb"(\n@@ [^\n]*?)[ \t\r]+(?=\n)")


def hunks(old: bytes, new: bytes) -> bytes:
    """The hunks, without any header; empty where the texts are equal."""
    if not old or not new:
        return _whole(old or new, b"-" if old else b"+")
    text = pygit2.Patch.create_from(old, new, flag=_FLAGS).data
    begin = text.find(b"\n@@ ")
    return _TRAILING_BLANKS.sub(rb"\1", text[begin:])[1:] if begin >= 0 else b""


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
    body = sign + text.replace(b"\n", b"\n" + sign)
    if text.endswith(b"\n"):
        return head + body[:-1]
    return head + body + b"\n\\ No newline at end of file\n"


def _lines(text: bytes) -> int:
    return text.count(b"\n") + (bool(text) and not text.endswith(b"\n"))
