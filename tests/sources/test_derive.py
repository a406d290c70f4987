"""Derived columns: versions, tests and issues; what is added, and what disagrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from mirrord.sources.derive import Column, Derived, Deriver, Disagreement
from mirrord.sources.pullrequests import SplitRule, resolved_issues, split
from mirrord.sources.versions import Version, cut, find_version

# -- versions --------------------------------------------------------------------------------------

TAG = "4.6.0-72-g450d264"


def found(repo: str, files: dict[str, str], tag: str | None = None) -> Version | None:
    return find_version(repo, files.get, lambda: tag)


@pytest.mark.parametrize(
    ("repo", "files", "tag", "version", "rule"),
    [
        ("psf/requests", {"requests/__init__.py": "__version__ = '2.7.0'"}, None, "2.7", "requests/__init__.py"),
        ("PSF/Requests", {"requests/__version__.py": '__version__ = "2.1"'}, None, "2.1", "requests/__version__.py"),
        ("django/django", {"django/__init__.py": "VERSION = (1, 7, 0, 'alpha', 0)"}, None, "1.7", "django/__init__.py"),
        ("Qiskit/qiskit", {"qiskit/VERSION.txt": "0.25.1\n"}, None, "0.25", "qiskit/VERSION.txt"),
        ("pallets/flask", {"src/flask/__init__.py": '"""__version__ = \'9.9\'"""\n__version__ = "2.0.1.dev0"'}, None, "2.0", "src/flask/__init__.py"),
        ("pytest-dev/pytest", {"setup.py": "use_scm_version={}  # setuptools-scm"}, TAG, "4.6", "tag 4.6.0"),
        ("o/n", {"pyproject.toml": '[project]\nversion = "1.2.3"'}, TAG, "1.2", "pyproject.toml"),
        ("o/n", {"pyproject.toml": '[tool.poetry]\nversion = "1.2.3"'}, None, "1.2", "pyproject.toml"),
        ("o/n", {"pyproject.toml": "[[[", "setup.cfg": "[metadata]\nversion = 3.4.5"}, None, "3.4", "setup.cfg"),
        ("o/n", {"setup.cfg": "[metadata]\nversion = file: VERSION", "VERSION": "0.7.1"}, None, "0.7", "VERSION"),
        ("o/n", {"setup.cfg": "[metadata]\nversion = attr: n.v.__version__", "src/n/v.py": "__version__ = '5.6'"}, None, "5.6", "src/n/v.py"),
        ("o/n", {"setup.py": "setup(version='7.8.9')"}, None, "7.8", "setup.py"),
        ("o/python-my-n", {"my_n/__about__.py": "__version__: str = '1.0'"}, None, "1.0", "my_n/__about__.py"),
        ("o/n", {"pyproject.toml": "[build-system]\nrequires = ['setuptools_scm']", "n/__init__.py": "__version__ = '0.0'"}, "v1.9.2-0-gabc", "1.9", "tag v1.9.2"),
        ("o/n", {}, "release-1.3-5-gabc1", "1.4", "tag release-1.3"),
        ("o/n", {}, "6.0.0rc1-33-g7f7a364", "6.0", "tag 6.0.0rc1"),
    ],
)  # fmt: skip
def test_a_project_has_the_version_of_its_rule(
    repo: str, files: dict[str, str], tag: str | None, version: str, rule: str
) -> None:
    assert found(repo, files, tag) == Version(version, rule)


def test_nothing_is_guessed() -> None:
    assert found("o/n", {}) is None
    assert found("o/n", {"n/__init__.py": "__version__ = get()"}, "latest-3-gabc") is None
    assert found("o/n", {"setup.cfg": "no section"}) is None


@pytest.mark.parametrize(
    ("text", "version"), [("1,7,0", "1.7"), ("8.0.0.dev0", "8.0"), ("3", "3"), ("unknown", None)]
)
def test_versions_are_cut_to_two_parts(text: str, version: str | None) -> None:
    assert cut(text) == version


