"""Deferred work: begun when the present request is answered, one piece after the other.

Nobody waits for it, and nothing is lost where it fails or is cancelled: it makes the next request
faster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio

from ..errors import MirrordError
from ..git.command import low_priority
from ..git.turns import Askers
from ..telemetry import log

_answered: ContextVar[asyncio.Event | None] = ContextVar("answered", default=None)


@contextmanager
def answering() -> Iterator[None]:
    """Hold back the work deferred inside, or in tasks begun there, until the block is left."""
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

    def begin(self, key: tuple[str, Hashable], work: Callable[[], Awaitable[None]]) -> None:
        """Defer `work`; once per key, its kind and its object, until it is done."""

        async def perform() -> None:
            Askers().bind()
            if answered := _answered.get():
                await answered.wait()
            try:
                async with self._turn:
                    with low_priority():
                        await work()
            except (MirrordError, OSError) as error:  # its mirror or store may be gone
                log.info("deferred.failed", kind=key[0], which=str(key[1]), error=str(error))

        if key not in self._tasks:
            self._tasks[key] = task = asyncio.get_running_loop().create_task(perform())
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
