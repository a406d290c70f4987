"""Shared work."""

from __future__ import annotations

import asyncio

import anyio

from mirrord.protocol import Progress
from mirrord.workers.coalesce import Coalescer, SharedWork


def test_callers_share_progress_and_the_last_one_cancels() -> None:
    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()
        runs: list[str] = []
        seen: list[int] = []

        async def run(work: SharedWork[int]) -> int:
            runs.append("started")
            work.report(Progress(done=1))
            try:
                await anyio.sleep_forever()
                raise AssertionError
            except BaseException:
                runs.append("cancelled")
                raise

        async with anyio.create_task_group() as outer:
            async with anyio.create_task_group() as inner:
                inner.start_soon(coalescer.join, "k", run, lambda p: seen.append(p.done))
                outer.start_soon(coalescer.join, "k", run)
                await anyio.sleep(0.01)
                inner.cancel_scope.cancel()
            assert runs == ["started"]
            outer.cancel_scope.cancel()
        assert runs == ["started", "cancelled"]
        assert seen == [1]

    anyio.run(main)


def test_callers_after_the_work_was_closed_share_the_next_run() -> None:
    """No caller gets facts that were read before it asked. Closing cancels waiting and running work."""

    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()
        turn = anyio.Lock()
        facts = [0]
        answers: list[tuple[str, int]] = []
        go_on = anyio.Event()

        async def run(work: SharedWork[int]) -> int:
            async with turn:
                work.close()
                seen = facts[-1]
                await go_on.wait()
                return seen

        async def ask(who: str) -> None:
            answers.append((who, await coalescer.join("k", run)))

        async with anyio.create_task_group() as group:
            for who in ("first", "at once"):
                group.start_soon(ask, who)
            await anyio.wait_all_tasks_blocked()
            facts.append(1)
            for who in ("later", "later too"):
                group.start_soon(ask, who)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        assert answers == [("first", 0), ("at once", 0), ("later", 1), ("later too", 1)]

        go_on = anyio.Event()
        left = []
        for _ in range(2):
            left.append(asyncio.ensure_future(coalescer.join("k", run)))
            await anyio.wait_all_tasks_blocked()
        await coalescer.close()
        await asyncio.wait(left)
        assert all(task.cancelled() for task in left)
        assert not turn.statistics().locked

    anyio.run(main)


def test_cancelled_work_is_not_joined() -> None:
    """Nor work that was cancelled before it began."""

    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()

        async def run(work: SharedWork[int]) -> int:
            await anyio.sleep(0)
            return 7

        for _ in range(2):
            given_up = asyncio.ensure_future(coalescer.join("k", run))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await coalescer.join("k", run) == 7

    anyio.run(main)
