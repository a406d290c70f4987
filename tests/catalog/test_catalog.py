"""The catalog, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import pytest
from next_release import add_revisions
from postgresql import Server, running
from sqlalchemy import inspect

from mirrord.catalog import (
    Catalog,
    DatasetHead,
    InstanceRow,
    MirrorRow,
    PinRow,
    ReceiptRow,
    encode_row,
)
from mirrord.catalog.database import MIGRATIONS, Database, migrate, read_revision
from mirrord.catalog.datasets import find_instances
from mirrord.catalog.schema import HEAD, metadata
from mirrord.errors import (
    ConflictError,
    CorruptCatalogError,
    DiskFullError,
    InstanceAmbiguousError,
    InvalidUrlError,
    ResourceError,
)
from mirrord.model import (
    AuditLevel,
    Backend,
    CommitId,
    CommitRole,
    CommitState,
    DatasetName,
    Direction,
    History,
    MirrorName,
    ReportKind,
    View,
)
from mirrord.protocol import RECEIPT_FORMAT, Audit, Digest, Receipt, Report, RowFault
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.slow

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
REQUESTS = MirrorName("psf", "Requests")


def commit(number: int) -> CommitId:
    return CommitId(f"{number:040x}")


def mirror(name: MirrorName = REQUESTS) -> MirrorRow:
    return MirrorRow(name=name, url=f"https://example.com/{name.repo}", added_at=NOW)


def instance(
    identity: str, base: int = 1, name: MirrorName = REQUESTS, patch: str | None = "diff"
) -> InstanceRow:
    commits = ((commit(base), CommitRole.BASE), (commit(99), CommitRole.ENVIRONMENT))
    return InstanceRow(
        identity,
        "",
        name,
        commit(base),
        Direction.FORWARD,
        commits,
        patch,
        None,
        ("a",),
        ("b", "c"),
    )


def head(name: str = "lite", **changes: Any) -> DatasetHead:
    values: dict[str, Any] = {
        "format": "swe-bench",
        "source": "lite.jsonl",
        "sha256": "0" * 64,
        "imported_at": NOW,
    }
    values |= {"fault_count": 0, "faults": [], "rules": {}, "refused": {}}
    return DatasetHead(name=DatasetName(name), **values | changes)


async def put(catalog: Catalog, directory: Path, rows: list[InstanceRow], **changes: Any) -> Any:
    spool = directory / "spool.jsonl"
    spool.write_bytes(b"".join(encode_row(row) for row in rows))
    return await catalog.replace_dataset(head(**changes), spool)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "sqlite":
        return tmp_path / "catalog.sqlite3"
    url: str = request.getfixturevalue("server").create()
    return url


@pytest.fixture
def using(place: str | Path) -> Callable[[Callable[[Catalog], Any]], Any]:
    """Run an async function on an open catalog."""

    def run(work: Callable[[Catalog], Any]) -> Any:
        async def main() -> Any:
            catalog = await Catalog.open(place)
            try:
                return await work(catalog)
            finally:
                await catalog.close()

        return anyio.run(main)

    return run


# -- mirrors and pins ------------------------------------------------------------------------------


def test_a_mirror_comes_back_as_it_was_put_whatever_the_letter_case(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        assert await catalog.find_mirror("PSF__requests") == mirror()
        assert await catalog.list_mirrors() == [mirror()]
        assert await catalog.find_mirror("psf__other") is None

    using(work)


def test_columns_of_a_mirror_are_updated_with_aware_times_and_large_sizes(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        changes = {
            "synced_at": NOW,
            "size_bytes": 2**40,
            "error": {"code": "x"},
            "ref_faults": [{"ref": "r"}],
        }
        assert await catalog.update_mirror("psf__requests", **changes)
        found = await catalog.find_mirror("psf__requests")
        assert found is not None
        assert found.synced_at == NOW
        assert found.synced_at.utcoffset() == timedelta()
        assert (found.size_bytes, found.error, found.ref_faults) == (
            2**40,
            {"code": "x"},
            [{"ref": "r"}],
        )
        assert not await catalog.update_mirror("no__such", size_bytes=1)

    using(work)


def test_putting_a_mirror_again_keeps_its_pins(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        await catalog.put_pins([PinRow(REQUESTS, commit(1), "person/0", "", NOW)])
        await catalog.put_mirror(mirror())
        assert len(await catalog.list_pins("psf__requests")) == 1

    using(work)


def test_a_pin_belongs_to_its_owner_and_goes_with_its_mirror(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        rows = [
            PinRow(REQUESTS, commit(1), owner, "why", NOW) for owner in ("dataset/lite", "person/7")
        ]
        await catalog.put_pins(rows + rows)
        assert await catalog.list_pins(commit=commit(1)) == rows
        assert await catalog.count_pins() == {"psf__requests": 1}
        await catalog.delete_pins("PSF__requests", [commit(1)], "dataset/lite")
        assert await catalog.list_pins() == rows[1:]
        await catalog.delete_mirror("psf__requests")
        assert await catalog.list_pins() == []

    using(work)


def test_thousands_of_pins_are_put_and_deleted_at_once(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        commits = [commit(n) for n in range(1, 3001)]
        await catalog.put_pins([PinRow(REQUESTS, c, "dataset/lite", "", NOW) for c in commits])
        await catalog.delete_pins("psf__requests", commits[:2999], "dataset/lite")
        assert [row.commit for row in await catalog.list_pins()] == [commits[-1]]

    using(work)


# -- datasets --------------------------------------------------------------------------------------


def test_an_export_is_in_the_order_of_bytes_and_rows_are_weighed(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        rows = [instance(identity, patch="p" * 1000) for identity in ("b", "é", "B", "a_", "a-")]
        await put(catalog, tmp_path, rows)
        await catalog.export_dataset("lite", tmp_path / "out")
        lines = (tmp_path / "out").read_text().splitlines()
        ids = [json.loads(line)["instance_id"] for line in lines]
        assert ids == sorted(ids, key=str.encode)
        change = await catalog.compare_dataset("lite", tmp_path / "spool.jsonl")
        assert (change.unchanged_count, change.added, change.removed) == (5, [], [])
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert found.digest
        assert 5000 < (await catalog.weigh_datasets())["lite"] < 6000

    using(work)


def test_a_dataset_says_what_changed_and_importing_it_again_changes_nothing(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        first = await put(catalog, tmp_path, [instance("a"), instance("b"), instance("c")])
        assert (first.added, first.changed, first.removed, first.unchanged_count) == (
            ["a", "b", "c"],
            [],
            [],
            0,
        )
        again = await put(catalog, tmp_path, [instance("a"), instance("b"), instance("c")])
        assert (again.added, again.changed, again.removed, again.unchanged_count) == ([], [], [], 3)
        third = await put(catalog, tmp_path, [instance("a"), instance("b", base=2), instance("d")])
        assert (third.added, third.changed, third.removed, third.unchanged_count) == (
            ["d"],
            ["b"],
            ["c"],
            1,
        )
        assert await catalog.list_instance_ids("lite") == ["a", "b", "d"]

    using(work)


def test_an_instance_comes_back_whole_even_with_a_nul_in_its_patch(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance("psf__requests-1", patch="a\0b\r\n\x7fü")])
        found = await catalog.find_instance("psf__requests-1")
        assert found is not None
        assert (found.dataset, found.mirror, found.base_commit, found.repo) == (
            "lite",
            REQUESTS,
            commit(1),
            "psf/Requests",
        )
        assert (found.patch, found.test_patch) == ("a\0b\r\n\x7fü", None)
        assert (found.fail_to_pass, found.pass_to_pass) == (("a",), ("b", "c"))
        assert set(found.commits) == {
            (commit(1), CommitRole.BASE),
            (commit(99), CommitRole.ENVIRONMENT),
        }

    using(work)


def test_every_fact_of_a_row_of_any_format_comes_back(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        made = replace(
            instance("swesmith.1"),
            dataset="lite",
            base_commit=None,
            commits=(),
            direction=Direction.REVERSE,
            revision="swesmith.1",
            environment="swesmith/python:3.10",
            python_version="3.10",
            version="2.1",
            created_at=NOW,
            history=History.SQUASHED,
            rules=("repo: URL",),
        )
        await put(catalog, tmp_path, [made])
        assert await catalog.find_instance("swesmith.1") == made

    using(work)


def test_an_id_that_tells_a_commit_of_the_answer_has_a_public_id_too(
    using: Any, tmp_path: Path
) -> None:
    gold = CommitId("0123456789" * 4)
    commits = ((commit(1), CommitRole.BASE), (gold, CommitRole.GOLD))
    told = replace(instance(f"instance_x-{gold[:7].upper()}"), commits=commits)
    silent = replace(instance(f"instance_x-{gold[:6]}"), commits=commits)
    own = replace(instance(f"x-{commit(1)}"), commits=commits[:1])

    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [told, silent, own])
        found = await catalog.find_instance(told.public_id)
        assert found is not None
        assert (found.id, found.public_id) == (told.id, told.public_id)
        assert re.fullmatch(r"psf__requests-[0-9a-f]{12}", told.public_id)
        assert await catalog.find_instance(told.id) == found
        assert (silent.public_id, own.public_id) == (silent.id, own.id)

    using(work)


def test_instance_ids_keep_their_letter_case(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance("A", base=1), instance("a", base=2)])
        upper, lower = await catalog.find_instance("A"), await catalog.find_instance("a")
        assert upper is not None
        assert lower is not None
        assert (upper.base_commit, lower.base_commit) == (commit(1), commit(2))

    using(work)


def test_the_dataset_first_imported_answers_for_an_id_that_several_have(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance("a", base=1)], name="zoo")
        await put(catalog, tmp_path, [instance("a", base=3)], name="ant")
        with pytest.raises(InstanceAmbiguousError):
            await catalog.find_instance("a")
        await put(catalog, tmp_path, [instance("a", base=3)], name="zoo")
        found = await catalog.find_instance("a")
        assert found is not None
        assert (found.dataset, found.base_commit) == ("zoo", commit(3))
        assert await catalog.list_ambiguous("ant") == []
        others = {"fail_to_pass": ("t9",)}, {"test_patch": "+9"}, {"install_config": {"a": 1}}
        for other in others:
            await put(catalog, tmp_path, [replace(instance("a", base=3), **other)], name="ant")
            with pytest.raises(InstanceAmbiguousError):
                await catalog.find_instance("a")
            (told,) = await catalog.list_ambiguous("ant")
            assert (told.id, told.datasets, told.differs) == ("a", ["ant", "zoo"], "tests")
            choice = await catalog.choose_instance("a")
            assert choice is not None
            assert (choice.row.dataset, choice.rivals) == ("zoo", ("zoo", "ant"))
        for environment, is_shared in (("image", True), ("another", False)):
            zoo = replace(instance("a", base=3), environment="image")
            ant = replace(zoo, fail_to_pass=("t9",), environment=environment)
            await put(catalog, tmp_path, [zoo], name="zoo")
            await put(catalog, tmp_path, [ant], name="ant")
            choice = await catalog.choose_instance("a")
            assert choice is not None
            assert (bool(choice.rivals), choice.shares_setup) == (True, is_shared)
        await put(catalog, tmp_path, [instance("a", base=3)], name="zoo")
        none = replace(instance("a", base=3), fail_to_pass=(), pass_to_pass=(), version="2")
        await put(catalog, tmp_path, [none], name="ant")
        assert await catalog.list_ambiguous("ant") == []
        assert await catalog.find_instance("a") == found
        await put(catalog, tmp_path, [instance("a", base=3)], name="ant")
        await catalog.delete_dataset("zoo")
        found = await catalog.find_instance("a")
        assert found is not None
        assert found.dataset == "ant"

    using(work)


def test_a_dataset_is_pinned_only_where_its_own_pins_are(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        refused = {"psf__requests": {commit(99): "upstream lost it"}}
        await put(catalog, tmp_path, [instance("a"), instance("b", base=2)], refused=refused)
        await catalog.put_pins([PinRow(REQUESTS, commit(1), "dataset/lite", "base", NOW)])
        await catalog.put_pins([PinRow(REQUESTS, commit(2), "person/0", "mine", NOW)])
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert (found.instance_count, found.commit_count, found.mirrors) == (
            2,
            3,
            ["psf__Requests"],
        )
        unpinned = {row.commit: row for row in found.unpinned}
        assert set(unpinned) == {commit(2), commit(99)}
        assert unpinned[commit(99)].instances == ["a", "b"]
        assert unpinned[commit(99)].reason == "upstream lost it"
        assert "not been pinned" in unpinned[commit(2)].reason
        assert found.unpinned_count == 2
        assert [row.unpinned_count for row in await catalog.summarise_datasets()] == [2]
        left = await catalog.list_recorded("psf__requests", unpinned=True)
        assert {(row.commit, row.instance) for row in left} == {
            (commit(2), "b"),
            (commit(99), "a"),
            (commit(99), "b"),
        }

    using(work)


def test_reasons_are_replaced_per_mirror(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance("a")], refused={"other__one": {commit(5): "x"}})
        await catalog.put_refused("lite", "psf__requests", {commit(1): "gone"})
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert {row.commit: row.reason for row in found.unpinned}[commit(1)] == "gone"
        await catalog.put_refused("lite", "psf__requests", {"*": "no upstream"})
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert {row.reason for row in found.unpinned} == {"no upstream"}

    using(work)


def test_pins_of_rows_that_went_away_are_stale(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        owners = ["dataset/lite", "dataset/gone", "person/0"]
        await catalog.put_pins(
            [PinRow(REQUESTS, commit(n), owner, "", NOW) for n in (1, 2) for owner in owners]
        )
        await put(catalog, tmp_path, [instance("a", base=1)])
        stale = {(row.owner, row.commit) for row in await catalog.list_stale_pins()}
        assert stale == {
            ("dataset/lite", commit(2)),
            ("dataset/gone", commit(1)),
            ("dataset/gone", commit(2)),
        }

    using(work)


def test_recorded_commits_are_listed_by_mirror_and_by_dataset_in_the_registered_spelling(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror(MirrorName("PSF", "requests")))
        await put(
            catalog, tmp_path, [instance("a"), instance("f", name=MirrorName("pallets", "flask"))]
        )
        await put(catalog, tmp_path, [instance("a", base=2)], name="full")
        rows = await catalog.list_recorded("psf__requests", "lite")
        assert [(row.commit, row.role, row.instance) for row in rows] == [
            (commit(1), CommitRole.BASE, "a"),
            (commit(99), CommitRole.ENVIRONMENT, "a"),
        ]
        assert {str(row.mirror) for row in rows} == {"PSF__requests"}
        assert len(await catalog.list_recorded()) == 6
        assert await catalog.list_named("PSF__requests") == {commit(1), commit(2), commit(99)}
        await catalog.put_pins([PinRow(MirrorName("PSF", "requests"), commit(7), "me", "", NOW)])
        assert commit(7) in await catalog.list_named("psf__requests")
        assert (await catalog.find_instance("a", "lite")).mirror == MirrorName("PSF", "requests")  # type: ignore[union-attr]

    using(work)


def test_deleting_a_dataset_takes_its_instances_along(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance("a")])
        assert await catalog.delete_dataset("lite")
        assert not await catalog.delete_dataset("lite")
        assert await catalog.find_instance("a") is None
        assert await catalog.list_recorded() == []
        assert await catalog.list_datasets() == []

    using(work)


def test_faults_and_rules_of_an_import_are_kept(using: Any, tmp_path: Path) -> None:
    async def work(catalog: Catalog) -> None:
        fault = RowFault(file="f.jsonl", line=3, instance="x", reason="no commit")
        await put(
            catalog,
            tmp_path,
            [instance("a")],
            faults=[fault],
            fault_count=7,
            rules={"list: JSON string": 2},
        )
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert (found.faults, found.rules, found.imported_at) == (
            [fault],
            {"list: JSON string": 2},
            NOW,
        )
        assert found.fault_count == 7
        assert (await catalog.summarise_datasets())[0].fault_count == 7

    using(work)


def test_a_list_of_datasets_shows_only_the_first_of_many_unpinned_commits(
    using: Any, tmp_path: Path
) -> None:
    async def work(catalog: Catalog) -> None:
        await put(catalog, tmp_path, [instance(f"i{n}", base=n + 100) for n in range(150)])
        (listed,) = await catalog.list_datasets()
        assert (len(listed.unpinned), listed.unpinned_count) == (100, 151)
        found = await catalog.find_dataset("lite")
        assert found is not None
        assert len(found.unpinned) == 151

    using(work)


# -- audits ----------------------------------------------------------------------------------------


def test_the_newest_audits_are_kept(using: Any) -> None:
    def audit(number: int) -> Audit:
        finished = NOW + timedelta(days=number)
        counts = {CommitState.OK: number}
        return Audit(
            id=f"audit{number}",
            level=AuditLevel.QUICK,
            mirrors=[],
            started_at=NOW,
            finished_at=finished,
            counts=counts,
            findings=[],
            open_count=0,
        )

    async def work(catalog: Catalog) -> None:
        for number in range(205):
            await catalog.put_audit(audit(number))
        assert await catalog.find_audit("audit204") == audit(204)
        assert await catalog.find_audit("audit0") is None
        assert [a.id for a in await catalog.list_audits(limit=2)] == ["audit204", "audit203"]
        assert len(await catalog.list_audits(limit=1000)) == 200

    using(work)


def test_statements_for_lists_of_all_lengths_are_not_kept(tmp_path: Path) -> None:
    """As many after 200 as after 100."""

    def count() -> int:
        return sum(type(each).__qualname__ == "Statement" for each in gc.get_objects())

    before, counts = count(), []
    with closing(Database(tmp_path / "catalog.sqlite3")) as database:
        migrate(str(tmp_path / "catalog.sqlite3"))
        for number in range(1, 201):
            with database.read() as connection:
                list(find_instances(connection, "none", ["x"] * number))
            if number % 100 == 0:
                counts.append(count() - before)
    assert 0 < counts[1] <= counts[0] < 50


def test_the_newest_receipts_are_kept_and_push_out_no_report(using: Any) -> None:
    def row(number: int) -> ReceiptRow:
        at = NOW + timedelta(minutes=number)
        receipt = Receipt(
            format=RECEIPT_FORMAT, version="1", issued_at=at, checkout="c", mirror="o__r",
            commit="a" * 40, tree="b" * 40, head="a" * 40, history=History.SEALED,
            view=View.AGENT, backend=Backend.POOL, created_at=at, expires_at=at, resets=0,
            diff=Digest(bytes=0, sha256="0" * 64),
        )  # fmt: skip
        return ReceiptRow(f"{number}", "n", "host", 7, number % 2 == 0, receipt)

    async def work(catalog: Catalog) -> None:
        report = Report(id="r", at=NOW, kind=ReportKind.GRADING, total=1)
        await catalog.put_report(report)
        for number in range(203):
            await catalog.put_receipts([row(number)])
        assert await catalog.find_receipt("202") == row(202)
        assert await catalog.find_receipt("2") is None
        assert [each.id for each in await catalog.list_receipts()][:2] == ["202", "201"]
        assert len(await catalog.list_receipts()) == 200
        assert await catalog.list_reports() == [report]

    using(work)


def test_the_newest_reports_are_kept(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        for number in range(203):
            at = NOW + timedelta(minutes=number)
            kind = ReportKind.GRADING
            report = Report(id=f"{number}", at=at, kind=kind, total=1, faults={"i": "conflict"})
            await catalog.put_report(report)
        assert await catalog.find_report("202") == report
        assert await catalog.find_report("2") is None
        assert [each.id for each in await catalog.list_reports(limit=2)] == ["202", "201"]
        assert len(await catalog.list_reports(limit=1000)) == 200

    using(work)


# -- many at once, much at once --------------------------------------------------------------------


def test_many_readers_and_writers_at_once_lose_nothing(using: Any) -> None:
    async def work(catalog: Catalog) -> None:
        async def one(number: int) -> None:
            name = MirrorName("owner", f"name{number}")
            await catalog.put_mirror(mirror(name))
            assert await catalog.find_mirror(name.key) is not None

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        assert len(await catalog.list_mirrors()) == 50

    using(work)


_IMPORT_MANY = """
import sys
from pathlib import Path
from datetime import datetime, timezone
from mirrord.catalog import DatasetHead
from mirrord.catalog.spool import replace_dataset
now = datetime.now(timezone.utc)
head = DatasetHead("big", "swe-bench", "big.jsonl", "0" * 64, now, 0, [], {}, {})
def peak_kib():  # not ru_maxrss: that begins with the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak_kib()
change = replace_dataset(sys.argv[1], head, Path(sys.argv[2]))
print(len(change.added), peak_kib() - before)
"""


def test_ten_thousand_instances_are_imported_in_bounded_memory(tmp_path: Path) -> None:
    """Of their 40 MB only ids and commits accumulate."""

    async def prepare() -> None:
        await (await Catalog.open(tmp_path / "catalog.sqlite3")).close()

    anyio.run(prepare)
    spool = tmp_path / "spool.jsonl"
    with spool.open("wb") as file:
        for number in range(10_000):
            file.write(
                encode_row(instance(f"owner__name-{number}", base=number + 1, patch="x" * 4000))
            )
    command = [sys.executable, "-c", _IMPORT_MANY, str(tmp_path / "catalog.sqlite3"), str(spool)]
    added, grown_kib = map(
        int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert added == 10_000
    assert grown_kib < 30 * 1024


def test_a_large_import_leaves_no_large_wal(tmp_path: Path) -> None:
    """The daemon keeps the catalog open, so that SQLite never removes it by itself."""

    async def run() -> None:
        catalog = await Catalog.open(tmp_path / "catalog.sqlite3")
        try:
            await put(
                catalog,
                tmp_path,
                [instance(f"a{n}", patch="x" * 2_000_000) for n in range(5)],
                name="big",
            )
            assert len(await catalog.list_instance_ids("big")) == 5
            assert (tmp_path / "catalog.sqlite3-wal").stat().st_size < 1 << 20
        finally:
            await catalog.close()

    anyio.run(run)


def test_a_killed_import_leaves_the_old_dataset_whole(tmp_path: Path) -> None:
    place = tmp_path / "catalog.sqlite3"

    async def before() -> None:
        catalog = await Catalog.open(place)
        await put(catalog, tmp_path, [instance("a", base=5)], name="big")
        await catalog.close()

    async def after() -> None:
        catalog = await Catalog.open(place)
        assert await catalog.list_instance_ids("big") == ["a"]
        await put(catalog, tmp_path, [instance("b")], name="big")
        await catalog.close()

    anyio.run(before)
    spool = tmp_path / "fifo"
    os.mkfifo(spool)
    importer = subprocess.Popen([sys.executable, "-c", _IMPORT_MANY, str(place), str(spool)])
    with spool.open("wb") as file:
        for number in range(5000):
            file.write(encode_row(instance(f"n{number}")))
        file.flush()
        importer.send_signal(signal.SIGKILL)
        importer.wait()
    anyio.run(after)


# -- opening ---------------------------------------------------------------------------------------


def test_opening_again_finds_what_was_there(using: Any) -> None:
    async def first(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())

    async def second(catalog: Catalog) -> None:
        assert await catalog.list_mirrors() == [mirror()]

    using(first)
    using(second)


def test_the_files_are_private(tmp_path: Path) -> None:
    async def work() -> None:
        catalog = await Catalog.open(tmp_path / "catalog.sqlite3")
        await catalog.put_mirror(mirror())
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
        await catalog.close()

    anyio.run(work)


def test_a_fresh_catalog_loads_neither_alembic_nor_the_other_dialect(tmp_path: Path) -> None:
    code = (
        "import sys, anyio, mirrord.catalog as c; anyio.run(c.Catalog.open, sys.argv[1]);"
        " assert not {'alembic', 'sqlalchemy.dialects.postgresql'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True)


def test_a_fresh_catalog_indexes_none_but_unresolved_rows(using: Any, place: str | Path) -> None:
    using(lambda _: anyio.sleep(0))
    database = Database(place)
    with database.read() as connection:
        found = {each["name"]: each for each in inspect(connection).get_indexes("instances")}
        options = found["unresolved_instances"]["dialect_options"]
        assert "base_commit" in str(options[f"{connection.dialect.name}_where"])
    database.close()


def test_migrations_build_exactly_the_tables_of_the_schema(place: str | Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]
    migrate(str(place))
    database = Database(place)
    with database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == HEAD
    database.close()


def test_an_unknown_revision_is_refused_and_migrations_run_in_a_worker(tmp_path: Path) -> None:
    place = tmp_path / "catalog.sqlite3"
    with sqlite3.connect(place) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        connection.execute("INSERT INTO alembic_version VALUES ('0000')")
    connection.close()
    older = MIGRATIONS / "versions"
    assert not list(older.glob("0000_*")), "0000 is never a revision"

    async def work() -> None:
        workers = Workers(size=1)
        try:
            with pytest.raises(ConflictError, match="schema 0000"):
                await Catalog.open(place, workers)
            place.unlink()
            await workers.run(migrate, str(place), timeout=timedelta(seconds=60))
            catalog = await Catalog.open(place, workers)
            await put(catalog, tmp_path, [instance("a")])
            assert await catalog.list_instance_ids() == ["a"]
            await catalog.close()
        finally:
            await workers.close()

    anyio.run(work)


def test_a_migration_keeps_the_last_two_catalogs_and_needs_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, migrations = tmp_path / "catalog.sqlite3", tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, migrations)
    add_revisions(migrations, range(2, 6))
    monkeypatch.setattr("mirrord.catalog.database.MIGRATIONS", migrations)
    for revision in ("0001", "0002", "0003", "0004"):
        migrate(str(place), revision)
    assert [path.name for path in sorted(tmp_path.glob("catalog-*"))] == [
        "catalog-0002.sqlite3",
        "catalog-0003.sqlite3",
    ]
    (tmp_path / "catalog-0004.new").mkdir()
    with pytest.raises(ResourceError, match="cannot back up the catalog"):
        migrate(str(place), "0005")
    with closing(sqlite3.connect(place)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0004",)


def test_a_migration_changes_every_row_or_nothing(
    using: Any, place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both databases, one that fails in its last statement is undone, and repeated."""
    using(lambda catalog: put(catalog, tmp_path, [instance("a"), instance("b")]))
    migrations = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, migrations)
    add_revisions(migrations, [2])
    monkeypatch.setattr("mirrord.catalog.database.MIGRATIONS", migrations)
    (newest,) = (migrations / "versions").glob("0002*")
    whole = newest.read_text()
    newest.write_text(whole + '    raise RuntimeError("failed at the end")\n')
    with pytest.raises(RuntimeError, match="failed at the end"):
        migrate(str(place), "0002")
    assert read_revision(str(place)) == HEAD
    using(lambda catalog: put(catalog, tmp_path, [instance("a"), instance("b"), instance("c")]))
    newest.write_text(whole)
    migrate(str(place), "0002")
    with closing(Database(place)) as database, database.read() as connection:
        notes = connection.exec_driver_sql("SELECT note_0002 FROM instances ORDER BY id").scalars()
        assert notes.all() == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["not-a-database", "broken-page", "empty-schema"])
