"""The outcome of each test of a run, compared with what a dataset expects."""

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


def outcome_named(word: str) -> Outcome:
    """Return the outcome that a parser of others names; FAILED for an unknown word."""
    word = word.upper()
    return Outcome.PASSED if word == "XFAIL" else Outcome.__members__.get(word, Outcome.FAILED)


Outcomes = dict[str, Outcome]
Parser = Callable[[str], Outcomes]

_STATUSES = (*(outcome.name for outcome in Outcome), "XFAIL")

# the first line of a report on one test in pytest, sympy and unittest
_RULE = re.compile(r"_{4,} .* _{4,}$|(?:FAIL|ERROR): ")
_END = re.compile(r"={4,}|-{4,} Captured ")
# the end of a report on a test names the assertion
_LINES_MAX = 8


class Want(StrEnum):
    """The expectation for a test.

    A test that is not in the log counts as failed. A skipped test satisfies KEEP but not PASS.
    """

    FAIL = "fail"
    # a verdict, not a password
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

# SWE-bench's NON_TEST_EXTS, in which csv has no dot either
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


def outcome_of(test: str, outcomes: Mapping[str, Outcome]) -> Outcome | None:
    """Return the outcome of a dataset's test.

    An id may be cut off inside a parameter. Then it means all ids that it is a prefix of, if their
    outcomes agree. SWE-bench's ids of TAP have its dash and directives.
    """
    if test not in outcomes and test.startswith("- "):
        test = test.removeprefix("- ").partition(" # ")[0]
    if test in outcomes or test.count("[") <= test.count("]"):
        return outcomes.get(test)
    matches = [outcome for name, outcome in outcomes.items() if name.startswith(test)]
    agree = len({outcome is Outcome.PASSED for outcome in matches}) == 1
    return matches[0] if agree else None


def iter_misses(
    tests: Sequence[str], outcomes: Mapping[str, Outcome], want: Want
) -> Iterator[Miss]:
    """Iterate the tests that miss their expectation."""
    for test in tests:
        outcome = outcome_of(test, outcomes)
        if outcome not in _WANTED[want]:
            yield Miss(test, outcome)


def lines_about(log: str, test: str) -> list[str]:
    """Return the last lines about a failed test, or of the log if it does not mention the test."""
    name = test.rpartition("::")[2].partition(" ")[0]
    lines = [line.rstrip() for line in log.splitlines()]
    heads = [number for number, line in enumerate(lines) if _RULE.match(line) and name in line]
    if heads:
        lines = lines[heads[-1] + 1 :]
        ends = (
            number for number, line in enumerate(lines) if _RULE.match(line) or _END.match(line)
        )
        lines = lines[: next(ends, None)]
    elif summary := [line for line in lines if name in line and line.startswith(_STATUSES)]:
        lines = summary
    return [line[:300] for line in lines if line.strip(" _=-")][-_LINES_MAX:]
