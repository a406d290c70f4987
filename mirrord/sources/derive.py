"""Derive missing columns of a dataset's rows, by named rules.

Versions come from a project's source, patches and issues from its pull request. No I/O. Values of
a row are never changed.
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
# SWE-bench's paths and patterns, then common places. The first rule that gives digits is taken and
# named with the version. Versions are cut to two parts, as SWE-bench's are.

Read = Callable[[str], str | None]
"""Returns the text of a project's file by its path, or None."""

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
_VERSION_FILES = ("__init__.py", "__version__.py", "__about__.py", "_version.py", "version.py")
_SETUP = re.compile(r"""\bversion\s*=\s*['"](\d[^'"]*)['"]""")
_FROM_TAGS = re.compile(r"setuptools[_-]scm|versioneer|hatch-vcs|poetry-dynamic-versioning|\bpbr\b")
_TAG = re.compile(r"\D*?(\d+(?:\.\d+)*)(.*)-(\d+)-g[0-9a-f]+")


class Version(NamedTuple):
    text: str
    rule: str


def find_version(repo: str, read: Read, describe: Callable[[], str | None]) -> Version | None:
    """Find the version of `repo` (owner/name). `describe` is `git describe --tags --long`."""
    for path in PATHS.get(repo.lower(), ()):
        if found := _in_source(path, read(path)):
            return found
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


def _in_source(path: str, text: str | None) -> Version | None:
    if text is None:
        return None
    if path.endswith(".txt"):
        return _found(text, path)
    text = _DOCUMENTATION.sub("", text)
    matches = (pattern.search(text) for pattern in _PATTERNS)
    versions = (_found(match[1].replace(" ", ""), path) for match in matches if match)
    return next(filter(None, versions), None)


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
            if found := _in_source(path, read(path)):
                yield found


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


def _from_tag(described: str | None) -> Version | None:
    """Guess as setuptools_scm does: commits after a release belong to the next one."""
    found = _TAG.fullmatch(described or "")
    if found is None:
        return None
    numbers, suffix, distance = [int(n) for n in found[1].split(".")], found[2], int(found[3])
    if distance and not suffix:
        numbers[-1] += 1
    tag = str(described).rsplit("-", 2)[0]
    return _found(".".join(map(str, numbers)), f"tag {tag}")


# -- the tests of a pull request, and the issues that it resolves ----------------------------------

_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_INDEX = re.compile(r"^index .*\n", re.MULTILINE)
_SEPARATORS = re.compile(r"[ _/.]")
_TEST_WORDS = {"test", "tests", "testing"}
_TEST_PARTS = ("test", "tests", "e2e", "testing")


class SplitRule(StrEnum):
    """SWE-bench's rules to separate solution and tests: in published sets, and since 2024-07."""

    SWEBENCH_V1 = "swebench-v1"
    SWEBENCH_V2 = "swebench-v2"


class SplitDiff(NamedTuple):
    """The two parts of a diff, with the paths of each, and those in neither (`dropped`)."""

    patch: str
    test_patch: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    dropped: tuple[str, ...]