def test_a_damaged_catalog_is_refused_with_a_hint(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "catalog.sqlite3"

    async def make() -> None:
        catalog = await Catalog.open(place)
        for number in range(300):
            await catalog.put_mirror(mirror(MirrorName("owner", f"name{number}")))
        await catalog.close()

    async def open_it() -> None:
        await Catalog.open(place)

    anyio.run(make)
    if damage == "not-a-database":
        place.write_bytes(b"hello\n" * 1000)
    elif damage == "broken-page":
        with place.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(8192))
    else:
        with sqlite3.connect(place) as connection:
            connection.execute("DROP TABLE alembic_version")
        connection.close()
    with pytest.raises(CorruptCatalogError) as caught:
        anyio.run(open_it)
    assert caught.value.hint
    assert str(place) in caught.value.message


def test_a_full_disk_stops_the_write_and_keeps_what_was(tmp_path: Path) -> None:
    """By a file size limit, which SQLite reports as a full disk or an input/output error."""
    place = tmp_path / "catalog.sqlite3"

    async def work() -> None:
        catalog = await Catalog.open(place)
        await catalog.put_mirror(mirror())
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            with pytest.raises((DiskFullError, ResourceError)):
                await catalog.put_mirror(
                    mirror(MirrorName("owner", "n" * 90))
                )  # small, so that only the next one is too large
                await catalog.put_pins(
                    [PinRow(REQUESTS, commit(n), "person/0", "x" * 1000, NOW) for n in range(1000)]
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert await catalog.list_pins() == []
        await catalog.put_pins([PinRow(REQUESTS, commit(1), "person/0", "", NOW)])
        await catalog.close()

    anyio.run(work)


def test_a_full_database_is_a_disk_full_error(tmp_path: Path) -> None:
    async def work() -> None:
        catalog = await Catalog.open(tmp_path / "catalog.sqlite3")
        with pytest.raises(DiskFullError, match="cannot write the catalog"):
            await catalog._run(
                catalog._database.write,
                lambda connection: (
                    connection.exec_driver_sql("PRAGMA max_page_count = 1"),
                    _grow(connection),
                ),
            )
        await catalog.close()

    def _grow(connection: Any) -> None:
        connection.exec_driver_sql("CREATE TABLE big AS SELECT randomblob(100000000) AS b")

    anyio.run(work)


def test_a_locked_catalog_waits_for_the_other_writer(tmp_path: Path) -> None:
    place = tmp_path / "catalog.sqlite3"

    async def work() -> None:
        catalog = await Catalog.open(place)
        other = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.1, lambda: other.execute("ROLLBACK")).start()
        await catalog.put_mirror(mirror())
        other.close()
        await catalog.close()

    anyio.run(work)


