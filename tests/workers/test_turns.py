"""Turns: fair to users, background work last, shared work in the best place of its users."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest
from worker_calls import add, hang, is_gone, nice_and_pid, until

from mirrord.git.command import low_priority, priority_prefix
from mirrord.workers.coalesce import Coalescer
from mirrord.workers.pool import Workers
from mirrord.workers.turns import Askers, Turns

pytestmark = pytest.mark.anyio

LONG = timedelta(seconds=30)
ALICE, BOB, CAROL = 1001, 1002, 1003


class Race:
    """Tasks that take turns, in the order in which they began; a turn lasts until `end` names it."""

    def __init__(self, turns: Turns) -> None:
        self.began: list[str] = []
        self._turns = turns
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def join(self, name: str, *uids: int) -> None:
        """Add a caller for these users."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, Askers(*uids)))
        await anyio.wait_all_tasks_blocked()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await anyio.wait_all_tasks_blocked()

    async def hang_up(self, name: str) -> None:
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        await anyio.wait_all_tasks_blocked()

    async def _run(self, name: str, askers: Askers) -> None:
        askers.bind()
        async with self._turns.turn():
            self.began.append(name)
            await self._ends[name].wait()


async def test_a_user_does_not_wait_behind_anothers_queue() -> None:
    race = Race(Turns(2, each=2))
    for name in ("a1", "a2", "a3", "a4"):
        await race.join(name, ALICE)
    await race.join("b1", BOB)
    await race.join("b2", BOB)
    await race.join("c1", CAROL)
    assert race.began == ["a1", "a2"]
    for ended in ("a1", "a2", "b1", "c1", "b2"):
        await race.end(ended)
    assert race.began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_user_holds_a_bounded_number_of_turns() -> None:
    """Other turns stay free for others."""
    race = Race(Turns(5, each=2))
    for name in ("a1", "a2", "a3"):
        await race.join(name, ALICE)
    await race.join("b1", BOB)
    assert race.began == ["a1", "a2", "b1"]
    await race.hang_up("a1")
    assert race.began == ["a1", "a2", "b1", "a3"]


async def test_background_work_waits_for_all_users() -> None:
    """And does not take every turn."""
    race = Race(Turns(3, each=2, background=1))
    await race.join("x1")
    await race.join("x2")
    await race.join("a1", ALICE)
    await race.join("a2", ALICE)
    await race.join("b1", BOB)
    assert race.began == ["x1", "a1", "a2"]
    await race.end("x1")
    assert race.began[3:] == ["b1"]
    await race.end("a1")
    assert race.began[4:] == ["x2"]


async def test_a_cancelled_task_leaves_the_queue() -> None:
    race = Race(Turns())
    await race.join("a1", ALICE)
    await race.join("b1", BOB)
    await race.join("c1", CAROL)
    await race.hang_up("b1")
    await race.end("a1")
    assert race.began == ["a1", "c1"]


async def test_shared_work_takes_the_best_place_of_its_users() -> None:
    """Bob wants what Alice has at the end of her queue."""
    turns = Turns()
    race = Race(turns)
    for name in ("a1", "a2", "a3"):
        await race.join(name, ALICE)
    flights: Coalescer[str] = Coalescer()

    async def ask(uid: int) -> str:
        Askers(uid).bind()
        return await flights.join("shared", lambda _: work())

    async def work() -> str:
        async with turns.turn():
            race.began.append("shared")
            return "done"

    alice = asyncio.create_task(ask(ALICE))
    await anyio.wait_all_tasks_blocked()
    bob = asyncio.create_task(ask(BOB))
    await anyio.wait_all_tasks_blocked()
    await race.end("a1")
    assert list(await asyncio.gather(alice, bob)) == ["done", "done"]
    assert race.began == ["a1", "shared", "a2"]
    await race.end("a2")
    await race.end("a3")


async def test_background_work_that_a_user_waits_for_is_preferred() -> None:
    """A job with a lock that a user needs does not wait behind an audit of hours."""
    workers, lock = Turns(4, each=2, background=1), Turns()
    race = Race(workers)
    await race.join("audit")
    done: list[str] = []

    async def prewarm() -> None:
        Askers().bind()
        async with lock.turn(), workers.turn():
            done.append("prewarm")

    async def checkout() -> None:
        Askers(ALICE).bind()
        async with lock.turn():
            done.append("checkout")

    background = asyncio.create_task(prewarm())
    await anyio.wait_all_tasks_blocked()
    assert done == []
    with anyio.fail_after(5):
        await checkout()
    assert done == ["prewarm", "checkout"]
    await background
    await race.end("audit")


