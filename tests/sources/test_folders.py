"""Task folders of SWE-bench v5 and Harbor, valid and invalid."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet

from mirrord.datasets.reading import read_dataset
from mirrord.datasets.rows import RawRow
from mirrord.errors import InvalidDatasetError
from mirrord.sources import folders
from mirrord.sources.folders import iter_tasks
from mirrord.sources.opening import open_sources

BASE, SETUP = "a" * 40, "b" * 40
LITE = Path(__file__).parents[3] / "shared/data/swe-bench/SWE-bench_Lite__test.parquet"
GOLD = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
TEST = "diff --git a/t b/t\r\n--- a/t\r\n+++ b/t\r\n+one\r\n"
YAML = f"""\
instance_id: {{name}}
repo: psf/requests
base_commit: {BASE}
environment_setup_commit: {SETUP}
version: 1.10
created_at: 2020-01-01 00:00:00
split: test
hints: ~
"""


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def swe_bench(root: Path, name: str, **changes: str | bytes | None) -> Path:
    files: dict[str, str | bytes | None] = {
        "task.yaml": YAML.format(name=name),
        "gold.patch": GOLD,
        "test.patch": TEST,
        "tests.json": json.dumps({"FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": []}),
        "problem_statement.md": "It is broken",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return write(root / "tasks" / name, {k: v for k, v in files.items() if v is not None})


def harbor(root: Path, name: str, files: dict[str, str]) -> Path:
    return write(root / name, {"instruction.md": "Repair it", "task.toml": "", **files})


def only(root: Path) -> dict[str, Any]:
    (row,) = iter_tasks(root)
    assert row.value is not None, row.fault
    return row.value


def faults(root: Path) -> dict[str, str | None]:
    rows: list[RawRow] = list(iter_tasks(root))
    return {row.origin.file: row.fault for row in rows if row.origin and row.fault}


# -- SWE-bench


def test_a_swe_bench_task_becomes_the_row_that_its_dataset_has(tmp_path: Path) -> None:
    swe_bench(tmp_path, "psf__requests-1")
    row = only(tmp_path)
    assert row["test_patch"] == TEST  # CRLF survives
    assert row["patch"] == GOLD
    assert (row["version"], row["created_at"]) == ("1.10", "2020-01-01 00:00:00")
    assert row["hints"] is None
    assert row["FAIL_TO_PASS"] == ["t::a"]
    assert row["problem_statement"] == "It is broken"


def test_the_script_of_a_task_is_its_file_or_in_its_yaml(tmp_path: Path) -> None:
    own = YAML.format(name="psf__requests-1") + "\neval_script: pytest\n"
    folder = swe_bench(tmp_path, "psf__requests-1", task__yaml=own)
    assert only(tmp_path)["eval_script"] == "pytest"
    (folder / "eval.sh").write_text("pytest -q\n")
    assert only(tmp_path)["eval_script"] == "pytest -q\n"


def test_a_folder_of_tasks_is_read_by_the_daemon_in_order_of_names(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        swe_bench(tmp_path / "repo", f"psf__requests-{number}")
    swe_bench(tmp_path / "repo", "psf__requests-9", gold__patch=None)
    source = open_sources([str(tmp_path / "repo")])
    assert (source.label, source.name, source.file) == ("repo", "repo", None)
    stream = tmp_path / "stream"
    stream.write_bytes(b"".join(source.pieces()))
    read = read_dataset(stream, source.label, None, tmp_path / "spool")
    assert (read.format, read.row_count, read.fault_count) == ("swe-bench-tasks", 3, 1)
    (fault,) = read.faults
    assert (fault.file, fault.reason) == ("tasks/psf__requests-9", "gold.patch is missing")
    ids = [json.loads(line)["id"] for line in (tmp_path / "spool").read_bytes().splitlines()]
    assert ids == [f"psf__requests-{number}" for number in (1, 2, 3)]


def test_each_bad_task_is_a_fault_with_its_folder(tmp_path: Path) -> None:
    bad: dict[str, dict[str, str | bytes | None]] = {
        "empty": {"test__patch": None},
        "aliases": {"task__yaml": "a: &a [x, x]\nb: [*a, *a]\n"},
        "list": {"task__yaml": "- 1\n"},
        "yaml": {"task__yaml": "a: [\n"},
        "json": {"tests__json": "{"},
        "latin": {"gold__patch": b"\xe9"},
        "stray": {"task__yaml": None},
        "object": {"task__yaml": "a: !!python/object/apply:os.system [id]\n"},
    }
    for name, changes in bad.items():
        swe_bench(tmp_path, name, **changes)
    link = swe_bench(tmp_path, "link", gold__patch=None)
    (link / "gold.patch").symlink_to("/etc/passwd")
    os.mkfifo(swe_bench(tmp_path, "fifo", gold__patch=None) / "gold.patch")
    huge = swe_bench(tmp_path, "huge")
    os.truncate(huge / "gold.patch", folders.FILE_LIMIT_BYTES + 1)
    (tmp_path / "tasks/linked").symlink_to(swe_bench(tmp_path / "elsewhere", "good"))
    found = faults(tmp_path / "tasks")
    assert found == {
        "aliases": "task.yaml cannot be read: it has aliases",
        "empty": "test.patch is missing",
        "fifo": "gold.patch is not a regular file",
        "huge": "gold.patch is longer than 128 MiB",
        "json": found["json"],
        "latin": "gold.patch is not UTF-8: unexpected end of data at byte 0",
        "link": "gold.patch is a symbolic link",
        "linked": "it is a symbolic link",
        "list": "task.yaml is not a mapping",
        "object": found["object"],
        "stray": "it has neither task.yaml nor task.toml",
        "yaml": found["yaml"],
    }
    assert "could not determine a constructor" in str(found["object"])


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a/b/c.txt": "x", ".git/task.yaml": "x", "1/2/3/4/5/6/7/task.yaml": "x"})
    with pytest.raises(InvalidDatasetError, match="it contains no task folder"):
        list(iter_tasks(tmp_path))


@pytest.mark.skipif(not LITE.exists(), reason=f"needs {LITE}")
def test_lite_as_folders_of_either_kind_is_lite(tmp_path: Path) -> None:
    """The rows equal those of its Parquet file, except for the applied rules."""
    for row in parquet.read_table(LITE).to_pylist()[:100]:
        name = row["instance_id"]
        harbor(tmp_path / "harbor", name, {"tests/config.json": json.dumps(row)})
        tests = {key: json.loads(row.pop(key)) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        files = {"gold.patch": row.pop("patch"), "test.patch": row.pop("test_patch")}
        texts = {"task.yaml": yaml.safe_dump(row), "tests.json": json.dumps(tests)}
        write(tmp_path / "swe-bench/tasks" / name, {**files, **texts})
    spool = tmp_path / "spool"
    read_dataset(LITE, "lite", None, spool)
    expected = [row for row in _known(spool) if (tmp_path / "harbor" / row["id"]).exists()]
    for kind in ("harbor", "swe-bench"):
        (stream := tmp_path / f"{kind}.jsonl").write_bytes(
            b"".join(open_sources([str(tmp_path / kind)]).pieces())
        )
        (spool := tmp_path / kind / "spool").unlink(missing_ok=True)
        read_dataset(stream, kind, None, spool)
        assert _known(spool) == expected


def _known(spool: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in spool.read_bytes().splitlines()]
    return sorted(({**row, "rules": None} for row in rows), key=lambda row: row["id"])


# -- Harbor


def test_the_row_that_an_adapter_left_is_taken(tmp_path: Path) -> None:
    config = {"instance_id": "psf__requests-1", "repo": "psf/requests", "base_commit": BASE}
    harbor(
        tmp_path,
        "task-0001",
        {
            "tests/config.json": json.dumps({**config, "patch": GOLD, "FAIL_TO_PASS": '["t"]'}),
            "environment/Dockerfile": "FROM --platform=x swebench/image:1 AS base\nRUN true\n",
        },
    )
    row = only(tmp_path)
    assert row["instance_id"] == "psf__requests-1"
    assert (row["patch"], row["image_name"]) == (GOLD, "swebench/image:1")


def test_repository_commit_and_patch_are_found_where_tasks_name_them(tmp_path: Path) -> None:
    metadata = f'[metadata.repo2env]\nrepo = "o/n"\nref = "{BASE}"\n[environment]\ndocker_image = "i"\nworkdir = "/app"'
    harbor(tmp_path / "a", "o__n-1", {"task.toml": metadata, "solution/patch.diff": GOLD})
    deepswe = f'[metadata]\nrepository_url = "https://x.org/o/n"\nbase_commit_hash = "{BASE}"\n'
    harbor(tmp_path / "c", "deep", {"task.toml": deepswe})
    assert (only(tmp_path / "c")["repo"], only(tmp_path / "c")["base_commit"]) == (
        "https://x.org/o/n",
        BASE,
    )
    docker = (
        "FROM x\nRUN git clone https://github.com/o/n.git /testbed && cd /testbed"
        f" && git reset --hard {BASE}\n"
    )
    script = f"cat > p.diff << '__SOLUTION__'\n{GOLD}__SOLUTION__\npatch -p1 -i p.diff\n"
    files = {"environment/Dockerfile": docker, "solution/solve.sh": script}
    harbor(tmp_path / "b", "o__n-2", {**files, "tests/test.patch": TEST})
    first, second = only(tmp_path / "a"), only(tmp_path / "b")
    for row in (first, second):
        assert (row["repo"], row["base_commit"], row["patch"]) == ("o/n", BASE, GOLD)
    assert (first["instance_id"], first["image_name"]) == ("o__n-1", "i")
    assert (first["workdir"], "workdir" in second) == ("/app", False)
    assert second["test_patch"] == TEST


def test_a_harbor_task_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"lacking/task.toml": "", "broken/task.toml": "a = [", "broken/instruction.md": ""},
    )
    found = faults(tmp_path)
    assert found["lacking"] == "instruction.md is missing"
    assert str(found["broken"]).startswith("task.toml cannot be read")
