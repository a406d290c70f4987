"""The schedule: jobs run as in the table, once each, counted from recorded times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest
import structlog
from waiting import BOUND_S

from mirrord.engine.timetable import Job, Schedule
from mirrord.errors import ResourceError, UpstreamNotFoundError, UpstreamThrottledError
from mirrord.jobs.clock import WallClock
from mirrord.model import utc_now
from mirrord.telemetry import bind_request
from mirrord.workers.turns import Askers

pytestmark = pytest.mark.anyio

HOUR = timedelta(hours=1)


async def nothing() -> None:
    """A job with nothing to do."""


async def opened(*jobs: Job, clock: WallClock | None = None) -> tuple[Schedule, list[Job]]:
    table = list(jobs)

    async def read() -> list[Job]:
        return table

    schedule = Schedule(read, clock=clock or WallClock(), delay=timedelta(seconds=0.02))
    await schedule.open()
    return schedule, table


def every(
    interval: timedelta, run: Callable[[], Awaitable[None]] = nothing, name: str = "job"
) -> Job:
    return Job(name, interval, run, since=utc_now())


async def test_a_job_runs_each_interval() -> None:
    """The state has the last and the next run."""
    ran = anyio.Event()
    count = 0

    async def run() -> None:
        nonlocal count
        count += 1
        if count == 3:
            ran.set()

    schedule, _ = await opened(every(timedelta(seconds=0.02), run))
    schedule.states()
    with anyio.fail_after(BOUND_S):
        await ran.wait()
    (state,) = schedule.states()
    assert state.last_at is not None
    assert state.next_at is not None
    await schedule.close()


async def test_a_job_runs_for_nobody() -> None:
    """Jobs rescheduled in a request do not run in its context."""
    seen: list[tuple[list[int], dict[str, Any]]] = []

    async def look() -> None:
        seen.append((Askers.present().uids, structlog.contextvars.get_contextvars()))
        if len(seen) < 3:
            raise ResourceError("cannot look: it is planned again after a failure")

    schedule, table = await opened()

    async def request() -> None:
        Askers(1000).bind()
        bind_request("of-the-request")
        table.append(replace(every(timedelta(seconds=0.02), look), retry=timedelta(seconds=0.01)))
        await schedule.reconcile()

    await asyncio.create_task(request())
    with anyio.fail_after(BOUND_S):
        while len(seen) < 5:
            await anyio.sleep(0.01)
    assert seen == [([], {})] * len(seen)
    await schedule.close()


async def test_what_happened_before_the_start_counts() -> None:
    """A daemon that restarts every hour still syncs every six; an overdue job runs soon."""
    now = utc_now()
    recent, overdue = (
        Job("recent", 6 * HOUR, nothing, since=now - HOUR),
        Job("overdue", 6 * HOUR, nothing, since=now - 9 * HOUR),
    )
    schedule, _ = await opened(recent, overdue)
    found = {state.name: state.next_at for state in schedule.states()}
    assert found["recent"] is not None
    assert found["overdue"] is not None
    assert abs(found["recent"] - (now + 5 * HOUR)) < timedelta(seconds=1)
    assert found["overdue"] - now < timedelta(minutes=1)
    await schedule.close()


async def test_recorded_times_of_the_future_do_not_delay_a_job() -> None:
    """The clock was a year ahead, and was set right while no daemon ran."""
    late = Job("late", HOUR, nothing, since=utc_now() + 9000 * HOUR)
    schedule, _ = await opened(late)
    (state,) = schedule.states()
    assert state.next_at is not None
    assert state.next_at - utc_now() <= HOUR
    await schedule.close()


@pytest.mark.parametrize("step", [-9 * HOUR, 9 * HOUR])
async def test_jobs_follow_a_step_of_the_wall_clock(step: timedelta) -> None:
    """Else none is due for as long as the clock was set back; after one forward what is overdue is due at once."""
    shift, told = timedelta(), anyio.Event()

    async def run() -> None:
        nonlocal shift
        shift = step  # apscheduler, which wakes for the next run, sees it

    clock = WallClock(lambda: time.time() + shift.total_seconds())
    often, seldom = every(timedelta(seconds=0.02), run, "often"), every(20 * HOUR, name="seldom")
    schedule, _ = await opened(often, seldom, clock=clock)
    clock.on_step(lambda _: told.set())
    before = {state.name: state.next_at for state in schedule.states()}
    with anyio.fail_after(20):
        await told.wait()
    after = {state.name: state.next_at for state in schedule.states()}
    assert before["seldom"]
    assert after["seldom"]
    moved = after["seldom"] - before["seldom"]
    assert abs(moved - min(step, timedelta())) < timedelta(seconds=1)
    assert after["often"] is not None
    assert (after["often"] > utc_now() + 8 * HOUR) == (step > timedelta())
    await schedule.close()


async def test_reconciling_adds_drops_and_replans() -> None:
    """A removed mirror is not synced again; a new interval applies at once."""
    schedule, table = await opened(
        every(HOUR, name="stays"), every(HOUR, name="goes"), every(HOUR, name="changes")
    )
    before = {state.name: state.next_at for state in schedule.states()}
    table[1:] = [every(2 * HOUR, name="changes"), every(HOUR, name="comes")]
    await schedule.reconcile()
    after = {state.name: state.next_at for state in schedule.states()}
    assert after.keys() == {"stays", "changes", "comes"}
    assert after["stays"] == before["stays"]
    assert after["changes"] != before["changes"]
    await schedule.close()


async def test_an_interval_of_nothing_switches_a_job_off() -> None:
    """`interval = "0"` in the configuration."""
    schedule, _ = await opened(every(timedelta()))
    assert schedule.states() == []
    await schedule.close()


@pytest.mark.parametrize(
    "error", [UpstreamNotFoundError("cannot sync a__b: it is gone"), KeyError("bug")]
)
async def test_a_failure_is_kept_for_the_status_and_the_next_turn_comes(error: Exception) -> None:
    """Expected or not."""
    turns = anyio.Event()
    count = 0

    async def run() -> None:
        nonlocal count
        count += 1
        if count == 2:
            turns.set()
        raise error

    schedule, _ = await opened(every(timedelta(seconds=0.02), run))
    with anyio.fail_after(BOUND_S):
        await turns.wait()
        while not schedule.states()[0].last_error:
            await anyio.sleep(0.01)
    text = schedule.states()[0].last_error or ""
    assert text == getattr(error, "message", text)
    assert "bug" not in text
    await schedule.close()


async def test_a_job_never_runs_beside_itself() -> None:
    """A run that is due while the last one is running is skipped."""
    running, most, turns = 0, 0, 0
    done = anyio.Event()

    async def run() -> None:
        nonlocal running, most, turns
        running, turns = running + 1, turns + 1
        most = max(most, running)
        await anyio.sleep(0.05)
        running -= 1
        if turns == 3:
            done.set()

    schedule, _ = await opened(every(timedelta(seconds=0.01), run))
    with anyio.fail_after(BOUND_S):
        await done.wait()
    assert most == 1
    await schedule.close()


async def test_what_is_one_of_many_has_its_own_place_in_the_interval() -> None:
    """Mirrors that were imported together do not sync together, and none waits longer."""
    now, jitter = utc_now(), timedelta(minutes=5)
    names = [f"sync/owner__name{number}" for number in range(100)]
    schedule, _ = await opened(*(Job(name, HOUR, nothing, jitter, now) for name in names))
    times = sorted(state.next_at for state in schedule.states() if state.next_at)
    await schedule.close()
    again, _ = await opened(*(Job(name, HOUR, nothing, jitter, now) for name in names))
    assert times == sorted(state.next_at for state in again.states() if state.next_at)
    await again.close()
    assert now + jitter <= times[0]
    assert times[-1] < now + HOUR + jitter
    quarters = [sum(time < now + jitter + HOUR * part / 4 for time in times) for part in (1, 2, 3)]
    assert all(abs(n - share) < 15 for n, share in zip(quarters, (25, 50, 75), strict=True))


async def test_its_next_turn_is_its_place_again() -> None:
    """Also after a late run, as after a long stop."""
    ran = anyio.Event()

    async def run() -> None:
        ran.set()

    jitter = timedelta(seconds=0.1)
    schedule, _ = await opened(Job("sync/a__b", HOUR, nothing, jitter, utc_now()))
    (place,) = schedule.states()
    await schedule.close()
    late = Job("sync/a__b", HOUR, run, jitter, utc_now() - 9 * HOUR)
    schedule, _ = await opened(late)
    with anyio.fail_after(BOUND_S):
        await ran.wait()
        while (state := schedule.states()[0]).next_at != place.next_at:
            await anyio.sleep(0.01)
    assert state.last_error is None
    await schedule.close()


async def test_a_failure_is_tried_again_before_the_next_turn() -> None:
    """After `retry`, twice that, and so on; a success ends it."""
    outcomes: list[Exception | None] = [
        UpstreamNotFoundError("cannot sync a__b: it is gone"),
        ResourceError("cannot sync a__b"),
        None,
    ]
    done = anyio.Event()

    async def run() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        done.set()

    schedule, _ = await opened(
        Job("job", HOUR, run, since=utc_now() - 2 * HOUR, retry=timedelta(seconds=0.02))
    )
    with anyio.fail_after(BOUND_S):
        await done.wait()
    (state,) = schedule.states()
    assert state.last_error is None
    assert state.next_at is not None
    assert state.next_at - utc_now() > HOUR / 2
    await schedule.close()


async def test_a_retry_waits_as_long_as_upstream_asks() -> None:
    """The retry is not later than the next regular run."""
    failed = anyio.Event()

    async def run() -> None:
        failed.set()
        raise UpstreamThrottledError("cannot sync a__b: throttled", retry_after_s=600)

    schedule, _ = await opened(
        Job("job", HOUR, run, since=utc_now() - 2 * HOUR, retry=timedelta(seconds=0.02))
    )
    with anyio.fail_after(BOUND_S):
        await failed.wait()
        while not schedule.states()[0].last_error:
            await anyio.sleep(0.01)
    next_at = schedule.states()[0].next_at
    assert next_at is not None
    assert timedelta(minutes=9) < next_at - utc_now() <= timedelta(minutes=10)
    await schedule.close()
