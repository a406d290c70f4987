"""Rows with what they lacked: what is added, what stays, what is said to disagree."""

from __future__ import annotations

from typing import Any

from mirrord.derive.rows import Column, Derived, Deriver, Disagreement
from mirrord.derive.versions import Version

SOURCE = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
TEST = SOURCE.replace("x.py", "test/x.py")
PYTEST = SOURCE.replace("x.py", "src/_pytest/x.py")


def derive(
    rows: list[dict[str, Any]], *columns: Column, versions: dict[Any, Any] | None = None
) -> tuple[list[dict[str, Any]], Derived]:
    deriver = Deriver(lambda: (dict(row) for row in rows), columns, versions=versions)
    return list(deriver.rows()), deriver.report


def test_a_diff_is_split_and_a_difference_between_the_rules_is_said() -> None:
    rows = [{"instance_id": "i", "diff": SOURCE + TEST}, {"instance_id": "p", "diff": PYTEST}]
    (first, second), report = derive(rows, Column.PATCH)
    assert (first["patch"], first["test_patch"]) == (SOURCE, TEST)
    assert first["derived"] == {"patch": "swebench-v1", "test_patch": "swebench-v1"}
    assert second["derived"]["split_differs"] == ["src/_pytest/x.py"]
    assert report.split_differs == {"p": ["src/_pytest/x.py"]}


def test_only_the_part_that_is_lacking_is_added() -> None:
    (row,), _ = derive([{"diff": SOURCE + TEST, "patch": "mine"}], Column.PATCH)
    assert (row["patch"], row["test_patch"]) == ("mine", TEST)
    assert row["derived"] == {"test_patch": "swebench-v1"}


def test_patches_that_a_row_has_stay_and_are_compared() -> None:
    rows: list[dict[str, Any]] = [
        {"instance_id": "same", "patch": SOURCE, "test_patch": TEST},
        {"instance_id": "other", "patch": SOURCE + TEST, "test_patch": TEST},
        {"instance_id": "none", "patch": SOURCE},
    ]
    found, report = derive(rows, Column.PATCH)
    assert found == rows
    assert report.agreed == {"patch": 1}
    (wrong,) = report.disagreements
    assert wrong == Disagreement("other", "patch", ["test/x.py", "x.py"], ["x.py"], "swebench-v1")
    assert report.lacking.total() == 1


def test_issues_come_from_every_text_of_a_pull_request() -> None:
    commits = [{"commit": {"message": "closes #2"}}, {"message": "fix #3"}, "resolves #4", 5]
    rows: list[dict[str, Any]] = [
        {"repo": "o/n", "title": "Fix #1", "body": None, "commits": commits},
        {"repo": "o/n", "body": "fixes #7", "resolved_issues": [7]},
    ]
    (first, _), report = derive(rows, Column.ISSUES)
    assert first["issue_numbers"] == ["1", "2", "3", "4"]
    assert report.agreed == {"issue_numbers": 1}


def test_the_set_up_commit_is_the_last_base_commit_of_a_version() -> None:
    """By time, across ways to write it and letter cases; versions that are derived count."""
    rows: list[dict[str, Any]] = [
        {"repo": "o/n", "base_commit": "b", "version": "1.0", "created_at": "2020-01-02T00:00:00Z"},
        {"repo": "O/N", "base_commit": "c", "created_at": "2020-01-03 00:00:00"},
        {"repo": "o/n", "base_commit": "a", "version": "1.0", "created_at": "2020-01-01"},
        {"repo": "o/n", "base_commit": "d", "version": "1.1"},
        {"repo": "o/n", "base_commit": "e", "version": "1.0", "environment_setup_commit": "z"},
    ]
    versions = {("O/N", "c"): Version("1.0", "tag 1.0")}
    found, report = derive(rows, Column.VERSION, Column.SETUP, versions=versions)
    assert [row.get("environment_setup_commit") for row in found] == ["c", "c", "c", None, "z"]
    assert found[1]["derived"] == {
        "version": "tag 1.0",
        "environment_setup_commit": "last of version 1.0",
    }
    assert [each.recorded for each in report.disagreements] == ["z"]