def split(diff: str, rule: SplitRule) -> SplitDiff:
    """Split a diff into solution and tests.

    v1: a test file has the word test, tests or testing in its `diff --git` line, in lower case,
    between blanks, `_`, `/` and `.`. Of the others only Python files are the solution. `index`
    lines are removed. v2: a test file has test or e2e anywhere in its path (as `_pytest`). All
    others are the solution.
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
    return SplitDiff("".join(parts["source"]), "".join(parts["test"]), *listed)


def _path_of(header: str, section: str) -> str:
    """Return the path after the change, or before it if the file is deleted."""
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
    """Find the issues that a pull request's title, body and commit messages resolve.

    Like SWE-bench: a form of close, fix or resolve, blanks, then `#N` or the issue's URL, outside
    HTML comments. Returns each number once, in the order of the text.
    """
    text = _COMMENT.sub("", "\n".join(texts))
    url = re.escape(f"https://github.com/{repo}/issues/")
    found = re.findall(rf"(\w+)\s+(?:#|{url})(\d+)", text)
    return list(dict.fromkeys(number for word, number in found if word.lower() in _KEYWORDS))


# -- rows with derived columns ---------------------------------------------------------------------
#
# Memory holds one row and the set-up commits, which take a pass of their own. The column `derived`
# has the rule of each added column.

Row = dict[str, Any]


class Column(StrEnum):
    """A column to derive. PATCH stands for patch and test_patch."""

    PATCH = "patch"
    ISSUES = "issue_numbers"
    VERSION = "version"
    SETUP = "environment_setup_commit"


class Disagreement(NamedTuple):
    """A recorded value that differs from the derived one."""

    instance: str
    column: str
    recorded: Any
    derived: Any
    rule: str


@dataclass
class Derived:
    """Counts by column. `lacking` counts by column and reason.

    `split_differs` has, by instance, the paths that are tests by only one of the split rules.
    """

    rows: int = 0
    added: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)
    lacking: Counter[tuple[str, str]] = field(default_factory=Counter)
    disagreements: list[Disagreement] = field(default_factory=list)
    split_differs: dict[str, list[str]] = field(default_factory=dict)


class Deriver:
    """Derives `columns` of the rows of `iterate`, and fills `report`."""

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
        """Iterate over all rows, with the added columns and `derived`."""
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
            solution = split(_joined(patch, ""), SplitRule.SWEBENCH_V2)  # v1 would drop paths
            recorded = sorted((*solution.sources, *solution.tests))
            rule = str(self._rule)
            self._settle(row, rules, Column.PATCH, sorted(chosen.sources), rule, recorded)
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
        if listed := row.get("issue_numbers") or row.get("resolved_issues"):
            recorded = sorted(re.findall(r"\d+", str(listed)))
            self._settle(row, rules, Column.ISSUES, sorted(found), "keywords", recorded)
        else:
            self._settle(row, rules, Column.ISSUES, found, "keywords", None)

    def _put_version(self, row: Row, rules: Row) -> None:
        found = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        if not isinstance(found, Version):
            self._lack(Column.VERSION, found or "the row has no repo or base_commit")
            return
        recorded = str(row["version"]) if row.get("version") else None
        self._settle(row, rules, Column.VERSION, found.text, found.rule, recorded)

    def _put_setup(self, setups: Mapping[tuple[str, str], str], row: Row, rules: Row) -> None:
        version = self._version_of(row)
        found = setups.get((_text(row, "repo").lower(), version or ""))
        if found is None:
            self._lack(Column.SETUP, "no row of its version has a date")
            return
        recorded = row.get(Column.SETUP) or None
        self._settle(row, rules, Column.SETUP, found, f"last of version {version}", recorded)

    def _setup_commits(self) -> dict[tuple[str, str], str]:
        """Return the last base commit, by `created_at`, of each repository and version."""
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
        self, row: Row, rules: Row, column: Column, value: Any, rule: str, recorded: Any
    ) -> None:
        """Add a value if none is recorded, else compare it with the recorded one."""
        if recorded is None:
            row[column], rules[column] = value, rule
            self.report.added[column] += 1
        elif recorded == value:
            self.report.agreed[column] += 1
        else:
            found = Disagreement(_id(row), column, recorded, value, rule)
            self.report.disagreements.append(found)


def read_date(value: object) -> datetime | None:
    """Read an ISO 8601 date, with or without zone, with T or a space; None for anything else."""
    try:
        date = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _joined(patch: Any, test_patch: Any) -> str:
    parts = [part for part in (patch, test_patch) if isinstance(part, str) and part]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _messages(commits: Any) -> list[str]:
    """Return the messages of commits: texts, or objects of GitHub's API."""
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
