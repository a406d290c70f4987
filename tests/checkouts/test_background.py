"""Requests do not wait for background work: prewarmed templates, audits, removals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from datetime import timedelta
from typing import TypeVar

import anyio
import pytest
from checkout_parts import NAME, USER, USER_PEER, Service, running_service
from gitrepos import Upstream, git
from waiting import BOUND_S
from worker_calls import hang

from mirrord.model import Backend, CommitId, History
from mirrord.protocol import ResetCheckout, StartCheckout
from mirrord.workers.turns import Askers

pytestmark = pytest.mark.root

T = TypeVar("T")


@pytest.fixture
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


def test_no_answer_waits_behind_prewarming(service: Service) -> None:
    """All turns of the background are taken for ever, and more of it waits, also for what a user wants next."""
    checkouts, workers = service.checkouts, service.workers
    mark = str(service.state / "hangs")
    commits = [CommitId(git(service.mirror, "rev-parse", f"v{n}^{{commit}}")) for n in (1, 2, 3)]

    async def asked(work: Awaitable[T]) -> T:
        Askers(USER).bind()
        with anyio.fail_after(BOUND_S):
            return await work

    async def start(commit: CommitId) -> str:
        request = StartCheckout(mirror=NAME.repo, commit=commit, backend=Backend.OVERLAY)
        return (await checkouts.checkout(request, USER_PEER)).id

    async def answers() -> None:
        held = [
            asyncio.create_task(workers.run(hang, mark, timeout=timedelta(minutes=minutes)))
            for minutes in (1, 10)
            for _ in range(8)
        ]
        prewarm = [
            asyncio.create_task(service.templates.ensure(NAME, commit, History.SEALED))
            for commit in commits
        ]
        while len(workers.calls()) < 4:  # two for each length
            await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert not any(task.done() for task in (*held, *prewarm))
        for commit in commits[:2]:  # a first checkout that the prewarm waits for, and a warm one
            made = [await asyncio.create_task(asked(start(commit))) for _ in range(2)]
            for each in made:
                await asyncio.create_task(asked(checkouts.diff(each, USER_PEER)))
                reset = checkouts.reset(each, ResetCheckout(), USER_PEER)
                await asyncio.create_task(asked(reset))
        assert [task.done() for task in prewarm] == [True, True, False]
        assert not any(task.done() for task in held)
        for task in (*held, *prewarm):
            task.cancel()
        await asyncio.wait([*held, *prewarm])

    service.call(answers)
