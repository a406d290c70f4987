"""The gate: in which order requests begin, how a crowd is held back, what is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from mirrord.config import AccessSettings
from mirrord.errors import OverloadedError, TooManyRequestsError
from mirrord.workers import gate as gates
from mirrord.workers.gate import Gate

pytestmark = pytest.mark.anyio

ALICE, BOB, ROOT = 1001, 1002, 0


class World:
    """A gate with a stopped clock, and requests that run until `end` names them."""

    def __init__(self, **limits: int) -> None:
        self.now = 1000.0
        self.gate = Gate(lambda: AccessSettings(**limits), lambda: self.now)
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def ask(self, uid: int, *names: str, is_admin: bool = False) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(uid, name, is_admin))

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self.tasks[name]

    async def _request(self, uid: int, name: str, is_admin: bool) -> None:
        async with self.gate.entered(uid, is_admin=is_admin):
            self.began.append(name)
            await self._ends[name].wait()


def names(user: str, count: int) -> list[str]:
    return [f"{user}{number}" for number in range(count)]


async def turns_of_the_loop(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_iteration_of_the_loop_begins_one_request() -> None:
    """However many arrived at once."""
    world = World()
    world.ask(ALICE, *names("a", 10))
    began = []
    for _ in range(12):
        await turns_of_the_loop(1)
        began.append(len(world.began))
    assert {after - before for before, after in itertools.pairwise(began)} == {0, 1}
    assert world.began == names("a", 10)


async def test_a_single_request_is_second_of_fifty() -> None:
    """It does not wait behind another user's queue."""
    world = World()
    world.ask(ALICE, *names("a", 50))
    await turns_of_the_loop(10)
    world.ask(BOB, "b")
    await turns_of_the_loop(1)  # it is at the gate now
    before = len(world.began)
    await turns_of_the_loop()
    assert world.began.index("b") <= before + 1
    assert len(world.began) == 51


async def test_users_with_queues_take_turns() -> None:
    """One request each, whoever came first."""
    world = World()
    world.ask(ALICE, *names("a", 8))
    world.ask(BOB, *names("b", 4))
    await turns_of_the_loop()
    assert set(world.began[1:9]) == {*names("a", 5), *names("b", 4)} - {world.began[0]}


async def test_requests_of_a_user_above_the_limit_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of one begins the next; other users are not affected."""
    monkeypatch.setattr(gates, "WORKING", 3)
    world = World()
    world.ask(ALICE, *names("a", 5))
    world.ask(BOB, "b")
    await turns_of_the_loop()
    assert sorted(world.began) == ["a0", "a1", "a2", "b"]
    assert (world.gate.working, world.gate.waiting) == (4, 2)
    await world.end("a1")
    await turns_of_the_loop()
    assert sorted(world.began) == ["a0", "a1", "a2", "a3", "b"]


async def test_a_crowd_waits_while_another_user_has_single_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it used its share of the machine, and only for a while."""
    monkeypatch.setattr(gates, "CROWD_SHARE", 100)  # so that the loop looks again soon
    world = World()
    world.ask(ALICE, "a0", "a1")
    world.ask(BOB, "b0")
    await turns_of_the_loop()
    world.gate.charge([ALICE], 0.2)
    world.ask(ALICE, "a2")
    await world.end("b0")
    world.ask(BOB, "b1")
    await turns_of_the_loop(20)
    assert world.began[-1] == "b1"
    world.now += 1
    while "a2" not in world.began:
        await asyncio.sleep(0.001)


async def test_a_crowd_alone_has_the_whole_machine() -> None:
    """It is not held back for another crowd either."""
    world = World()
    world.ask(ALICE, "a0", "a1")
    await turns_of_the_loop()
    world.gate.charge([ALICE], 0.2)
    world.ask(ALICE, "a2")
    await turns_of_the_loop()
    assert world.began == ["a0", "a1", "a2"]


