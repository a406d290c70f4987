"""Old generations go, and nothing that one which stays needs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
import s3
from exchanges import NAME, Node, accepted
from gitrepos import Upstream

from mirrord.catalog import Generation
from mirrord.errors import StoreDamagedError, StoreUnavailableError
from mirrord.fleet.collection import clock_of, collect
from mirrord.fleet.generations import (
    index_key,
    list_published,
    manifest_key,
    pack_key,
    read_manifest,
)
from mirrord.fleet.objects import ObjectStore

SOON, LATER = timedelta(), timedelta(days=2)


async def _published(node: Node, upstream: Upstream, count: int) -> list[Generation]:
    made: list[Generation] = []
    for number in range(count):
        upstream.commit({"file": f"{number}\n" * 40})
        await node.sync(upstream)
        generation = await node.publish(made[-1] if made else None)
        assert generation
        made.append(generation)
    return made


@s3.OF_EACH_KIND
def test_the_newest_and_the_young_stay(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    async def body() -> None:
        a, b = Node(tmp_path / "a", store), Node(tmp_path / "b", store)
        made = await _published(a, upstream, 5)  # packs of the first ones became one
        now = clock_of(store)
        before = len(list(store.iterate("mirrors/")))
        assert collect(store, NAME, made[-1], now).objects == 0
        gone = collect(store, NAME, made[-1], now + LATER)
        assert gone.objects > 4
        assert gone.size_bytes > 0
        assert len(list(store.iterate("mirrors/"))) == before - gone.objects
        assert list_published(store, NAME) == made[-1:]
        await b.follow(made[-1])
        b.must_be_sound()
        assert b.refs() == a.refs()
        assert list(store.iterate("checks/")) == []

    anyio.run(body)


def test_an_empty_catalog_drops_no_backup(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    async def body() -> None:
        a, b = Node(tmp_path / "a", store), Node(tmp_path / "b", store)
        made = await _published(a, upstream, 2)
        collect(store, NAME, None, clock_of(store) + LATER)
        await b.follow(made[-1])
        b.must_be_sound()

    anyio.run(body)


def test_what_the_catalog_has_stays_beside_a_later_orphan(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    """A daemon that died between its manifest and the catalog."""

    async def body() -> None:
        a, b = Node(tmp_path / "a", store), Node(tmp_path / "b", store)
        made = await _published(a, upstream, 3)
        collect(store, NAME, made[1], clock_of(store) + LATER)
        assert list_published(store, NAME) == made[1:]
        await b.follow(made[1])
        b.must_be_sound()

    anyio.run(body)


def test_nothing_goes_while_a_manifest_cannot_be_read(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    async def body() -> None:
        a = Node(tmp_path / "a", store)
        made = await _published(a, upstream, 3)
        key = manifest_key(NAME, made[-1])
        store.delete([key])
        store.put(key, b"{}")
        before = sorted(it.key for it in store.iterate("mirrors/"))
        with pytest.raises(StoreDamagedError):
            collect(store, NAME, made[-1], clock_of(store) + LATER)
        assert sorted(it.key for it in store.iterate("mirrors/")) == before

    anyio.run(body)


class _Dying(ObjectStore):
    """Deletes in the worst order, and ends after the first object."""

    def delete(self, keys: Collection[str]) -> None:
        if any("/packs/" in key or "/generations/" in key for key in keys):
            super().delete([max(keys)])
            raise StoreUnavailableError("cannot delete objects: it is away")
        super().delete(keys)


def test_a_manifest_goes_before_its_packs(tmp_path: Path, upstream: Upstream) -> None:
    async def body() -> None:
        store = _Dying(f"file://{tmp_path}/store")
        made = await _published(Node(tmp_path / "a", store), upstream, 5)
        with pytest.raises(StoreUnavailableError):
            collect(store, NAME, made[-1], clock_of(store) + LATER)
        left = {it.key for it in store.iterate("mirrors/")}
        for generation in list_published(store, NAME):
            for pack in read_manifest(store, NAME, generation).packs:
                assert {pack_key(NAME, pack), index_key(NAME, pack)} <= left

    anyio.run(body)


@s3.OF_EACH_KIND
def test_what_the_newest_needs_and_the_store_has_lost_is_named(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    async def body() -> None:
        made = await _published(Node(tmp_path / "a", store), upstream, 2)
        assert collect(store, NAME, made[-1], clock_of(store)).lost == []
        packs = read_manifest(store, NAME, made[-1]).packs
        gone, short = index_key(NAME, packs[0]), pack_key(NAME, packs[-1])
        store.delete([gone, short])
        store.put(short, b"short")
        assert collect(store, NAME, made[-1], clock_of(store)).lost == [gone, short]

    anyio.run(body)


def test_a_generation_that_is_not_whole_is_written_over(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    """The pack of the next one has the same name: nothing else changed."""

    async def body() -> None:
        a = Node(tmp_path / "a", store)
        (made,) = await _published(a, upstream, 1)
        (pack,) = read_manifest(store, NAME, made).packs
        store.put(pack_key(NAME, pack), bytes(pack.pack.size_bytes), replace=True)
        with pytest.raises(StoreDamagedError):
            await a.exchange.prove(NAME, made)
        again = await a.exchange.publish(
            a.mirror, await a.mirror.all_refs(), await a.mirror.head(), url="", epoch=2,
            previous=made, accept=accepted, is_whole=False,
        )  # fmt: skip
        assert again
        assert [it.pack for it in read_manifest(store, NAME, again).packs] == [pack.pack]
        await a.exchange.prove(NAME, again)

    anyio.run(body)