# -- pull requests ---------------------------------------------------------------------------------

V1, V2 = SplitRule.SWEBENCH_V1, SplitRule.SWEBENCH_V2
LITE = Path(__file__).parents[3] / "shared/data/swe-bench/SWE-bench_Lite__test.parquet"


def change(path: str, *, new: bool = True, index: bool = True) -> str:
    return "".join(
        [
            f"diff --git a/{path} b/{path}\n",
            "index 123..456 100644\n" if index else "",
            f"--- a/{path}\n+++ {f'b/{path}' if new else '/dev/null'}\n@@ -1 +1 @@\n-a\n+b\n",
        ]
    )


@pytest.mark.parametrize(
    ("path", "v1", "v2"),
    [
        ("pkg/core.py", "source", "source"),
        ("tests/test_core.py", "test", "test"),
        ("pkg/testing.py", "test", "test"),
        ("Test/X.PY", "test", "source"),
        ("src/_pytest/python.py", "source", "test"),
        ("pkg/latest.py", "source", "test"),
        ("e2e/run.py", "source", "test"),
        ("docs/index.rst", "dropped", "source"),
        ("tests/data.json", "test", "test"),
    ],
)
def test_each_rule_files_a_path_where_swe_bench_did(path: str, v1: str, v2: str) -> None:
    for rule, kind in ((V1, v1), (V2, v2)):
        parts = split(change(path), rule)
        found = {"source": parts.sources, "test": parts.tests, "dropped": parts.dropped}
        assert {name for name, paths in found.items() if paths} == {kind}, rule


def test_parts_keep_their_order_and_bytes_and_v1_drops_index_lines() -> None:
    diff = "prose\n" + change("b.py") + change("tests/t.py") + change("a.py").rstrip("\n")
    parts = split(diff, V1)
    assert parts.patch == change("b.py", index=False) + change("a.py", index=False)
    assert parts.test_patch == change("tests/t.py", index=False)
    assert split(diff, V2).patch == change("b.py") + change("a.py")


def test_paths_of_deleted_renamed_and_empty_files() -> None:
    rename = (
        "diff --git a/x.py b/y z.py\nsimilarity index 100%\nrename from x.py\nrename to y z.py\n"
    )
    empty = "diff --git a/e b/e.py b/e b/e.py\nnew file mode 100644\nindex 000..e69\n"
    diff = change("gone.py", new=False) + rename + empty
    assert split(diff, V1).sources == ("gone.py", "y z.py", "e b/e.py")


@pytest.mark.skipif(not LITE.exists(), reason=f"needs {LITE}")
def test_v1_reproduces_lite_and_v2_misfiles_seventeen_rows() -> None:
    """All seventeen are of pytest, whose own package is `_pytest`."""
    columns = ["instance_id", "patch", "test_patch"]
    misfiled = []
    for row in parquet.read_table(LITE, columns=columns).to_pylist():
        diff = row["patch"] + row["test_patch"]
        parts = split(diff, V1)
        assert (parts.patch, parts.test_patch) == (row["patch"], row["test_patch"])
        if split(diff, V2).patch != row["patch"]:
            misfiled.append(row["instance_id"])
    assert len(misfiled) == 17
    assert all(instance.startswith("pytest-dev__pytest-") for instance in misfiled)


def test_issues_follow_a_keyword_and_comments_do_not_count() -> None:
    texts = [
        "Fixes #12 and closes\n#13, see #14",
        "<!-- fixes #1\n --> RESOLVED #15, fixed #12; refixes #9",
        "resolve https://github.com/o/n/issues/16 and fix https://github.com/x/y/issues/17",
    ]
    assert resolved_issues(texts, "o/n") == ["12", "13", "15", "16"]


# -- rows ------------------------------------------------------------------------------------------

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
    """By time in any format, and repository in any letter case; derived versions count."""
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
