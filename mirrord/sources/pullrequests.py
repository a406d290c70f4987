"""The tests of a pull request, and the issues that it resolves."""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


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


_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_INDEX = re.compile(r"^index .*\n", re.MULTILINE)
_SEPARATORS = re.compile(r"[ _/.]")
_TEST_WORDS = {"test", "tests", "testing"}
_TEST_PARTS = ("test", "tests", "e2e", "testing")


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
    listed = (tuple(group) for group in paths.values())
    return SplitDiff("".join(parts["source"]), "".join(parts["test"]), *listed)


def _path_of(header: str, section: str) -> str:
    """Return the path after the change, or before it if the file is deleted."""
    for mark in ("+++ b/", "rename to ", "--- a/"):
        if match := re.search(rf"^{re.escape(mark)}(.*)$", section, re.MULTILINE):
            return match[1].split("\t")[0].rstrip("\r")
    # of a mode or an empty file alone there is no other line: the header has the path twice
    both = header.removeprefix("diff --git a/")
    half = both[: (len(both) - len(" b/")) // 2]
    return half if both == f"{half} b/{half}" else both.rpartition(" b/")[2]


# by which GitHub links a pull request to an issue, and closes it
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
    issues = re.findall(rf"(\w+)\s+(?:#|{url})(\d+)", text)
    return list(dict.fromkeys(number for word, number in issues if word.lower() in _KEYWORDS))
