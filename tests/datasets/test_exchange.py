"""Exports: canonical bytes, an equal dataset after an import, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import anyio
import pytest
from dataset_rows import BASE, DATA, SETUP, Case, row

from mirrord.catalog import Catalog, DatasetHead
from mirrord.catalog.spool import Found
from mirrord.datasets.reading import ReadResult
from mirrord.model import CommitId, DatasetName, History
from mirrord.protocol import RowsChange

GOLD = "c0ffee1234" * 4
OTHER = "d" * 40
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "swe-bench": [row(2), row(1, environment_setup_commit="", patch="a\0b\u2028\x7f ÿ\r\n")],
    "swe-rebench": [row(install_config={"python": 3.9, "pre_install": ["a"]}, image_name="i", created_at="2020-02-03 04:05:06+02:00")],
    "swe-smith": [
        {"instance_id": "p__r.1a2b3c4d.x", "repo": "swesmith/p__r.1a2b3c4d", "patch": "p"},
        {"instance_id": "p__r.1a2b3c4d.y", "repo": "swesmith/P__r.1a2b3c4d", "patch": "q"},
    ],
    "swe-minisandbox": [{"instance_id": BASE, "repo": "psf/requests", "image_name": "x"}],
    "swe-bench-pro": [
        {
            "instance_id": f"instance_psf__requests-{GOLD}-v1",
            "repo": "psf/requests",
            "base_commit": BASE,
            "patch": "p",
            "fail_to_pass": "['a']",
            "before_repo_set_cmd": f"git reset --hard {BASE}\ngit checkout {GOLD} -- test/a.py",
        }
    ],
    "swe-bench-live": [row(commit_urls=[f"https://x/{GOLD}", f"https://x/{OTHER}"])],
    "multi-swe-bench": [
        {
            "org": "psf", "repo": "requests", "number": 12, "base": {"sha": BASE},
            "fix_patch": "p", "test_patch": "t", "fixed_tests": {"a": {}, "b": {}},
        }
    ],
    "generic": [row(environment_setup_commit=..., created_at=..., FAIL_TO_PASS=["a"])],
}  # fmt: skip
REAL = sorted(path for path in DATA.glob("*/*") if "SYNTHETIC" not in path.name)


class Exchange:
    """A catalog that imports and exports the rows of a case."""

    def __init__(self, case: Case, catalog: Catalog) -> None:
        self.case, self.catalog = case, catalog

    async def put(self, name: str, result: ReadResult, found: Found | None = None) -> None:
        head = DatasetHead(
            name=DatasetName(name),
            format=result.format,
            source="f",
            sha256=result.sha256,
            imported_at=datetime.now(timezone.utc),
            fault_count=0,
            faults=[],
            rules={},
            refused={},
        )
        await self.catalog.replace_dataset(head, self.case.spool, found)

    async def export(self, name: str) -> Path:
        file = self.case.directory / f"{name}-exported.jsonl"
        file.unlink(missing_ok=True)
        await self.catalog.export_dataset(name, file)
        return file

    async def digest(self, name: str) -> str | None:
        found = await self.catalog.find_dataset(name)
        assert found is not None
        return found.digest


Test = Callable[[Exchange], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Test], None]:
    async def main(test: Test) -> None:
        catalog = await Catalog.open(tmp_path / "catalog.sqlite3")
        try:
            await test(Exchange(Case(tmp_path), catalog))
        finally:
            await catalog.close()

    return lambda test: anyio.run(main, test)


async def assert_same_again(exchange: Exchange, result: ReadResult) -> list[dict[str, Any]]:
    """Export, read, export: equal rows, equal digests, equal bytes."""
    await exchange.put("first", result)
    file = await exchange.export("first")
    again = exchange.case.read_path(file)
    assert (again.format, again.fault_count) == ("mirrord", 0)
    assert (again.row_count, again.commits) == (result.row_count, result.commits)
    change = await exchange.catalog.compare_dataset("first", exchange.case.spool)
    assert change == RowsChange(unchanged_count=result.row_count)
    await exchange.put("second", again)
    assert (await exchange.export("second")).read_bytes() == file.read_bytes()
    assert await exchange.digest("first") == await exchange.digest("second")
    return [json.loads(line) for line in file.read_bytes().splitlines()]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_export_is_read_as_the_same_rows(run: Callable[[Test], None], name: str) -> None:
    """Ids, directions, bounds, dates, all commits with their roles, every byte of a patch."""

    async def test(exchange: Exchange) -> None:
        result = exchange.case.read(SAMPLES[name])
        assert result.format == name
        ids = sorted(exchange.case.ids)
        assert [line["instance_id"] for line in await assert_same_again(exchange, result)] == ids

    run(test)


def test_scripts_that_run_the_tests_are_exported(run: Callable[[Test], None]) -> None:
    columns: list[dict[str, Any]] = [
        {"eval_script": "#!/bin/bash\npytest\n"},
        {
            "run_script": "pytest $1\n", "parsing_script": "print(1)\n",
            "selected_test_files_to_run": '["tests/test_a.py"]',
        },
    ]  # fmt: skip

    async def test(exchange: Exchange) -> None:
        rows = [row(n, **more) for n, more in enumerate(columns)]
        first, second = await assert_same_again(exchange, exchange.case.read(rows))
        assert first["install_config"] == columns[0]
        assert second["install_config"]["test_files"] == ["tests/test_a.py"]

    run(test)


def test_a_row_at_a_branch_keeps_the_commit_that_was_found(run: Callable[[Test], None]) -> None:
    """Roles and branch are exported; compared with the original file nothing differs."""

    async def test(exchange: Exchange) -> None:
        result = exchange.case.read(SAMPLES["swe-smith"][:1])
        at = {"swesmith__p__r.1a2b3c4d": {"p__r.1a2b3c4d.x": CommitId(OTHER)}}
        await exchange.put("first", result, at)
        change = await exchange.catalog.compare_dataset("first", exchange.case.spool)
        assert change == RowsChange(unchanged_count=1)
        file = await exchange.export("first")
        (line,) = map(json.loads, file.read_text().splitlines())
        assert (line["base_commit"], line["revision"]) == (OTHER, "p__r.1a2b3c4d.x")
        again = exchange.case.read_path(file)
        assert again.revisions == {}
        await exchange.put("second", again)
        assert await exchange.digest("first") == await exchange.digest("second")

    run(test)


@pytest.mark.parametrize("file", REAL, ids=lambda path: path.name)
def test_a_real_file_is_the_same_after_an_export(run: Callable[[Test], None], file: Path) -> None:
    async def test(exchange: Exchange) -> None:
        await assert_same_again(exchange, exchange.case.read_path(file))

    run(test)


def test_the_same_rows_in_another_order_or_format_export_the_same_bytes(
    run: Callable[[Test], None],
) -> None:
    """One JSON object a line with sorted keys, in the order of the ids' bytes."""
    rows = [row(n, instance_id=f"{word}-{n}") for n, word in enumerate(("b", "é", "A", "a", "ﬁ"))]

    async def test(exchange: Exchange) -> None:
        await exchange.put("first", exchange.case.read(rows))
        listed = [{**each, "FAIL_TO_PASS": ["t1", "t2"]} for each in reversed(rows)]
        await exchange.put("second", exchange.case.read(json.dumps(listed).encode()))
        content = (await exchange.export("first")).read_bytes()
        assert (await exchange.export("second")).read_bytes() == content
        values = [json.loads(line) for line in content.splitlines()]
        ids = [value["instance_id"] for value in values]
        assert ids == sorted(ids, key=str.encode)
        assert all(list(value) == sorted(value) for value in values)
        assert await exchange.digest("first") == await exchange.digest("second")

    run(test)


