"""Old generations go, and nothing that one which stays needs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from exchanges import NAME, Node
from gitrepos import Upstream

from mirrord.catalog import Generation
from mirrord.errors import StoreDamagedError
from mirrord.fleet.collect import clock_of, collect
from mirrord.fleet.generations import list_published, manifest_key
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
