"""What `.gitattributes` files say of a path, exactly as git 2.39 does (attr.c).

The files of the tree alone: none of the machine, of a user or in a `.git`. Pure: reads no file.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from .patterns import Pattern, parse_pattern

State = bool | str | None
"""Set, unset, a value; None is unspecified."""

_States = list[tuple[str, State]]

_LINE_LIMIT_BYTES = 2048
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_NAME = re.compile(rb"[A-Za-z0-9_.][-A-Za-z0-9_.]*")
_MACRO = b"[attr]"
_QUOTED = re.compile(rb'"((?:[^"\\]|\\(?:[abfnrtv\\"]|[0-3][0-7]{2}))*)"')
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))")
_ESCAPED = dict(zip(b'abfnrtv\\"', b'\a\b\f\n\r\t\v\\"', strict=True))


class _Line(NamedTuple):
    pattern: Pattern
    states: _States


class Attributes:
    """The attributes of paths, by the `.gitattributes` files on the way to each.

    `read` gives the file of a directory, which is empty for the top, or None.
    """

    def __init__(self, read: Callable[[bytes], bytes | None]) -> None:
        self._read = read
        self._files: dict[bytes, list[tuple[bytes, list[_Line]]]] = {}
        self._macros: dict[str, _States] = {
            "binary": [("diff", False), ("merge", False), ("text", False)]
        }

    def find(self, path: bytes) -> dict[str, State]:
        """The attributes that something is said of, for a file."""
        found: dict[str, State] = {}
        above, _, name = path.rpartition(b"/")
        if (files := self._files.get(above)) is None:
            files = self._files_for(above)
        for base, rules in files:
            for pattern, states in rules:
                if not pattern.directory_only and pattern.matches(base, path, name):
                    self._fill(found, states)
        return found

    def _files_for(self, directory: bytes) -> list[tuple[bytes, list[_Line]]]:
        """The files that speak of names in a directory, the nearest first, each with its base."""
        if (found := self._files.get(directory)) is None:
            found = self._files_for(directory.rpartition(b"/")[0]) if directory else []
            if content := self._read(directory):
                rules, macros = _parse(content)
                found = [(directory + b"/" if directory else b"", rules), *found]
                if not directory:
                    self._macros |= macros
            self._files[directory] = found
        return found

    def _fill(self, found: dict[str, State], states: _States) -> None:
        for name, state in states:
            if name not in found:
                found[name] = state
                if state is True and name in self._macros:
                    self._fill(found, self._macros[name])


@lru_cache(maxsize=64)
def _parse(content: bytes) -> tuple[list[_Line], dict[str, _States]]:
    """The rules and macros of a file, the last line first."""
    rules: list[_Line] = []
    macros: dict[str, _States] = {}
    for line in reversed(content.removeprefix(_BOM).split(b"\n")):
        line = line.removesuffix(b"\r").partition(b"\0")[0]
        if len(line) >= _LINE_LIMIT_BYTES:
            continue
        line = line.lstrip(_BLANK)
        if not line or line.startswith(b"#"):
            continue
        if quoted := _QUOTED.match(line):
            name, rest = _ESCAPE.sub(_unescaped, quoted.group(1)), line[quoted.end() :]
        else:
            name = re.split(rb"[ \t\r\n]", line, maxsplit=1)[0]
            rest = line[len(name) :]
        is_macro = name.startswith(_MACRO) and len(name) > len(_MACRO)
        states = _states(rest)
        if states is None:
            continue
        if is_macro:
            name = name[len(_MACRO) :].lstrip(_BLANK)
            if _NAME.fullmatch(name):
                macros.setdefault(name.decode(), states)
        elif not (pattern := parse_pattern(name)).negative:
            rules.append(_Line(pattern, states))
    return rules, macros


def _states(text: bytes) -> _States | None:
    """The attributes of a line, the last first; None where git refuses the line."""
    states: _States = []
    for word in re.split(rb"[ \t\r\n]+", text.strip(_BLANK)):
        name, equals, value = word.partition(b"=")
        sign = name[:1] if name[:1] in (b"-", b"!") else b""
        name = name[len(sign) :]
        if not word:
            continue
        if not _NAME.fullmatch(name):
            return None
        state: State = True
        if sign:
            state = False if sign == b"-" else None
        elif equals:
            state = value.decode(errors="surrogateescape")
        states.append((name.decode(), state))
    return states[::-1]


def _unescaped(found: re.Match[bytes]) -> bytes:
    octal, char = found.groups()
    return bytes([int(octal, 8) if octal else _ESCAPED[char[0]]])
