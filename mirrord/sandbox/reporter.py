"""The plugin of pytest that reports each test apart from the log. PYTEST_DONT_REWRITE

It runs in a sandbox, on Python 3.6 and pytest 2.8 or later, under a name that is new in each run.
`-p` loads it after all options of the tree's configuration and before any file of the tree. Its key
comes through standard input, once. It writes to a pipe that nobody in the sandbox can read, one
line for each phase of a test: what the call raised, beside what hooks made of it. Code in its
process can still forge that; docs/cheats.md says what is seen of it.
"""

import builtins
import importlib.util
import json
import marshal
import os
import sys
import time
import unittest
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_WATCHED = (
    *("_pytest", "pytest", "pluggy", "unittest", "builtins"),
    *("decimal", "difflib", "fractions", "math", "numbers", "operator", "re", "statistics"),
)  # the runner, and what assertions are made of
_NOTES_MAX = 20
_WRAPS_MAX = 10
# of bytecode files (PEP 552)
_HEADER_BYTES = 16 if sys.version_info >= (3, 7) else 12
_SET_FROM_OUTSIDE = (
    *("__getattr__", "pytest_generate_tests", "pytestmark"),
    *("setUpModule", "setup_module", "setup_function", "load_tests"),
)
_BEGAN_NS = time.time_ns()
_ran: Any = {}
_functions: Any = {}
_notes: Any = set()
_configs: Any = []
_files: Any = {}
_codes: Any = {}
_globals: Any = {}
_hooks: Any = set()
_sources: Any = {}
_TREE = os.getcwd() + os.sep


def _tracers() -> Any:
    """Return what may run between the lines of a test."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    return sys.gettrace(), sys.getprofile(), tools


_TRACERS = _tracers()


def _connect() -> Any:
    """Read the key, open the pipe, and leave nothing of both to the tests."""
    path, name = os.environ.pop("MIRRORD_REPORT", ""), __name__
    here = os.path.dirname(__file__)
    _take_out("PYTEST_ADDOPTS", "-p " + name)
    _take_out("PYTHONPATH", here)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    # not by sys.stdin, which would buffer what comes after the key
    key = os.read(0, 64) if path else b""
    if len(key) != 64:  # a second pytest, such as a worker's or a test's
        return lambda *fields: None
    pipe, pid = os.open(path, os.O_WRONLY), os.getpid()
    # held here: tests replace functions of modules
    getpid, write, dumps = os.getpid, os.write, json.dumps

    def send(*fields: Any) -> None:
        if getpid() == pid:  # not in a child of a test
            write(pipe, key + b" " + dumps(fields).encode() + b"\n")

    return send


def _take_out(variable: str, ours: str) -> None:
    left = os.environ.pop(variable, "").replace(ours, "").strip(" :")
    if left:
        os.environ[variable] = left


_send = _connect()
_send("begin", pytest.__version__)


def pytest_load_initial_conftests() -> None:
    """Remember the runner, with its installed plugins and without any file of the tree.

    pytest's own come before, and the one that loads files of the tree is marked `trylast`.
    """
    _functions.update(_iter_functions())


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: Any) -> None:
    """Remember its function, before the module of the next test is imported."""
    _codes[item] = type(item), _code_of(getattr(item, "obj", None))
    module, path = getattr(item, "module", None), _path_of(item)
    if module is None or module in _globals:
        return
    _globals[module] = {
        name: value for name, value in vars(module).items() if callable(value) or _is_module(value)
    }
    loader = getattr(module, "__loader__", None)
    if any(_is_foreign(_code_of(member)) for _, member in _iter_attributes(loader)):
        _note(f"{_short(path)} is loaded by the tree's own {type(loader).__name__}")
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if origin and os.path.realpath(origin) != os.path.realpath(path):
        _note(f"{_short(path)} is loaded from {_short(origin)}")
    for name in _SET_FROM_OUTSIDE:
        if name in vars(module) and name.encode() not in _text_of(path):
            _note(f"{_short(path)}: its {name} was set from outside")
    if vars(module).get("__builtins__") not in (builtins, vars(builtins)):
        _note(f"{_short(path)}: its builtins were replaced")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Remember the hooks of all plugins; later come those of the conftests below."""
    _hooks.update(function for _, function in _iter_hooks())


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _compare()


