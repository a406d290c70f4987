"""Closure packs that one daemon made are taken by the others, if they are undamaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_fleet import Fleet, checkout, done, eventually
from daemons import Daemon
from gitrepos import Upstream, git

pytestmark = pytest.mark.slow

MIRROR = "owner__name"
SETTINGS = "[checkouts]\nprewarm = false\n"
FAR = 20  # first parents: more than a worker packs without git


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(3 * FAR)
    return made


def _documents(fleet: Fleet) -> dict[str, Any]:
    found = fleet.server.execute_in(fleet.catalog, "SELECT commit_id, document FROM closures")
    return dict(found)  # type: ignore[arg-type]


def _shared(fleet: Fleet) -> dict[str, str | None]:
    """The bases of the layers that the catalog has, by commit."""
    return {commit: it["layer"]["base"] for commit, it in _documents(fleet).items()}


def _objects(fleet: Fleet) -> list[Path]:
    """Their packs in the store."""
    packs = fleet.store_path / "mirrors" / MIRROR / "packs"
    return [packs / f"{it['pack'][0]}.pack" for it in _documents(fleet).values()]


def _packed(one: Daemon) -> dict[str, str | None]:
    """The bases of the layers that a daemon packed itself, by commit."""
    lines = [line for line in one.log_lines if line["event"] == "closure.packed"]
    return {line["commit"]: line["base"] for line in lines}


def _taken(one: Daemon) -> list[int]:
    """How many layers it took at a time."""
    return [line["count"] for line in one.log_lines if line["event"] == "closures.taken"]


def _must_be_sealed(one: Daemon, upstream: Upstream, commit: str) -> None:
    """Its store holds the closure of the commit, nothing else, and every bit of it is right."""
    [store] = (one.state_dir / "templates" / MIRROR / "gits").glob(f"sealed-{commit}/.git")
    git(store, "fsck", "--strict", "--full")
    held = git(store, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    reached = upstream.git("rev-list", "--objects", commit).splitlines()
    assert set(held) == {line[:40] for line in reached}


@pytest.fixture
def line(fleet: Fleet, upstream: Upstream) -> list[str]:
    """First parents, newest first; one daemon has the closure of the one in the middle."""
    found = upstream.git("rev-list", "--first-parent", "HEAD").split()
    first = fleet.make(SETTINGS)
    done(first, "POST", "/v1/mirrors", {"repo": "owner/name"})
    assert checkout(first, mirror=MIRROR, commit=found[FAR])
    eventually(lambda: found[FAR] in _shared(fleet))
    return found


def test_a_closure_that_one_packed_is_taken_by_others(
    fleet: Fleet, upstream: Upstream, line: list[str]
) -> None:
    other = fleet.make(SETTINGS)
    assert checkout(other, mirror=MIRROR, commit=line[FAR])
    assert _packed(other) == {}
    assert _taken(other) == [len(_shared(fleet))]
    _must_be_sealed(other, upstream, line[FAR])


def test_what_is_newer_is_packed_on_what_others_share(
    fleet: Fleet, upstream: Upstream, line: list[str]
) -> None:
    other = fleet.make(SETTINGS)
    assert checkout(other, mirror=MIRROR, commit=line[0])
    assert line[FAR] not in _packed(other)
    assert len(_taken(other)) == 1
    eventually(lambda: line[0] in _shared(fleet))  # with its bases
    assert _packed(other).items() <= _shared(fleet).items()
    _must_be_sealed(other, upstream, line[0])
    third = fleet.make(SETTINGS)
    assert checkout(third, mirror=MIRROR, commit=line[0])
    assert _packed(third) == {}
    _must_be_sealed(third, upstream, line[0])


@pytest.mark.parametrize("damage", ["gone", "another"])
def test_a_damaged_pack_is_packed_again_and_shared_again(
    fleet: Fleet, upstream: Upstream, line: list[str], damage: str
) -> None:
    """No byte that is not what the catalog says reaches a checkout."""
    other = fleet.make(SETTINGS)
    assert other.get(f"/v1/mirrors/{MIRROR}/refs/log")[0] == 200  # before the store is damaged
    shared = _objects(fleet)
    for file in shared:
        if damage == "gone":
            file.unlink()
    if damage == "another":
        first, second, *_ = [file.read_bytes() for file in shared]
        shared[0].write_bytes(second)
        shared[1].write_bytes(first)
    assert checkout(other, mirror=MIRROR, commit=line[FAR])
    assert line[FAR] in _packed(other)
    assert _taken(other) == []
    _must_be_sealed(other, upstream, line[FAR])
    eventually(lambda: line[FAR] in _shared(fleet))
    third = fleet.make(SETTINGS)
    assert checkout(third, mirror=MIRROR, commit=line[FAR])
    assert _packed(third) == {}
    _must_be_sealed(third, upstream, line[FAR])


def test_what_nobody_used_for_a_month_is_shared_no_longer(fleet: Fleet, line: list[str]) -> None:
    month_ms = 30 * 24 * 3600 * 1000
    aged = f"UPDATE closures SET used_ms = used_ms - {month_ms} WHERE commit_id = '{line[FAR]}'"
    others = _shared(fleet).keys() - {line[FAR]}
    fleet.server.execute_in(fleet.catalog, aged)
    fleet.server.execute_in(
        fleet.catalog, "UPDATE claims SET due_ms = 0 WHERE key = 'store/collect'"
    )
    eventually(lambda: _shared(fleet).keys() == others)
