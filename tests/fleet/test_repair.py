"""Objects that the store lost come back from a daemon that has them, without an operator."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from daemon_fleet import Fleet, become_like, checkout, done, eventually, refs
from exchanges import Node
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House

from mirrord.bundles.service import Bundles
from mirrord.catalog import Generation
from mirrord.errors import StoreDamagedError
from mirrord.fleet import service
from mirrord.fleet.generations import pack_key, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.mirrors.refs import followed_refs

pytestmark = pytest.mark.slow


def packs(fleet: Fleet) -> set[Path]:
    return {*fleet.store_path.rglob("*.pack")}


def test_a_pack_whose_bytes_became_others_is_published_again(
    fleet: Fleet, upstream: Upstream
) -> None:
    """Found by a follower, which cannot repair it; its length is what it was. Nor need syncs be due."""
    a, b = fleet.make(interval="0s"), fleet.make(interval="0s")
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    assert checkout(b, mirror="owner/name", commit="main")
    before = packs(fleet)
    os.kill(b.pid, signal.SIGSTOP)
    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    damaged = [*packs(fleet)]  # also the pack that b has already: all are published again
    assert len(damaged) > len(before)
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    os.kill(b.pid, signal.SIGCONT)
    become_like(a, b)
    assert commit in refs(b)
    c = fleet.make()
    assert checkout(c, mirror="owner/name", commit=commit)
    assert (
        fleet.server.execute_in(fleet.catalog, "SELECT key FROM claims WHERE key LIKE 'rep%'") == []
    )


def test_a_pack_that_is_gone_is_found_by_the_collection(fleet: Fleet, upstream: Upstream) -> None:
    a, b = fleet.make(interval="0s"), fleet.make(interval="0s")
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    collected = "SELECT 1 FROM claims WHERE key = 'store/collect' AND due_ms > 0 AND node IS NULL"
    eventually(lambda: fleet.server.execute_in(fleet.catalog, collected))
    for path in packs(fleet):
        path.unlink()
    due = "UPDATE claims SET due_ms = 0 WHERE key = 'store/collect' RETURNING key"
    fleet.server.execute_in(fleet.catalog, due)
    eventually(lambda: packs(fleet))
    upstream.path.rename(upstream.path.with_name("gone"))
    assert eventually(lambda: checkout(b, mirror="owner/name", commit="main"))
    become_like(a, b)


def test_a_daemon_that_is_behind_publishes_what_it_has(
    store: ObjectStore, upstream: Upstream, tmp_path: Path
) -> None:
    """If no daemon has more: the packs of the newest generation are gone, with its publisher."""

    async def body(it: House) -> None:
        fleet = it.mirrors.sharing = service.Fleet(store, Bundles(it.mirrors))
        await fleet.open()
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        first, repository = fleet.generations[NAME.key], it.mirrors.repository(NAME)
        second = await _publish_elsewhere(it, first)
        await fleet.refresh([NAME.key])
        with pytest.raises(StoreDamagedError):
            await fleet.follow(repository)
        before = followed_refs(await repository.all_refs())
        async with fleet.claim(NAME) as claim, it.mirrors.lock(NAME):
            with pytest.raises(StoreDamagedError):
                await claim.publish(repository)
            assert await fleet.repair(claim, repository)
            assert not await fleet.repair(claim, repository)
        third = fleet.generations[NAME.key]
        assert third[:2] > second[:2] > first[:2]
        assert followed_refs(read_manifest(store, NAME, third).refs) == before
        await it.mirrors.sync(NAME)
        assert upstream.git("rev-parse", "HEAD") in (await repository.all_refs()).values()
        await fleet.close()

    async def _publish_elsewhere(it: House, first: Generation) -> Generation:
        key = f"mirror/{NAME.key}"
        claim = await it.catalog.claim("other", key, timedelta(minutes=1))
        assert claim
        upstream.commit({"seen": "elsewhere\n"})
        node = Node(tmp_path / "other", store)
        await node.follow(first)
        await node.sync(upstream)
        made = await node.publish(first, claim.epoch)
        assert made
        assert await it.catalog.publish_generation("other", NAME.key, made, first)
        await it.catalog.release("other", [claim])
        old = {pack.pack for pack in read_manifest(store, NAME, first).packs}
        packs = read_manifest(store, NAME, made).packs
        store.delete([pack_key(NAME, pack) for pack in packs if pack.pack not in old])
        return made

    Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").run(body)
