"""Which files of a diff are tests by each rule, and which issues a pull request resolves."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet

from mirrord.derive.pulls import SplitRule, resolved_issues, split

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
