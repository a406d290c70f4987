"""Operations: background work with an id, progress, a result or an error, and a way to cancel it."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest

from mirrord.errors import (
    ConflictError,
    MirrorNotFoundError,
    NotFoundError,
    StoppingError,
    TooManyRequestsError,
)
from mirrord.jobs.events import Events
from mirrord.jobs.operations import Operations
from mirrord.protocol import QUEUED, Progress, ProgressSink

pytestmark = pytest.mark.anyio


async def succeed(_: ProgressSink) -> dict[str, Any]:
    return {"n": 1}


async def hang(_: ProgressSink) -> None:
    await anyio.sleep_forever()


def names(events: Events) -> list[str]:
    return [event.name for event in events.remembered(0)]


async def test_an_operation_ends_with_its_result() -> None:
    """Start and end are events."""
    events = Events()
    operations = Operations(events)
    started = operations.start("audit", "all", succeed, owner_uid=7)
    assert (started.state, started.kind, started.subject) == ("running", "audit", "all")
    ended = await operations.wait(started.id)
    assert (ended.state, ended.result, ended.error) == ("done", {"n": 1}, None)
    assert ended.finished_at is not None
    assert names(events) == ["operation.started", "operation.finished"]
    assert operations.running_count == 0


async def test_a_failed_operation_has_the_problem_of_its_error() -> None:
    """Code, sentence, hint and facts, as a failed request would have."""
    operations = Operations(Events())

    async def fail(_: ProgressSink) -> None:
        raise MirrorNotFoundError(
            "cannot find mirror a__b: there is none", hint="add it", mirror="a__b"
        )

    ended = await operations.wait(operations.start("sync", "a__b", fail).id)
    assert ended.error is not None
    assert (ended.state, ended.error.code, ended.error.hint) == (
        "failed",
        "mirror-not-found",
        "add it",
    )
    assert ended.error.to_json()["mirror"] == "a__b"


async def test_a_bug_in_the_work_is_an_internal_error_that_leaks_nothing() -> None:
    """The details are in the log."""
    operations = Operations(Events())

    async def crash(_: ProgressSink) -> None:
        raise KeyError("secret")

    ended = await operations.wait(operations.start("sync", "a__b", crash).id)
    assert ended.error is not None
    assert ended.error.code == "internal"
    assert "secret" not in json.dumps(ended.to_json())


async def test_progress_is_seen_while_it_runs_whichever_thread_tells_it() -> None:
    """Git's output is read on the loop, files are counted in threads."""
    operations = Operations(Events())
    told, go_on = anyio.Event(), anyio.Event()

    async def work(progress: ProgressSink) -> None:
        await anyio.to_thread.run_sync(progress, Progress(done=3, total=9, unit="files"))
        told.set()
        await go_on.wait()

    started = operations.start("import", "x", work)
    await told.wait()
    assert operations.get(started.id).progress == Progress(done=3, total=9, unit="files")
    go_on.set()
    assert (await operations.wait(started.id)).progress.done == 3


async def test_cancelling_ends_the_work_and_is_told_apart_from_failing() -> None:
    """A second cancellation is a conflict."""
    operations = Operations(Events())
    started = operations.start("sync", "a__b", hang)
    cancelled = await operations.cancel(started.id)
    assert cancelled.state == "cancelled"
    assert cancelled.error is not None
    assert cancelled.error.code == "cancelled"
    with pytest.raises(ConflictError):
        await operations.cancel(started.id)


async def test_others_operations_do_not_exist_for_a_user() -> None:
    """They are neither listed nor found by id."""
    operations = Operations(Events())
    mine = operations.start("sync", "a", succeed, owner_uid=7)
    other = operations.start("sync", "b", succeed, owner_uid=8)
    assert [operation.id for operation in operations.list(owner_uid=7)] == [mine.id]
    assert [operation.id for operation in operations.list()] == [other.id, mine.id]
    with pytest.raises(NotFoundError):
        operations.get(other.id, owner_uid=7)
    with pytest.raises(NotFoundError):
        await operations.cancel(other.id, owner_uid=7)


async def test_closing_waits_its_bound_then_cancels_and_takes_no_more() -> None:
    """Work that ends within the drain time completes."""
    operations = Operations(Events())
    quick, stuck = operations.start("sync", "a", succeed), operations.start("sync", "b", hang)
    await operations.close(timedelta(seconds=0.05))
    assert (operations.get(quick.id).state, operations.get(stuck.id).state) == ("done", "cancelled")
    with pytest.raises(StoppingError):
        operations.start("sync", "c", succeed)


async def test_only_the_last_thousand_are_remembered() -> None:
    """Running operations are kept."""
    operations = Operations(Events())
    running = operations.start("sync", "stuck", hang)
    for n in range(1005):
        await operations.wait(operations.start("sync", str(n), succeed).id)
    assert len(operations.list()) <= 1001
    assert operations.get(running.id).state == "running"
    await operations.close()


async def test_what_nobody_has_seen_the_end_of_is_not_forgotten() -> None:
    """A client that starts more than a thousand asks for them one after the other."""
    operations = Operations(Events())
    started = [operations.start("sync", str(n), succeed).id for n in range(2500)]
    while operations.running_count:
        await asyncio.sleep(0)
    operations.start("sync", "another", succeed)
    assert [(await operations.wait(identity)).state for identity in started] == ["done"] * 2500
    operations.start("sync", "the last", succeed)
    assert len(operations.list()) <= 1001
    await operations.close()


async def test_a_member_has_few_operations_at_a_time_and_a_hundred_in_memory() -> None:
    """Those of others are not touched; an end makes room."""
    operations = Operations(Events())
    other = operations.start("audit", "all", succeed, owner_uid=8)
    await operations.wait(other.id)
    for _ in range(120):
        operations.admit_member(7)
        await operations.wait(operations.start("prepare", "d", succeed, owner_uid=7).id)
    assert len(operations.list(owner_uid=7)) == 100
    assert len(operations.list(owner_uid=8)) == 1
    running = []
    with pytest.raises(TooManyRequestsError):
        for _ in range(100):
            operations.admit_member(7)
            running.append(operations.start("prepare", "d", hang, owner_uid=7))
    assert len(running) == 16
    operations.admit_member(8)
    await operations.cancel(running[0].id)
    operations.admit_member(7)
    await operations.close()


async def test_work_that_waits_for_its_turn_does_not_count_as_running() -> None:
    operations = Operations(Events())

    async def wait_for_turn(progress: ProgressSink) -> None:
        progress(Progress(note=QUEUED))
        await asyncio.sleep(60)

    operations.start("sync", "queued", wait_for_turn)
    operations.start("sync", "running", hang)
    await asyncio.sleep(0)
    assert (operations.running_count, operations.queued_count) == (1, 1)
    await operations.close()
