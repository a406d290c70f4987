"""What a dataset's rows lack and can be computed, by rules that have names.

Versions come from a project's source, patches and issues from its pull request. Nothing is read
here but what the caller gives; values that a row has stay.
"""

import configparser
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

# -- the version of a project ----------------------------------------------------------------------
#
# SWE-bench's paths and patterns, then what is usual. The first rule that gives digits wins and is
# named with the version. Versions are cut to two parts, as SWE-bench's are.

Read = Callable[[str], str | None]
"""The text of a file of the project by its path; None where there is none."""

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
"""SWE-bench's MAP_REPO_TO_VERSION_PATHS, by names in lower case."""

_PATTERNS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"""^\s*__version__(?:: \w+)? = (?:version = )?['"](.*?)['"]""",
        r"VERSION = \((.*)\)",
        r"^version_info = (\d+, *\d+)",
    )
)
_DOCUMENTATION = re.compile(r'""".*?"""', re.DOTALL)
_USUAL = ("__init__.py", "__version__.py", "__about__.py", "_version.py", "version.py")
_SETUP = re.compile(r"""\bversion\s*=\s*['"](\d[^'"]*)['"]""")
_FROM_TAGS = re.compile(r"setuptools[_-]scm|versioneer|hatch-vcs|poetry-dynamic-versioning|\bpbr\b")
_TAG = re.compile(r"\D*?(\d+(?:\.\d+)*)(.*)-(\d+)-g[0-9a-f]+")


class Version(NamedTuple):
    text: str
    rule: str


def find_version(repo: str, read: Read, describe: Callable[[], str | None]) -> Version | None:
    """The version of `repo` (owner/name). `describe` answers as `git describe --tags --long`."""
    for path in PATHS.get(repo.lower(), ()):
        if found := _in_source(path, read(path)):
            return found
    builds = {name: read(name) or "" for name in ("pyproject.toml", "setup.cfg", "setup.py")}
    usual = partial(_iter_usual, repo.partition("/")[2], read, builds)
    if any(_FROM_TAGS.search(text) for text in builds.values()):  # `__version__` is a stub there
        return _from_tag(describe()) or next(usual(), None)
    return next(usual(), None) or _from_tag(describe())


def cut(text: str) -> str | None:
    """The first two parts of a version, digits only, as SWE-bench writes it."""
    for separator in (".", ","):
        if separator in text:
            text = ".".join(text.strip().split(separator)[:2])
    digits = re.sub(r"[^0-9.]", "", text)
    return digits if digits.strip(".") else None


def _found(text: object, rule: str) -> Version | None:
    version = cut(text) if isinstance(text, str) else None
    return Version(version, rule) if version else None


def _in_source(path: str, text: str | None) -> Version | None:
    if text is None:
        return None
    if path.endswith(".txt"):
        return _found(text, path)
    text = _DOCUMENTATION.sub("", text)
    matches = (pattern.search(text) for pattern in _PATTERNS)
    versions = (_found(match[1].replace(" ", ""), path) for match in matches if match)
    return next(filter(None, versions), None)


def _iter_usual(name: str, read: Read, builds: Mapping[str, str]) -> Iterator[Version]:
    """`[project]` and `[tool.poetry]`, `[metadata]`, `setup.py`, then the package's own files."""
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
        for path in (f"{directory}/{file}" for file in _USUAL):
            if found := _in_source(path, read(path)):
                yield found


def _declared(value: str, rule: str, read: Read) -> Version | None:
    """A value of setup.cfg: the version, `file: PATH`, or `attr: package.name`."""
    kind, _, rest = value.partition(":")
    if kind == "file":
        return _found(read(rest.strip()), rest.strip())
    if kind != "attr":
        return _found(value, rule)
    module = rest.strip().rpartition(".")[0].replace(".", "/")
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


def _from_tag(described: str | None) -> Version | None:
    """As setuptools_scm guesses: commits after a release belong to the next one."""
    found = _TAG.fullmatch(described or "")
    if found is None:
        return None
    numbers, rest, distance = [int(n) for n in found[1].split(".")], found[2], int(found[3])
    if distance and not rest:
        numbers[-1] += 1
    tag = str(described).rsplit("-", 2)[0]
    return _found(".".join(map(str, numbers)), f"tag {tag}")


# -- which files of a pull request are tests, which issues it resolves -----------------------------

_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_INDEX = re.compile(r"^index .*\n", re.MULTILINE)
_SEPARATORS = re.compile(r"[ _/.]")
_TEST_WORDS = {"test", "tests", "testing"}
_TEST_PARTS = ("test", "tests", "e2e", "testing")


class SplitRule(StrEnum):
    """How SWE-bench told solution from tests: in its published sets, and since July 2024."""

    SWEBENCH_V1 = "swebench-v1"
    SWEBENCH_V2 = "swebench-v2"


class Parts(NamedTuple):
    """A diff in two; with the paths of each, and of what the rule puts into neither."""

    patch: str
    test_patch: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    dropped: tuple[str, ...]