async def test_a_lock_holder_takes_the_place_of_those_who_wait_for_it() -> None:
    """Alice's work hangs; her build holds a mirror's lock and waits behind it. Bob wants the lock."""
    workers, lock = Turns(4, each=2), Turns()
    race = Race(workers)
    await race.join("hanging 1", ALICE)
    await race.join("hanging 2", ALICE)
    done: list[str] = []

    async def build(uid: int, name: str) -> None:
        Askers(uid).bind()
        async with lock.turn(), workers.turn():
            done.append(name)

    alice = asyncio.create_task(build(ALICE, "alice"))
    await anyio.wait_all_tasks_blocked()
    assert done == []
    with anyio.fail_after(5):
        await asyncio.create_task(build(BOB, "bob"))
    assert done == ["alice", "bob"]
    await alice
    await race.end("hanging 1")
    await race.end("hanging 2")


async def test_shared_work_ends_with_its_last_caller() -> None:
    flights: Coalescer[None] = Coalescer()
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    both = [asyncio.create_task(flights.join("one", lambda _: work())) for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    both[0].cancel()
    await anyio.wait_all_tasks_blocked()
    assert ended == []
    both[1].cancel()
    await asyncio.wait(both)
    assert ended == [True]
    assert "one" not in flights


async def _asking(uid: int | None, work: Callable[[], Awaitable[object]]) -> object:
    Askers(*(() if uid is None else (uid,))).bind()
    return await work()


async def test_neither_background_work_nor_another_user_holds_all_workers(tmp_path: Path) -> None:
    """Background work and one user hang in all their calls; a third user's call ends."""
    workers = Workers(size=1)
    try:
        hanging = [
            asyncio.create_task(
                _asking(uid, partial(workers.run, hang, str(tmp_path / at), timeout=LONG))
            )
            for at, uid in (("x", None), ("a", ALICE), ("b", BOB))
        ]
        await until(lambda: all((tmp_path / at).exists() for at in "xab"))
        with anyio.fail_after(15):
            assert await _asking(CAROL, lambda: workers.run(add, 1, 1, timeout=LONG)) == 2
            late = asyncio.create_task(_asking(ALICE, lambda: workers.run(add, 1, 1, timeout=LONG)))
            await asyncio.sleep(0.5)
            assert not late.done()
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        assert await late == 2
    finally:
        await workers.close()


async def test_a_call_with_a_short_deadline_waits_for_no_long_one(tmp_path: Path) -> None:
    """A user's diff, while templates are built for that user."""
    workers = Workers(size=1)
    try:
        build = partial(workers.run, hang, str(tmp_path / "pid"), timeout=timedelta(minutes=10))
        building = asyncio.create_task(_asking(ALICE, build))
        await until(lambda: (tmp_path / "pid").exists())
        with anyio.fail_after(15):
            assert await _asking(ALICE, lambda: workers.run(add, 1, 1, timeout=LONG)) == 2
        assert not building.done()
        building.cancel()
        await asyncio.wait([building])
    finally:
        await workers.close()


async def test_a_cancelled_call_ends_with_its_worker(tmp_path: Path) -> None:
    """The caller may rely on it: nothing of the call writes afterwards."""
    workers = Workers(size=1)
    try:
        call = asyncio.create_task(workers.run(hang, str(tmp_path / "pid"), timeout=LONG))
        await until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
        call.cancel()
        await asyncio.wait([call])
        assert is_gone(int((tmp_path / "pid").read_text()))
    finally:
        await workers.close()


# -- priority ---------------------------------------------------------------------------------------------------------


async def test_background_calls_have_low_priority() -> None:
    """In workers that serve no user afterwards."""
    workers = Workers(size=1)
    base = os.nice(0)
    try:
        seen = []
        for askers in ((), (ALICE,), (), (BOB,)):
            Askers(*askers).bind()
            seen.append(await workers.run(nice_and_pid, timeout=LONG))
        Askers().bind()
    finally:
        await workers.close()
    assert [nice for nice, _ in seen] == [min(base + 10, 19), base] * 2
    assert len({pid for _, pid in seen}) == 2


async def test_git_has_low_priority_until_a_user_waits_for_it() -> None:
    """A user who joins background work is not slowed down by its priority."""
    askers = Askers()
    askers.bind()
    with low_priority():
        assert priority_prefix()
        with askers.joined(Askers(ALICE)):
            assert not priority_prefix()
        assert priority_prefix()
    assert not priority_prefix()
