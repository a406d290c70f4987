"""Datasets from a file to pinned commits: real mirrors, real git, a real catalog."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal
from dataset_parts import NAME, House, parts_on
from gitrepos import Upstream, git

from mirrord.catalog import PinRow
from mirrord.datasets.lookups import QueryCache
from mirrord.datasets.pinning import write_journal
from mirrord.datasets.service import DatasetFile, Datasets, name_from
from mirrord.errors import (
    CatalogUnavailableError,
    InstanceAmbiguousError,
    InstanceNotFoundError,
    InvalidDatasetError,
    InvalidNameError,
    NotFoundError,
    ResourceError,
)
from mirrord.model import CommitId, CommitRole, Direction, MirrorName, utc_now
from mirrord.protocol import Progress
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.slow

ABSENT = "d" * 40


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[BlockingPortal, Workers]]:
    """One event loop and one worker for all tests: a worker takes a second to start."""
    with start_blocking_portal() as portal:
        workers = portal.call(lambda: Workers(size=1))
        yield portal, workers
        portal.call(workers.close)


class Builder:
    """Runs a test's body with new parts on the same state directory, as after a restart."""

    def __init__(self, root: Path, portal: BlockingPortal, workers: Workers) -> None:
        self.root = root
        self._portal = portal
        self._workers = workers
        (root / "state").mkdir()

    def run(self, body: Callable[[House], Awaitable[None]]) -> None:
        self._portal.call(self._run, body)

    async def _run(self, body: Callable[[House], Awaitable[None]]) -> None:
        async with parts_on(self.root, self._workers) as house:
            await body(house)


@pytest.fixture
def house(tmp_path: Path, shared: tuple[BlockingPortal, Workers]) -> Builder:
    return Builder(tmp_path, *shared)


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    return make_upstream("owner+name")


def row(identity: str, base: str, repo: str = "owner/name", **more: Any) -> dict[str, Any]:
    return {
        "instance_id": identity,
        "repo": repo,
        "base_commit": base,
        "patch": "diff",
        "test_patch": "tests",
        **more,
    }


# -- import ----------------------------------------------------------------------------------------


def test_an_import_mirrors_fetches_and_pins_what_it_records(
    house: Builder, upstream: Upstream
) -> None:
    first, second, _ = upstream.history(3)

    async def body(house: House) -> None:
        told: list[Progress] = []
        rows = [
            row("a", first, environment_setup_commit=second),
            row("b", second, environment_setup_commit=second),
        ]
        dataset = await house.take(rows, progress=told.append)
        assert (dataset["instance_count"], dataset["commit_count"], dataset["mirrors"]) == (
            2,
            2,
            ["owner__name"],
        )
        assert (dataset["unpinned"], dataset["faults"], dataset["change"]["added"]) == (
            [],
            [],
            ["a", "b"],
        )
        assert house.refs() == {f"dataset/lite/{first}", f"dataset/lite/{second}"}
        reasons = {pin.commit: pin.reason for pin in await house.catalog.list_pins()}
        assert reasons == {first: "base", second: "base, environment-setup"}
        assert (told[-1].done, told[-1].total, told[-1].unit) == (2, 2, "commits")
        assert house.events.counts["dataset.imported"] == 1
        assert list((house.root / "state" / "quarantine").iterdir()) == []

    house.run(body)


def test_a_commit_that_no_ref_reaches_is_fetched_by_id(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})
    upstream.git("config", "uploadpack.allowAnySHA1InWant", "true")
    upstream.git("checkout", "--quiet", "--detach")
    lost = upstream.commit({"a": "2"})
    upstream.git("checkout", "--quiet", "main")

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base), row("b", lost)])
        assert dataset["unpinned"] == []
        assert f"dataset/lite/{lost}" in house.refs()

    house.run(body)


def test_importing_again_changes_nothing_and_says_so(house: Builder, upstream: Upstream) -> None:
    base, setup = upstream.history(2)
    instance = row("a", base, environment_setup_commit=setup)

    async def body(house: House) -> None:
        with structlog.testing.capture_logs() as told:
            await house.take([instance])
        asked = [line["command"].split()[0] for line in told if line["event"] == "git.ended"]
        assert sorted(asked) == ["ask", "fetch", "look", "move"]  # each costs 10 ms
        before = house.refs()
        with structlog.testing.capture_logs() as told:
            again = await house.take([instance])
        assert again["change"] == {"added": [], "changed": [], "removed": [], "unchanged_count": 1}
        assert house.refs() == before
        asked = [line["command"] for line in told if line["event"] == "git.ended"]
        assert asked == []

    house.run(body)