def split(diff: str, rule: SplitRule) -> Parts:
    """The solution and test parts of a diff.

    v1: a file is a test where its `diff --git` line, in lower case, has the word test, tests or
    testing between blanks, `_`, `/` and `.`; of the rest only Python files are the solution; lines
    of `index` are left out. v2: a file is a test where its path contains test or e2e anywhere
    (`_pytest` does); the rest is the solution.
    """
    parts: dict[str, list[str]] = {"source": [], "test": [], "dropped": []}
    paths: dict[str, list[str]] = {"source": [], "test": [], "dropped": []}
    for section in _SECTION.split(diff):
        if not section.startswith("diff --git "):
            continue  # prose above the diff
        header = section.partition("\n")[0]
        path = _path_of(header, section)
        if rule is SplitRule.SWEBENCH_V2:
            kind = "test" if any(part in path for part in _TEST_PARTS) else "source"
        else:
            section = _INDEX.sub("", section)
            kind = "source" if header.rstrip().endswith(".py") else "dropped"
            if not _TEST_WORDS.isdisjoint(_SEPARATORS.split(header.lower())):
                kind = "test"
        parts[kind].append(section if section.endswith("\n") else f"{section}\n")
        paths[kind].append(path)
    listed = (tuple(each) for each in paths.values())
    return Parts("".join(parts["source"]), "".join(parts["test"]), *listed)


def _path_of(header: str, section: str) -> str:
    """The path after the change, or before it where it deletes the file."""
    for mark in ("+++ b/", "rename to ", "--- a/"):
        if found := re.search(rf"^{re.escape(mark)}(.*)$", section, re.MULTILINE):
            return found[1].split("\t")[0].rstrip("\r")
    both = header.removeprefix("diff --git a/")
    half = both[: (len(both) - len(" b/")) // 2]
    return half if both == f"{half} b/{half}" else both.rpartition(" b/")[2]


_KEYWORDS = {"close", "closes", "closed", "fix", "fixes", "fixed"}
_KEYWORDS |= {"resolve", "resolves", "resolved"}
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def resolved_issues(texts: Iterable[str], repo: str) -> list[str]:
    """Numbers of the issues that a pull request's title, body and commit messages resolve.

    As SWE-bench: a form of close, fix or resolve, blanks, then `#N` or the issue's URL; comments in
    HTML do not count. In the order of the text, each once.
    """
    text = _COMMENT.sub("", "\n".join(texts))
    url = re.escape(f"https://github.com/{repo}/issues/")
    found = re.findall(rf"(\w+)\s+(?:#|{url})(\d+)", text)
    return list(dict.fromkeys(number for word, number in found if word.lower() in _KEYWORDS))


# -- a dataset's rows with what they lacked --------------------------------------------------------
#
# Passes over the source twice and holds one row, so the set-up commits of the first pass are all
# that grows. `derived` says of each added column by which rule it came.

Row = dict[str, Any]


class Column(StrEnum):
    """What can be derived; `patch` stands for patch and test_patch."""

    PATCH = "patch"
    ISSUES = "issue_numbers"
    VERSION = "version"
    SETUP = "environment_setup_commit"


class Disagreement(NamedTuple):
    """A column that a row has, beside what its rule gives."""

    instance: str
    column: str
    recorded: Any
    derived: Any
    rule: str


@dataclass
class Derived:
    """Counts by column, and lists. `lacking` counts by column and reason; `split_differs` has, by
    instance, the paths that are tests by one split rule only."""

    rows: int = 0
    added: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)
    lacking: Counter[tuple[str, str]] = field(default_factory=Counter)
    disagreements: list[Disagreement] = field(default_factory=list)
    split_differs: dict[str, list[str]] = field(default_factory=dict)


