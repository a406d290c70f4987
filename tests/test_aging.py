"""What goes when a person says how long the past is kept, and what never goes. Times are those of the records."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from test_mirrors import NAME
from test_ref_history import DAYS, Told, told

from mirrord.audit.examine import examine
from mirrord.errors import NotFoundError
from mirrord.mirrors.aging import Aged, age
from mirrord.mirrors.bundles.service import Bundles
from mirrord.mirrors.repository import HISTORY, KEPT
from mirrord.model import AuditLevel, CommitId

FEBRUARY = timedelta(days=80), datetime(2024, 5, 15, tzinfo=timezone.utc)
"""How long and now; keeps what stood on 25 February: the records of 1 February and 1 March."""

MARCH = timedelta(days=100), datetime(2024, 7, 10, tzinfo=timezone.utc)


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(4)
    return made


def kept_refs(it: Told) -> set[str]:
    refs = git(it.it.mirrors.path(NAME), "for-each-ref", "--format=%(refname)", KEPT).split()
    return {ref.removeprefix(KEPT) for ref in refs}


def test_old_records_are_folded_and_their_tips_let_go(tmp_path: Path, upstream: Upstream) -> None:
    """The record that stood then is the first; later ones are as they were and answer to their old ids."""

    async def check(it: Told) -> None:
        repository = it.it.mirrors.repository(NAME)
        before = await it.it.mirrors.refs_log(NAME)
        assert kept_refs(it) == {it.tips[0], it.tag}
        assert await age(repository, *FEBRUARY, ()) == Aged(records=1, kept=2)
        after = await it.it.mirrors.refs_log(NAME)
        assert [(r.at, r.summary, r.ref_count) for r in after] == [(r.at, r.summary, r.ref_count) for r in before[:2]]
        assert [record.was for record in after] == [[it.records[2]], [it.records[1]]]
        diff = await it.it.mirrors.refs_diff(NAME, it.records[1][:10], it.records[2])
        assert (diff.a, {change.ref for change in diff.changes}) == (after[1].id, {"refs/heads/main", "refs/heads/topic"})
        with pytest.raises(NotFoundError):
            await it.it.mirrors.refs_diff(NAME, it.records[0], "latest")
        assert kept_refs(it) == set()

    told(tmp_path, upstream, check)


def test_an_aged_mirror_is_sound_and_goes_on(tmp_path: Path, upstream: Upstream) -> None:
    """The audit misses nothing that was let go on purpose; the next fold keeps all former ids; a sync adds to it."""

    async def check(it: Told) -> None:
        repository = it.it.mirrors.repository(NAME)
        await age(repository, *FEBRUARY, ())
        assert await age(repository, *FEBRUARY, ()) is None
        assert examine(repository.path, [CommitId(it.tips[2])], AuditLevel.CONTENT).faults == {}
        second = (await it.it.mirrors.refs_log(NAME))[0].id
        assert await age(repository, *MARCH, ()) == Aged(records=1, kept=0)
        (only,) = await it.it.mirrors.refs_log(NAME)
        assert only.was == [it.records[2], second]
        git(repository.path, "fsck", "--full", "--strict")
        it.upstream.commit({"more": "1"})
        assert (await it.it.mirrors.sync(NAME)).changed
        assert len(await it.it.mirrors.refs_log(NAME)) == 2

    told(tmp_path, upstream, check)


def test_nothing_is_folded_before_a_quarter_of_the_time_has_come_together(tmp_path: Path, upstream: Upstream) -> None:
    """A fold gives later records new ids, so it is not done for every record that becomes too old."""

    async def check(it: Told) -> None:
        repository = it.it.mirrors.repository(NAME)
        due = datetime(2024, 2, 1, 12, tzinfo=timezone.utc) + timedelta(days=80 + 20)
        assert await age(repository, timedelta(days=80), due - timedelta(seconds=1), ()) is None
        assert await age(repository, timedelta(days=80), due, ()) == Aged(records=1, kept=2)

    told(tmp_path, upstream, check)


def test_a_pin_is_never_removed_by_age(tmp_path: Path, upstream: Upstream) -> None:
    async def check(it: Told) -> None:
        tip = CommitId(it.tips[0])
        assert await it.it.mirrors.pin(NAME, [tip], owner="person/7", reason="paper") == {}
        await age(it.it.mirrors.repository(NAME), *MARCH, ())
        path = it.it.mirrors.path(NAME)
        assert kept_refs(it) == set()
        assert git(path, "rev-parse", f"refs/mirrord/pins/person/7/{tip}") == tip
        assert examine(path, [tip], AuditLevel.CLOSURE).faults == {}

    told(tmp_path, upstream, check)


def test_a_tip_that_something_recorded_needs_stays(tmp_path: Path, upstream: Upstream) -> None:
    """Recorded, and without the pin that it should have: the commit before the tip."""

    async def check(it: Told) -> None:
        needed = git(it.it.mirrors.path(NAME), "rev-parse", f"{it.tips[0]}^")
        aged = await age(it.it.mirrors.repository(NAME), *MARCH, {needed})
        assert aged == Aged(records=2, kept=0)
        assert kept_refs(it) == {it.tips[0], it.tag}

    told(tmp_path, upstream, check)


@pytest.mark.parametrize("kept_for", [None, "90d"])
def test_maintenance_ages_only_when_it_is_told_to(tmp_path: Path, upstream: Upstream, kept_for: str | None) -> None:
    """By default everything stays, however old."""

    async def check(it: Told) -> None:
        await it.it.mirrors.maintain(NAME)
        kept = 2 if kept_for is None else 0
        assert (len(await it.it.mirrors.refs_log(NAME)), len(kept_refs(it))) == (len(DAYS) if kept else 1, kept)
        assert (await it.it.mirrors.describe(NAME)).kept_count == kept
        assert it.it.events.counts["history.folded"] == (0 if kept else 1)

    told(tmp_path, upstream, check, **({"maintenance": {"kept_for": kept_for}} if kept_for else {}))


def test_a_bundle_since_a_former_id_brings_the_records_anew(tmp_path: Path, upstream: Upstream) -> None:
    """Whoever has the record of that id does not have it as it is now."""

    async def check(it: Told) -> None:
        await age(it.it.mirrors.repository(NAME), *FEBRUARY, ())
        bundles = Bundles(
            mirrors=it.it.mirrors, catalog=it.it.catalog, git=it.it.mirrors.repository(NAME).git, events=it.it.events
        )
        made = await bundles.create(str(NAME), since=it.records[2])
        (tmp_path / "b").write_bytes(b"".join([chunk async for chunk in made.content]))
        head = git(tmp_path, "bundle", "list-heads", str(tmp_path / "b"), HISTORY)
        assert head.split()[0] == (await it.it.mirrors.refs_log(NAME))[0].id
        text = (tmp_path / "b").read_bytes().partition(b"\n\n")[0]
        assert head.split()[0].encode() not in b"\n".join(line for line in text.split(b"\n") if line.startswith(b"-"))

    told(tmp_path, upstream, check)
