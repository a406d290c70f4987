"""Deferred work starts after the answer of the current request."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from mirrord.jobs.operations import Deferred, answering


class Work:
    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1
        self.begun.set()


async def turns() -> None:
    """Let all runnable tasks run."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_nothing_begins_before_the_answer_has_gone_and_then_it_does_at_once() -> None:
    afterwards, work = Deferred(), Work()

    async def flight() -> None:
        afterwards.begin(("kind", "which"), work)

    with answering():
        await asyncio.get_running_loop().create_task(
            flight()
        )  # as a template is made: in a task of its own
        await turns()
        assert work.count == 0
    await turns()
    assert work.count == 1
    await afterwards.close()


@pytest.mark.anyio
async def test_another_answer_that_takes_long_holds_nothing_up() -> None:
    afterwards, work = Deferred(), Work()
    done = anyio.Event()

    async def slow() -> None:
        with answering():
            await done.wait()

    other = asyncio.get_running_loop().create_task(slow())
    with answering():
        afterwards.begin(("kind", "which"), work)
    await turns()
    assert work.count == 1
    done.set()
    await other
    await afterwards.close()


@pytest.mark.anyio
async def test_what_nobody_waits_for_begins_at_once() -> None:
    afterwards, work = Deferred(), Work()
    afterwards.begin(("kind", "which"), work)
    await turns()
    assert work.count == 1
    await afterwards.close()
