"""The conditions of rules: what a change does, judged by its bytes before and after.

A condition returns None if it does not hold, or else a detail for people, possibly empty. The bytes
are an agent's: nothing is run, and a file that cannot be parsed counts as changed.
"""

import configparser
import json
import re
import sys
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

from ...git.objects.trees import BaseTree
from ..patches.fit import Change

T = TypeVar("T")

_SYMLINK, _SUBMODULE = 0o120000, 0o160000
_PARSED_BYTES, _MOST_DOTS = 128 * 1024, 100

_TEST_PATH = re.compile(
    rb"(?:.*/)?(?:tests?|testing|__tests__|specs?|e2e|unittests?|test[_-]suite|src/test)/.*"
    rb"|(?:.*/)?(?:test_[^/]*|[^/]*_tests?)\.py"
    rb"|(?:.*/)?[^/]*_(?:test|spec)\.(?:go|rb|rs|exs|dart|c|cc|cpp|php)"
    rb"|(?:.*/)?[^/]*[.-](?:test|spec)\.[cm]?[jt]sx?"
    rb"|(?:.*/)?[^/]*Tests?\.(?:java|kt|kts|scala|groovy|cs|php|swift)",
    re.DOTALL,
)
_TESTS = re.compile(
    rb"^[ \t]*(?:async[ \t]+)?def[ \t]+test|\b(?:it|test)[ \t]*\(|^func[ \t]+Test|#\[test\]|@Test\b"
    rb"|@ParameterizedTest\b",
    re.MULTILINE,
)
_ASSERTIONS = re.compile(
    rb"\bassert|\bexpect[ \t]*\(|\.fail\w*\(|\.should\b|\bt\.(?:Error|Fatal)|\brequire\.\w"
    rb"|\braises[ \t]*\(",
    re.IGNORECASE,
)
_SKIPS = re.compile(
    rb"\bskip|\bxfail|@Ignore\b|@Disabled\b|\.only[ \t]*\(|#\[ignore|\bt\.Skip|\bx(?:it|describe)\("
    rb"|\bcollect_ignore|__test__|\bdeselect|\bpytestmark\b",
    re.IGNORECASE,
)
_RUNNER_MODULES = (
    "pytest _pytest pluggy py iniconfig packaging exceptiongroup tomli nose nose2 tox coverage mock"
    " hypothesis xdist execnet setuptools pkg_resources pip _distutils_hack site"
)
_RUNNERS = frozenset(_RUNNER_MODULES.split())
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstanceTests:
    """The changes of an instance's test patch to the base tree.

    `imports` are the modules that the patched files import at the base commit, `new_imports` those
    that they import only after the patch.
    """

    changes: list[Change] = field(default_factory=list)
    imports: frozenset[str] = frozenset()
    new_imports: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Context:
    """What conditions read besides a change: the base tree, all changes by path, the tests."""

    base: BaseTree
    read_blob: Callable[[str], bytes]
    changes: Mapping[bytes, Change]
    tests: InstanceTests
    file_bytes: int

    def before(self, change: Change) -> bytes:
        """Return the bytes at the base commit; empty if there was no file."""
        is_file = change.old is not None and not (change.old.is_tree or change.old.is_submodule)
        return self.read_blob(change.old.oid) if change.old and is_file else b""

    def has(self, path: bytes) -> bool:
        """Return whether the path exists after the changes."""
        change = self.changes.get(path)
        return change.mode is not None if change else self.base.find(path) is not None

    @cached_property
    def modules_of(self) -> Callable[[bytes], list[str]]:
        """Return the top-level modules that a new file at a path makes importable."""
        return cache(lambda path: list(_iter_modules(path, self)))


@lru_cache(maxsize=1024)
def is_test(path: bytes) -> bool:
    return _TEST_PATH.fullmatch(path) is not None


def imports_of(source: bytes) -> set[str]:
    """Return the top-level modules that Python source imports, by a match of its lines."""
    return {name.decode("ascii", "replace") for name in _IMPORT.findall(source)}


# -- lines and files ------------------------------------------------------------------------------


def _adds(change: Change, context: Context, *patterns: str) -> str | None:
    """A new line matches one of the patterns."""
    if change.mode in (None, _SYMLINK, _SUBMODULE):
        return None
    wanted, old = _expression(patterns), context.before(change)
    part = differing_part(old, change.data)
    if not wanted.search(part):
        return None
    had = set(old.splitlines())
    for line in part.splitlines():
        if line not in had and (found := wanted.search(line)):
            return f"adds {found[0].decode(errors='backslashreplace').strip()[:60]}"
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


def _beside(change: Change, context: Context, name: str) -> str | None:
    """The tree has the file `name` at its top."""
    return "" if context.has(name.encode()) else None