def test_pins_of_rows_that_went_away_are_removed_unless_another_row_has_them(
    house: Builder, upstream: Upstream
) -> None:
    first, second, third = upstream.history(3)

    async def body(house: House) -> None:
        await house.take([row("a", first), row("b", second), row("c", second), row("d", third)])
        changed = await house.take([row("a", third), row("b", second)])
        assert changed["change"] == {
            "added": [],
            "changed": ["a"],
            "removed": ["c", "d"],
            "unchanged_count": 1,
        }
        assert house.refs() == {f"dataset/lite/{second}", f"dataset/lite/{third}"}

    house.run(body)


def test_removing_a_dataset_removes_only_its_own_pins(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.take([row("a", base)], name="one")
        await house.take([row("a", base)], name="two")
        await house.mirrors.pin(NAME, [CommitId(base)], owner="person/7", reason="mine")
        await house.datasets.remove("one")
        assert house.refs() == {f"dataset/two/{base}", f"person/7/{base}"}
        assert [dataset.name for dataset in await house.datasets.list()] == ["two"]
        with pytest.raises(NotFoundError):
            await house.datasets.remove("one")
        with pytest.raises(NotFoundError):
            await house.datasets.get("one")

    house.run(body)


def test_a_commit_that_nobody_has_is_told_with_its_instances_and_the_others_are_pinned(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base), row("b", ABSENT), row("c", ABSENT)])
        (unpinned,) = dataset["unpinned"]
        assert (unpinned["commit"], unpinned["instances"], unpinned["mirror"]) == (
            ABSENT,
            ["b", "c"],
            "owner__name",
        )
        assert unpinned["reason"]
        assert house.refs() == {f"dataset/lite/{base}"}
        assert (await house.catalog.summarise_datasets())[0].unpinned_count == 1

    house.run(body)


def test_an_object_that_is_no_commit_is_not_pinned(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})
    tree = upstream.git("rev-parse", "HEAD^{tree}")

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base), row("b", tree)])
        assert "not a commit" in dataset["unpinned"][0]["reason"]

    house.run(body)


def test_a_mirror_that_fails_does_not_stop_the_others(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base), row("b", base, repo="no/such")])
        assert {entry["mirror"]: entry["instances"] for entry in dataset["unpinned"]} == {
            "no__such": ["b"]
        }
        assert "no+such" in dataset["unpinned"][0]["reason"]
        assert house.refs() == {f"dataset/lite/{base}"}

    house.run(body)


def test_what_upstream_gets_later_is_pinned_by_importing_again(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.take([row("a", base)])
        later = upstream.commit({"a": "2"})
        dataset = await house.take([row("a", base), row("b", later)])
        assert dataset["unpinned"] == []
        assert f"dataset/lite/{later}" in house.refs()

    house.run(body)


def test_what_upstream_gets_later_is_pinned_after_a_sync(
    house: Builder, make_upstream: Callable[..., Upstream], upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})
    stage = make_upstream("stage")
    stage.git("pull", "--quiet", str(upstream.path), "main")
    future = stage.commit({"a": "2"})

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base), row("b", future)])
        assert [entry["commit"] for entry in dataset["unpinned"]] == [future]
        assert await house.datasets.repin(NAME) == 0
        upstream.git("pull", "--quiet", str(stage.path), "main")
        await house.mirrors.sync(NAME)
        assert await house.datasets.repin(NAME) == 1
        assert (await house.datasets.get("lite")).unpinned == []

    house.run(body)


def smith(identity: str) -> dict[str, Any]:
    return {"instance_id": identity, "repo": "swesmith/owner__name.12345678", "patch": "diff"}


