"""Templates made before they are asked for, with low priority."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio

from ..catalog import Catalog
from ..config import Settings
from ..errors import DiskFullError, MirrordError
from ..git.command import low_priority
from ..jobs.operations import Operations
from ..model import CommitId, CommitRole, DatasetName, History, MirrorName
from ..protocol import Prewarmed, Progress, ProgressSink
from ..telemetry import log
from ..workers.coalesce import Coalescer, SharedWork

_Commits = list[tuple[MirrorName, CommitId]]
_CHECK_EVERY = 16  # commits between two checks of the room for templates


@dataclass(slots=True)
class Prewarm:
    """Prepares base commits: of imported datasets if the settings say so, or on request.

    One commit at a time and with low priority, so it uses at most one worker; oldest first, so that
    each is built on those before it. A failing commit is counted and skipped. It stops when
    templates are full (`is_full`) and resumes there when there is room, so it prepares no evicted
    template again. What was built survives a restart.
    """

    settings: Callable[[], Settings]
    catalog: Catalog
    operations: Operations
    prepare: Callable[[MirrorName, CommitId, History], Awaitable[object]]
    oldest_first: Callable[[MirrorName, Collection[CommitId]], Awaitable[Sequence[CommitId]]]
    is_full: Callable[[], Awaitable[bool]]
    _unfinished: dict[DatasetName, _Commits] = field(default_factory=dict)
    _preparing: dict[str, anyio.Lock] = field(default_factory=dict)
    _running: Coalescer[Prewarmed] = field(default_factory=Coalescer)

    @asynccontextmanager
    async def paused(self, name: MirrorName) -> AsyncIterator[None]:
        """Prepare nothing of a mirror in the block. Waits for the commit being prepared."""
        async with self._preparing.setdefault(name.key, anyio.Lock()):
            yield

    def start(self, dataset: DatasetName) -> None:
        """Prepare a dataset that was imported or removed."""
        self._unfinished.pop(dataset, None)
        self._start(dataset, None)

    async def resume(self) -> None:
        """Continue with datasets for which there was no room, if there is now."""
        if self._unfinished and not await self.is_full():
            unfinished, self._unfinished = self._unfinished, {}
            for dataset, commits in sorted(unfinished.items()):
                self._start(dataset, commits)

    def _start(self, dataset: DatasetName, commits: _Commits | None) -> None:
        checkouts = self.settings().checkouts
        is_wanted = checkouts.prewarm and checkouts.history is not History.LINKED
        if is_wanted and not self.operations.is_stopping:
            self.operations.start("prewarm", dataset, partial(self._run, dataset, commits))

    async def _run(
        self, dataset: DatasetName, commits: _Commits | None, progress: ProgressSink
    ) -> Prewarmed:
        commits = commits or await self.ordered(await self.list_bases(dataset))
        result = await self.run(dataset, commits, progress)
        if result.left:
            self._unfinished[dataset] = commits[-result.left :]
        return result

    async def list_bases(self, dataset: DatasetName) -> _Commits:
        """List the base commits of a dataset."""
        rows = await self.catalog.list_recorded(dataset=dataset)
        return [(row.mirror, row.commit) for row in rows if row.role is CommitRole.BASE]

    async def ordered(self, commits: _Commits) -> _Commits:
        """Return each commit once, by mirror, oldest first."""
        mirrors: dict[str, tuple[MirrorName, set[CommitId]]] = {}
        for name, commit in commits:
            mirrors.setdefault(name.key, (name, set()))[1].add(commit)
        return [
            (name, commit)
            for _, (name, unordered) in sorted(mirrors.items())
            for commit in await self._order(name, unordered)
        ]

    async def _order(self, name: MirrorName, commits: Collection[CommitId]) -> Sequence[CommitId]:
        try:
            return await self.oldest_first(name, commits)
        except MirrordError:  # never synced, or git cannot open it: each commit fails for itself
            return sorted(commits)

    async def run(
        self, dataset: DatasetName, commits: _Commits, progress: ProgressSink
    ) -> Prewarmed:
        """Prepare commits in this order regardless of the settings, or join a run of the same."""
        history = self.settings().checkouts.history
        if history is History.LINKED:  # it needs no template; requests for another are for sealed
            history = History.SEALED
        run = partial(self._prepare_each, dataset, commits, history)
        return await self._running.join(f"{history} {commits}", run, progress)

    async def _prepare_each(
        self,
        dataset: DatasetName,
        commits: _Commits,
        history: History,
        work: SharedWork[Prewarmed],
    ) -> Prewarmed:
        total, prepared, failed = len(commits), 0, 0
        for number, (name, commit) in enumerate(commits):
            # what fails at once is not done: the rate would promise too much
            done = Progress(done=prepared, total=total - failed, unit="commits", note=str(name))
            work.report(done)
            if number % _CHECK_EVERY == 0 and await self.is_full():
                log.info("prewarm.stopped", dataset=dataset, prepared=prepared, left=total - number)
                break
            try:
                async with self.paused(name):
                    with low_priority():
                        await self.prepare(name, commit, history)
                prepared += 1
            # the next commits would fail for the same reason
            except DiskFullError:
                raise
            except MirrordError as error:
                failed += 1
                log.info("prewarm.failed", mirror=str(name), commit=commit, detail=error.message)
        work.report(Progress(done=prepared, total=total - failed, unit="commits"))
        return Prewarmed(prepared=prepared, failed=failed, left=total - prepared - failed)