def _submodule(change: Change, context: Context) -> str | None:
    was = change.old is not None and change.old.is_submodule
    return "" if was or change.mode == _SUBMODULE else None


def _large(change: Change, context: Context) -> str | None:
    size = len(change.data)
    return f"{size:,} bytes" if size > context.file_bytes else None


def _symlink_outside(change: Change, context: Context) -> str | None:
    """The target is absolute, leaves the tree, or has `..` after a name, which may be a link."""
    if change.mode != _SYMLINK:
        return None
    target, depth = change.data, change.path.count(b"/")
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    ups = next((n for n, part in enumerate(parts) if part != b".."), len(parts))
    if target.startswith(b"/") or ups > depth or b".." in parts[ups:]:
        return f"to {target[:200].decode(errors='backslashreplace')}"
    return None


# -- parts of configuration -----------------------------------------------------------------------


def _sections(change: Change, context: Context, *names: str) -> str | None:
    """A section of an INI file differs."""

    def read(text: str) -> configparser.RawConfigParser:
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.read_string(text)
        return parser

    def pick(found: configparser.RawConfigParser, name: str) -> dict[str, str] | None:
        return dict(found[name]) if found.has_section(name) else None

    return _differing(change, context, read, pick, names)


def _tables(change: Change, context: Context, *names: str) -> str | None:
    """A table of a TOML file differs, or an array or value with that dotted name."""
    return _differing(change, context, _read_toml, _dig, names)


def _read_toml(text: str) -> Any:
    # tomllib (3.11) takes time that is quadratic in the parts of a dotted key
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError("a key has too many parts")
    return tomllib.loads(text)


def _keys(change: Change, context: Context, *names: str) -> str | None:
    """A member of a JSON object differs."""
    return _differing(change, context, lambda text: json.loads(text or "{}"), _dig, names)


def _dig(found: Any, name: str) -> Any:
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _differing(
    change: Change,
    context: Context,
    read: Callable[[str], T],
    pick: Callable[[T, str], Any],
    names: tuple[str, ...],
) -> str | None:
    if change.mode == _SYMLINK:
        return "becomes a symbolic link"
    before, after = context.before(change), change.data
    if max(len(before), len(after)) > _PARSED_BYTES:
        return "too long to be read"
    try:
        old, new = read(before.decode()), read(after.decode())
        return ", ".join(name for name in names if pick(old, name) != pick(new, name)) or None
    except (ValueError, configparser.Error, RecursionError, AttributeError):
        return "cannot be read"


# -- modules --------------------------------------------------------------------------------------


def _new_modules(change: Change, context: Context) -> list[str]:
    is_new = change.old is None and change.mode is not None
    return context.modules_of(change.path) if is_new else []


def _iter_modules(path: bytes, context: Context) -> Iterator[str]:
    """Iterate over the top-level modules that a new file makes importable: those in a directory
    without `__init__.py` in which the base has nothing of the name.
    """
    above, *parts = b"", *path.split(b"/")
    for part in parts:
        name = part.partition(b".")[0] if part is parts[-1] else part
        stems = (above + name, above + name + b".py")
        is_top = name != b"__init__" and not context.has(above + b"__init__.py")
        if is_top and not any(map(context.base.find, stems)):
            yield name.decode(errors="backslashreplace")
        above += part + b"/"


def _new_module(change: Change, context: Context) -> str | None:
    """The module has the name of one of the standard library or a test runner."""
    for name in _new_modules(change, context):
        if name in sys.stdlib_module_names or name in _RUNNERS or name.startswith("pytest_"):
            return f"module {name}"
    return None


def _new_dependency(change: Change, context: Context) -> str | None:
    """The module has the name of a dependency: the tests import it, and the base lacks it."""
    names = [name for name in _new_modules(change, context) if name in context.tests.imports]
    return f"module {names[0]}" if names and _new_module(change, context) is None else None


def _new_tested_module(change: Change, context: Context) -> str | None:
    """The module is imported only after the test patch; it may be what the task asks for."""
    names = [name for name in _new_modules(change, context) if name in context.tests.new_imports]
    return f"module {names[0]}" if names else None


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


CONDITIONS: dict[str, Callable[..., str | None]] = {
    condition.__name__[1:].replace("_", "-"): condition
    for condition in (
        *(_adds, _beside, _code_adds, _keys, _large, _new_dependency, _new_module),
        *(_new_tested_module, _package_marker, _sections, _submodule, _symlink_outside, _tables),
        *(_test_added, _test_edited, _test_removed, _test_weakened),
    )
}
"""By the names that rules use: `_code_adds` is `code-adds`."""
