"""One flight for many passengers: work that several ask for at the same time runs once.

Owns running work by key. Each passenger gets the progress and the result; one that is cancelled leaves, and when the last has
left the work is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from ..protocol import Progress

T = TypeVar("T")
ProgressSink = Callable[[Progress], None]


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    sinks: list[ProgressSink] = field(default_factory=list)
    passengers: int = 0
    task: asyncio.Task[T] | None = None

    def tell(self, progress: Progress) -> None:
        for sink in self.sinks:
            sink(progress)


class Flights(Generic[T]):
    """Work by key."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def join(self, key: str, run: Callable[[ProgressSink], Awaitable[T]], progress: ProgressSink | None = None) -> T:
        """Wait for the running work of that key, or start it with `run`."""
        flight = self._flights.get(key) or self._start(key, run)
        task = flight.task
        assert task is not None
        flight.passengers += 1
        if progress is not None:
            flight.sinks.append(progress)
        try:
            return await asyncio.shield(task)
        finally:
            flight.passengers -= 1
            if progress is not None:
                flight.sinks.remove(progress)
            if not flight.passengers and not task.done():
                await self._cancel(flight)

    def _start(self, key: str, run: Callable[[ProgressSink], Awaitable[T]]) -> _Flight[T]:
        flight: _Flight[T] = _Flight()
        self._flights[key] = flight

        async def fly() -> T:
            try:
                return await run(flight.tell)
            finally:
                self._forget(key, flight)

        flight.task = asyncio.get_running_loop().create_task(fly())
        return flight

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        for flight in list(self._flights.values()):
            await self._cancel(flight)

    async def _cancel(self, flight: _Flight[T]) -> None:
        if flight.task is None:
            return
        flight.task.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(BaseException):
            await asyncio.wait([flight.task])
            flight.task.exception()