class Deriver:
    """Derives `columns` of rows that `iterate` yields again at each call; fills `report`."""

    def __init__(
        self,
        iterate: Callable[[], Iterable[Row]],
        columns: Collection[Column],
        rule: SplitRule = SplitRule.SWEBENCH_V1,
        versions: Mapping[tuple[str, str], Version | str] | None = None,
    ) -> None:
        self._iterate = iterate
        self._columns = columns
        self._rule = rule
        self._versions = versions or {}
        self.report = Derived()

    def rows(self) -> Iterator[Row]:
        """All rows in their order, with the added columns and `derived`."""
        setups = self._setup_commits() if Column.SETUP in self._columns else {}
        steps: dict[Column, Callable[[Row, Row], None]] = {
            Column.PATCH: self._split,
            Column.ISSUES: self._find_issues,
            Column.VERSION: self._put_version,
            Column.SETUP: partial(self._put_setup, setups),
        }
        chosen = [step for column, step in steps.items() if column in self._columns]
        for row in self._iterate():
            self.report.rows += 1
            rules: dict[str, Any] = {}
            for step in chosen:
                step(row, rules)
            yield {**row, "derived": rules} if rules else row

    # -- the columns ------------------------------------------------------------------------------

    def _split(self, row: Row, rules: Row) -> None:
        patch, test_patch = row.get("patch"), row.get("test_patch")
        is_split = bool(patch and test_patch)
        diff = row.get("diff") or (_joined(patch, test_patch) if is_split else None)
        if not isinstance(diff, str):
            self._lack(Column.PATCH, "the row has no diff, and not both patches")
            return
        parts = {rule: split(diff, rule) for rule in SplitRule}
        chosen = parts[self._rule]
        tests = [set(each.tests) for each in parts.values()]
        if differing := sorted(tests[0] ^ tests[1]):
            self.report.split_differs[_id(row)] = rules["split_differs"] = differing
        if chosen.dropped:
            rules["split_dropped"] = list(chosen.dropped)
        if is_split:
            known = split(_joined(patch, ""), SplitRule.SWEBENCH_V2)  # v1 would drop paths
            recorded = sorted((*known.sources, *known.tests))
            rule = str(self._rule)
            self._settle(row, rules, Column.PATCH, sorted(chosen.sources), rule, [recorded])
            return
        lacking = {column for column in ("patch", "test_patch") if not row.get(column)}
        row |= {column: getattr(chosen, column) for column in lacking}
        rules |= dict.fromkeys(sorted(lacking), str(self._rule))
        self.report.added[Column.PATCH] += 1

    def _find_issues(self, row: Row, rules: Row) -> None:
        texts = [row[name] for name in ("title", "body") if isinstance(row.get(name), str)]
        texts += _messages(row.get("commits") or row.get("commit_messages"))
        if not texts:
            self._lack(Column.ISSUES, "the row has no title, body or commits of a pull request")
            return
        found = resolved_issues(texts, str(row.get("repo")))
        recorded = row.get("issue_numbers") or row.get("resolved_issues")
        known = [sorted(re.findall(r"\d+", str(recorded)))] if recorded else []
        value = sorted(found) if recorded else found
        self._settle(row, rules, Column.ISSUES, value, "keywords", known)

    def _put_version(self, row: Row, rules: Row) -> None:
        found = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        if not isinstance(found, Version):
            self._lack(Column.VERSION, found or "the row has no repo or base_commit")
            return
        known = [str(row["version"])] if row.get("version") else []
        self._settle(row, rules, Column.VERSION, found.text, found.rule, known)

    def _put_setup(self, setups: Mapping[tuple[str, str], str], row: Row, rules: Row) -> None:
        version = self._version_of(row)
        found = setups.get((_text(row, "repo").lower(), version or ""))
        if found is None:
            self._lack(Column.SETUP, "no row of its version has a date")
            return
        known = [row[Column.SETUP]] if row.get(Column.SETUP) else []
        self._settle(row, rules, Column.SETUP, found, f"last of version {version}", known)

    def _setup_commits(self) -> dict[tuple[str, str], str]:
        """The last base commit by `created_at` of each repository's versions."""
        last: dict[tuple[str, str], tuple[datetime, str]] = {}
        for row in self._iterate():
            version, created = self._version_of(row), read_date(row.get("created_at"))
            commit = _text(row, "base_commit")
            if version and created and commit:
                key = _text(row, "repo").lower(), version
                last[key] = max(last.get(key, (created, commit)), (created, commit))
        return {key: commit for key, (_, commit) in last.items()}

    def _version_of(self, row: Row) -> str | None:
        if recorded := row.get("version"):
            return str(recorded)
        found = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        return found.text if isinstance(found, Version) else None

    # -- the report -------------------------------------------------------------------------------

    def _lack(self, column: Column, reason: str) -> None:
        self.report.lacking[column, reason] += 1

    def _settle(
        self, row: Row, rules: Row, column: Column, value: Any, rule: str, recorded: list[Any]
    ) -> None:
        """Add a value where none is recorded, or compare it with the one that is."""
        if not recorded:
            row[column], rules[column] = value, rule
            self.report.added[column] += 1
        elif recorded == [value]:
            self.report.agreed[column] += 1
        else:
            found = Disagreement(_id(row), column, recorded[0], value, rule)
            self.report.disagreements.append(found)


def read_date(value: object) -> datetime | None:
    """A date as datasets spell it: ISO 8601, with or without zone, with T or a space."""
    try:
        date = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _joined(patch: Any, test_patch: Any) -> str:
    parts = [part for part in (patch, test_patch) if isinstance(part, str) and part]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _messages(commits: Any) -> list[str]:
    """Messages of a list of texts, or of objects as GitHub's API has them."""
    found = []
    for commit in commits if isinstance(commits, list) else []:
        if isinstance(commit, dict):
            inner = commit.get("commit")
            commit = commit.get("message") or (inner or {}).get("message")
        if isinstance(commit, str):
            found.append(commit)
    return found


def _id(row: Row) -> str:
    return _text(row, "instance_id") or "a row without id"


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) else ""
