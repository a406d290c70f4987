"""What a pull request's diff and text say: which files are tests, which issues it resolves."""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

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
