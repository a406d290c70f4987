"""Work for those who ask next: begun when the one who asked now has the answer, one piece after the other.

Owns the tasks. Nobody waits for them, and nothing is lost where one fails or is cancelled: what it makes is only made sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio
import structlog

from ..errors import MirrordError
from ..git.priority import giving_way
from ..git.turns import Askers

log = structlog.get_logger()

_answered: ContextVar[asyncio.Event | None] = ContextVar("answered", default=None)


@contextmanager
def answering() -> Iterator[None]:
    """Work that is asked for inside, or in tasks begun there, waits until the block is left."""
    answered = asyncio.Event()
    token = _answered.set(answered)
    try:
        yield
    finally:
        _answered.reset(token)
        answered.set()


class Deferred:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._turn = anyio.Lock()

    def begin(self, what: tuple[str, Hashable], work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done; once, however often it is asked for meanwhile. `what` names it: the kind, and which one."""
        if what not in self._tasks:
            task = self._tasks[what] = asyncio.get_running_loop().create_task(
                self._perform(what, work)
            )
            task.add_done_callback(lambda _: self._tasks.pop(what, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _perform(
        self, what: tuple[str, Hashable], work: Callable[[], Awaitable[None]]
    ) -> None:
        Askers().bind()
        if answered := _answered.get():
            await answered.wait()
        try:
            async with self._turn:
                with giving_way():
                    await work()
        except (
            MirrordError,
            OSError,
        ) as error:  # a mirror may have been removed meanwhile, a store dropped
            log.info("preparation.failed", kind=what[0], which=str(what[1]), error=str(error))
