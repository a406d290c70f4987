"""The kinds of background work there are, each as an operation: what requests, the schedule and the watched directory start.

Owns what goes together around one piece of work: a mirror that was added gets scheduled, an uploaded file is removed when it was
read. Never waits for the work itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from ..audit.service import Audits
from ..checkouts.stores.builder import StoreBuilder
from ..checkouts.templates.store import Templates
from ..datasets.service import Datasets
from ..heal import Heals
from ..jobs.operations import Operations, ProgressSink
from ..mirrors.bundles.header import read_header
from ..mirrors.bundles.service import Bundles
from ..mirrors.service import Mirrors
from ..model import AuditLevel, DatasetName, MirrorName
from ..protocol import Operation, StartAudit, to_json
from .prewarm import Prewarm


class Work:
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
