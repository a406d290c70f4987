"""The version of a project, from its source.

SWE-bench's paths and patterns, then common places. The first rule that gives digits is taken and
named with the version. Versions are cut to two parts, as SWE-bench's are.
"""

import configparser
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# returns the text of a project's file by its path, or None
Read = Callable[[str], str | None]

# SWE-bench's MAP_REPO_TO_VERSION_PATHS, by names in lower case
PATHS: Mapping[str, tuple[str, ...]] = {
    "dbt-labs/dbt-core": ("core/dbt/version.py", "core/dbt/__init__.py"),
    "django/django": ("django/__init__.py",),
    "huggingface/transformers": ("src/transformers/__init__.py",),
    "marshmallow-code/marshmallow": ("src/marshmallow/__init__.py",),
    "mwaskom/seaborn": ("seaborn/__init__.py",),
    "pallets/flask": ("src/flask/__init__.py", "flask/__init__.py"),
    "psf/requests": ("requests/__version__.py", "requests/__init__.py"),
    "pyca/cryptography": ("src/cryptography/__about__.py", "src/cryptography/__init__.py"),
    "pylint-dev/astroid": ("astroid/__pkginfo__.py", "astroid/__init__.py"),
    "pylint-dev/pylint": ("pylint/__pkginfo__.py", "pylint/__init__.py"),
    "pytest-dev/pytest": ("src/_pytest/_version.py", "_pytest/_version.py"),
    "pyvista/pyvista": ("pyvista/_version.py", "pyvista/__init__.py"),
    "qiskit/qiskit": ("qiskit/VERSION.txt",),
    "scikit-learn/scikit-learn": ("sklearn/__init__.py",),
    "sphinx-doc/sphinx": ("sphinx/__init__.py",),
    "sympy/sympy": ("sympy/release.py", "sympy/__init__.py"),
}


_FROM_TAGS = re.compile(r"setuptools[_-]scm|versioneer|hatch-vcs|poetry-dynamic-versioning|\bpbr\b")


class Version(NamedTuple):
    text: str
    rule: str


def find_version(repo: str, read: Read, describe: Callable[[], str | None]) -> Version | None:
    """Find the version of `repo` (owner/name). `describe` is `git describe --tags --long`."""
    for path in PATHS.get(repo.lower(), ()):
        if version := _in_source(path, read(path)):
            return version
    builds = {name: read(name) or "" for name in ("pyproject.toml", "setup.cfg", "setup.py")}
    candidates = _iter_declared(repo.partition("/")[2], read, builds)
    if any(_FROM_TAGS.search(text) for text in builds.values()):  # their `__version__` is a stub
        return _from_tag(describe()) or next(candidates, None)
    return next(candidates, None) or _from_tag(describe())


def cut(text: str) -> str | None:
    """Return the first two parts of a version, digits only, as in SWE-bench."""
    for separator in (".", ","):
        if separator in text:
            text = ".".join(text.strip().split(separator)[:2])
    digits = re.sub(r"[^0-9.]", "", text)
    return digits if digits.strip(".") else None


def _found(text: object, rule: str) -> Version | None:
    version = cut(text) if isinstance(text, str) else None
    return Version(version, rule) if version else None


_PATTERNS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"""^\s*__version__(?:: \w+)? = (?:version = )?['"](.*?)['"]""",
        r"VERSION = \((.*)\)",
        r"^version_info = (\d+, *\d+)",
    )
)
_DOCUMENTATION = re.compile(r'""".*?"""', re.DOTALL)


def _in_source(path: str, text: str | None) -> Version | None:
    if text is None:
        return None
    if path.endswith(".txt"):
        return _found(text, path)
    # as SWE-bench's script does
    text = _DOCUMENTATION.sub("", text)
    matches = (pattern.search(text) for pattern in _PATTERNS)
    versions = (_found(match[1].replace(" ", ""), path) for match in matches if match)
    return next(filter(None, versions), None)


_VERSION_FILES = ("__init__.py", "__version__.py", "__about__.py", "_version.py", "version.py")
_SETUP = re.compile(r"""\bversion\s*=\s*['"](\d[^'"]*)['"]""")


def _iter_declared(name: str, read: Read, builds: Mapping[str, str]) -> Iterator[Version]:
    """Iterate over versions in pyproject.toml, setup.cfg, setup.py, then the package's files."""
    tables = _toml(builds["pyproject.toml"])
    setup = configparser.RawConfigParser(strict=False)
    try:
        setup.read_string(builds["setup.cfg"])
    except configparser.Error:
        setup.clear()
    literal = _SETUP.search(builds["setup.py"])
    declared = [
        _found(_at(tables, "project", "version"), "pyproject.toml"),
        _found(_at(tables, "tool", "poetry", "version"), "pyproject.toml"),
        _declared(setup.get("metadata", "version", fallback=""), "setup.cfg", read),
        _found(literal[1], "setup.py") if literal else None,
    ]
    yield from filter(None, declared)
    package = name.removeprefix("python-").replace("-", "_")
    for directory in dict.fromkeys((f"src/{package}", package, f"src/{name}", name)):
        for path in (f"{directory}/{file}" for file in _VERSION_FILES):
            if version := _in_source(path, read(path)):
                yield version


def _declared(value: str, rule: str, read: Read) -> Version | None:
    """Resolve a version of setup.cfg: a literal, `file: PATH`, or `attr: package.name`."""
    kind, _, target = value.partition(":")
    if kind == "file":
        return _found(read(target.strip()), target.strip())
    if kind != "attr":
        return _found(value, rule)
    module = target.strip().rpartition(".")[0].replace(".", "/")
    paths = (f"{above}{module}{end}" for above in ("", "src/") for end in (".py", "/__init__.py"))
    return next(filter(None, (_in_source(path, read(path)) for path in paths)), None)


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


# TAG-DISTANCE-gDIGITS, as `git describe --long` prints it
_TAG = re.compile(r"\D*?(\d+(?:\.\d+)*)(.*)-(\d+)-g[0-9a-f]+")


def _from_tag(described: str | None) -> Version | None:
    """Guess as setuptools_scm does: commits after a release belong to the next one."""
    match = _TAG.fullmatch(described or "")
    if match is None:
        return None
    numbers, suffix, distance = [int(n) for n in match[1].split(".")], match[2], int(match[3])
    if distance and not suffix:
        numbers[-1] += 1
    tag = str(described).rsplit("-", 2)[0]
    return _found(".".join(map(str, numbers)), f"tag {tag}")
