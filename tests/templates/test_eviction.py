"""Eviction of templates: which go, which stay, and that evicted ones are built again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from gitrepos import Upstream
from template_parts import NAME, Store, assert_equals_commit, disk_bytes, run

from mirrord.errors import CatalogUnavailableError, CheckoutBusyError
from mirrord.model import CommitId, History, MirrorName

pytestmark = pytest.mark.root


def record(store: Store, commit: str) -> Path:
    return store.trees.parent / "gits" / f"sealed-{commit}.json"


def age(store: Store, commits: list[str], by: timedelta = timedelta(days=8)) -> None:
    """Set the last use of these commits' stores to `by` ago."""
    long_ago = (datetime.now(timezone.utc) - by).timestamp()
    for commit in commits:
        os.utime(record(store, commit), (long_ago, long_ago))


def whole_trees(upstream: Upstream, count: int) -> list[str]:
    """Commits that share no file."""
    commits = []
    for number in range(count):
        shutil.rmtree(upstream.path / "src", ignore_errors=True)
        commits.append(
            upstream.commit({f"src/{number}-{n}": os.urandom(5000).hex() for n in range(20)})
        )
    return commits


def test_least_recently_used_first_and_held_ones_stay(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
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
            await store.templates.remove_mirror(NAME)
        store.templates.drop(made[0])
        assert await store.templates.evict() == 1
        for left in ("trees", "gits", "packs", "blobs"):
            assert list((store.trees.parent / left).glob("*")) == []

    run(tmp_path, upstream, test)


def test_unused_templates_are_evicted_and_built_again(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """With the layers and packs that no other store needs; used ones stay whole."""
    upstream = make_upstream("up")
    commits = [upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})]
    for number in range(24):
        commits.append(upstream.commit({f"d{number}/f": os.urandom(20_000).hex()}))

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        assert await store.templates.evict() == 0
        before = disk_bytes(store.trees.parent)
        age(store, commits[:-2])
        age(store, commits[-2:], timedelta(days=6))
        again = await store.reopened()
        assert await again.templates.evict() == 23
        kept = {path.name for path in (store.trees.parent / "gits").glob("*.json")}
        assert kept == {f"sealed-{commit}.json" for commit in commits[-2:]}
        packs = {path.name for path in (store.trees.parent / "packs").glob("*/*.pack")}
        assert packs == {
            path.name for path in (store.trees.parent / "gits").glob("*/.git/objects/pack/*.pack")
        }
        assert disk_bytes(store.trees.parent) < before
        for number in (0, 5, 24):
            back = await again.ensure(commits[number])
            assert_equals_commit(
                back,
                tmp_path / str(number),
                upstream.git("rev-parse", f"{commits[number]}^{{tree}}"),
            )
        assert await again.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_the_last_store_of_a_mirror_outlives_its_time(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Without it the next checkout would be a very first one. It goes where there is no room for
    it.
    """
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 3)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        age(store, commits)
        age(store, commits[1:2], timedelta(days=7.5))
        again = await store.reopened()
        assert await again.templates.evict() == 2
        assert await again.templates.evict() == 0
        assert record(store, commits[1]).exists()
        again.template_bytes = "1B"
        assert await again.templates.evict() == 1

    run(tmp_path, upstream, test)


def test_a_day_of_use_is_remembered_over_a_restart(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """The next daemon keeps a recently used template, however old it is."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 4)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        age(store, commits)
        again = await store.reopened()
        await again.ensure(commits[0])
        assert await again.templates.evict() >= 1
        third = await store.reopened()
        await third.templates.evict()
        assert third.stores.find(NAME, CommitId(commits[0]), History.SEALED)

    run(tmp_path, upstream, test)


def test_a_store_that_is_being_built_keeps_its_packs(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Packs that no finished store has yet are not taken from under a build."""
    upstream = make_upstream("up")
    commits = upstream.history(3)

    async def test(store: Store) -> None:
        await store.ensure(commits[0])
        packs = set((store.trees.parent / "packs").glob("*/*.pack"))
        shutil.rmtree(store.trees.parent / "gits")
        fresh = await store.reopened()
        fresh.stores._building[NAME.key] += 1
        await fresh.stores.evict_packs(NAME)
        assert set((store.trees.parent / "packs").glob("*/*.pack")) == packs
        fresh.stores._building[NAME.key] -= 1
        await fresh.stores.evict_packs(NAME)
        assert list((store.trees.parent / "packs").glob("*/*.pack")) == []

    run(tmp_path, upstream, test)


def test_the_ttl_counts_from_the_release_of_the_last_checkout(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Not when it was made."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 3)

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        store.templates.hold(made[0])
        age(store, commits)
        again = await store.reopened()
        again.templates.hold(made[0])
        again.templates.drop(made[0])
        await again.templates.evict()
        assert [record(store, commit).exists() for commit in commits] == [True, False, False]

    run(tmp_path, upstream, test)


def test_a_commit_that_nothing_names_goes_some_time_after_its_last_checkout(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """With the packs that no other store needs; not while it is held, nor while the catalog is out of reach."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 4)

    async def test(store: Store) -> None:
        directory = store.trees.parent
        later = [await store.ensure(commit) for commit in commits[2:]]
        packs = set((directory / "packs").glob("*/*.pack"))
        for commit in commits[:2]:
            await store.ensure(commit)
        age(store, commits, timedelta(hours=3))
        again = await store.reopened()
        again.ttl, again.named = "2h", {template.commit for template in later}
        held = await again.ensure(commits[1])
        again.templates.hold(held)
        known, again.stores.recorded = again.stores.recorded, unreachable
        assert await again.templates.evict() == 0
        again.stores.recorded = known
        assert await again.templates.evict() == 1
        assert [record(store, commit).exists() for commit in commits] == [False, True, True, True]
        again.templates.drop(held)
        assert await again.templates.evict() == 0
        again.stores.used_at[held.layers[1]] -= 3 * 3600
        assert await again.templates.evict() == 1
        assert set((directory / "packs").glob("*/*.pack")) == packs
        assert_equals_commit(
            await again.ensure(commits[0]),
            tmp_path / "back",
            upstream.git("rev-parse", f"{commits[0]}^{{tree}}"),
        )

    async def unreachable(name: MirrorName) -> set[CommitId]:
        raise CatalogUnavailableError("cannot reach the catalog: refused")

    run(tmp_path, upstream, test)


def test_a_step_of_the_wall_clock_makes_no_template_old_or_new(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Nor does a use that was recorded in the future keep one for ever."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 2)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        used_at = dict(store.stores.used_at)
        store.templates.follow(timedelta(days=365))
        later = {path: time + 365 * 86400 for path, time in used_at.items()}
        assert store.stores.used_at == pytest.approx(later)
        age(store, commits, timedelta(days=-365))
        again = await store.reopened()
        assert await again.templates.evict() == 0
        assert max(again.stores.used_at.values()) <= datetime.now(timezone.utc).timestamp()

    run(tmp_path, upstream, test)


def test_a_collection_evicts_all_that_is_not_needed(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Not what a checkout holds, a lease names or a worker reads; it frees as many bytes as `weigh` said."""
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 5)

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        squashed = await store.ensure(commits[0], History.SQUASHED)
        store.templates.hold(made[1])
        sealed = store.stores.find(NAME, CommitId(commits[2]), History.SEALED)
        assert sealed is not None
        keep = {(NAME.key, CommitId(commits[3]), History.SEALED)}
        directory = store.trees.parent
        with store.stores.holding(sealed):
            (weight,) = await store.templates.weigh(keep)
            before = disk_bytes(directory)
            assert await store.templates.collect(keep) == {NAME: (3, weight.free_bytes)}
        assert before - disk_bytes(directory) == pytest.approx(weight.free_bytes, rel=0.15)
        assert weight.size_bytes == pytest.approx(before, rel=0.15)
        assert [path.is_dir() for path in (made[0].layers[1], squashed.layers[1])] == [False, False]
        kept = {path.name for path in (directory / "gits").glob("*.json")}
        assert kept == {f"sealed-{commit}.json" for commit in commits[1:4]}
        store.templates.drop(made[1])
        assert (await store.templates.collect([]))[NAME][0] == 3
        for left in ("trees", "gits", "packs", "blobs"):
            assert list((directory / left).glob("*")) == []
        back = await store.ensure(commits[0])
        assert_equals_commit(
            back, tmp_path / "back", upstream.git("rev-parse", f"{commits[0]}^{{tree}}")
        )

    run(tmp_path, upstream, test)
