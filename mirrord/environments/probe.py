"""The probe: a program that says what a runner of tests would read and import, in a sandbox.

The environment's own Python runs it, from 3.7 on, with `-I -S`, with the tree at the working
directory and a question as JSON on its only argument. It imports nothing of the tree. The answer is
one line of JSON after MARKER. Paths in it are relative to the tree; others are absolute.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import pathlib
import re
import resource
import shlex
import sys
from importlib import machinery
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    ModulePlace = tuple[str, str]
    """A file as it is named, and after all links."""

MARKER = "mirrord-probe: "
_TREE = os.getcwd()
# `site` imports them where they exist
_STARTUP = ("sitecustomize", "usercustomize")


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer what the tests of a question are run by: see `grading/loading.py`."""
    environment = os.path.dirname(os.path.dirname(sys.executable))
    sites = [
        os.path.join(environment, lib, _version(), "site-packages") for lib in ("lib", "lib64")
    ]
    sites = [site for site in sites if os.path.isdir(site)]
    options = Options(question)
    tests = [os.path.join(_TREE, test) for test in question["tests"]]
    config = _config(sites, options, [test for test in tests if os.path.isfile(test)])
    options.read(config["values"].get("addopts", ""))
    conftests = list(_conftests(tests, config))
    linked, installed = _installed(sites)
    places = _unique([
        _TREE, *linked, *options.python_path, *_paths_of(config),
        *(_base_of(path)[0] for path in [*tests, *conftests]),
        *map(os.path.dirname, tests),
    ])  # fmt: skip
    names = {*installed, *_standard(), *_STARTUP, "conftest"}
    names.update(_plain_name(test) for test in tests)
    plugins = [*options.plugins, *_plugins_in([*conftests, *tests])]
    return {
        "python": sys.version.split()[0],
        "pytest": config.pop("pytest"),
        "modules": _found(places, names, installed),
        "helpers": dict(_helpers([*conftests, *tests], places)),
        "tests": {path: _loaded(os.path.join(_TREE, path)) for path in question["tests"]},
        "config": config,
        "distributions": dict(_distributions(places)),
        "conftests": [_place(path) for path in conftests],
        "plugins": [
            module
            for name in _unique(plugins)
            for place in places
            for module in _chain(place, name.split("."))
        ],
    }


class Options:
    """What a command line of pytest, and variables around it, say about files and plugins."""

    def __init__(self, question: dict[str, Any]) -> None:
        self.file: str | None = None
        self.root: str | None = None
        self.plugins: list[str] = []
        self.python_path: list[str] = []
        variables = dict(question["variables"])
        words = _words(question["command"])
        for word in words:
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                variables[name] = value
        self.read(words)
        self.read(variables.get("PYTEST_ADDOPTS", ""))
        self.plugins += filter(None, variables.get("PYTEST_PLUGINS", "").split(","))
        for entry in variables.get("PYTHONPATH", "").split(":"):
            if entry:
                self.python_path.append(_absolute(entry))

    def read(self, options: Any) -> None:
        words = _words(options) if isinstance(options, str) else list(map(str, options))
        for place, word in enumerate(words):
            after = words[place + 1] if place + 1 < len(words) else ""
            if word == "-p" and after:
                self.plugins.append(after)
            elif word.startswith("-p") and len(word) > 2:
                self.plugins.append(word[2:])
            elif word in ("-c", "--config-file"):
                self.file = after
            elif word.startswith("--config-file="):
                self.file = word.partition("=")[2]
            elif word.startswith("--rootdir="):
                self.root = word.partition("=")[2]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# -- pytest's configuration ------------------------------------------------------------------------


def _config(sites: list[str], options: Options, tests: list[str]) -> dict[str, Any]:
    """Let pytest itself find and read its configuration."""
    config: dict[str, Any] = {
        "pytest": None, "file": None, "root": None, "values": {}, "error": None,
    }  # fmt: skip
    sys.path[:] = [*[directory for directory in sys.path if not _is_within(directory)], *sites]
    if not any(_chain(site, ["_pytest"]) for site in sites):
        return config  # none, or it is the project in the tree, which is not imported
    try:
        import pytest  # noqa: PLC0415 - of the environment
        from _pytest.config import findpaths  # noqa: PLC0415

        config["pytest"] = getattr(pytest, "__version__", "?")
        given: dict[str, Any] = {
            "inifile": options.file, "args": tests or [_TREE], "rootdir_cmd_arg": options.root,
            "invocation_dir": pathlib.Path(_TREE), "config": None, "override_ini": None,
        }  # fmt: skip
        # its parameters, and what it returns besides three values, differ between releases
        parameters = inspect.signature(findpaths.determine_setup).parameters
        asked = {name: given[name] for name in parameters if name in given}
        root, file, values = findpaths.determine_setup(**asked)[:3]
        config["root"] = _relative(str(root))
        config["file"] = _relative(str(file)) if file else None
        config["values"] = {key: _plain(value) for key, value in dict(values or {}).items()}
    except BaseException as error:  # noqa: BLE001 - UsageError is no Exception of ours
        config["error"] = "%s: %s" % (type(error).__name__, str(error)[:500])  # noqa: UP031
    return config


