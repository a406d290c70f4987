"""What is kept of the templates: within two bounds; what is cheap to make again goes soon, and what was dropped comes back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from gitrepos import Upstream
from templatelab import NAME, Store, assert_equals_commit, disk_bytes, run

from mirrord.checkouts import account
from mirrord.checkouts.account import STAY_MAX, STAY_MIN, Account, Departures, stay
from mirrord.checkouts.gitdir import Gitdir
from mirrord.checkouts.layer import Layer
from mirrord.checkouts.shelf import Shelf
from mirrord.errors import CheckoutBusyError
from mirrord.host.remains import Remains
from mirrord.model import CommitId, History

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def record(store: Store, commit: str) -> Path:
    return store.trees.parent / "gits" / f"sealed-{commit}.json"


def age(store: Store, commits: list[str], by: timedelta = 2 * STAY_MAX) -> None:
    """As if nobody had asked for these for so long."""
    long_ago = (datetime.now(timezone.utc) - by).timestamp()
    for commit in commits:
        os.utime(record(store, commit), (long_ago, long_ago))


def made_in(store: Store, commit: str, seconds: float) -> None:
    """As if the store of a commit had taken so long to make."""
    facts = json.loads(record(store, commit).read_text())
    record(store, commit).write_text(json.dumps(facts | {"seconds": seconds}))


def layers_made_in(store: Store, seconds: float) -> None:
    """As if each layer had taken so long to make."""
    for path in store.trees.glob("*/layer.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))


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
        for left in ("trees", "gits", "packs", "blobs"):
            assert list((store.trees.parent / left).glob("*")) == []

    run(tmp_path, upstream, test)


def test_what_nobody_asks_for_rests_within_a_share(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a week without use the oldest go, with layers and packs that nobody else needs; each comes back when asked for."""
    monkeypatch.setattr(account, "_REST_BYTES", 0)
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
        again = await store.reopened()
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


def test_a_few_do_not_hold_on_to_the_chains_of_many(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that lie on one another, each of a third of a second: a day later they take less than two of one whole."""
    monkeypatch.setattr(account, "_REST_BYTES", 0)
    upstream = make_upstream("up")
    commits = [upstream.commit({f"d{n}/f": os.urandom(1000).hex() for n in range(400)})]
    for number in range(40):
        commits.append(upstream.commit({f"d{n % 400}/f": os.urandom(1000).hex() for n in range(number * 30, number * 30 + 30)}))

    async def test(store: Store) -> None:
        await store.ensure(commits[0])
        one = disk_bytes(store.trees.parent)
        made = [await store.ensure(commit) for commit in commits]
        assert max(len(each.layers) for each in made) > 8
        for commit in commits:
            made_in(store, commit, 0.3)
        layers_made_in(store, 0.3)
        assert disk_bytes(store.trees.parent) > 3 * one
        age(store, commits, timedelta(days=1))
        again = await store.reopened()
        evicted = await again.templates.evict()
        assert len(list(store.trees.glob("*"))) <= 2 * (len(commits) - evicted) < len(commits)
        assert disk_bytes(store.trees.parent) < 2 * one

    run(tmp_path, upstream, test)


def test_the_last_store_of_a_mirror_stays_though_it_alone_is_too_much(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lies on may be more than a whole tree and closure; without it the next checkout would be a very first one."""
    monkeypatch.setattr(account, "_REST_BYTES", -(10**12))
    monkeypatch.setattr(account, "_REST_SHARE", -1000)
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 3)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        age(store, commits)
        again = await store.reopened()
        assert await again.templates.evict() == 2
        assert await again.templates.evict() == 0

    run(tmp_path, upstream, test)


