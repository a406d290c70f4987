"""Derive missing columns of a dataset's rows, by named rules.

Versions come from a project's source, patches and issues from its pull request. No I/O. Values of
a row are never changed.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from .pullrequests import SplitRule, resolved_issues, split
from .versions import Version

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
        tests = [set(part.tests) for part in parts.values()]
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
        issues = resolved_issues(texts, str(row.get("repo")))
        if listed := row.get("issue_numbers") or row.get("resolved_issues"):
            recorded = sorted(re.findall(r"\d+", str(listed)))
            self._settle(row, rules, Column.ISSUES, sorted(issues), "keywords", recorded)
        else:
            self._settle(row, rules, Column.ISSUES, issues, "keywords", None)

    def _put_version(self, row: Row, rules: Row) -> None:
        version = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        if not isinstance(version, Version):
            self._lack(Column.VERSION, version or "the row has no repo or base_commit")
            return
        recorded = str(row["version"]) if row.get("version") else None
        self._settle(row, rules, Column.VERSION, version.text, version.rule, recorded)

    def _put_setup(self, setups: Mapping[tuple[str, str], str], row: Row, rules: Row) -> None:
        version = self._version_of(row)
        setup = setups.get((_text(row, "repo").lower(), version or ""))
        if setup is None:
            self._lack(Column.SETUP, "no row of its version has a date")
            return
        recorded = row.get(Column.SETUP) or None
        self._settle(row, rules, Column.SETUP, setup, f"last of version {version}", recorded)

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
        version = self._versions.get((_text(row, "repo"), _text(row, "base_commit")))
        return version.text if isinstance(version, Version) else None

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
            disagreement = Disagreement(_id(row), column, recorded, value, rule)
            self.report.disagreements.append(disagreement)


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
    messages = []
    for commit in commits if isinstance(commits, list) else []:
        if isinstance(commit, dict):
            inner = commit.get("commit")
            commit = commit.get("message") or (inner or {}).get("message")
        if isinstance(commit, str):
            messages.append(commit)
    return messages


def _id(row: Row) -> str:
    return _text(row, "instance_id") or "a row without id"


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) else ""
