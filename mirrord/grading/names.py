"""Which modules a change makes importable, and whose names it takes. Python loads names, not paths.

In one directory Python prefers a package to an extension, that to a module, and that to bytecode. A
link counts as what it leads to (`seen_through`), because every loader follows it.
"""

import posixpath
import sys
from collections.abc import Iterator
from itertools import islice

from ..patches.fit import Change
from ..quoting import quote_name
from .context import Context

_LINKS_DEEP = 40  # as the kernel
LINKED_FILES = 500  # that a link is judged by; one that leads to more is named as such

_RUNNER_MODULES = (
    "pytest _pytest pluggy py iniconfig packaging exceptiongroup tomli nose nose2 tox coverage mock"
    " hypothesis _hypothesis_pytestplugin _hypothesis_ftz_detector anyio attr attrs xdist execnet"
    " flaky asynctest respx setuptools pkg_resources pip _distutils_hack site"
)


# -- links -----------------------------------------------------------------------------------------


def seen_through(change: Change, context: Context) -> Iterator[Change]:
    """Iterate over the files that a link shows, as if they were at its path; none if it leads out
    of the tree, which a rule names, or nowhere.
    """
    target = target_of(change, context)
    if target is None:
        return
    if (file := context.file_at(target)) is not None:
        yield Change(change.path, *file, change.old)
        return
    for below in islice(context.files_below(target), LINKED_FILES):
        if (file := context.file_at(below)) is not None:
            rest = below[len(target) :] if target else b"/" + below
            yield Change(change.path + rest, *file, None)


def target_of(change: Change, context: Context) -> bytes | None:
    """Return the path in the tree that a link leads to, after all further links."""
    path, target = change.path, change.data
    for _ in range(_LINKS_DEEP):
        joined = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target.startswith(b"/") or joined == b".." or joined.startswith(b"../"):
            return None
        path = b"" if joined == b"." else joined
        if (link := context.link_at(path)) is None:
            return path
        path, target = link
    return None


# -- names -----------------------------------------------------------------------------------------


def iter_modules(path: bytes, context: Context) -> Iterator[str]:
    """Iterate over the top-level modules that a new file makes importable: those in the top, or in
    a directory that is no package, of which the base has no module.

    A directory without `__init__` takes no name: any module of the name comes before it.
    """
    above, *parts = b"", *path.split(b"/")
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        name = part.partition(b".")[0] if is_last else part
        is_module = is_last or _is_package(above + part, parts[place + 1], context)
        if is_module and name != b"__init__" and not _in_package(above, context):
            taken = (above + name + b".py", above + name + b"/__init__.py")
            if not any(map(context.base.find, taken)):
                yield quote_name(name)
        above += part + b"/"


def _is_package(directory: bytes, first: bytes, context: Context) -> bool:
    return first.startswith(b"__init__.") or context.has(directory + b"/__init__.py")


def _in_package(above: bytes, context: Context) -> bool:
    """Return whether a directory is part of a package, before and after the changes.

    The top may be on Python's path whatever it has.
    """
    # both: an agent may add the marker, or remove it
    marker = above + b"__init__.py"
    return bool(above) and context.base.find(marker) is not None and context.has(marker)


def new_modules(change: Change, context: Context) -> list[str]:
    if change.old is not None or change.mode is None:
        return []
    if (names := context.modules.get(change.path)) is None:
        names = context.modules[change.path] = list(iter_modules(change.path, context))
    return names


_RUNNERS = frozenset(_RUNNER_MODULES.split())


def new_module(change: Change, context: Context) -> str | None:
    """The module has the name of one of the standard library or a test runner."""
    for name in new_modules(change, context):
        if name in sys.stdlib_module_names or name in _RUNNERS or name.startswith("pytest_"):
            return f"module {name}"
    return None


def new_dependency(change: Change, context: Context) -> str | None:
    """The module has the name of a dependency: the tests import it, and the base lacks it."""
    names = [name for name in new_modules(change, context) if name in context.tests.imports]
    return f"module {names[0]}" if names and new_module(change, context) is None else None


def new_tested_module(change: Change, context: Context) -> str | None:
    """The module is imported only after the test patch; it may be what the task asks for."""
    names = [name for name in new_modules(change, context) if name in context.tests.new_imports]
    return f"module {names[0]}" if names else None


_SUFFIXES = (b".py", b".so", b".pyd", b".pyc", b".pyo")


def takes_name(change: Change, context: Context) -> str | None:
    """Python would load it in place of a test, or of what the tests are loaded with."""
    if change.mode is None:
        return None
    above, parts = b"", change.path.split(b"/")
    for place, part in enumerate(parts):
        name, dot, _ = part.partition(b".")
        if (owner := context.names_of_tests.get((above, name))) and (
            (place < len(parts) - 1 and not dot and parts[place + 1].startswith(b"__init__."))
            or (place == len(parts) - 1 and part.endswith(_SUFFIXES) and change.path != owner)
        ):
            return f"in place of {quote_name(owner)}"
        above += part + b"/"
    return None