def _plain(value: Any) -> Any:
    # pytest 9 has a ConfigValue in place of each value
    value = getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, str) else repr(value)


def _paths_of(config: dict[str, Any]) -> list[str]:
    """Return the directories that the configuration puts on the path."""
    value = config["values"].get("pythonpath", [])
    entries = _words(value) if isinstance(value, str) else value
    above = os.path.dirname(os.path.join(_TREE, config["file"] or "x"))
    return [os.path.normpath(os.path.join(above, entry)) for entry in entries]


def _conftests(tests: list[str], config: dict[str, Any]) -> Iterator[str]:
    """Iterate over the conftests above the tests, and those that pytest reads at its start."""
    value = config["values"].get("testpaths", [])
    starts = [
        os.path.join(_TREE, path) for path in (_words(value) if isinstance(value, str) else value)
    ]
    directories = {_TREE}
    for path in [*tests, *(os.path.join(start, "x") for start in starts)]:
        above = os.path.dirname(path)
        while _is_within(above):
            directories.add(above)
            above = os.path.dirname(above)
    for start in [_TREE, *starts]:
        for name in _names_in(start):
            # as pytest: it loads conftests of test* below each start
            if name.startswith("test"):
                directories.add(os.path.join(start, name))
    for directory in sorted(directories):
        if os.path.lexists(os.path.join(directory, "conftest.py")):
            yield os.path.join(directory, "conftest.py")


# -- names -----------------------------------------------------------------------------------------


# in the order in which Python tries them
_LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


@functools.lru_cache(None)
def _finder(directory: str) -> machinery.FileFinder:
    # it reads directories and no modules: nothing of the tree is imported
    return machinery.FileFinder(directory, *_LOADERS)


def _specs(place: str, names: list[str]) -> Iterator[machinery.ModuleSpec]:
    """Iterate over what an import of a dotted name in a directory finds, as far as it does."""
    directories = [place]
    for name in names:
        specs = (_finder(directory).find_spec(name) for directory in directories)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return
        yield spec
        directories = list(spec.submodule_search_locations or [])


def _chain(place: str, names: list[str]) -> list[ModulePlace]:
    """Return the files that an import of a dotted name in a directory would load."""
    return [
        _place(spec.origin)
        for spec in _specs(place, names)
        if spec.origin and spec.loader is not None
    ]


def _helpers(paths: list[str], places: list[str]) -> Iterator[tuple[str, ModulePlace]]:
    """Iterate over the files of the tree that imports of tests and conftests lead to."""
    imported = {(place, name) for path in paths for place, name in _imports_of(path, places)}
    for place, name in sorted(imported):
        names = name.split(".")
        for depth, spec in enumerate(_specs(place, names), 1):
            if spec.origin and spec.loader is not None:
                yield _key(place, "/".join(names[:depth])), _place(spec.origin)


def _found(places: list[str], names: Any, installed: dict[str, bool]) -> dict[str, ModulePlace]:
    """Return the file of each name in each directory. One without `__init__` takes a name only from
    an installed one without.
    """
    modules = {}
    for place in places:
        stems = {name.partition(".")[0] for name in _names_in(place)}
        for name in sorted(stems.intersection(names)):
            spec = _finder(place).find_spec(name)
            if spec is None:
                continue
            if spec.loader is not None and spec.origin:
                modules[_key(place, name)] = _place(spec.origin)
            elif installed.get(name):
                modules[_key(place, name)] = _place(os.path.join(place, name))
    return modules


def _loaded(test: str) -> tuple[str, list[ModulePlace]]:
    """Return the module that pytest makes of a test file, and the files that its import loads."""
    base, names = _base_of(test)
    return ".".join(names), _chain(base, names)


def _base_of(path: str) -> tuple[str, list[str]]:
    """Return the directory that pytest puts on the path for a file, and the module's names."""
    above, names = os.path.dirname(path), [_plain_name(path)]
    while os.path.isfile(os.path.join(above, "__init__.py")):
        # as pytest: what cannot be written in an import is no package
        if not os.path.basename(above).isidentifier() or above == _TREE:
            break
        names.insert(0, os.path.basename(above))
        above = os.path.dirname(above)
    return above, names


