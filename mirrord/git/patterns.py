"""`.gitignore` and `.gitattributes`: which paths they match, exactly as in git 2.39.

Follows `parse_path_pattern`, `match_basename` and `match_pathname` of dir.c, and attr.c; the
patterns of wildmatch.c become regular expressions. Only files of the tree count: none of the host,
of a user or in a `.git`. Pure: reads no file. Paths are relative to the top of the tree.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ..quoting import decode_name, unquoted

# git skips one at the start of either file
_BOM = b"\xef\xbb\xbf"
_ALPHA = bytes([*range(0x41, 0x5B), *range(0x61, 0x7B)])
_PUNCT = rb"!\"#$%&'()*+,-./:;<=>?@[\]^_`{|}~"
_NEVER = re.compile(rb"(?!)")


class Pattern(NamedTuple):
    """One pattern. `literal` is its part before the first wildcard.

    With `is_name` it matches only the last component of a path; with `suffix` that one's end.
    """

    text: bytes
    literal: bytes
    suffix: bytes | None
    is_name: bool
    directory_only: bool
    negative: bool

    def matches(self, base: bytes, path: bytes, name: bytes) -> bool:
        """Return whether it matches `path`, whose last component is `name`.

        `base` is the directory of the pattern's file: empty, or a prefix of `path` with a slash.
        """
        if self.is_name:
            if len(self.literal) == len(self.text):
                return name == self.text
            if self.suffix is not None:
                return name.endswith(self.suffix)
            return bool(_compiled(self.text, False).fullmatch(name))
        position = len(base)
        if not path.startswith(self.literal, position):
            return False
        position += len(self.literal)
        if len(self.literal) == len(self.text):
            return position == len(path)
        # git matches the remainder by itself: `foo**/x` is `foo`, then `**/x`
        return bool(_compiled(self.text[len(self.literal) :], True).fullmatch(path, position))


_SPECIAL = re.compile(rb"[*?[\\]")


def parse_pattern(text: bytes) -> Pattern:
    negative = text.startswith(b"!")
    text = text[negative:]
    match = _SPECIAL.search(text)
    literal = len(text) if match is None else match.start()
    # `no_wildcard` runs before the slash at the end is removed
    is_suffix = text.startswith(b"*") and not _SPECIAL.search(text, 1)
    directory_only = text.endswith(b"/")
    if directory_only:
        text = text[:-1]
    is_name = b"/" not in text
    suffix = text[1:] if is_suffix else None
    if not is_name and text.startswith(b"/"):
        text, literal = text[1:], literal - 1
    return Pattern(text, text[:literal], suffix, is_name, directory_only, negative)


class _IgnoreFile(NamedTuple):
    """The patterns of a `.gitignore`, the last first, as they are tried.

    Most paths match none. `names`, `suffixes`, `starts` and `globs` join all patterns, so that four
    look-ups rule them out.
    """

    patterns: list[Pattern]
    names: frozenset[bytes]
    suffixes: tuple[bytes, ...]
    starts: tuple[bytes, ...]
    globs: re.Pattern[bytes]

    def find(self, base: bytes, path: bytes, name: bytes, is_directory: bool) -> Pattern | None:
        may_match = (
            name in self.names
            or name.endswith(self.suffixes)
            or path.startswith(self.starts, len(base))
            or self.globs.fullmatch(name)
        )
        for pattern in self.patterns if may_match else ():
            if (is_directory or not pattern.directory_only) and pattern.matches(base, path, name):
                return pattern
        return None


@lru_cache(maxsize=64)
def _parse_ignore_file(content: bytes) -> _IgnoreFile:
    patterns = []
    for line in content.removeprefix(_BOM).split(b"\n"):
        if line and not line.startswith(b"#"):
            line = line.removesuffix(b"\r").partition(b"\0")[0]
            patterns.append(parse_pattern(_trimmed(line)))
    of_names = [pattern for pattern in patterns if pattern.is_name]
    globs = [pattern for pattern in of_names if pattern.literal != pattern.text]
    others = [_compiled(glob.text, False).pattern for glob in globs if glob.suffix is None]
    return _IgnoreFile(
        patterns[::-1],
        frozenset(pattern.text for pattern in of_names if pattern.literal == pattern.text),
        tuple(pattern.suffix for pattern in globs if pattern.suffix is not None),
        tuple(pattern.literal for pattern in patterns if not pattern.is_name),
        re.compile(b"|".join(others) or _NEVER.pattern, re.DOTALL),
    )


def _trimmed(line: bytes) -> bytes:
    """Strip trailing blanks, except one after a backslash."""
    kept = line.rstrip(b" ")
    is_escaped = (len(kept) - len(kept.rstrip(b"\\"))) % 2
    return line[: len(kept) + is_escaped]


class Ignores:
    """The ignored paths of a tree. Everything in an ignored directory is ignored.

    `read` returns the `.gitignore` of a directory, or None.
    """

    def __init__(self, read: Callable[[bytes], bytes | None]) -> None:
        self._read = read
        self._directories: dict[bytes, list[tuple[bytes, _IgnoreFile]] | None] = {}

    def match(self, path: bytes, *, is_directory: bool = False) -> bool:
        above, _, name = path.rpartition(b"/")
        if above not in self._directories:
            self._enter(above)
        if (files := self._directories[above]) is None:
            return True
        for base, file in files:
            if pattern := file.find(base, path, name, is_directory):
                return not pattern.negative
        return False

    def _enter(self, directory: bytes) -> None:
        """Find the files that apply in a directory, the nearest first; None if it is ignored."""
        files: list[tuple[bytes, _IgnoreFile]] | None = []
        if directory:
            is_ignored = self.match(directory, is_directory=True)
            files = None if is_ignored else self._directories[directory.rpartition(b"/")[0]]
        if files is not None and (content := self._read(directory)):
            base = directory + b"/" if directory else b""
            files = [(base, _parse_ignore_file(content)), *files]
        self._directories[directory] = files


@lru_cache(maxsize=1024)
def _compiled(glob: bytes, is_path: bool) -> re.Pattern[bytes]:
    """Translate a wildmatch glob; with `is_path`, `*` matches no slash."""
    try:
        return re.compile(b"".join(_translated(glob, is_path)), re.DOTALL)
    except _NeverMatches:
        return _NEVER


class _NeverMatches(Exception):
    """git aborts the match of such a glob."""


def _translated(glob: bytes, is_path: bool) -> Iterator[bytes]:
    some, one = (b"[^/]*", b"[^/]") if is_path else (b".*", b".")
    position, end = 0, len(glob)
    while position < end:
        char = glob[position : position + 1]
        if char == b"*":
            stars = position
            while glob[position : position + 1] == b"*":
                position += 1
            following = glob[position : position + 2]
            opens = stars == 0 or glob[stars - 1 : stars] == b"/"
            closes = following[:1] in (b"", b"/") or following == b"\\/"
            if position - stars == 1 or not (is_path and opens and closes):
                yield some
            elif following[:1] == b"/":
                yield b"(?:.*/)?"
                position += 1
            else:
                yield b".*"
        elif char == b"?":
            yield one
            position += 1
        elif char == b"[":
            members, negated, position = _bracket(glob, position + 1)
            if is_path:
                members = members | {0x2F} if negated else members - {0x2F}
            inside = b"".join(b"\\x%02x" % member for member in sorted(members))
            if inside:
                yield b"[%s%s]" % (b"^" if negated else b"", inside)
            else:
                yield b"." if negated else b"(?!)"
        else:
            position += char == b"\\"
            if position == end:
                raise _NeverMatches
            yield re.escape(glob[position : position + 1])
            position += 1


_CLASSES = {
    b"alpha": _ALPHA,
    b"digit": b"0123456789",
    b"alnum": _ALPHA + b"0123456789",
    b"blank": b" \t",
    b"cntrl": bytes([*range(32), 127]),
    b"graph": bytes(range(33, 127)),
    b"print": bytes(range(32, 127)),
    b"lower": _ALPHA[26:],
    b"upper": _ALPHA[:26],
    b"punct": _PUNCT,
    b"space": b" \t\n\r\v\f",
    b"xdigit": b"0123456789abcdefABCDEF",
}


def _bracket(glob: bytes, position: int) -> tuple[set[int], bool, int]:
    """Return a bracket's members, whether it is negated, and the position after it.

    Its content begins at `position`. A `]` or `-` in first place is a member (`dowild`).
    """
    negated = glob[position : position + 1] in (b"!", b"^")
    position += negated
    members: set[int] = set()
    previous, is_first = -1, True
    while is_first or glob[position : position + 1] != b"]":
        is_first = False
        char = glob[position : position + 1]
        if char == b"-" and previous > 0 and glob[position + 1 : position + 2] not in (b"", b"]"):
            position += 1 + (glob[position + 1 : position + 2] == b"\\")
            members |= {*range(previous, _byte(glob, position) + 1)}
            previous = -1
        elif char == b"[" and glob[position + 1 : position + 2] == b":":
            closing = glob.find(b"]", position + 2)
            if closing < 0:
                raise _NeverMatches
            if closing > position + 2 and glob[closing - 1 : closing] == b":":
                if glob[position + 2 : closing - 1] not in _CLASSES:
                    raise _NeverMatches
                members |= {*_CLASSES[glob[position + 2 : closing - 1]]}
                position, previous = closing, -1
            else:
                members.add(previous := char[0])
        else:
            position += char == b"\\"
            members.add(previous := _byte(glob, position))
        position += 1
    return members, negated, position + 1


def _byte(glob: bytes, position: int) -> int:
    if position >= len(glob):
        raise _NeverMatches
    return glob[position]


# -- attributes ------------------------------------------------------------------------------------

# True is set, False unset, a string a value, None unspecified
State = bool | str | None
_States = list[tuple[str, State]]

# git ignores longer lines of .gitattributes (ATTR_MAX_LINE_LENGTH, since 2.38.3)
_LINE_LIMIT_BYTES = 2048
_BLANK = b" \t\r\n"
_NAME = re.compile(rb"[A-Za-z0-9_.][-A-Za-z0-9_.]*")
_MACRO = b"[attr]"


class _PatternLine(NamedTuple):
    pattern: Pattern
    states: _States


class _AttributeFile:
    """The lines of a `.gitattributes`, the last first, by the ends of the names they can match."""

    def __init__(self, rules: list[_PatternLine]) -> None:
        self._rules = rules
        self._any: list[int] = []
        self._by_end: dict[bytes, list[int]] = {}
        self._near: dict[bytes, list[_PatternLine]] = {}
        for number, (pattern, _) in enumerate(rules):
            end = _end_of(pattern.suffix or b"")
            if pattern.is_name and end and end == pattern.suffix:
                self._by_end.setdefault(end, []).append(number)
            else:
                self._any.append(number)

    def near(self, name: bytes) -> list[_PatternLine]:
        """Return the lines that can match a name, in order."""
        end = _end_of(name)
        if (rules := self._near.get(end)) is None:
            numbers = sorted([*self._any, *self._by_end.get(end, ())])
            rules = self._near[end] = [self._rules[number] for number in numbers]
        return rules


def _end_of(name: bytes) -> bytes:
    """Return a name from its last dot on; empty without one."""
    return name[dot:] if (dot := name.rfind(b".")) >= 0 else b""


class Attributes:
    """The attributes of paths. `read` returns the `.gitattributes` of a directory, or None."""

    def __init__(self, read: Callable[[bytes], bytes | None]) -> None:
        self._read = read
        self._files: dict[bytes, list[tuple[bytes, _AttributeFile]]] = {}
        self._macros = {"binary": _states(b"-diff -merge -text") or []}

    def find(self, path: bytes) -> dict[str, State]:
        """Return the attributes of a file that are mentioned."""
        attributes: dict[str, State] = {}
        above, _, name = path.rpartition(b"/")
        if (files := self._files.get(above)) is None:
            files = self._files_for(above)
        for base, rules in files:
            for pattern, states in rules.near(name):
                if not pattern.directory_only and pattern.matches(base, path, name):
                    self._fill(attributes, states)
        return attributes

    def _files_for(self, directory: bytes) -> list[tuple[bytes, _AttributeFile]]:
        """Return the files that apply in a directory, the nearest first, each with its base."""
        if (files := self._files.get(directory)) is None:
            files = self._files_for(directory.rpartition(b"/")[0]) if directory else []
            if content := self._read(directory):
                rules, macros = _parse(content)
                files = [(directory + b"/" if directory else b"", _AttributeFile(rules)), *files]
                # git takes macros from the file at the top of the tree alone
                if not directory:
                    self._macros |= macros
            self._files[directory] = files
        return files

    def _fill(self, attributes: dict[str, State], states: _States) -> None:
        for name, state in states:
            if name not in attributes:
                attributes[name] = state
                if state is True and name in self._macros:
                    self._fill(attributes, self._macros[name])


@lru_cache(maxsize=64)
def _parse(content: bytes) -> tuple[list[_PatternLine], dict[str, _States]]:
    rules: list[_PatternLine] = []
    macros: dict[str, _States] = {}
    for line in reversed(content.removeprefix(_BOM).split(b"\n")):
        line = line.removesuffix(b"\r").partition(b"\0")[0]
        if len(line) >= _LINE_LIMIT_BYTES:
            continue
        line = line.lstrip(_BLANK)
        if not line or line.startswith(b"#"):
            continue
        if (quoted := unquoted(line)) is not None:
            name, words = quoted
        else:
            name = re.split(rb"[ \t\r\n]", line, maxsplit=1)[0]
            words = line[len(name) :]
        is_macro = name.startswith(_MACRO) and len(name) > len(_MACRO)
        if (states := _states(words)) is None:
            continue
        if is_macro:
            name = name[len(_MACRO) :].lstrip(_BLANK)
            if _NAME.fullmatch(name):
                macros.setdefault(name.decode(), states)
        # git warns of a negative pattern among attributes, and skips its line
        elif not (pattern := parse_pattern(name)).negative:
            rules.append(_PatternLine(pattern, states))
    return rules, macros


def _states(text: bytes) -> _States | None:
    """Parse the attributes of a line, the last first; None if git rejects the line."""
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
            state = decode_name(value)
        states.append((name.decode(), state))
    return states[::-1]