async def test_work_that_a_single_user_waits_for_is_not_charged_to_a_crowd() -> None:
    """Bob waits for what Alice's crowd began."""
    world = World()
    world.ask(ALICE, "a0", "a1")
    world.ask(BOB, "b0")
    await turns_of_the_loop()
    world.gate.charge([ALICE, BOB], 0.2)
    world.ask(ALICE, "a2")
    await turns_of_the_loop()
    assert world.began[-1] == "a2"


async def test_a_member_with_too_many_requests_is_refused() -> None:
    """Unanswered requests count, but not an administrator's."""
    world = World(requests_per_user=2)
    world.ask(ALICE, *names("a", 2))
    world.ask(ROOT, *names("r", 4), is_admin=True)
    await turns_of_the_loop()
    world.ask(ALICE, "late")
    with pytest.raises(TooManyRequestsError) as refused:
        await world.tasks["late"]
    assert refused.value.facts == {"reason": "concurrency", "retry_after": 1}
    assert set(names("r", 4)) < set(world.began)
    await world.end("a0")
    world.ask(ALICE, "a2")
    await turns_of_the_loop()
    assert world.began[-1] == "a2"


async def test_a_member_who_sends_too_fast_is_told_when_to_retry() -> None:
    """The rate is also the burst."""
    world = World(rate_per_user=10)

    async def ask(name: str, uid: int = ALICE, *, is_admin: bool = False) -> None:
        world.ask(uid, name, is_admin=is_admin)
        await world.end(name)

    for name in names("a", 10):
        await ask(name)
    with pytest.raises(TooManyRequestsError) as refused:
        await ask("late")
    assert refused.value.facts == {"reason": "rate", "retry_after": 0.1}
    await ask("b", BOB)
    for name in names("r", 20):
        await ask(name, ROOT, is_admin=True)
    world.now += 0.1
    await ask("again")
    with pytest.raises(TooManyRequestsError):
        await ask("late again")


async def test_a_full_queue_accepts_only_administrators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "WORKING", 1)
    monkeypatch.setattr(gates, "WAITING", 2)
    world = World()
    world.ask(ALICE, *names("a", 3))
    await turns_of_the_loop()
    world.ask(BOB, "late")
    with pytest.raises(OverloadedError) as refused:
        await world.tasks["late"]
    assert refused.value.facts == {"retry_after": 1}
    world.ask(ROOT, "r", is_admin=True)
    await turns_of_the_loop()
    assert world.began == ["a0", "r"]


async def test_a_cancelled_request_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting, just admitted, or running."""
    monkeypatch.setattr(gates, "WORKING", 1)
    for turns in range(6):
        world = World()
        world.ask(ALICE, "a0", "a1", "a2")
        await turns_of_the_loop(turns)
        for name in ("a0", "a1"):
            world.tasks[name].cancel()
            with suppress(asyncio.CancelledError):
                await world.tasks[name]
        await turns_of_the_loop()
        assert world.began[-1] == "a2"
        await world.end("a2")
        assert (world.gate.working, world.gate.waiting) == (0, 0)


async def test_users_are_forgotten_when_there_are_many() -> None:
    """But not those with requests."""
    world = World()
    world.ask(ALICE, "a")
    for uid in range(2000, 2600):
        world.ask(uid, f"{uid}")
        await world.end(f"{uid}")
    assert ALICE in world.gate._users
    assert len(world.gate._users) <= gates._USERS + 1


# -- what work takes --------------------------------------------------------------------------------------------------


async def test_metering_does_not_change_the_work() -> None:
    """Its result, its error, its cancellation, and what it catches."""
    gate = Gate(AccessSettings)

    async def metered(work: Callable[[], Awaitable[str]]) -> str:
        async def run() -> str:
            return await work()

        async with gate.entered(ALICE, is_admin=False):
            return await gate.metered(ALICE, run())

    async def late() -> str:
        await asyncio.sleep(0)
        return "done"

    async def fail() -> str:
        await asyncio.sleep(0)
        raise KeyError("it")

    async def hang() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "cancelled"

    assert await metered(late) == "done"
    with pytest.raises(KeyError, match="it"):
        await metered(fail)
    task = asyncio.create_task(metered(hang))
    await turns_of_the_loop()
    task.cancel()
    assert await task == "cancelled"
    assert gate.unanswered() == {}
