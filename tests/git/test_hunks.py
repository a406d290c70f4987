"""Hunks, byte for byte those of git."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pygit2
import pytest
from gitrepos import git

from mirrord.git.objects.text import hunks

PAIRS = 400
_LINES = [b"def f(x):", b"    return x", b"", b"}", b"x" * 99, *[b"x = %d" % n for n in range(9)]]


def _pair(random: Random) -> tuple[bytes, bytes]:
    """A text, and the same edited in one place, at any end, with or without a last line feed."""
    old = random.choices(_LINES, k=random.choice((1, 2, 5, 20)))
    at = random.randint(0, len(old))
    added = random.choices([*_LINES, b"new", b"newer"], k=random.randint(0, 3))
    new = [*old[:at], *added, *old[at + random.randint(0, 3) :]]
    ends = random.choices((b"\n", b""), (4, 1), k=2)
    before, after = (b"\n".join(lines) + end for lines, end in zip((old, new), ends, strict=True))
    return before or b"x\n", after or b"x\n"


def test_an_edit_in_one_place_is_printed_as_git_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are removed and added again, or that fit a line higher, are left to libgit2; the
    others are not hashed for it.
    """
    random, asked = Random(1), list[object]()
    pairs = [_pair(random) for _ in range(PAIRS)]
    for place, side in (("a", 0), ("b", 1)):
        (tmp_path / place).mkdir()
        for number, pair in enumerate(pairs):
            (tmp_path / place / f"{number:03}").write_bytes(pair[side])
    printed = git(tmp_path, "diff", "--no-index", "a", "b", check=False) + "\n"
    entries = re.split(rb"(?m)^diff --git .*\n", printed.encode())
    expected = iter(entries[1:])
    create_from: Callable[..., pygit2.Patch] = pygit2.Patch.create_from

    def create(*args: object, **options: object) -> pygit2.Patch:
        asked.append(args)
        return create_from(*args, **options)

    monkeypatch.setattr(pygit2, "Patch", type("Patch", (), {"create_from": staticmethod(create)}))
    for old, new in pairs:
        ours = hunks(old, new, None)
        theirs = next(expected).partition(b"@@ ") if old != new else (b"", b"", b"")
        assert ours == theirs[1] + theirs[2]
    assert 0 < len(asked) < PAIRS / 2
