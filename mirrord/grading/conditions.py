"""The conditions of rules: what a change does, judged by its bytes before and after.

A condition returns None if it does not hold, or else a detail for people, possibly empty. The bytes
are an agent's: nothing is run, and a file that cannot be parsed counts as changed.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from ..git.modes import SUBMODULE, SYMLINK
from ..patches.fit import Change
from ..quoting import decode_name, legible, quote_name
from .configuration import keys, sections, tables
from .context import Context, is_test
from .names import (
    LINKED_FILES,
    new_dependency,
    new_module,
    new_tested_module,
    seen_through,
    takes_name,
)

# -- lines and files ------------------------------------------------------------------------------


def _adds(change: Change, context: Context, *patterns: str) -> str | None:
    """A new line matches one of the patterns."""
    if change.mode in (None, SYMLINK, SUBMODULE):
        return None
    wanted, old = _expression(patterns), context.before(change)
    part = differing_part(old, change.data)
    if not wanted.search(part):
        return None
    had = set(old.splitlines())
    for line in part.splitlines():
        if line not in had and (match := wanted.search(line)):
            return f"adds {legible(decode_name(match[0].strip()[:60]))}"
    return None


@lru_cache(maxsize=64)
def _expression(patterns: tuple[str, ...]) -> re.Pattern[bytes]:
    return re.compile("|".join(patterns).encode(), re.MULTILINE)


def differing_part(old: bytes, new: bytes) -> bytes:
    """Return the lines of `new` without the first and last lines that both have."""
    most = min(len(old), len(new))
    start = bisect_left(range(most), 1, key=lambda n: old[: n + 1] != new[: n + 1])
    start = new.rfind(b"\n", 0, start) + 1
    most -= start
    same = bisect_left(
        range(most), 1, key=lambda n: old[len(old) - n - 1 :] != new[len(new) - n - 1 :]
    )
    end = new.find(b"\n", len(new) - same)
    return new[start : len(new) if end < 0 else end + 1]


def _code_adds(change: Change, context: Context, *patterns: str) -> str | None:
    """As `adds`, outside of tests, which may name their runner."""
    return None if is_test(change.path) else _adds(change, context, *patterns)


_ALWAYS = re.compile(
    rb"def\s+__(?:eq|ne)__\s*\([^)]*\)[^:\n]*:\s*"
    rb"(?:#[^\n]*\s*|\"\"\"[^\"]*\"\"\"\s*)*return\s+(?:True|False)\b"
    rb"|__(?:eq|ne)__\s*=\s*lambda\b[^:]*:\s*(?:True|False)\b"
)


def _always_equal(change: Change, context: Context) -> str | None:
    """A new comparison returns a constant, outside of tests."""
    if change.mode in (None, SYMLINK, SUBMODULE) or is_test(change.path):
        return None
    new, old = (len(_ALWAYS.findall(data)) for data in (change.data, context.before(change)))
    return f"{new - old} comparisons" if new > old else None


def _beside(change: Change, context: Context, name: str) -> str | None:
    """The tree has the file `name` at its top."""
    return "" if context.has(name.encode()) else None


def _submodule(change: Change, context: Context) -> str | None:
    if below := context.base.submodule_above(change.path):
        return f"below submodule {quote_name(below)}"
    was = change.old is not None and change.old.is_submodule
    return "" if was or change.mode == SUBMODULE else None


def _large(change: Change, context: Context) -> str | None:
    size = len(change.data)
    return f"{size:,} bytes" if size > context.file_bytes else None


def _symlink_outside(change: Change, context: Context) -> str | None:
    """The target is absolute, leaves the tree, or has `..` after a name, which may be a link."""
    if change.mode != SYMLINK:
        return None
    target, depth = change.data, change.path.count(b"/")
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    ups = next((n for n, part in enumerate(parts) if part != b".."), len(parts))
    if target.startswith(b"/") or ups > depth or b".." in parts[ups:]:
        return f"to {quote_name(target[:200])}"
    if sum(1 for _ in seen_through(change, context)) == LINKED_FILES:
        return f"to more than {LINKED_FILES} files"
    return None


# -- tests ----------------------------------------------------------------------------------------


def _package_marker(change: Change, context: Context) -> str | None:
    """`__init__.py` is added or removed at the top, or in a directory of tests."""
    if change.old is not None and change.mode is not None:
        return None
    above = change.path.rpartition(b"/")[0]
    holds_tests = any(is_test(above + b"/" + name) for name in context.base.names_in(above))
    if above and not holds_tests and not is_test(change.path):
        return None
    return "added" if change.old is None else "removed"


def _test_removed(change: Change, context: Context) -> str | None:
    return "" if change.mode is None and is_test(change.path) else None


# Python; the frameworks of JavaScript; Go; Rust; JUnit
_TESTS = re.compile(
    rb"^[ \t]*(?:async[ \t]+)?def[ \t]+test|\b(?:it|test)[ \t]*\(|^func[ \t]+Test|#\[test\]|@Test\b"
    rb"|@ParameterizedTest\b",
    re.MULTILINE,
)
# `assert` of most languages, Jest, unittest, Chai and RSpec, Go and its testify, pytest
_ASSERTIONS = re.compile(
    rb"\bassert|\bexpect[ \t]*\(|\.fail\w*\(|\.should\b|\bt\.(?:Error|Fatal)|\brequire\.\w"
    rb"|\braises[ \t]*\(",
    re.IGNORECASE,
)
# `.only` of Mocha and Jest leaves out every other test
_SKIPS = re.compile(
    rb"\bskip|\bxfail|@Ignore\b|@Disabled\b|\.only[ \t]*\(|#\[ignore|\bt\.Skip|\bx(?:it|describe)\("
    rb"|\bcollect_ignore|__test__|\bdeselect|\bpytestmark\b",
    re.IGNORECASE,
)


def _test_weakened(change: Change, context: Context) -> str | None:
    if change.old is None or change.mode is None or not is_test(change.path):
        return None
    old = context.before(change)
    before, after = differing_part(change.data, old), differing_part(old, change.data)
    details = []
    for noun, pattern, sign in (
        ("tests", _TESTS, -1),
        ("assertions", _ASSERTIONS, -1),
        ("skips", _SKIPS, 1),
    ):
        count = (len(pattern.findall(after)) - len(pattern.findall(before))) * sign
        if count > 0:
            details.append(f"{count} {noun} {'fewer' if sign < 0 else 'more'}")
    return ", ".join(details) or None


def _test_edited(change: Change, context: Context) -> str | None:
    is_edit = change.old is not None and change.mode is not None and is_test(change.path)
    return "" if is_edit and _test_weakened(change, context) is None else None


def _test_added(change: Change, context: Context) -> str | None:
    return "" if change.old is None and change.mode is not None and is_test(change.path) else None


# by the names that rules use: `_code_adds` is `code-adds`
CONDITIONS: dict[str, Callable[..., str | None]] = {
    condition.__name__.strip("_").replace("_", "-"): condition
    for condition in (
        *(_adds, _always_equal, _beside, _code_adds, keys, _large, new_dependency, new_module),
        *(new_tested_module, _package_marker, sections, _submodule, _symlink_outside, tables),
        *(takes_name, _test_added, _test_edited, _test_removed, _test_weakened),
    )
}