def test_what_differs_is_told_by_row_and_field(run: Callable[[Test], None]) -> None:
    async def test(exchange: Exchange) -> None:
        await exchange.put("old", exchange.case.read([row(n) for n in range(1, 6)]))
        new = [row(2), row(3, base_commit=OTHER), row(4, patch="x", version="2"), row(6)]
        new.append(row(5, environment_setup_commit=OTHER))
        exchange.case.read(new)
        change = await exchange.catalog.compare_dataset("old", exchange.case.spool)
        assert (change.added, change.removed) == (["psf__requests-6"], ["psf__requests-1"])
        assert change.unchanged_count == 1
        three, four, five = change.changed
        assert (three.fields, three.base_before, three.base_after) == (
            ["base_commit", "commits"],
            BASE,
            OTHER,
        )
        assert (four.id, four.fields) == ("psf__requests-4", ["patch", "version"])
        assert (five.fields, five.base_before) == (["commits"], None)
        nothing = await exchange.catalog.compare_dataset("none", exchange.case.spool)
        assert len(nothing.added) == 5

    run(test)


def test_the_sums_of_a_dataset_say_what_its_rows_have(run: Callable[[Test], None]) -> None:
    async def test(exchange: Exchange) -> None:
        rows = [row(1, image_name="a"), row(2, image_name="b", created_at="2021-05-06")]
        await exchange.put("d", exchange.case.read([*rows, row(3, base_commit=OTHER)]))
        found = await exchange.catalog.find_dataset("d")
        assert found is not None
        assert found.commits_by_role == {"base": 2, "environment-setup": 1}
        assert found.environment_count == 2
        first, last = found.first_created_at, found.last_created_at
        assert first == datetime(2020, 1, 1, tzinfo=timezone.utc)
        assert last == datetime(2021, 5, 6, tzinfo=timezone.utc)

    run(test)


def test_bad_commits_of_an_exported_row_are_told(tmp_path: Path) -> None:
    good = [{"commit": BASE, "role": "base"}, {"commit": SETUP, "role": "gold"}]
    rows = [
        row(number, direction="reverse", history="squashed", commits=commits)
        for number, commits in enumerate([good, [{"commit": BASE}], "x", [7]])
    ]
    case = Case(tmp_path)
    result = case.read(rows)
    assert (result.format, result.row_count, result.fault_count) == ("mirrord", 1, 3)
    assert {fault.reason for fault in result.faults} == {
        "commits is not a list of objects with commit and role"
    }
    (line,) = case.rows
    assert (line["direction"], line["history"]) == ("reverse", History.SQUASHED)
    assert line["commits"] == [[BASE, "base"], [SETUP, "gold"]]
