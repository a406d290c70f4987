"""Test logs: the outcome of each test, compared with what a dataset expects.

The rules are those of SWE-bench's grading, with their quirks, because they read the test ids in
datasets from logs. For example, an id ends at its first space, and a parameter that is a path loses
its directories. Standard library only; no I/O.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """The outcome of a test in a log; an expected failure has passed."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    ERROR = "error"


Outcomes = dict[str, Outcome]
Parser = Callable[[str], Outcomes]

_WORDS = {each.name: each for each in Outcome} | {"XFAIL": Outcome.PASSED}
_COUNT = re.compile(r"\[\d+\]")
_STATUSES = tuple(_WORDS)


def _summary(log: str) -> Iterator[tuple[Outcome, str]]:
    """Iterate pytest's -rA summary: an outcome, and an id that ends at its first space."""
    for line in log.split("\n"):
        if line.startswith(_STATUSES):
            if line.startswith("FAILED"):
                line = line.replace(" - ", " ")
            status, *rest = line.split()
            if rest and status in _WORDS and not _is_count(status, rest[0]):
                yield _WORDS[status], rest[0]


def _is_count(status: str, name: str) -> bool:
    """Return whether a line is `SKIPPED [1] path:3: reason`, which names no test."""
    return status == "SKIPPED" and _COUNT.fullmatch(name) is not None


def _pytest(log: str) -> Outcomes:
    return {name: outcome for outcome, name in _summary(log)}


def _pytest_paths(log: str) -> Outcomes:
    """Read a summary; a parameter that is an absolute path keeps only its last component."""
    return {_short(name): outcome for outcome, name in _summary(log)}


def _short(name: str) -> str:
    if match := re.search(r"(.*?)\[(.*)\]", name):
        main, option = match.groups()
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.rpartition("/")[2]
        return f"{main}[{option}]"
    return name


def _pytest_full_ids(log: str) -> Outcomes:
    """Read ids with spaces, without colours; older releases write the outcome last."""
    found: Outcomes = {}
    for raw in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", raw))
        if line.startswith(_STATUSES):
            if line.startswith("FAILED"):
                line = line.partition(" - ")[0]
            status, *rest = line.split()
            if rest and status in _WORDS and not _is_count(status, rest[0]):
                found[" ".join(rest)] = _WORDS[status]
        elif line.endswith(_STATUSES):
            *rest, status = line.split()
            if rest and status in _WORDS:
                found[" ".join(rest)] = _WORDS[status]
    return found


def _seaborn(log: str) -> Outcomes:
    found: Outcomes = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) >= 2 and line.startswith(("FAILED", "PASSED")):
            found[words[1]] = Outcome.FAILED if line.startswith("FAILED") else Outcome.PASSED
        elif len(words) >= 2 and words[1] == "PASSED":
            found[words[0]] = Outcome.PASSED
    return found


def _matplotlib(log: str) -> Outcomes:
    return _pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


