"""The kinds of background work there are, each as an operation: what requests, the schedule and the watched directory start.

Owns what goes together around one piece of work: a mirror that was added gets scheduled, an uploaded file is removed when it was
read. Never waits for the work itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import structlog

from .audit.service import Audits
from .catalog import Catalog
from .checkouts.stores.builder import StoreBuilder
from .checkouts.templates.store import Templates
from .config import Settings
from .datasets.service import Datasets
from .errors import DiskFullError, MirrordError
from .git.command import low_priority
from .heal import Heals
from .jobs.operations import Operations
from .mirrors.bundles.format import read_header
from .mirrors.bundles.service import Bundles
from .mirrors.service import Mirrors
from .model import AuditLevel, CommitId, CommitRole, DatasetName, History, MirrorName
from .protocol import Operation, Progress, ProgressSink, StartAudit, to_json


class BackgroundWork:
    """Starts operations. `on_mirrors_changed` is called after a mirror was added or removed."""

    def __init__(
        self,
        *,
        operations: Operations,
        mirrors: Mirrors,
        bundles: Bundles,
        datasets: Datasets,
        audits: Audits,
        heals: Heals,
        templates: Templates,
        gitdirs: StoreBuilder,
        prewarm: Prewarm,
        on_mirrors_changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._operations = operations
        self._mirrors = mirrors
        self._bundles = bundles
        self._datasets = datasets
        self._audits = audits
        self._heals = heals
        self._templates = templates
        self._gitdirs = gitdirs
        self._prewarm = prewarm
        self._on_mirrors_changed = on_mirrors_changed

    # -- mirrors ------------------------------------------------------------------------------------------------------

    async def add_mirror(self, repo: str, url: str | None, *, owner_uid: int = 0) -> Operation:
        """Register a mirror and sync it for the first time."""
        row = await self._mirrors.add(repo, url)
        await self._on_mirrors_changed()
        return self.sync(row.name, kind="mirror.add", owner_uid=owner_uid)

    def sync(
        self,
        name: MirrorName,
        *,
        kind: str = "mirror.sync",
        accept_loss: bool = False,
        owner_uid: int = 0,
    ) -> Operation:
        async def run(progress: ProgressSink) -> dict[str, Any]:
            result = await self._mirrors.sync(name, progress, accept_loss=accept_loss)
            pinned = await self._datasets.repin(name)  # what upstream lacked the last time
            return {**result.as_dict(), "pinned": pinned}

        return self._operations.start(kind, str(name), run, owner_uid=owner_uid)

    def maintain(self, name: MirrorName) -> Operation:
        async def run(progress: ProgressSink) -> None:
            await self._mirrors.maintain(name, progress)

        return self._operations.start("mirror.maintain", str(name), run)

    def restore_refs(self, name: MirrorName, at: str, *, owner_uid: int = 0) -> Operation:
        async def run(progress: ProgressSink) -> dict[str, Any]:
            return _plain(await self._mirrors.refs_restore(name, at, progress))

        return self._operations.start("refs.restore", str(name), run, owner_uid=owner_uid)

    async def import_bundle(
        self, path: Path, *, mirror: str | None, owner_uid: int = 0
    ) -> Operation:
        """Take a bundle file that is ours; it is removed at the end, whatever the end is."""

        async def run(progress: ProgressSink) -> dict[str, Any]:
            result = await self._bundles.import_file(
                path, mirror=mirror, owner_uid=owner_uid, progress=progress
            )
            self._datasets.rows_changed(result["datasets"])
            await self._on_mirrors_changed()
            return result

        return await self._start_with("bundle.import", mirror or "a bundle", path, run, owner_uid)

    async def remove_mirror(self, name: MirrorName) -> None:
        """Remove a mirror, and what was built from it. Raises MirrorInUseError while something recorded needs it."""
        async with self._prewarm.paused(name):
            await self._mirrors.remove(name)
            await self._templates.forget(name)
            await self._gitdirs.forget(name)
        await self._on_mirrors_changed()

    # -- datasets -----------------------------------------------------------------------------------------------------

    async def import_upload(
        self,
        path: Path,
        *,
        filename: str,
        name: DatasetName | None,
        format_name: str | None,
        owner_uid: int = 0,
    ) -> Operation:
        """Import a file that is ours; it is removed at the end, whatever the end is."""

        async def run(progress: ProgressSink) -> dict[str, Any]:
            return await self._import(path, name, format_name, filename, progress)

        return await self._start_with("dataset.import", name or filename, path, run, owner_uid)

    def import_watched(self, path: Path) -> Operation:
        """Import a file of the watched directory, which stays where it is."""

        async def run(progress: ProgressSink) -> dict[str, Any]:
            return await self._import(path, None, None, path.name, progress)

        return self._operations.start("dataset.import", path.name, run)

    async def _import(
        self,
        path: Path,
        name: DatasetName | None,
        format_name: str | None,
        source: str,
        progress: ProgressSink,
    ) -> dict[str, Any]:
        result = await self._datasets.import_file(
            path, name=name, format=format_name, source=source, progress=progress
        )
        await self._on_mirrors_changed()
        return _plain(result)

    # -- audits -------------------------------------------------------------------------------------------------------

    async def audit(
        self, request: StartAudit, *, kind: str = "audit", resume: bool = False, owner_uid: int = 0
    ) -> Operation:
        """With `resume`, go on with an interrupted one. Raises MirrorNotFoundError and DatasetNotFoundError before it starts."""
        names = [(await self._mirrors.get(text)).name for text in request.mirrors]
        if request.dataset:
            await self._datasets.get(request.dataset)

        async def run(progress: ProgressSink) -> dict[str, Any]:
            return _plain(await self._audits.run(request, progress, resume=resume))

        subject = ", ".join(map(str, names)) or request.dataset or "everything recorded"
        return self._operations.start(kind, subject, run, owner_uid=owner_uid)

    async def heal_with(self, bundle: Path, mirror: str, *, owner_uid: int = 0) -> Operation:
        """Heal a mirror with a bundle file of ours as one more donor. Raises MirrorNotFoundError, InvalidBundleError."""
        try:
            name = (await self._mirrors.get(mirror)).name
            await anyio.to_thread.run_sync(read_header, bundle)
        except BaseException:
            await self._mirrors.quarantine.remove(bundle)
            raise
        request = StartAudit(mirrors=[str(name)], level=AuditLevel.CONTENT, heal=True)

        async def run(progress: ProgressSink) -> dict[str, Any]:
            with self._mirrors.quarantine.holding(bundle), self._heals.lending(bundle):
                return _plain(await self._audits.run(request, progress))

        return await self._start_with("heal", str(name), bundle, run, owner_uid)

    async def _start_with(
        self,
        kind: str,
        subject: str,
        path: Path,
        run: Callable[[ProgressSink], Awaitable[dict[str, Any]]],
        owner_uid: int,
    ) -> Operation:
        """Start work on a file that is removed at its end, also when it does not begin."""

        async def run_and_remove(progress: ProgressSink) -> dict[str, Any]:
            try:
                return await run(progress)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._mirrors.quarantine.remove(path)

        try:
            return self._operations.start(kind, subject, run_and_remove, owner_uid=owner_uid)
        except BaseException:
            await self._mirrors.quarantine.remove(path)
            raise


def _plain(result: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_json(result)
    return plain


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
                    with low_priority():
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
