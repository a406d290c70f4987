"""One flight for many passengers: work that several ask for at the same time runs once.

Owns work by key. Who asks joins a flight that has not departed, which is when the work looks at what its result is about. All
who ask later share the next one, so nobody gets what was seen before he asked; the work's own lock has it wait for the first.
Each passenger gets the progress and the result; one that is cancelled leaves, and when the last has left the work is cancelled.
The work gets its turns (`git/turns.py`) as all who wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from ..git.turns import Askers
from ..protocol import Progress, ProgressSink

T = TypeVar("T")
Run = Callable[["Flight[T]"], Coroutine[None, None, T]]


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    """What the work sees of those who wait for it."""

    depart: Callable[[], None]
    """Called before the work looks at anything that may have changed for whoever asks from then on."""
    askers: Askers = field(default_factory=Askers)
    sinks: list[ProgressSink] = field(default_factory=list)
    passengers: int = 0
    task: asyncio.Task[T] | None = None

    def tell(self, progress: Progress) -> None:
        for sink in self.sinks:
            sink(progress)


class Coalescer(Generic[T]):
    """Work by key."""

    def __init__(self) -> None:
        self._boarding: dict[str, Flight[T]] = {}
        self._flights: set[Flight[T]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._boarding

    async def join(self, key: str, run: Run[T], progress: ProgressSink | None = None) -> T:
        """Wait for the work of that key that has not departed, or begin it with `run`."""
        flight = self._boarding.get(key) or self._begin(key, run)
        task = flight.task
        assert task is not None
        flight.passengers += 1
        if progress is not None:
            flight.sinks.append(progress)
        try:
            with flight.askers.joined(Askers.present()):
                return await asyncio.shield(task)
        finally:
            flight.passengers -= 1
            if progress is not None:
                flight.sinks.remove(progress)
            if not flight.passengers and not task.done():
                await self._cancel(flight)

    def _begin(self, key: str, run: Run[T]) -> Flight[T]:
        flight: Flight[T] = Flight(depart=lambda: self._close_doors(key, flight))
        flight.task = asyncio.get_running_loop().create_task(self._run(run, flight))
        flight.task.add_done_callback(lambda _: self._land(flight))
        self._boarding[key] = flight
        self._flights.add(flight)
        return flight

    async def _run(self, run: Run[T], flight: Flight[T]) -> T:
        flight.askers.bind()
        return await run(flight)

    def _close_doors(self, key: str, flight: Flight[T]) -> None:
        if self._boarding.get(key) is flight:
            del self._boarding[key]

    def _land(self, flight: Flight[T]) -> None:
        flight.depart()
        self._flights.discard(flight)

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        for flight in list(self._flights):
            await self._cancel(flight)

    async def _cancel(self, flight: Flight[T]) -> None:
        flight.depart()
        if flight.task is None:
            return
        flight.task.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(BaseException):
            await asyncio.wait([flight.task])
            flight.task.exception()