def _installed(sites: list[str]) -> tuple[list[str], dict[str, bool]]:
    """Return directories of the tree that path files and editable installations put on the path,
    and the installed top names, each with whether it is a directory without `__init__`.
    """
    linked: list[str] = []
    names: dict[str, bool] = {}
    for site in sites:
        for name in _names_in(site):
            path = os.path.join(site, name)
            stem = name.partition(".")[0]
            if name.endswith(".pth"):
                linked += _directories_in(path)
            # of setuptools (PEP 660): its module has the mapping as a literal
            elif re.match(r"__editable__.*finder\.py$", name):
                linked += map(os.path.dirname, _mapping_in(path).values())
            if stem.isidentifier() and not name.endswith((".dist-info", ".egg-info", ".pth")):
                is_bare = os.path.isdir(path) and not _chain(site, [stem])
                names[stem] = is_bare and names.get(stem, True)
    names.pop("__pycache__", None)
    return [directory for directory in linked if _is_within(directory)], names


def _directories_in(path: str) -> Iterator[str]:
    for line in _text(path).splitlines():
        line = line.strip()
        # `site` executes lines that begin with import
        if line and not line.startswith(("#", "import ", "import\t")):
            yield os.path.normpath(os.path.join(os.path.dirname(path), line))


def _mapping_in(path: str) -> dict[str, str]:
    """Return the packages that the finder of an editable installation maps."""
    for node in _parsed(path).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and target.id == "MAPPING":
            try:
                return dict(ast.literal_eval(node.value))  # type: ignore[attr-defined]
            except ValueError:
                return {}
    return {}


def _standard() -> Iterator[str]:
    # sys.stdlib_module_names came with Python 3.10
    yield from getattr(sys, "stdlib_module_names", sys.builtin_module_names)
    for name in _names_in(os.path.dirname(os.__file__)):
        if not name.endswith("-packages"):
            yield name.partition(".")[0]


def _distributions(places: list[str]) -> Iterator[tuple[str, str]]:
    """Iterate over the distributions in the tree, each with a hash of its entry points."""
    for place in places:
        for name in _names_in(place):
            if name.endswith((".dist-info", ".egg-info", ".egg-link", ".egg")):
                path = os.path.join(place, name)
                text = "".join(
                    _text(os.path.join(path, *inner))
                    for inner in (["entry_points.txt"], ["EGG-INFO", "entry_points.txt"])
                )
                yield _relative(path), hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


# -- sources ---------------------------------------------------------------------------------------


def _plugins_in(paths: list[str]) -> Iterator[str]:
    """Iterate over what files name as `pytest_plugins`."""
    for path in paths:
        for node in ast.walk(_parsed(path)):
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if any(
                isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in targets
            ):
                for inner in ast.walk(node):
                    # the text of Python 3.7's ast.Str is `s`
                    text = getattr(inner, "value", getattr(inner, "s", None))
                    if isinstance(text, str):
                        yield from text.split(",")


def _imports_of(path: str, places: list[str]) -> Iterator[tuple[str, str]]:
    """Iterate over the names that a file imports, each with the directories where it may be."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((place, alias.name) for place in places)
        elif isinstance(node, ast.ImportFrom):
            above = path
            for _ in range(node.level):
                above = os.path.dirname(above)
            module = [node.module] if node.module else []
            for name in (".".join([*module, alias.name]) for alias in node.names):
                yield from ((place, name) for place in ([above] if node.level else places))


def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse(_text(path))
    # ValueError: a NUL, for Pythons before 3.12; MemoryError: too deep for the parser's stack
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse("")


_READ_BYTES = 1 << 20


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# -- paths -----------------------------------------------------------------------------------------


def _names_in(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _plain_name(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _key(directory: str, name: str) -> str:
    return os.path.normpath(os.path.join(_relative(directory), name))


def _place(path: str) -> ModulePlace:
    return _relative(path), _relative(os.path.realpath(path))


def _absolute(path: str) -> str:
    return os.path.normpath(os.path.join(_TREE, path))


def _is_within(path: str) -> bool:
    return path == _TREE or path.startswith(_TREE + "/")


def _relative(path: str) -> str:
    path = os.path.normpath(path)
    return os.path.relpath(path, _TREE) if _is_within(path) else path


def _unique(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _version() -> str:
    return "python%d.%d" % sys.version_info[:2]  # noqa: UP031


_MEMORY, _SECONDS = 2 << 30, 60


def main() -> None:
    # what is parsed is an agent's, and may be made to take any memory or time
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    sys.stdout.write("\n" + MARKER + json.dumps(answer(question)) + "\n")


if __name__ == "__main__":
    main()
