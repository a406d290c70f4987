"""What conditions of rules read: the base tree, all changes by path, the tests of the instance."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ..git.modes import SUBMODULE, SYMLINK
from ..git.objects.trees import BaseTree
from ..model import FoundStrategy
from ..patches.fit import Change
from ..trees.reader import parents

# directories of tests; then names of files, as Python, Go and others, JavaScript and Java have them
_TEST_PATH = re.compile(
    rb"(?:.*/)?(?:tests?|testing|__tests__|specs?|e2e|unittests?|test[_-]suite|src/test)/.*"
    rb"|(?:.*/)?(?:test_[^/]*|[^/]*_tests?)\.py"
    rb"|(?:.*/)?[^/]*_(?:test|spec)\.(?:go|rb|rs|exs|dart|c|cc|cpp|php)"
    rb"|(?:.*/)?[^/]*[.-](?:test|spec)\.[cm]?[jt]sx?"
    rb"|(?:.*/)?[^/]*Tests?\.(?:java|kt|kts|scala|groovy|cs|php|swift)",
    re.DOTALL,
)
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstanceTests:
    """The changes of an instance's test patch to the base tree.

    `imports` are the modules that the patched files import at the base commit, `new_imports` those
    that they import only after the patch. `strategy` is how the patch applied, with its `notes`.
    """

    changes: list[Change] = field(default_factory=list)
    imports: frozenset[str] = frozenset()
    new_imports: frozenset[str] = frozenset()
    strategy: FoundStrategy | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """What conditions read besides a change: the base tree, all changes by path, the tests."""

    base: BaseTree
    read_blob: Callable[[str], bytes]
    changes: Mapping[bytes, Change]
    tests: InstanceTests
    file_bytes: int
    # a cache by path, of what `names.py` says: several conditions ask
    modules: dict[bytes, list[str]] = field(default_factory=dict)

    def before(self, change: Change) -> bytes:
        """Return the bytes at the base commit; empty if there was no file."""
        is_file = change.old is not None and not (change.old.is_tree or change.old.is_submodule)
        return self.read_blob(change.old.oid) if change.old and is_file else b""

    def has(self, path: bytes) -> bool:
        """Return whether the path exists after the changes."""
        change = self.changes.get(path)
        return change.mode is not None if change else self.base.find(path) is not None

    def file_at(self, path: bytes) -> tuple[int, bytes] | None:
        """Return mode and bytes of a file after the changes; None for a link or a directory."""
        if (change := self.changes.get(path)) is not None:
            is_file = change.mode not in (None, SYMLINK, SUBMODULE)
            return (change.mode or 0, change.data) if is_file else None
        entry = self.base.find(path) if path else None
        if entry is None or entry.is_tree or entry.is_symlink or entry.is_submodule:
            return None
        return entry.mode, self.read_blob(entry.oid)

    def files_below(self, directory: bytes) -> Iterator[bytes]:
        """Iterate over the paths below a directory after the changes, links included."""
        above = directory + b"/" if directory else b""
        for path, change in self.changes.items():
            if change.mode is not None and path.startswith(above):
                yield path
        for entry in self.base.iter_files(directory):
            if entry.path not in self.changes:
                yield entry.path

    def link_at(self, path: bytes) -> tuple[bytes, bytes] | None:
        """Return a link and where its target leads to, if the path or one above it is a link."""
        for place in (*parents(path), path):
            change = self.changes.get(place)
            entry = None if change else self.base.find(place)
            target = change.data if change and change.mode == SYMLINK else None
            if entry and entry.is_symlink:
                target = self.read_blob(entry.oid)
            if target is not None:
                rest = path[len(place) :]
                return place, target + rest
        return None

    @cached_property
    def names_of_tests(self) -> dict[tuple[bytes, bytes], bytes]:
        """What the tests are loaded by: a directory and a name, with the file that has it.

        It is each test, and above it each conftest, each `__init__`, and the helpers of tests.
        """
        names: dict[tuple[bytes, bytes], bytes] = {}
        new = [test.path for test in self.tests.changes if test.mode is not None]
        for path in new:
            above, slash, name = path.rpartition(b"/")
            if name.endswith(b".py"):
                names[above + slash, name[: -len(b".py")]] = path
        helpers = [name.encode() for name in self.tests.imports]
        places = {b"", *(parent + b"/" for path in new for parent in parents(path))}
        for place in places:
            for name in (b"__init__", b"conftest", *helpers):
                path = place + name + b".py"
                is_theirs = name not in helpers or is_test(path)
                if is_theirs and (path in new or self.base.find(path)):
                    names[place, name] = path
        return names


@lru_cache(maxsize=1024)
def is_test(path: bytes) -> bool:
    return _TEST_PATH.fullmatch(path) is not None


def imports_of(source: bytes) -> set[str]:
    """Return the top-level modules that Python source imports, by a match of its lines."""
    return {name.decode("ascii", "replace") for name in _IMPORT.findall(source)}
