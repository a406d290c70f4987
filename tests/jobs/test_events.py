"""The event stream: numbered, resumable, bounded; a slow follower loses events and is informed."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest
from structlog.testing import capture_logs
from waiting import BOUND_S

from mirrord.jobs.events import Events
from mirrord.protocol import Event

pytestmark = pytest.mark.anyio


async def take(events: Events, after: int | None, count: int) -> list[Event]:
    found: list[Event] = []
    with anyio.fail_after(BOUND_S):
        async for some in events.subscribe(after):
            found += some
            if len(found) >= count:
                break
    return found[:count]


async def test_numbers_grow_by_one_within_a_boot() -> None:
    """A follower can verify that it missed nothing."""
    events = Events()
    for _ in range(3):
        events.publish("a.done", x=1)
    found = await take(events, 0, 3)
    assert [event.id for event in found] == [1, 2, 3]
    assert {event.boot for event in found} == {events.boot}
    assert found[0].fields == {"x": 1}


async def test_what_was_refused_or_failed_is_a_warning_in_the_log() -> None:
    """They appear in logs of warnings only."""
    with capture_logs() as logged:
        for name in ("config.reloaded", "config.refused", "mirror.failed", "operation.progressed"):
            Events().publish(name)
    assert [entry["log_level"] for entry in logged] == ["info", "warning", "warning", "debug"]


async def test_a_follower_gets_what_comes_after_it_asked() -> None:
    """Waiting costs nothing, and every follower gets everything."""
    events = Events()
    events.publish("before.done")
    found: list[list[Event]] = []

    async def follow() -> None:
        found.append(await take(events, None, 2))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        events.publish("a.done")
        events.publish("b.done")
    assert [[event.name for event in each] for each in found] == [["a.done", "b.done"]] * 3


async def test_a_follower_that_fell_behind_is_told_what_it_missed() -> None:
    """One event replaces those that left the ring; the later ones follow."""
    events = Events(capacity=5)
    for _ in range(12):
        events.publish("a.done")
    found = await take(events, 2, 6)
    assert found[0].name == "events.dropped"
    assert found[0].fields == {"after": 2, "count": 5}
    assert [event.id for event in found] == [7, 8, 9, 10, 11, 12]


async def test_closing_ends_every_follower_after_the_last_event() -> None:
    """A stopping daemon does not wait for its followers, but sends them all events."""
    events = Events()
    events.publish("a.done")
    events.close()
    with anyio.fail_after(BOUND_S):
        assert [event.name async for some in events.subscribe(0) for event in some] == ["a.done"]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (None, 3),
        ("", 3),
        ("2", 2),
        ("0", 0),
        ("99", 3),
        ("other:2", 0),
        ("x", 0),
        ("-1", 0),
        ("9" * 60, 3),
    ],
)
async def test_a_last_event_id_is_a_position(text: str | None, position: int) -> None:
    """Invalid ids, and those of another boot, mean the beginning."""
    events = Events()
    for _ in range(3):
        events.publish("a.done")
    assert events.position(text) == position
    assert events.position(f"{events.boot}:2") == 2


async def test_what_is_remembered_is_all_of_the_ring() -> None:
    """More than one hundred, which is how many a follower takes at once."""
    events = Events()
    for _ in range(250):
        events.publish("a.done")
    assert [event.id for event in events.remembered(0)] == list(range(1, 251))


async def test_an_event_is_encoded_once_for_all_who_follow() -> None:
    """They are sent the same bytes."""
    events = Events()
    events.publish("a.done", x=1)
    first, second = [events.remembered(0)[0].frame for _ in range(2)]
    assert first is second
    assert first.startswith(b"id: " + events.boot.encode() + b":1\nevent: a.done\ndata: {")


async def test_silence_is_told() -> None:
    """An empty batch after that time without events."""
    events = Events()
    with anyio.fail_after(BOUND_S):
        async for some in events.subscribe(silence=timedelta(seconds=0.05)):
            assert some == []
            break
