"""A dataset's rows with what they lacked, and where a column says something else than its rule.

Passes over the source twice and holds one row, so the set-up commits of the first pass are all that
grows. Values that a row has stay; `derived` says of each added column by which rule it came.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import StrEnum
from typing import Any, NamedTuple

from .pulls import SplitRule, resolved_issues, split
from .versions import Version

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
        for row in self._iterate():
            self.report.rows += 1
            rules: dict[str, Any] = {}
            if Column.PATCH in self._columns:
                self._split(row, rules)
            if Column.ISSUES in self._columns:
                self._find_issues(row, rules)
            if Column.VERSION in self._columns:
                self._put_version(row, rules)
            if Column.SETUP in self._columns:
                self._put_setup(row, rules, setups)
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
            self._compare(row, Column.PATCH, recorded, sorted(chosen.sources), str(self._rule))
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
        if not recorded:
            self._add(row, rules, Column.ISSUES, found, "keywords")
        else:
            known = sorted(re.findall(r"\d+", str(recorded)))
            self._compare(row, Column.ISSUES, known, sorted(found), "keywords")

    def _put_version(self, row: Row, rules: Row) -> None:
        found = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        if not isinstance(found, Version):
            self._lack(Column.VERSION, found or "the row has no repo or base_commit")
        elif recorded := row.get("version"):
            self._compare(row, Column.VERSION, str(recorded), found.text, found.rule)
        else:
            self._add(row, rules, Column.VERSION, found.text, found.rule)

    def _put_setup(self, row: Row, rules: Row, setups: Mapping[tuple[str, str], str]) -> None:
        version = self._version_of(row)
        found = setups.get((_text(row, "repo").lower(), version or ""))
        if found is None:
            self._lack(Column.SETUP, "no row of its version has a date")
        elif recorded := row.get(Column.SETUP):
            self._compare(row, Column.SETUP, recorded, found, f"last of version {version}")
        else:
            self._add(row, rules, Column.SETUP, found, f"last of version {version}")

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

    def _add(self, row: Row, rules: Row, column: Column, value: Any, rule: str) -> None:
        row[column] = value
        rules[column] = rule
        self.report.added[column] += 1

    def _lack(self, column: Column, reason: str) -> None:
        self.report.lacking[column, reason] += 1

    def _compare(self, row: Row, column: Column, recorded: Any, derived: Any, rule: str) -> None:
        if recorded == derived:
            self.report.agreed[column] += 1
        else:
            found = Disagreement(_id(row), column, recorded, derived, rule)
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