@pytest.mark.parametrize("place", ["mysterious://x/y", "not a url://"])
def test_an_unknown_url_is_refused_without_showing_it(place: str) -> None:
    async def work() -> None:
        await Catalog.open(place)

    with pytest.raises(InvalidUrlError, match="is of no supported database"):
        anyio.run(work)


def test_a_server_that_does_not_answer_is_a_missing_resource_and_its_password_is_not_shown() -> (
    None
):
    async def work() -> None:
        await Catalog.open("postgresql+psycopg://user:s3cret@127.0.0.1:1/none")

    with pytest.raises(ResourceError) as caught:
        anyio.run(work)
    assert "s3cret" not in str(caught.value)


def test_a_directory_that_is_not_there_is_a_missing_resource(tmp_path: Path) -> None:
    async def work() -> None:
        await Catalog.open(tmp_path / "no" / "catalog.sqlite3")

    with pytest.raises(ResourceError, match="No such file"):
        anyio.run(work)


def test_bytes_that_are_no_text_are_kept_or_escaped(using: Callable[..., Any]) -> None:
    """A name comes back byte by byte; in other text a byte is an escape, on both databases."""
    every = bytes(range(1, 256)).decode("utf-8", "surrogateescape")

    async def work(catalog: Catalog) -> None:
        await catalog.put_mirror(mirror())
        key = mirror().name.key
        problem = {"code": "internal", "detail": "caf\udce9"}
        await catalog.update_mirror(key, default_branch=every, error=problem)
        row = await catalog.find_mirror(key)
        assert row is not None
        assert row.default_branch == every
        assert row.error == {"code": "internal", "detail": "caf\\351"}
        assert await catalog.find_instance("o/r@caf\udce9\0") is None

    using(work)
