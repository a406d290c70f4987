"""The names in a patch, as `git apply` (2.39) finds them in its headers. Pure; names are bytes."""

import re

from ...model import TREE_PATH_LIMIT_BYTES

_LIMIT_BYTES = 4 * TREE_PATH_LIMIT_BYTES
_STAMP = re.compile(
    rb"(?:\t| +)(?:\d\d)?\d\d-\d\d-\d\d(?: \d\d:\d\d:\d\d)?(?:\.\d+)?(?: [-+]\d\d:?\d\d)?$"
)
NULL = re.compile(rb"/dev/null(?:[ \t\r]|$)")
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)
_ESCAPES = dict(zip(b'abfnrtv\\"', b'\a\b\f\n\r\t\v\\"', strict=True))


class NotPlainError(Exception):
    """A patch that only git can judge."""


def traditional_name(line: bytes, strip: int) -> bytes | None:
    """The name after `--- ` or `+++ ` of a traditional patch, without a timestamp."""
    _must_be_sane(line)
    if not line.startswith(b'"') and (stamp := _STAMP.search(line)):
        return _stripped(line[: stamp.start()], strip)
    return name_of(line, strip)


def name_of(line: bytes, strip: int, *, has_tabs: bool = False) -> bytes | None:
    """A name without its first `strip` directories; None where it has not as many."""
    _must_be_sane(line)
    if line.startswith(b'"'):
        quoted, _ = _unquoted(line)
        if (name := _stripped(quoted, strip)) is None:
            raise NotPlainError("a quoted name without a directory")
        return name
    return _stripped(re.split(rb"\r" if has_tabs else rb"[\t\r]", line, maxsplit=1)[0], strip)


def _must_be_sane(line: bytes) -> None:
    """A long line of blanks would keep us for minutes; none is a path that may be written."""
    if b"\0" in line or len(line) > _LIMIT_BYTES:
        raise NotPlainError("a name with a NUL, or very long")


def _stripped(name: bytes, strip: int) -> bytes | None:
    parts = name.split(b"/", strip)
    if len(parts) <= strip or not parts[-1]:
        return None
    return re.sub(rb"/+", b"/", parts[-1])


def _unquoted(text: bytes) -> tuple[bytes, bytes]:
    """The name in C's quotes at the start of a text, and the rest of that."""
    found = _QUOTED.match(text)
    if not found:
        raise NotPlainError("a quote without an end")

    def unescaped(escape: re.Match[bytes]) -> bytes:
        if len(escape[1]) == 3:
            return bytes([int(escape[1], 8)])
        if (code := _ESCAPES.get(escape[1][0])) is None:
            raise NotPlainError("an escape that git does not know")
        return bytes([code])

    name = _ESCAPE.sub(unescaped, found[1])
    if b"\0" in name:
        raise NotPlainError("a NUL in a name")
    return name, text[found.end() :]


def header_name(rest: bytes, strip: int) -> bytes | None:
    """The name that both sides of `diff --git` have; None where they differ, as in a rename."""
    _must_be_sane(rest)
    if b'"' in rest:
        if not rest.startswith(b'"'):
            raise NotPlainError("a quote inside a header")
        first, rest = _unquoted(rest)
        rest = rest.lstrip(b" \t\r")
        second, _ = _unquoted(rest) if rest.startswith(b'"') else (rest, b"")
        names = [_after_slash(name, strip) for name in (first, second)]
        return names[0] if names[0] == names[1] else None
    name = _after_slash(rest, strip)
    if name is None:
        return None
    for at in (found.start() for found in re.finditer(rb"[\t ]", name)):
        if _after_slash(name[at + 1 :], strip) == name[:at]:
            return name[:at]
    return None


def _after_slash(name: bytes, strip: int) -> bytes | None:
    if strip == 0:
        return None if name.startswith(b"/") else name
    at = -1
    for _ in range(strip):
        if (at := name.find(b"/", at + 1)) < 0:
            return None
    return None if at == 0 else name[at + 1 :]
