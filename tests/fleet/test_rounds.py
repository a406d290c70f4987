"""What a daemon hears of others while it works: nothing of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House

from mirrord.bundles.service import Bundles
from mirrord.catalog import PinRow
from mirrord.errors import ClaimLostError, UpstreamNotFoundError
from mirrord.fleet.generations import read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.fleet.rounds import Rounds
from mirrord.fleet.service import Fleet
from mirrord.mirrors.pinrefs import pin_ref
from mirrord.mirrors.repository import Repository
from mirrord.model import CommitId, utc_now

OWNER = "person/0"


@pytest.fixture
def run(tmp_path: Path, upstream: Upstream) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Call a body with a mirror that is synced and published, and the rounds of its daemon."""

    def call(body: Callable[[House, Rounds], Awaitable[None]]) -> None:
        async def main(it: House) -> None:
            fleet = Fleet(ObjectStore(f"file://{tmp_path}/store"), Bundles(it.mirrors))
            it.mirrors.sharing = fleet
            await fleet.open()
            await it.mirrors.add("owner/name")
            await it.mirrors.sync(NAME)
            unused = cast("Any", SimpleNamespace(expire_cache=lambda: None))
            rounds = Rounds(
                fleet=fleet, datasets=unused, operations=unused, on_gone=unused, on_mirrors=_nothing
            )
            try:
                await body(it, rounds)
            finally:
                await fleet.close()

        Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").run(main)

    return call


async def _nothing() -> None:
    pass


def test_a_pin_that_is_heard_of_during_a_follow_is_followed_next(
    run: Callable[[Callable[..., Awaitable[None]]], None],
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (CommitId(upstream.git("rev-parse", f"HEAD~{back}")) for back in (0, 1))

    async def body(it: House, rounds: Rounds) -> None:
        async def hear_of(commit: CommitId) -> None:
            """As from another daemon, by a poll."""
            await it.catalog.put_pins([PinRow(NAME, commit, OWNER, "", utc_now())])
            rounds._hear({NAME.key})

        follow = it.mirrors.pins.follow

        async def follow_and_hear(repository: Repository) -> None:
            await follow(repository)
            monkeypatch.setattr(it.mirrors.pins, "follow", follow)
            await hear_of(second)

        monkeypatch.setattr(it.mirrors.pins, "follow", follow_and_hear)
        await hear_of(first)
        await rounds._catch_up()
        assert rounds.fleet.behind == {NAME.key}
        await rounds._catch_up()
        assert rounds.fleet.behind == set()
        refs = await it.mirrors.repository(NAME).all_refs()
        assert {pin_ref(OWNER, first), pin_ref(OWNER, second)} <= refs.keys()

    run(body)


def test_health_ends_its_complaint_when_another_daemon_has_synced(
    run: Callable[[Callable[..., Awaitable[None]]], None], upstream: Upstream
) -> None:
    async def body(it: House, rounds: Rounds) -> None:
        away = upstream.path.with_name("away")
        upstream.path.rename(away)
        with pytest.raises(UpstreamNotFoundError):
            await it.mirrors.sync(NAME)
        assert it.mirrors.outages()
        await it.mirrors.refresh_errors()
        assert it.mirrors.outages()
        await it.catalog.record_unchanged([NAME.key], utc_now())  # as another daemon's round does
        await it.mirrors.refresh_errors()
        assert not it.mirrors.outages()

    run(body)


def test_what_a_lost_claim_left_on_one_node_is_published_by_the_next_poll(
    run: Callable[[Callable[..., Awaitable[None]]], None],
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(it: House, rounds: Rounds) -> None:
        async def refuse(*_: object) -> bool:
            monkeypatch.undo()
            return False

        fleet = rounds.fleet
        before, tip = fleet.generations[NAME.key], upstream.commit({"seen": "here alone\n"})
        monkeypatch.setattr(fleet.catalog, "publish_generation", refuse)
        with pytest.raises(ClaimLostError):
            await it.mirrors.sync(NAME)
        assert fleet.generations[NAME.key] == before
        await rounds._publish_records()
        assert tip in read_manifest(fleet.store, NAME, fleet.generations[NAME.key]).refs.values()

    run(body)
