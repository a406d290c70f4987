"""A machine that lost everything, from the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import anyio
import pytest
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House

from mirrord.bundles.service import Bundles
from mirrord.catalog import DatasetHead, Generation, InstanceRow, encode_row
from mirrord.errors import ClaimLostError, StoreDamagedError
from mirrord.fleet.exchange import Exchange
from mirrord.fleet.generations import list_published, pack_key, read_generation, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.fleet.restore import Restoration
from mirrord.fleet.service import Fleet
from mirrord.mirrors.repository import PINS
from mirrord.model import CommitId, CommitRole, Direction, parse_dataset_name

HEAD = DatasetHead(
    parse_dataset_name("tasks"), "swe-bench", "tasks.jsonl", "0" * 64,
    datetime(2026, 11, 1, tzinfo=timezone.utc), 0, [], {}, {},
)  # fmt: skip


@pytest.fixture
def house(tmp_path: Path, upstream: Upstream) -> Callable[[str], Builder]:
    template = f"file://{upstream.path.parent}/{{owner}}+{{name}}"

    def make(name: str) -> Builder:
        (tmp_path / name).mkdir()
        return Builder(tmp_path / name, template)

    return make


async def _record(it: House, commit: CommitId, directory: Path) -> None:
    """One instance, and its pin."""
    await it.mirrors.pin(NAME, [commit], owner="dataset/tasks", reason="recorded")
    await it.mirrors.pin(NAME, [commit], owner="person/7", reason="paper")
    row = InstanceRow(
        "owner__name-1", "", NAME, commit, Direction.FORWARD, ((commit, CommitRole.BASE),),
        "diff", None, ("test",), (),
    )  # fmt: skip
    (directory / "rows").write_bytes(encode_row(row))
    assert await it.catalog.merge_dataset(HEAD, directory / "rows") == 1


async def _publish(it: House, store: ObjectStore, old: Generation | None) -> Generation | None:
    repository, row = it.mirrors.repository(NAME), await it.mirrors.get(str(NAME))

    async def accept(_: Generation) -> bool:
        return True

    return await Exchange(store, it.mirrors.quarantine).publish(
        repository, await repository.all_refs(), await repository.head(), url=row.url, epoch=4,
        previous=old, accept=accept,
        record=partial(Bundles(it.mirrors).write_records, row, repository),
    )  # fmt: skip


def _restoration(it: House, store: ObjectStore) -> Restoration:
    return Restoration(Exchange(store, it.mirrors.quarantine), Bundles(it.mirrors))


def test_mirror_pins_and_rows_come_back(
    house: Callable[[str], Builder], store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    commit = CommitId(upstream.git("rev-parse", "HEAD~2"))
    made: list[Generation] = []
    states: list[object] = []

    async def state(it: House) -> object:
        refs = git(it.mirrors.path(NAME), "for-each-ref")
        pins = await it.mirrors.list_pins()
        rows = await it.catalog.find_instance("owner__name-1")
        row = await it.mirrors.get(str(NAME))
        return refs, pins, rows, row.url, row.default_branch, row.history

    async def lose(it: House) -> None:
        await _record(it, commit, tmp_path)
        first = await _publish(it, store, None)
        assert first
        assert await _publish(it, store, first) is None  # the same records
        upstream.commit({"file": "more\n"})
        await it.mirrors.sync(NAME)
        second = await _publish(it, store, first)  # built on records that no ref of ours keeps
        assert second
        made.append(second)
        states.append(await state(it))

    async def restore(it: House) -> None:
        assert list_published(store, NAME)[-1] == made[0]
        result = await _restoration(it, store).restore(NAME.key, made[0], 0)
        assert (result.mirror, result.created, result.pins) == (str(NAME), True, 2)
        assert result.datasets == {"tasks": 1}
        assert await state(it) == states[0]
        assert read_generation(it.mirrors.path(NAME)) == made[0]
        assert await it.catalog.list_generations() == {NAME.key: made[0]}
        claim = await it.catalog.claim("node", f"mirror/{NAME.key}", timedelta(seconds=20))
        assert claim and claim.epoch > made[0].epoch
        again = await _restoration(it, store).restore(NAME.key, made[0], 0)
        assert (again.created, again.datasets) == (False, {"tasks": 0})
        assert await state(it) == states[0]

    house("lost").synced().run(lose)
    house("new").run(restore)


def test_nothing_is_published_before_a_restoration_is_finished(
    house: Callable[[str], Builder], store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    """It would lack the pins and rows that are not merged yet, and the next one would take it."""
    commit = CommitId(upstream.git("rev-parse", "HEAD~2"))
    made: list[Generation] = []

    async def lose(it: House) -> None:
        await _record(it, commit, tmp_path)
        generation = await _publish(it, store, None)
        assert generation
        made.append(generation)
        upstream.commit({"file": "more\n"})

    async def restore(it: House) -> None:
        fleet = it.mirrors.sharing = Fleet(store, Bundles(it.mirrors))
        await fleet.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_restoration(it, store).restore, NAME.key, made[0], 0)
            while await it.catalog.find_mirror(NAME.key) is None:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with pytest.raises(ClaimLostError, match="older state"):
            await it.mirrors.sync(NAME)
        assert list_published(store, NAME) == made
        assert fleet.lost == {NAME.key: made[0]}  # the next round restores it
        result = await _restoration(it, store).restore(NAME.key, made[0], 0)
        assert (result.pins, {*result.datasets}) == (2, {"tasks"})
        await it.mirrors.sync(NAME)
        published = read_manifest(store, NAME, list_published(store, NAME)[-1])
        assert len([ref for ref in published.refs if ref.startswith(PINS)]) == 2
        await fleet.close()

    house("lost").synced().run(lose)
    house("new").run(restore)


def test_a_store_with_a_hole_restores_nothing_of_that_mirror(
    house: Callable[[str], Builder], store: ObjectStore
) -> None:
    made: list[Generation] = []

    async def lose(it: House) -> None:
        generation = await _publish(it, store, None)
        assert generation
        made.append(generation)

    async def restore(it: House) -> None:
        pack = read_manifest(store, NAME, made[0]).packs[0]
        store.delete([pack_key(NAME, pack)])
        with pytest.raises(StoreDamagedError, match="gone"):
            await _restoration(it, store).restore(NAME.key, made[0], 0)
        assert await it.catalog.list_mirrors() == []
        assert not it.mirrors.path(NAME).exists()

    house("lost").synced().run(lose)
    house("new").run(restore)