def test_a_day_of_use_is_remembered_over_a_restart(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for lately is kept by the next daemon too, however long ago it was made."""
    monkeypatch.setattr(account, "_REST_BYTES", 0)
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
        fresh = await store.reopened()
        fresh.gitdirs._building[NAME.key] += 1
        await fresh.gitdirs.drop_unneeded_packs(NAME)
        assert set((store.trees.parent / "packs").glob("*/*.pack")) == packs
        fresh.gitdirs._building[NAME.key] -= 1
        await fresh.gitdirs.drop_unneeded_packs(NAME)
        assert list((store.trees.parent / "packs").glob("*/*.pack")) == []

    run(tmp_path, upstream, test)


# -- how long a template stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "stays"),
    [
        (0.0, timedelta(hours=1)),
        (0.03, timedelta(hours=1)),
        (0.25, timedelta(hours=3)),
        (2.0, timedelta(days=1)),
        (14.0, timedelta(days=7)),
        (600.0, timedelta(days=7)),
    ],
)
def test_what_takes_long_to_make_stays_long(seconds: float, stays: timedelta) -> None:
    """Half a day for each second, from an hour to a week."""
    assert stay(seconds) == stays


WHOLE_BYTES = 64 * 1024**2


class Books:
    """An account of stores that are on no disk: a whole tree that took 10 seconds, and variants of it."""

    def __init__(self) -> None:
        self.shelf = Shelf(Path("/nowhere"), Remains())
        self.stores: list[tuple[Gitdir, float]] = []
        self.shelf.layers.add(self._layer("whole", None, 10.0))

    def variant(self, name: str, *, seconds: float, used_at: float = 0.0, on: str = "whole", size_bytes: int = 0) -> Gitdir:
        self.shelf.layers.add(self._layer(name, on, 0.02, size_bytes))
        return self.store(name, seconds=seconds, used_at=used_at)

    def store(self, tree: str, *, seconds: float, used_at: float = 0.0) -> Gitdir:
        commit = CommitId(tree)
        facts = Gitdir(Path(f"/nowhere/{tree}"), NAME, commit, History.SEALED, commit, tree, (), (), 0, seconds)
        self.stores.append((facts, used_at))
        return facts

    def gone_by(self, after: timedelta) -> list[str]:
        """The stores whose time is over so long after the epoch, in their order."""
        account = Account(NAME, self.shelf, self.stores)
        departures, gone = Departures(account), list[str]()
        while store := departures.next(after.total_seconds()):
            gone.append(store.tree)
            account.forget(store)
        return gone

    def _layer(self, tree: str, base: str | None, seconds: float, size_bytes: int = 0) -> Layer:
        depth = self.shelf.layers[base].depth + 1 if base else 1
        return Layer(tree, base, tree, 0, depth, size_bytes, 0, WHOLE_BYTES, seconds=seconds)


def test_variants_go_after_an_hour_and_what_they_lie_on_stays() -> None:
    """The store of the whole tree took as long as its layer."""
    books = Books()
    books.store("whole", seconds=2.0)
    for number in range(3):
        books.variant(f"v{number}", seconds=0.03, used_at=float(number))
    assert books.gone_by(STAY_MIN - timedelta(seconds=1)) == []
    assert books.gone_by(STAY_MIN + timedelta(seconds=9)) == ["v0", "v1", "v2"]
    assert books.gone_by(timedelta(days=4.9)) == ["v0", "v1", "v2"]
    assert books.gone_by(timedelta(days=5.1)) == ["v0", "v1", "v2", "whole"]


def test_the_last_one_on_a_whole_tree_stays_as_long_as_that_is_worth() -> None:
    """It would take the tree with it, and the next one would pay for both."""
    books = Books()
    for number in range(3):
        books.variant(f"v{number}", seconds=0.03, used_at=float(number))
    assert books.gone_by(timedelta(hours=2)) == ["v0", "v1"]
    assert books.gone_by(timedelta(days=5.1)) == ["v0", "v1", "v2"]


def test_what_lies_on_many_layers_is_made_again_as_one() -> None:
    """They count as the longest of them, not as all."""
    books = Books()
    books.store("whole", seconds=2.0)
    below = "whole"
    for number in range(14):
        books.shelf.layers.add(books._layer(f"l{number}", below, 0.2))
        below = f"l{number}"
    books.variant("top", on=below, seconds=0.03)
    assert books.gone_by(timedelta(hours=2.3)) == []
    assert books.gone_by(timedelta(hours=2.5)) == ["top"]


def test_what_much_goes_with_goes_sooner() -> None:
    """What frees a quarter of the tree stays an eighth of what its two seconds are worth; what frees a 32nd stays all of it."""
    books = Books()
    books.store("whole", seconds=10.0)
    books.variant("light", seconds=2.0, size_bytes=WHOLE_BYTES // 33)
    books.variant("heavy", seconds=2.0, size_bytes=WHOLE_BYTES // 4)
    assert books.gone_by(timedelta(hours=2.9)) == []
    assert books.gone_by(timedelta(hours=3.1)) == ["heavy"]
    assert books.gone_by(timedelta(hours=23.9)) == ["heavy"]
    assert books.gone_by(timedelta(hours=24.1)) == ["heavy", "light"]


def test_what_two_hold_is_let_go_with_the_second() -> None:
    """Each alone frees little; when one has gone the other frees what lay below both, and its own time is over, too."""
    books = Books()
    books.store("whole", seconds=10.0)
    books.shelf.layers.add(books._layer("below", "whole", 0.2, WHOLE_BYTES // 4))
    books.variant("first", on="below", seconds=1.0)
    books.variant("second", on="below", seconds=2.0)
    assert books.gone_by(timedelta(hours=11.9)) == []
    assert books.gone_by(timedelta(hours=12.1)) == ["first", "second"]


def test_a_closure_without_a_tree_may_rest() -> None:
    """Pooled checkouts have no layers; what their stores take is no less worth its time."""
    commit = CommitId("pooled")
    store = Gitdir(Path("/nowhere/pooled"), NAME, commit, History.SEALED, commit, "none", ("p",), (WHOLE_BYTES,), 0, 10.0)
    account = Account(NAME, Shelf(Path("/nowhere"), Remains()), [(store, 0.0)])
    assert account.size_bytes <= account.rest_bytes


def test_a_costly_store_outlives_one_that_was_asked_for_later() -> None:
    """Time since the last use is not all that counts."""
    books = Books()
    books.store("whole", seconds=2.0)
    books.variant("slow", seconds=6.0, used_at=0.0)
    books.variant("quick", seconds=0.03, used_at=timedelta(days=1).total_seconds())
    assert books.gone_by(timedelta(days=2)) == ["whole", "quick"]


def test_what_it_took_to_make_is_known_to_the_next_daemon(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three hours the quick ones are gone and the slow one is there."""
    monkeypatch.setattr(account, "_REST_SHARE", -1)
    monkeypatch.setattr(account, "_REST_BYTES", -(10**9))
    upstream = make_upstream("up")
    commits = whole_trees(upstream, 5)

    async def test(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        assert all(json.loads(record(store, commit).read_text())["seconds"] > 0 for commit in commits)
        assert all(json.loads(path.read_text())["seconds"] > 0 for path in store.trees.glob("*/layer.json"))
        for commit in commits:
            made_in(store, commit, 0.01)
        made_in(store, commits[1], 4.0)
        age(store, commits, timedelta(hours=50))
        age(store, commits[:2], timedelta(hours=3))
        again = await store.reopened()
        assert await again.templates.evict() == 4
        assert record(store, commits[1]).exists()

    run(tmp_path, upstream, test)


def test_the_time_to_stay_begins_when_the_last_checkout_lets_go(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it was made."""
    monkeypatch.setattr(account, "_REST_BYTES", 0)
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