# not `wrapper`, which needs pluggy 1.2
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Remember what the call raised, whatever other hooks make of it."""
    before = call.excinfo
    yield
    raised, outcome, by = before or call.excinfo, "passed", ""  # unittest's are added by a hook
    if raised is not None:
        outcome = "failed"
        if "xfail" in item.keywords:
            outcome = "xfailed"
        if issubclass(raised.type, (pytest.skip.Exception, unittest.SkipTest)):
            outcome, by = "skipped", _caller(item, raised)
        elif issubclass(raised.type, pytest.xfail.Exception):
            outcome, by = "xfailed", _caller(item, raised)
    if outcome == "xfailed" and not _mentions_failure(_path_of(item)):
        by = by or "a marker that its file does not have"
    _ran[item.nodeid, call.when] = outcome, by
    if call.when == "call":
        _look_at(item)


def _look_at(item: Any) -> None:
    """Name what replaced a test, or runs beside it."""
    if _tracers() != _TRACERS:
        _note("tests run under a trace or profile function")
    kind, before = _codes.get(item, (type(item), None))
    value = getattr(item, "obj", None)
    is_other = before and value is not None and not _wraps(value, before)
    if is_other or "runtest" in vars(item) or kind is not type(item):
        _note(f"{item.nodeid}: its function was replaced")


def _wraps(value: Any, code: Any) -> bool:
    """Return whether a function has this code, or is a plugin's around the one that has."""
    for _ in range(_WRAPS_MAX):
        current = _code_of(value)
        if current is code:
            return True
        if current is not None and _is_foreign(current):
            return False
        value = getattr(value, "__wrapped__", None)
    return False


def _caller(item: Any, raised: Any) -> str:
    """Return the file that skipped a test, if it is another than the test's, below the root."""
    frames = [str(frame.path) for frame in raised.traceback]
    frames = [path for path in frames if _is_of_tree(path)]
    return _short(frames[-1]) if frames and frames[-1] != _path_of(item) else ""


def _mentions_failure(path: str) -> bool:
    return b"xfail" in _text_of(path) or b"expectedFailure" in _text_of(path)


def _text_of(path: str) -> Any:
    if path not in _files:
        _files[path] = b""
        with suppress(OSError), open(path, "rb") as file:
            _files[path] = file.read()
    return _files[path]


def _is_of_tree(path: Any) -> bool:
    if not isinstance(path, str) or path.startswith("<"):  # frozen or generated
        return False
    return os.path.abspath(path).startswith(_TREE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    raised, by = _ran.pop((report.nodeid, report.when), (None, ""))
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        # so pytest reports them: an expected failure as skipped, an unexpected pass as passed
        outcome = {"skipped": "xfailed", "passed": "xpassed"}.get(outcome, outcome)
    [config] = _configs
    if raised is None and _is_elsewhere(config.option):
        raised = "elsewhere"
    name = config.cwd_relative_nodeid(report.nodeid)  # as in the log
    _send("test", name, report.when, raised, outcome, by)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: Any) -> None:
    _configs.append(config)


def _is_elsewhere(option: Any) -> bool:
    """Return whether other processes run the tests, as options of xdist and pytest-forked say."""
    return getattr(option, "dist", "no") != "no" or bool(getattr(option, "forked", False))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(exitstatus: Any) -> None:
    _compare()
    _compare_globals()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and (_is_of_tree(path) or path.startswith(sys.prefix + os.sep)):
            with suppress(OSError):
                if os.stat(path).st_ctime_ns > _BEGAN_NS:
                    _note(f"{name} was written while the tests ran")
    _send("end", int(exitstatus))


# -- the runner's own functions --------------------------------------------------------------------


