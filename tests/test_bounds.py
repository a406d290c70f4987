"""What is kept of the templates: within two bounds, the least recently used goes first, and what was dropped comes back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream
from templatelab import NAME, Store, assert_equals_commit, disk_bytes, run

from mirrord.checkouts import bounds
from mirrord.errors import CheckoutBusyError
from mirrord.model import CommitId, History

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def age(store: Store, commits: list[str]) -> None:
    """As if nobody had asked for these for two days."""
    long_ago = time.time() - 2 * bounds.REST.total_seconds()
    for commit in commits:
        os.utime(store.trees.parent / "gits" / f"sealed-{commit}.json", (long_ago, long_ago))


def whole_trees(upstream: Upstream, count: int) -> list[str]:
    """Commits that share no file."""
    commits = []
    for number in range(count):
        shutil.rmtree(upstream.path / "src", ignore_errors=True)
        commits.append(upstream.commit({f"src/{number}-{n}": os.urandom(5000).hex() for n in range(20)}))
    return commits


def test_the_least_used_goes_first_and_what_is_held_stays(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """Over `template_bytes` only templates that no checkout uses are dropped."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 3)

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        store.templates.hold(made[0])
        assert not await store.templates.is_full()
        store.template_bytes = "1B"
        assert await store.templates.is_full()
        assert await store.templates.evict() == 2
        assert [store.find(commit) is not None for commit in commits] == [True, False, False]
        with pytest.raises(CheckoutBusyError):
            await store.templates.forget(NAME)
        store.templates.drop(made[0])
        assert await store.templates.evict() == 1
        for left in ("trees", "gits", "packs", "indexes", "blobs"):
            assert list((store.trees.parent / left).glob("*")) == []

    run(tmp_path, upstream, test)


def test_what_nobody_asks_for_rests_within_a_share(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a week without use the oldest go, with layers and packs that nobody else needs; each comes back when asked for."""
    monkeypatch.setattr(bounds, "_REST_BYTES", 0)
    upstream = make_upstream("up")
    commits = [upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})]
    for number in range(24):
        commits.append(upstream.commit({f"d{number}/f": os.urandom(20_000).hex()}))

    async def test(store: Store) -> None:
        for commit in commits:
            made = await store.ensure(commit)
        one = disk_bytes(made.layers[-1]) + disk_bytes(made.layers[1])
        assert await store.templates.evict() == 0
        age(store, commits[:-2])
        again = Store(tmp_path / "state", upstream, store.templates._workers)
        await again.templates.open()
        assert await again.templates.evict() >= 12
        kept = {path.name for path in (store.trees.parent / "gits").glob("*.json")}
        assert {f"sealed-{commit}.json" for commit in commits[-2:]} <= kept
        packs = {path.name for path in (store.trees.parent / "packs").glob("*/*.pack")}
        assert packs == {path.name for path in (store.trees.parent / "gits").glob("*/.git/objects/pack/*.pack")}
        assert disk_bytes(store.trees.parent) < 2 * one
        for number in (0, 5, 24):
            back = await again.ensure(commits[number])
            assert_equals_commit(back, tmp_path / str(number), upstream.git("rev-parse", f"{commits[number]}^{{tree}}"))
        assert await again.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_a_day_of_use_is_remembered_over_a_restart(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for lately is kept by the next daemon too, however long ago it was made."""
    monkeypatch.setattr(bounds, "_REST_BYTES", 0)
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 4)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        age(store, commits)
        again = Store(tmp_path / "state", upstream, store.templates._workers)
        await again.templates.open()
        await again.ensure(commits[0])
        assert await again.templates.evict() >= 1
        third = Store(tmp_path / "state", upstream, store.templates._workers)
        await third.templates.open()
        await third.templates.evict()
        assert third.gitdirs.find(NAME, CommitId(commits[0]), History.SEALED)

    run(tmp_path, upstream, test)


def test_a_store_that_is_being_built_keeps_its_packs(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """Packs that no finished store has yet are not taken from under a build."""
    upstream = make_upstream("up")
    commits = upstream.history(3)

    async def test(store: Store) -> None:
        await store.ensure(commits[0])
        packs = set((store.trees.parent / "packs").glob("*/*.pack"))
        shutil.rmtree(store.trees.parent / "gits")
        fresh = Store(tmp_path / "state", upstream, store.templates._workers)
        fresh.gitdirs._building[NAME.key] += 1
        await fresh.gitdirs.drop_unneeded_packs(NAME)
        assert set((store.trees.parent / "packs").glob("*/*.pack")) == packs
        fresh.gitdirs._building[NAME.key] -= 1
        await fresh.gitdirs.drop_unneeded_packs(NAME)
        assert list((store.trees.parent / "packs").glob("*/*.pack")) == []

    run(tmp_path, upstream, test)
