"""`.gitignore` and `.gitattributes` compared with `git check-ignore` and `git check-attr`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from gitrepos import git

from mirrord.git.patterns import Attributes, Ignores

CASES = int(os.environ.get("MIRRORD_PATTERN_CASES", "40"))
ATOMS = [
    b"a", b"b", b"ab", b"a.o", b"*", b"**", b"***", b"?", b"/", b"/", b"[a-c]", b"[!a]", b"[^/]", b"[]a]", b"[[:alpha:]]", b"[[:bogus:]]",
    b"[a", b"\\*", b"\\", b"\\ ", b" ", b".o", b"\xff", b"[\\]]", b"[a-]", b"[--0]", b"[[:]", b"[[::]]", b"-", b"\\/",
    b"[[:space:][:digit:]x]", b"[+--]", b"[\\a-\\c]",
]  # fmt: skip
NAMES = [b"a", b"b", b"ab", b"a.o", b"x.o", b"a b", b"*", b"\xff", b"a*", b"foo", b"-", b"]", b"[", b" ", b"b ", b"\\", b"aab"]  # fmt: skip
STATES = [b"text", b"-text", b"!text", b"text=auto", b"binary", b"m", b"-m", b"eol=crlf text", b"text -text", b"x-=1 text"]  # fmt: skip
ASKED = ("text", "eol", "diff", "m")


class Rules:
    """Random rule files at the top, in `a` and in `a/b`."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.random = place, Random(seed)
        git(place, "init", "--quiet")
        (place / "a/b").mkdir(parents=True)
        names = [[self.random.choice(NAMES) for _ in range(4)] for _ in range(300)]
        self.paths = sorted({b"/".join(each[: self.random.randint(1, 4)]) for each in names})

    def iter_files(self, name: str) -> Iterator[dict[bytes, bytes]]:
        for _ in range(CASES):
            chance = self.random.random()
            directories = [
                b"",
                *([b"a"] if chance < 0.5 else []),
                *([b"a/b"] if chance < 0.3 else []),
            ]
            files = {directory: self.content() for directory in directories}
            if name == ".gitattributes":
                files = {
                    directory: self.with_states(content) for directory, content in files.items()
                }
            for directory in (b"", b"a", b"a/b"):
                file = self.place / os.fsdecode(directory) / name
                file.unlink(missing_ok=True)
                if directory in files:
                    file.write_bytes(files[directory])
            yield files

    def content(self) -> bytes:
        mark = b"\xef\xbb\xbf" if self.random.random() < 0.05 else b""
        lines = b"\n".join(self.pattern() for _ in range(self.random.randint(1, 4)))
        return mark + lines + (b"\n" if self.random.random() < 0.8 else b"")

    def pattern(self) -> bytes:
        pattern = b"".join(self.random.choice(ATOMS) for _ in range(self.random.randint(1, 5)))
        for chance, before, behind in (
            (0.25, b"!", b""), (0.25, b"", b"/"), (0.15, b"/", b""), (0.1, b"", b"  "), (0.1, b"", b"\r"),
        ):  # fmt: skip
            if self.random.random() < chance:
                pattern = before + pattern + behind
        return pattern

    def with_states(self, content: bytes) -> bytes:
        lines = []
        for line in content.split(b"\n"):
            if self.random.random() < 0.3:
                line = b'"' + re.sub(rb'(["\\])', rb"\\\1", line).replace(b"\xff", b"\\377") + b'"'
            lines.append(line + b" " + self.random.choice(STATES))
        return b"\n".join([*lines, b"[attr]m text=1 eol=lf", b""])


@pytest.mark.parametrize("seed", [1, 2])
def test_paths_are_ignored_as_by_git(tmp_path: Path, seed: int) -> None:
    """Random patterns of every kind, malformed ones too, at three levels."""
    rules = Rules(tmp_path, seed)
    for files in rules.iter_files(".gitignore"):
        named = b"\0".join(b"./" + path for path in rules.paths)
        asked = git(
            tmp_path, "check-ignore", "-z", "--no-index", "--stdin", stdin=named, check=False
        )
        theirs = {os.fsencode(each).removeprefix(b"./") for each in asked.split("\0") if each}
        ignores = Ignores(files.get)
        directories = {b"a", b"a/b"}
        ours = {
            path for path in rules.paths if ignores.match(path, is_directory=path in directories)
        }
        assert ours == theirs, files


@pytest.mark.parametrize("seed", [1, 2])
def test_attributes_are_found_as_by_git(tmp_path: Path, seed: int) -> None:
    """Values, macros, quoted patterns, lines that git rejects."""
    rules = Rules(tmp_path, seed)
    shown = {True: "set", False: "unset", None: "unspecified"}
    for files in rules.iter_files(".gitattributes"):
        asked = git(tmp_path, "check-attr", "-z", "--stdin", *ASKED, stdin=b"\0".join(rules.paths))
        theirs = asked.split("\0")[2::3]
        attributes = Attributes(files.get)
        found = [attributes.find(path).get(name) for path in rules.paths for name in ASKED]
        assert [each if isinstance(each, str) else shown[each] for each in found] == theirs, files
