"""A mirror's generations: published into a store by one daemon, followed by another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
import s3
from exchanges import NAME, Node
from gitrepos import Upstream, git

from mirrord.catalog import Generation
from mirrord.errors import ClaimLostError, StoreDamagedError
from mirrord.fleet.generations import (
    GenerationManifest,
    list_published,
    manifest_key,
    read_generation,
    read_manifest,
)
from mirrord.fleet.objects import ObjectStore
from mirrord.mirrors.refs import followed_refs
from mirrord.mirrors.repository import HISTORY


@pytest.fixture
def node(tmp_path: Path, store: ObjectStore) -> Callable[[str], Node]:
    return lambda name: Node(tmp_path / name, store)


def run(body: Callable[[], Awaitable[None]]) -> None:
    anyio.run(body)


def packs(node: Node) -> list[str]:
    return sorted(it.key for it in node.store.iterate("mirrors/owner__name/packs/"))


@s3.OF_EACH_KIND
def test_an_empty_mirror_becomes_what_was_published(
    node: Callable[[str], Node], upstream: Upstream
) -> None:
    async def body() -> None:
        a, b = node("a"), node("b")
        await a.sync(upstream)
        made = await a.publish(None)
        assert made is not None
        await b.follow(made)
        assert b.refs() == a.refs()
        assert read_generation(b.mirror.path) == made
        b.must_be_sound()
        assert "secret" not in str(read_manifest(b.store, NAME, made).encode())
        assert not list((b.root / "quarantine").iterdir())

    run(body)


def test_what_did_not_change_is_not_published_again(
    node: Callable[[str], Node], upstream: Upstream
) -> None:
    async def body() -> None:
        a = node("a")
        await a.sync(upstream)
        made = await a.publish(None)
        before = sorted(it.key for it in a.store.iterate("mirrors/"))
        assert await a.publish(made, epoch=2) is None
        assert sorted(it.key for it in a.store.iterate("mirrors/")) == before

    run(body)


def test_a_follower_takes_only_what_is_new_and_keeps_what_upstream_left(
    node: Callable[[str], Node], upstream: Upstream
) -> None:
    async def body() -> None:
        a, b = node("a"), node("b")
        await a.sync(upstream)
        first = await a.publish(None)
        assert first
        await b.follow(first)
        (old,) = packs(a)[:1]
        left = upstream.git("rev-parse", "HEAD")
        upstream.git("reset", "--quiet", "--hard", "HEAD~2")
        upstream.commit({"new": "line\n"})
        await a.sync(upstream)
        second = await a.publish(first, epoch=3)
        assert second
        assert (second.epoch, second.number) == (3, 2)
        # the first pack is not asked for again
        a.store.delete([it for it in packs(a) if it.startswith(old[:-5])])
        await b.follow(second)
        assert b.refs() == a.refs()
        assert git(b.mirror.path, "rev-parse", f"refs/mirrord/kept/{left}") == left
        b.must_be_sound()

    run(body)


@s3.OF_EACH_KIND
def test_many_small_packs_become_one(node: Callable[[str], Node], upstream: Upstream) -> None:
    async def body() -> None:
        a, b, c = node("a"), node("b"), node("c")
        await a.sync(upstream)
        newest, counts = await a.publish(None), []
        for number in range(6):
            upstream.commit({"file": f"{number}\n" * 50})
            await a.sync(upstream)
            newest = await a.publish(newest)
            assert newest
            manifest = read_manifest(a.store, NAME, newest)
            counts.append(len(manifest.packs))
            uptos = [it.upto for it in manifest.packs]
            assert uptos == sorted(set(uptos))
            await b.follow(newest)
        assert max(counts) < 6
        assert 2 in counts[1:]
        assert newest
        await c.follow(newest)
        assert a.refs() == b.refs() == c.refs()
        b.must_be_sound()
        c.must_be_sound()

    run(body)


def test_a_publisher_that_lost_its_claim_publishes_nothing(
    node: Callable[[str], Node], upstream: Upstream
) -> None:
    async def body() -> None:
        a = node("a")
        await a.sync(upstream)

        async def refuse(_: Generation) -> bool:
            return False

        with pytest.raises(ClaimLostError):
            await a.exchange.publish(
                a.mirror, await a.mirror.all_refs(), None, url="", epoch=1, previous=None,
                accept=refuse,
            )  # fmt: skip
        assert len(list_published(a.store, NAME)) == 1  # an orphan, by its epoch before any other

    run(body)


@pytest.mark.parametrize("damage", ["gone", "truncated", "other", "swapped"])
@pytest.mark.parametrize("suffix", [".pack", ".idx", ".json"])
def test_damaged_objects_change_nothing_and_are_named(
    node: Callable[[str], Node], upstream: Upstream, damage: str, suffix: str
) -> None:
    async def body() -> None:
        a, b = node("a"), node("b")
        await a.sync(upstream)
        first = await a.publish(None)
        assert first
        await b.follow(first)
        before = b.refs()
        upstream.commit({"file": "more\n"})
        await a.sync(upstream)
        second = await a.publish(first)
        assert second
        known = {pack.pack.sha256 for pack in read_manifest(a.store, NAME, first).packs}
        (victim,) = (
            it.key
            for it in a.store.iterate("mirrors/")
            if it.key.endswith(suffix)
            and not any(name in it.key for name in known | {"0000000001-0000000001"})
        )
        good = a.store.get(victim, limit_bytes=1 << 20)
        assert good
        a.store.delete([victim])
        if damage != "gone":
            other = b"{}" if suffix == ".json" else bytes(len(good))
            bad = {"truncated": good[:-7], "other": other, "swapped": good[::-1]}[damage]
            a.store.put(victim, bad)
        with pytest.raises(StoreDamagedError, match=victim):
            await b.follow(second)
        assert b.refs() == before
        b.must_be_sound()
        a.store.delete([victim])
        a.store.put(victim, good)
        await b.follow(second)
        assert b.refs() == a.refs()

    run(body)


def test_a_pack_that_lacks_objects_moves_no_ref(
    node: Callable[[str], Node], upstream: Upstream
) -> None:
    """Its hashes are right, but its publisher lacked objects."""

    async def body() -> None:
        a, b = node("a"), node("b")
        await a.sync(upstream)
        first = await a.publish(None)
        assert first
        await b.follow(first)
        upstream.commit({"file": "more\n"})
        await a.sync(upstream)
        second = await a.publish(first)
        assert second
        manifest = read_manifest(a.store, NAME, second)
        value = json.loads(manifest.encode())
        value["packs"] = value["packs"][:1]
        value["number"] = 3
        content = json.dumps(value).encode()
        third = Generation(1, 3, hashlib.sha256(content).hexdigest())
        a.store.put(manifest_key(NAME, third), content)
        before = b.refs()
        with pytest.raises(StoreDamagedError, match="lack"):
            await b.follow(third)
        assert b.refs() == before

    run(body)


def test_a_mirror_with_a_past_of_its_own_keeps_it(
    node: Callable[[str], Node], upstream: Upstream, tmp_path: Path
) -> None:
    """As a machine that joins a fleet with its state."""

    async def body() -> None:
        a, b = node("a"), node("b")
        await b.sync(upstream)
        own = git(b.mirror.path, "rev-parse", HISTORY)
        upstream.git("branch", "gone")
        upstream.git("commit", "--quiet", "--amend", "--allow-empty", "-m", "rewritten")
        tip = git(b.mirror.path, "rev-parse", "refs/heads/main")
        await a.sync(upstream)
        made = await a.publish(None)
        assert made
        await b.follow(made)
        theirs_b, theirs_a = [followed_refs(await it.mirror.all_refs()) for it in (b, a)]
        assert theirs_b == theirs_a
        kept = await b.mirror.all_refs()
        assert kept[f"refs/mirrord/kept/{own}"] == own
        assert kept[f"refs/mirrord/kept/{tip}"] == tip
        b.must_be_sound()

    run(body)


def manifest_of(**members: object) -> bytes:
    value = {"format": 1, "mirror": "o__r", "url": "", "epoch": 1, "number": 1, "head": None}
    return json.dumps({**value, "refs": {}, "packs": [], **members}).encode()


@pytest.mark.parametrize(
    "content",
    [
        manifest_of()[:-1] + b',"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        manifest_of()[:-1] + b',"more":' + b"[" * 200 + b"]" * 200 + b"}",
        manifest_of(refs={"refs/heads/\ud800": "a" * 40}),
        manifest_of(refs={"refs/heads/\udcff": "a" * 40, '"refs/heads/\\377"': "b" * 40}),
        manifest_of(refs={"refs/heads/a": "a" * 40, '"refs/heads/\\141"': "b" * 40}),
        manifest_of(refs={'"refs/heads/\\000"': "a" * 40}),
        manifest_of(refs={'"refs/heads/a\\nb"': "a" * 40}),
        manifest_of(refs={"refs/heads/a": "a" * 40}, head=["refs/heads/a"]),
    ],
    ids=["deep", "nested", "surrogate", "twice", "spelt twice", "NUL", "line feed", "head"],
)
def test_a_hostile_manifest_is_refused(content: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        GenerationManifest.decode(content)


def test_a_manifest_has_names_of_any_bytes() -> None:
    refs = {
        f"refs/heads/{byte}": "a" * 40 for byte in ("\udcff", "\u2028", '"q"', "\udced\udca0\udc80")
    }
    made = GenerationManifest("o__r", "", 1, 1, "refs/heads/\udcff", refs, ())
    assert GenerationManifest.decode(made.encode()) == made
    made.encode().decode()