def _iter_functions() -> Any:
    """Iterate the functions and classes of the runner, each with its code."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in _WATCHED:
            continue
        for place, value in _iter_members(name, module):
            yield place, (value, _code_of(value))
            if isinstance(value, type) and value.__module__ == name:
                for inner, member in _iter_members(place, value):
                    yield inner, (member, _code_of(member))


def _iter_members(name: str, owner: Any) -> Any:
    for member, value in list(vars(owner).items()):
        if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
            yield f"{name}.{member}", value


def _code_of(value: Any) -> Any:
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) and isinstance(value, FunctionType) else None


def _compare() -> None:
    """Name the functions of the runner that were replaced since its start."""
    now = dict(_iter_functions())
    for place, (value, code) in _functions.items():
        if place.partition(".")[2].startswith("_") and place not in now:
            continue
        current, its_code = now.get(place, (None, None))
        if current is not value or its_code is not code:
            _note(f"{place} was replaced")
    for place, (_, code) in now.items():
        is_new = place not in _functions and place.rpartition(".")[0] in _functions
        if is_new and code and _is_of_tree(code.co_filename):
            _note(f"{place} was added")
    for module in _globals:
        _compare_imports(module)
    for name, function in _iter_hooks():
        if function not in _hooks and _is_foreign(_code_of(function)):
            _note(f"{name} was hooked while the tests ran")


def _compare_imports(module: Any) -> None:
    """Name functions that a test's module imports from elsewhere and that are the tree's."""
    for value in list(vars(module).values()):
        if not (_is_module(value) or isinstance(value, type)) or _is_of_tree(_file_of(value)):
            continue
        for place, member in _iter_members(value.__name__, value):
            code = _code_of(member)
            if code and _is_of_tree(code.co_filename) and place not in _functions:
                _note(f"{place} was replaced")


def _iter_hooks() -> Any:
    """Iterate the functions that run for each hook, without those of conftests."""
    [config] = _configs
    for name, caller in _iter_attributes(config.hook):
        # before pluggy 0.7 there is no such method
        for hook in getattr(caller, "get_hookimpls", list)():
            file = getattr(hook.plugin, "__file__", None) or ""
            if os.path.basename(file) != "conftest.py" and not _asks_for_plugins(file):
                yield name, hook.function


def _asks_for_plugins(file: str) -> bool:
    """Return whether a test's file names plugins, of which this module may be one."""
    return bool(file) and any(b"pytest_plugins" in _text_of(module.__file__) for module in _globals)


def _compare_globals() -> None:
    """Name what the globals of a test's module no longer are, or whose bytecode is another's."""
    for module, before in _globals.items():
        path = getattr(module, "__file__", None) or ""
        for name, value in before.items():
            is_own = b"global " in _text_of(path) or name.startswith(("@", "__"))
            if not is_own and vars(module).get(name) is not value:
                _note(f"{_short(path)}: its {name} was replaced")
            file = _file_of(value)
            if isinstance(file, str) and not _is_cached_as_written(file):
                _note(f"{_short(file)} was loaded from other bytecode than its own")


def _is_cached_as_written(path: str) -> bool:
    """Return whether bytecode of the tree that was written while the tests ran is its source's."""
    if path not in _sources:
        _sources[path] = True
        with suppress(Exception):  # no bytecode, no source
            cached = importlib.util.cache_from_source(path)
            if _is_of_tree(path) and os.stat(cached).st_ctime_ns > _BEGAN_NS:
                with open(cached, "rb") as file:
                    code = marshal.loads(file.read()[_HEADER_BYTES:])  # noqa: S302
                _sources[path] = code == compile(_text_of(path), path, "exec", 0, True)
    return bool(_sources[path])


def _iter_attributes(value: Any) -> Any:
    for name in dir(value):
        with suppress(Exception):  # of the tree's own, it may be anything
            yield name, getattr(value, name)


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _is_foreign(code: Any) -> bool:
    """Return whether code is the tree's or made while it ran, and not Python's own."""
    path = code.co_filename if code else "<frozen>"
    if path.startswith(sys.prefix + os.sep):  # an environment in the tree
        return False
    return _is_of_tree(path) or (path.startswith("<") and not path.startswith("<frozen"))


def _file_of(value: Any) -> Any:
    module = value if _is_module(value) else sys.modules.get(value.__module__)
    return getattr(module, "__file__", None)


def _note(text: str) -> None:
    if text not in _notes and len(_notes) < _NOTES_MAX:
        _notes.add(text)
        _send("note", text)


def _path_of(item: Any) -> str:
    # `path` came with pytest 7
    return str(getattr(item, "path", None) or item.fspath)


def _short(path: str) -> str:
    return os.path.relpath(path)