_UNITTEST_ENDS = {
    **dict.fromkeys((" ... ok", " ... OK", " ...  OK"), Outcome.PASSED),
    " ... FAIL": Outcome.FAILED,
    " ... ERROR": Outcome.ERROR,
}
_INTERRUPTED = re.compile(  # the test's own output between `...` and `ok`
    r"^(.*?)\s\.\.\.\s(?:Testing against Django installed in (?s:.*?) silenced\)\."
    r"|Internal Server Error: \/(?:.*)\/|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def _unittest(log: str) -> Outcomes:
    """Read the output of unittest -v and of Django's runner."""
    found: Outcomes = {}
    before = None
    for raw in log.split("\n"):
        line = raw.strip()
        if "--version is equivalent to version" in line:
            found["--version is equivalent to version"] = Outcome.PASSED
        if " ... " in line:
            before = line.partition(" ... ")[0]
        for end, outcome in _UNITTEST_ENDS.items():
            if line.endswith(end):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.partition("...")[2].strip()  # django-7188: two lines in one
                found[line.rpartition(end)[0]] = outcome
                break
        if " ... skipped" in line:
            found[line.partition(" ... skipped")[0]] = Outcome.SKIPPED
        for start, outcome in (("FAIL:", Outcome.FAILED), ("ERROR:", Outcome.ERROR)):
            if line.startswith(start) and len(words := line.split()) > 1:
                found[words[1]] = outcome
        if line.startswith("ok") and before is not None:
            found[before] = Outcome.PASSED
    return found | dict.fromkeys(_INTERRUPTED.findall(log), Outcome.PASSED)


def _sympy(log: str) -> Outcomes:
    pairs = re.findall(r"_* (.*)\.py:(.*) _*", log)
    found: Outcomes = {f"{path}.py:{name}": Outcome.FAILED for path, name in pairs}
    ends = {" E": Outcome.ERROR, " F": Outcome.FAILED, " ok": Outcome.PASSED}
    for raw in log.split("\n"):
        line = raw.strip()
        for end, outcome in ends.items():
            if line.startswith("test_") and line.endswith(end):
                found[line.split()[0]] = outcome
    return found


_PARSERS: dict[str, Parser] = {
    "pytest": _pytest,
    "pytest_options": _pytest_paths,
    "pytest_v2": _pytest_full_ids,
    "unittest": _unittest,
    "django": _unittest,
    "matplotlib": _matplotlib,
    "seaborn": _seaborn,
    "sympy": _sympy,
    **dict.fromkeys(("astroid", "flask", "marshmallow", "pvlib", "pyvista"), _pytest),
    **dict.fromkeys(("sqlfluff", "xarray"), _pytest),
    **dict.fromkeys(("pydicom", "pylint", "requests"), _pytest_paths),
    **dict.fromkeys(("astropy", "scikit", "sphinx"), _pytest_full_ids),
}
_REPOSITORIES = {"pvlib-python": "pvlib", "scikit-learn": "scikit"}


def find_parser(name: str) -> Parser | None:
    """Find a parser by name, with or without SWE-bench's prefix `parse_log_`."""
    return _PARSERS.get(name.removeprefix("parse_log_"))


def parser_of_repo(repo: str) -> str:
    """Return the name of the parser that SWE-bench uses for a repository."""
    name = repo.lower().rpartition("/")[2]
    name = _REPOSITORIES.get(name, name)
    return name if name in _PARSERS else "pytest"


_RULE = re.compile(r"_{4,} .* _{4,}$|(?:FAIL|ERROR): ")
"""The first line of a report on one test in pytest, sympy and unittest."""
_END = re.compile(r"={4,}|-{4,} Captured ")
# the end of a report on a test names the assertion
_LINES_MAX = 8


class Want(StrEnum):
    """The expectation for a test.

    A test that is not in the log counts as failed. A skipped test satisfies KEEP but not PASS.
    """

    FAIL = "fail"
    PASS = "pass"  # noqa: S105
    KEEP = "keep"


class Miss(NamedTuple):
    """A test that misses its expectation, with its outcome; None if it is not in the log."""

    test: str
    outcome: Outcome | None


_WANTED: dict[Want, set[Outcome | None]] = {
    Want.FAIL: {Outcome.FAILED, Outcome.ERROR, Outcome.SKIPPED, None},
    Want.PASS: {Outcome.PASSED},
    Want.KEEP: {Outcome.PASSED, Outcome.SKIPPED},
}

_NO_TESTS = (
    *(".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml"),
    ".toml",
)


def arguments_of(test_patch: str, repo: str) -> list[str]:
    """Return SWE-bench's arguments of the test command: files of a patch, modules for Django."""
    paths = re.findall(r"diff --git a/.* b/(.*)", test_patch)
    paths = [path for path in paths if not path.endswith(_NO_TESTS)]
    if repo.lower() != "django/django":
        return paths
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in paths]


def outcome_of(test: str, found: Mapping[str, Outcome]) -> Outcome | None:
    """Return the outcome of a dataset's test.

    An id may be cut off inside a parameter. Then it means all ids that it is a prefix of, if their
    outcomes agree.
    """
    if test in found or test.count("[") <= test.count("]"):
        return found.get(test)
    matches = [outcome for name, outcome in found.items() if name.startswith(test)]
    agree = len({outcome is Outcome.PASSED for outcome in matches}) == 1
    return matches[0] if agree else None


def iter_misses(tests: Sequence[str], found: Mapping[str, Outcome], want: Want) -> Iterator[Miss]:
    """Iterate the tests that miss their expectation."""
    for test in tests:
        outcome = outcome_of(test, found)
        if outcome not in _WANTED[want]:
            yield Miss(test, outcome)


def lines_about(log: str, test: str) -> list[str]:
    """Return the last lines about a failed test, or of the log if it does not mention the test."""
    name = test.rpartition("::")[2].partition(" ")[0]
    lines = [line.rstrip() for line in log.splitlines()]
    heads = [at for at, line in enumerate(lines) if _RULE.match(line) and name in line]
    if heads:
        lines = lines[heads[-1] + 1 :]
        ends = (at for at, line in enumerate(lines) if _RULE.match(line) or _END.match(line))
        lines = lines[: next(ends, None)]
    elif summary := [line for line in lines if name in line and line.startswith(_STATUSES)]:
        lines = summary
    return [line[:300] for line in lines if line.strip(" _=-")][-_LINES_MAX:]