def test_a_row_that_names_a_branch_gets_its_commit_once_the_mirror_has_it(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    upstream = make_upstream("swesmith+owner__name.12345678")
    upstream.commit({"a": "1"})
    tips = {}
    for name in ("bug.1", "bug.2"):
        upstream.git("checkout", "--quiet", "-b", name, "main")
        tips[name] = upstream.commit({"a": name})

    async def body(house: House) -> None:
        rows = [smith("bug.1"), smith("bug.2"), smith("bug.3")]
        dataset = await house.take(rows)
        assert (dataset["instance_count"], dataset["commit_count"]) == (3, 2)
        assert (dataset["unpinned_count"], dataset["mirrors"]) == (
            1,
            ["swesmith__owner__name.12345678"],
        )
        [missing] = dataset["unpinned"]
        assert (missing["commit"], missing["roles"]) == ("bug.3", ["base"])
        assert "no such branch, tag or commit" in missing["reason"]
        found = await house.catalog.find_instance("bug.2")
        assert found is not None
        assert (found.base_commit, found.direction) == (tips["bug.2"], Direction.REVERSE)
        assert {role for _, role in found.commits} == {CommitRole.BASE, CommitRole.BUG}
        name = found.mirror
        assert house.refs(name) == {f"dataset/lite/{tip}" for tip in tips.values()}
        again = await house.take(rows)
        assert again["change"]["unchanged_count"] == 3
        assert await house.datasets.repin(name) == 0

        upstream.git("checkout", "--quiet", "-b", "bug.3", "main")
        tips["bug.3"] = upstream.commit({"a": "3"})
        upstream.git("checkout", "--quiet", "bug.1")
        tips["bug.1"] = upstream.commit({"a": "moved"})
        assert (await house.datasets.find_instance("bug.3")) is not None
        await house.mirrors.sync(name)
        assert await house.datasets.repin(name) == 1
        row = await house.datasets.find_instance("bug.3")
        assert row is not None
        assert row.base_commit == tips["bug.3"]
        assert (await house.datasets.get("lite")).unpinned_count == 0
        assert house.events.counts["dataset.resolved"] == 1
        again = await house.take(rows)
        assert (again["change"]["changed"], again["unpinned"]) == (["bug.1"], [])
        assert house.refs(name) == {f"dataset/lite/{tip}" for tip in tips.values()}

    house.run(body)


def test_a_row_may_start_at_the_parent_of_its_gold_commit(
    house: Builder, upstream: Upstream
) -> None:
    base, gold = upstream.history(2)

    async def body(house: House) -> None:
        parent: dict[str, Any] = {"instance_id": "a", "repo": "owner/name", "revision": f"{gold}^"}
        parent |= {"gold_commits": [gold], "base_commit": ""}
        await house.take([parent])
        found = await house.catalog.find_instance("a")
        assert found is not None
        assert set(found.commits) == {(base, CommitRole.BASE), (gold, CommitRole.GOLD)}
        assert house.refs() == {f"dataset/lite/{base}", f"dataset/lite/{gold}"}

    house.run(body)


def test_a_revision_is_resolved_at_its_import_and_recorded_as_a_commit(
    house: Builder, upstream: Upstream
) -> None:
    """A branch, tags of both kinds, steps back from each; a tag's own id, also as a gold commit."""
    first, second, third = upstream.history(3)
    upstream.git("tag", "light", second)
    upstream.git("tag", "-a", "v1.0", "-m", "x", third)
    tag = upstream.git("rev-parse", "v1.0")
    written = {
        "main": third,
        "light": second,
        "refs/tags/light": second,
        "v1.0": third,
        f"{third}^": second,
        f"{third.upper()}~2": first,
        "v1.0~1": second,
        tag: third,
    }

    async def body(house: House) -> None:
        rows = [row(f"i{n}", text) for n, text in enumerate(written)]
        rows.append(row("gold", first, gold_commits=tag))
        dataset = await house.take(rows)
        assert (dataset["instance_count"], dataset["unpinned"]) == (9, [])
        for n, (text, commit) in enumerate(written.items()):
            kept = await house.catalog.find_instance(f"i{n}")
            assert kept is not None
            revision = text.replace(third.upper(), third)
            assert (kept.base_commit, kept.revision) == (commit, revision)
            assert (commit, CommitRole.BASE) in kept.commits
            assert all(role is not CommitRole.BUG for _, role in kept.commits)
        kept = await house.catalog.find_instance("gold")
        assert kept is not None
        assert (third, CommitRole.GOLD) in kept.commits
        assert house.refs() == {f"dataset/lite/{commit}" for commit in (first, second, third)}
        assert (await house.take(rows))["change"]["unchanged_count"] == 9

    house.run(body)


def test_a_gold_commit_that_nobody_has_keeps_no_instance_from_being_served(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        dataset = await house.take([row("a", base, gold_commits=f"see commit/{ABSENT}")])
        [missing] = dataset["unpinned"]
        assert (missing["commit"], missing["roles"]) == (ABSENT, ["gold"])
        assert house.refs() == {f"dataset/lite/{base}"}
        found = await house.datasets.find_instance("a")
        assert found is not None
        assert (await house.mirrors.resolve(found.mirror, str(found.base_commit))).commit == base

    house.run(body)


def test_branches_of_an_upstream_that_is_away_say_why(house: Builder) -> None:
    async def body(house: House) -> None:
        dataset = await house.take([smith("bug.1"), smith("bug.2")])
        assert (dataset["instance_count"], dataset["unpinned_count"]) == (2, 2)
        reasons = {each["reason"] for each in dataset["unpinned"]}
        assert len(reasons) == 1
        assert "swesmith+owner__name" in reasons.pop()
        assert await house.datasets.repin(MirrorName("swesmith", "owner__name.12345678")) == 0

    house.run(body)


def test_bad_rows_are_told_and_the_rest_is_imported(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        dataset = await house.take(
            [row("a", base), row("b", "1234567"), row("c", base, repo="../../etc")]
        )
        assert [
            (fault["file"], fault["line"], fault["instance"]) for fault in dataset["faults"]
        ] == [
            ("lite.jsonl", 2, "b"),
            ("lite.jsonl", 3, "c"),
        ]
        assert dataset["instance_count"] == 1

    house.run(body)


@pytest.mark.parametrize("content", [b"", b"not a dataset", b'{"instance_id": "a"}\n'])
def test_a_file_of_no_use_changes_nothing(
    house: Builder, upstream: Upstream, content: bytes
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.take([row("a", base)])
        with pytest.raises(InvalidDatasetError, match=r"lite\.jsonl"):
            await house.take(content)
        assert (await house.datasets.get("lite")).instance_count == 1
        assert house.refs() == {f"dataset/lite/{base}"}
        assert list((house.root / "state" / "quarantine").iterdir()) == []

    house.run(body)


def test_a_file_whose_name_is_not_utf_8_is_imported(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        path = house.root / os.fsdecode(b"caf\xe9.jsonl")
        path.write_text(json.dumps(row("a", base)) + "\nnonsense\n")
        answer = await house.datasets.import_file(DatasetFile(path, str(path)))
        assert answer.dataset.name == "caf-"
        assert answer.dataset.faults[0].file == r'"caf\351.jsonl"'

    house.run(body)


def test_a_file_that_is_not_there_is_an_error_of_its_own(house: Builder) -> None:
    async def body(house: House) -> None:
        with pytest.raises(ResourceError, match="No such file"):
            await house.datasets.import_file(DatasetFile(house.root / "none", "none.jsonl", "x"))

    house.run(body)


def test_many_imports_of_the_same_dataset_at_once_end_in_one_whole_dataset(
    house: Builder, upstream: Upstream
) -> None:
    commits = upstream.history(4)

    async def body(house: House) -> None:
        async def one(number: int) -> None:
            path = house.root / f"upload{number}"
            path.write_text(json.dumps(row("a", commits[number])))
            await house.datasets.import_file(DatasetFile(path, "lite.jsonl", "lite"))

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(one, number)
        found = await house.datasets.find_instance("a")
        assert found is not None
        assert house.refs() == {f"dataset/lite/{found.base_commit}"}

    house.run(body)


# -- crashes ---------------------------------------------------------------------------------------


def test_a_start_removes_what_a_killed_import_left(house: Builder, upstream: Upstream) -> None:
    """Killed after the pins, before the catalog: the old dataset is whole, with extra pins."""
    first, second = upstream.history(2)

    async def crash(house: House) -> None:
        await house.take([row("a", first)])
        await house.mirrors.pin(NAME, [CommitId(second)], owner="dataset/lite", reason="base")
        await house.mirrors.pin(NAME, [CommitId(second)], owner="dataset/new", reason="base")
        left = house.root / "state" / "quarantine" / "dataset-left"
        left.mkdir()
        (left / "rows.jsonl").write_text("x")

    async def after(house: House) -> None:
        assert house.refs() == {f"dataset/lite/{first}"}
        assert list((house.root / "state" / "quarantine").iterdir()) == []

    house.run(crash)
    house.run(after)


def test_a_start_undoes_the_pins_of_a_killed_import_and_no_others(
    house: Builder, upstream: Upstream
) -> None:
    """Killed in its ref transaction, after the catalog was lost: earlier pins stay."""
    first, second = upstream.history(2)

    async def record_all(house: House) -> None:
        await house.take([row("a", first)])

    async def begin(house: House) -> None:
        left = house.root / "state" / "quarantine" / "dataset-left"
        left.mkdir()
        write_journal(left, "dataset/lite", frozenset({(NAME.key, first)}))
        git(
            house.mirrors.path(NAME),
            "update-ref",
            f"refs/mirrord/pins/dataset/lite/{second}",
            second,
        )

    async def after(house: House) -> None:
        assert house.refs() == {f"dataset/lite/{first}"}
        assert list((house.root / "state" / "quarantine").iterdir()) == []

    house.run(record_all)
    for file in (house.root / "state").glob("catalog*"):
        file.unlink()
    house.run(begin)
    house.run(after)


def test_a_start_waits_for_an_import_that_a_worker_of_the_killed_daemon_commits(
    house: Builder, upstream: Upstream
) -> None:
    """Its pins are those of the new rows, and must not be removed before these are recorded."""
    first, second = upstream.history(2)

    async def body(house: House) -> None:
        await house.take([row("a", first)])
        await house.mirrors.pin(NAME, [CommitId(second)], owner="dataset/lite", reason="base")
        left = house.root / "state" / "quarantine" / "dataset-left"
        left.mkdir()
        write_journal(left, "dataset/lite", frozenset({(NAME.key, first)}))
        catalog = house.root / "state" / "catalog.sqlite3"
        connection = sqlite3.connect(catalog, isolation_level=None, check_same_thread=False)
        with closing(connection) as worker:
            worker.execute("BEGIN IMMEDIATE")
            worker.execute("UPDATE instances SET base_commit = ?", [second])
            worker.execute("UPDATE recorded_commits SET commit_id = ?", [second])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Datasets(house.mirrors).open)
                await anyio.sleep(0.3)
                worker.execute("COMMIT")
        assert (await house.datasets.get("lite")).unpinned == []
        assert f"dataset/lite/{second}" in house.refs()

    house.run(body)


def test_a_start_ends_what_was_being_unpinned(house: Builder, upstream: Upstream) -> None:
    """Killed after the rows and before the refs of pins that a new version does not record."""
    first, second = upstream.history(2)

    async def begin(house: House) -> None:
        await house.take([row("a", first)])
        await house.take([row("a", second)])
        for number, left in enumerate(
            [frozenset({(NAME.key, first)}), frozenset[tuple[str, str]]()]
        ):
            directory = house.root / "state" / "quarantine" / f"dataset-{number}"
            directory.mkdir()
            write_journal(directory, "dataset/lite", left)
        git(
            house.mirrors.path(NAME), "update-ref", f"refs/mirrord/pins/dataset/lite/{first}", first
        )

    async def after(house: House) -> None:
        assert house.refs() == {f"dataset/lite/{second}"}

    house.run(begin)
    house.run(after)


_IMPORTER = """
import sys, anyio
from pathlib import Path
from dataset_parts import standing_house
from mirrord.datasets.service import DatasetFile

async def main():
    async with standing_house(Path(sys.argv[1])) as house:
        while True:
            for name in sys.argv[2:]:
                await house.datasets.import_file(DatasetFile(Path(name), name, "lite"))
                print("done", flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.07])
def test_a_kill_at_any_moment_leaves_one_whole_dataset_with_exactly_its_pins(
    house: Builder, upstream: Upstream, delay_s: float
) -> None:
    commits = upstream.history(6)
    sets = [commits[:4], commits[2:]]
    for number, some in enumerate(sets):
        rows = [json.dumps(row(f"i{n}", base)) + "\n" for n, base in enumerate(some)]
        (house.root / f"set{number}.jsonl").write_text("".join(rows))
    command = [
        sys.executable,
        "-c",
        _IMPORTER,
        str(house.root),
        *(str(house.root / f"set{n}.jsonl") for n in (0, 1)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "tests/support")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as importer:
        assert importer.stdout is not None
        seen = 0
        while seen < 3:
            seen += importer.stdout.readline().strip() == b"done"
        time.sleep(delay_s)
        importer.kill()

    async def body(house: House) -> None:
        bases = [row.commit for row in await house.catalog.list_recorded(dataset="lite")]
        assert sorted(bases) in [sorted(some) for some in sets]
        dataset = await house.datasets.get("lite")
        assert dataset.unpinned == []
        assert house.refs() == {f"dataset/lite/{base}" for base in bases}
        assert list((house.root / "state" / "quarantine").glob("dataset-*")) == []

    house.run(body)


def test_a_cancelled_import_leaves_the_old_dataset_and_the_next_one_repairs(
    house: Builder, upstream: Upstream
) -> None:
    first, second = upstream.history(2)

    async def body(house: House) -> None:
        await house.take([row("a", first)])
        with anyio.CancelScope() as scope:

            def cancel(_: Progress) -> None:
                scope.cancel()

            await house.take([row("a", second)], progress=cancel)
        assert scope.cancelled_caught
        found = await house.datasets.find_instance("a")
        assert found is not None
        assert found.base_commit == first
        assert f"dataset/lite/{first}" in house.refs()
        assert list((house.root / "state" / "quarantine").glob("dataset-*")) == []
        await house.take([row("a", first)])
        assert house.refs() == {f"dataset/lite/{first}"}

    house.run(body)


def test_an_unchanged_import_reads_no_tree_and_yet_sees_damage(
    house: Builder, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = upstream.history(3)

    async def body(house: House) -> None:
        rows = [row(name, base) for name, base in zip("abc", bases, strict=True)]
        await house.take(rows)
        run, calls = house.mirrors.workers.run, list[str]()

        async def note(function: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return await run(function, *args, **kwargs)

        monkeypatch.setattr(house.mirrors.workers, "run", note)
        assert (await house.take(rows))["change"]["unchanged_count"] == 3
        # the second beside the first
        assert sorted(calls) == ["are_proven", "read_dataset", "replace_dataset"]
        calls.clear()
        newer = upstream.commit({"new": "line\n"})
        await house.take([*rows, row("d", newer)])
        assert calls.count("read_all_needs") == 1
        for pack in house.mirrors.path(NAME).glob("objects/pack/*.pack"):
            pack.rename(house.root / pack.name)
        ensure, refused = house.mirrors.ensure_commits, set[str]()

        async def look(*args: Any) -> dict[CommitId, str]:
            answer = await ensure(*args)
            refused.update(answer)
            return answer

        monkeypatch.setattr(house.mirrors, "ensure_commits", look)
        await house.take(rows)
        assert refused == {*bases}

    house.run(body)


def test_a_dataset_whose_pins_are_gone_says_so_and_importing_again_repairs(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.take([row("a", base)])
        await house.mirrors.unpin(NAME, [CommitId(base)], owner="dataset/lite")
        assert [entry.commit for entry in (await house.datasets.get("lite")).unpinned] == [base]
        assert (await house.take([row("a", base)]))["unpinned"] == []
        assert house.refs() == {f"dataset/lite/{base}"}

    house.run(body)


# -- looking up ------------------------------------------------------------------------------------


def test_an_instance_shows_its_answer_only_to_a_grader(house: Builder, upstream: Upstream) -> None:
    first, second = upstream.history(2)

    async def body(house: House) -> None:
        await house.take([row("a", first, environment_setup_commit=second, FAIL_TO_PASS='["t"]')])
        agent = await house.datasets.instance("a", False)
        assert {name for name, value in agent.to_json().items() if value is not None} == {
            "id",
            "dataset",
            "mirror",
            "repo",
            "base_commit",
            "commits",
        }
        assert [(c.commit, c.role) for c in agent.commits or []] == [(first, CommitRole.BASE)]
        grader = await house.datasets.instance("a", True)
        assert (grader.patch, grader.test_patch, grader.direction) == (
            "diff",
            "tests",
            Direction.FORWARD,
        )
        assert (grader.fail_to_pass, grader.pass_to_pass) == (["t"], [])
        assert {c.commit for c in grader.commits or []} == {first, second}
        with pytest.raises(InstanceNotFoundError, match="no dataset"):
            await house.datasets.instance("A", False)

    house.run(body)


def test_an_instance_is_looked_up_anew_after_its_dataset_changed_or_went(
    house: Builder, upstream: Upstream
) -> None:
    first, second = upstream.history(2)

    async def body(house: House) -> None:
        heard: list[str] = []
        house.datasets.on_change(heard.append)
        for base in (first, second):
            await house.take([row("a", base)])
            found = await house.datasets.find_instance("a")
            assert found is not None
            assert found.base_commit == base
            assert await house.datasets.find_instance("a") is found
        await house.datasets.remove("lite")
        assert await house.datasets.find_instance("a") is None
        assert heard == ["lite", "lite", "lite"]

    house.run(body)


def test_an_instance_names_its_mirror_as_it_is_registered(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.mirrors.add("owner/name")
        dataset = await house.take([row("a", base, repo="OWNER/Name")])
        assert dataset["unpinned"] == []
        found = await house.datasets.find_instance("a")
        assert found is not None
        assert house.mirrors.path(found.mirror).exists()

    house.run(body)


def test_a_held_instance_is_found_by_its_dataset_while_the_catalog_is_away(
    house: Builder, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout is asked for by the id alone; its reset and its grade name the dataset too."""
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.take([row("a", base)])
        assert (await house.datasets.find_instance("a")) is not None

        async def away(*_: object) -> None:
            raise CatalogUnavailableError("away")

        monkeypatch.setattr(type(house.catalog), "find_instance", away)
        held = await house.datasets.find_instance("a", "lite")
        assert held is not None
        assert held.base_commit == base

    house.run(body)


def test_the_cache_is_bounded_and_never_keeps_an_answer_older_than_a_change() -> None:
    from mirrord.catalog import InstanceRow

    async def body() -> None:
        loads: list[str] = []
        gate, is_away = anyio.Event(), False

        async def load(identity: str) -> InstanceRow:
            loads.append(identity)
            if is_away:
                raise CatalogUnavailableError("away")
            if identity == "slow":
                await gate.wait()
            big = "x" * 1000
            return InstanceRow(
                identity, "d", NAME, CommitId(ABSENT), Direction.FORWARD, (), big, None, (), ()
            )

        cache = QueryCache(load, lambda row: len(row.patch or "") + 1000, limit_bytes=64_000)
        for number in range(100):
            await cache.find(str(number))
        await cache.find("99")
        await cache.find("0")
        assert len(loads) == 101
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.find, "slow")
            await anyio.wait_all_tasks_blocked()
            cache.expire()
            gate.set()
        await cache.find("slow")
        assert loads[-2:] == ["slow", "slow"]
        is_away, count = True, len(loads)
        assert (await cache.find("99")).id == "99"
        with pytest.raises(CatalogUnavailableError):
            await cache.find("never")
        is_away = False
        await cache.find("99")
        assert len(loads) == count + 3

    anyio.run(body)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("SWE-bench_Lite__test.parquet", "SWE-bench_Lite__test"),
        ("a/b/requests-flask.jsonl", "requests-flask"),
        ("my data (1).json.gz", "my-data-1-"),
        ("..hidden..jsonl", "hidden"),
        ("x" * 300 + ".json", "x" * 100),
    ],
)
def test_a_dataset_is_named_after_its_file(source: str, name: str) -> None:
    assert name_from(source) == name


@pytest.mark.parametrize("source", [".jsonl", "", "...", "日本.json"])
def test_a_file_of_which_no_name_is_left_needs_one(source: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        name_from(source)
    assert "--name" in str(caught.value.hint)


def test_pins_of_another_owner_are_never_stale(house: Builder, upstream: Upstream) -> None:
    base = upstream.commit({"a": "1"})

    async def body(house: House) -> None:
        await house.mirrors.add("owner/name")
        await house.mirrors.pin(NAME, [CommitId(base)], owner="person/0", reason="")
        await house.datasets.open()
        assert house.refs() == {f"person/0/{base}"}
        await house.catalog.put_pins(
            [PinRow(NAME, CommitId(ABSENT), f"person/{os.getuid()}", "", utc_now())]
        )
        assert len(await house.catalog.list_stale_pins()) == 0

    house.run(body)


def test_pins_outlive_the_catalog_until_their_dataset_is_there_again(
    house: Builder, upstream: Upstream
) -> None:
    """A start with an empty catalog adopts them; an import without their rows removes them."""
    base = upstream.commit({"a": "1"})
    other = upstream.commit({"a": "2"})

    async def record(house: House) -> None:
        await house.take([row("a", base)])

    async def start_without_catalog(house: House) -> None:
        await house.datasets.open()
        assert house.refs() == {f"dataset/lite/{base}"}
        await house.take([row("b", other)])
        assert house.refs() == {f"dataset/lite/{other}"}

    house.run(record)
    for file in (house.root / "state").glob("catalog*"):
        file.unlink()
    house.run(start_without_catalog)


# -- one id in several datasets --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "is_another"),
    [
        ({"FAIL_TO_PASS": '["test_other"]'}, True),
        ({"test_patch": "", "FAIL_TO_PASS": '["test_other"]'}, True),
        ({"install_config": {"test_cmd": "tox", "log_parser": "pytest"}}, True),
        ({"test_patch": "", "install_config": {"test_cmd": "tox", "log_parser": "pytest"}}, False),
        ({"test_patch": ""}, False),
        ({"patch": "", "problem_statement": "another", "hints_text": "more"}, False),
    ],
)
def test_an_id_with_other_tests_in_another_dataset_asks_for_its_dataset(
    house: Builder, upstream: Upstream, members: dict[str, Any], is_another: bool
) -> None:
    """Else the tests of the dataset that came first would grade it; a checkout needs none of them."""
    base = upstream.history(1)[0]

    async def body(it: House) -> None:
        await it.take([row("a", base)], name="lite")
        told = await it.take([row("a", base, **members)], name="other")
        assert [it["differs"] for it in told["ambiguous"]] == ["tests"] * is_another
        assert (await it.datasets.instance("a", grader=False)).base_commit == base
        if not is_another:
            assert (await it.datasets.instance("a", grader=True)).dataset == "lite"
            return
        with pytest.raises(InstanceAmbiguousError, match="lite and other record it") as refused:
            await it.datasets.instance("a", grader=True)
        assert refused.value.facts["datasets"] == ["lite", "other"]
        assert (await it.datasets.instance("a", grader=True, dataset="other")).dataset == "other"

    house.run(body)


def test_of_two_datasets_the_one_with_tests_is_graded_whichever_came_first(
    house: Builder, upstream: Upstream
) -> None:
    base = upstream.history(1)[0]

    async def body(it: House) -> None:
        await it.take([row("a", base, test_patch="")], name="bare")
        assert (await it.datasets.instance("a", grader=True)).dataset == "bare"
        told = await it.take([row("a", base)], name="verified")
        assert told["ambiguous"] == []
        assert (await it.datasets.instance("a", grader=True)).dataset == "verified"
        assert (await it.datasets.instance("a", True, "bare")).dataset == "bare"

    house.run(body)


def test_an_id_that_two_datasets_record_differently_is_told_and_asks_for_its_dataset(
    house: Builder, upstream: Upstream
) -> None:
    """By base commit or by repository, in any spelling; the same facts twice are one instance."""
    first, second, third = upstream.history(3)

    async def body(it: House) -> None:
        await it.take([row("a", first), row("b", second), row("c", third)], name="lite")
        same = await it.take([row("a", first, repo="Owner/NAME")], name="same")
        assert (same["ambiguous"], same["ambiguous_count"]) == ([], 0)
        assert (await it.datasets.instance("a", grader=False)).dataset == "lite"
        other = await it.take([row("a", second), row("b", second), row("c", first)], name="other")
        assert other["ambiguous"] == [
            {"id": "a", "datasets": ["other", "lite", "same"], "differs": "commit"},
            {"id": "c", "datasets": ["other", "lite"], "differs": "commit"},
        ]
        assert other["ambiguous_count"] == 2
        with pytest.raises(InstanceAmbiguousError) as refused:
            await it.datasets.instance("a", grader=False)
        assert refused.value.facts["datasets"] == ["lite", "same", "other"]
        assert "--dataset lite" in (refused.value.hint or "")
        assert (
            await it.datasets.instance("a", grader=False, dataset="other")
        ).base_commit == second
        assert (await it.datasets.instance("a", grader=False, dataset="same")).base_commit == first
        assert (await it.datasets.instance("b", grader=False)).dataset == "lite"
        with pytest.raises(InstanceNotFoundError):
            await it.datasets.instance("c", grader=False, dataset="same")
        found = await it.datasets.find_instance("a", "other")
        assert await it.datasets.find_instance("a", "other") is found, (
            "it was looked up in the catalog again"
        )
        await it.datasets.remove("other")
        assert (await it.datasets.instance("a", grader=False)).base_commit == first

    house.run(body)
