"""Preparing what checkouts are made from before anybody asks: the base commits of a dataset that was imported.

One commit after the other, so that it takes at most one worker from those who wait for an answer, and giving way to whatever else
wants the processors; oldest first, so that each is built on what is there. A commit that cannot be prepared is counted and
skipped: its checkout gets the error. It stops where it would evict what others use, and resumes there when there is room again:
what was prepared once and evicted is not prepared again. Being killed costs nothing; what is built is found again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import structlog

from ..catalog import Catalog
from ..config import Settings
from ..errors import DiskFullError, MirrordError
from ..git.priority import giving_way
from ..jobs.operations import Operations, ProgressSink
from ..model import CommitId, CommitRole, DatasetName, History, MirrorName
from ..protocol import Progress

log = structlog.get_logger()

_LOOK_EVERY = 16

_Wanted = tuple[MirrorName, CommitId]
Prepare = Callable[[MirrorName, CommitId, History], Awaitable[object]]
Order = Callable[[MirrorName, Collection[CommitId]], Awaitable[Sequence[CommitId]]]


class Room(Protocol):
    """What is said of the templates there are."""

    async def is_full(self) -> bool:
        """Whether making more would soon drop something."""


class Prewarm:
    """Starts an operation for each dataset that changed, where the settings ask for it."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        catalog: Catalog,
        operations: Operations,
        prepare: Prepare,
        oldest_first: Order,
        room: Room,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._operations = operations
        self._prepare = prepare
        self._oldest_first = oldest_first
        self._room = room
        self._unfinished: dict[DatasetName, list[_Wanted]] = {}
        self._preparing: dict[str, anyio.Lock] = {}

    @asynccontextmanager
    async def paused(self, name: MirrorName) -> AsyncIterator[None]:
        """Prepare nothing of a mirror meanwhile; what is being prepared ends first."""
        async with self._preparing.setdefault(name.key, anyio.Lock()):
            yield

    def start(self, dataset: DatasetName) -> None:
        """To be called when a dataset was imported or removed."""
        self._unfinished.pop(dataset, None)
        self._start(dataset, None)

    async def resume(self) -> None:
        """Go on where there was no room for a dataset, once there is."""
        if self._unfinished and not await self._room.is_full():
            unfinished, self._unfinished = self._unfinished, {}
            for dataset, wanted in sorted(unfinished.items()):
                self._start(dataset, wanted)

    def _start(self, dataset: DatasetName, wanted: list[_Wanted] | None) -> None:
        checkouts = self._settings().checkouts
        if (
            checkouts.prewarm
            and checkouts.history is not History.LINKED
            and not self._operations.is_stopping
        ):
            self._operations.start(
                "prewarm", dataset, lambda progress: self._run(dataset, wanted, progress)
            )

    async def _run(
        self, dataset: DatasetName, wanted: list[_Wanted] | None, progress: ProgressSink
    ) -> dict[str, Any]:
        """Prepare what is wanted; all base commits of the dataset when that is None."""
        history = self._settings().checkouts.history
        wanted = await self._wanted(dataset) if wanted is None else wanted
        prepared = failed = 0
        for number, (name, commit) in enumerate(wanted):
            progress(Progress(done=number, total=len(wanted), unit="commits", note=str(name)))
            if number % _LOOK_EVERY == 0 and await self._room.is_full():
                log.info(
                    "prewarm.stopped", dataset=dataset, prepared=prepared, left=len(wanted) - number
                )
                self._unfinished[dataset] = wanted[number:]
                break
            try:
                async with self.paused(name):
                    with giving_way():
                        await self._prepare(name, commit, history)
                prepared += 1
            except DiskFullError:
                raise
            except MirrordError as error:
                failed += 1
                log.info("prewarm.failed", mirror=str(name), commit=commit, detail=error.message)
        progress(Progress(done=prepared + failed, total=len(wanted), unit="commits"))
        return {"prepared": prepared, "failed": failed, "left": len(wanted) - prepared - failed}

    async def _wanted(self, dataset: DatasetName) -> list[_Wanted]:
        """The base commits of a dataset, mirror by mirror, each mirror's oldest first."""
        commits: dict[str, tuple[MirrorName, set[CommitId]]] = {}
        for row in await self._catalog.list_recorded(dataset=dataset):
            if row.role is CommitRole.BASE:
                commits.setdefault(row.mirror.key, (row.mirror, set()))[1].add(row.commit)
        return [
            (name, commit)
            for _, (name, asked) in sorted(commits.items())
            for commit in await self._oldest_first(name, asked)
        ]
