"""The kinds of operations, started by requests, the schedule and watched files.

Includes the steps around the work itself: a new mirror is scheduled, an uploaded file is removed
after it was read. Does not wait for the work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from ..audit.service import Audits
from ..bundles.bundle_file import read_header
from ..bundles.service import Bundles
from ..catalog import MirrorRow
from ..datasets.service import DatasetFile, Datasets
from ..environments.images.importing import key_of_image
from ..environments.service import Environments
from ..errors import InstanceNotFoundError, InvalidRequestError
from ..fleet import with_obstore
from ..heal.service import Heals
from ..jobs.operations import Operations, Work, patiently
from ..mirrors.service import Mirrors
from ..model import AuditLevel, DatasetName, MirrorName, shown
from ..protocol import (
    BuildEnvironments,
    BundleImported,
    ImportImage,
    Message,
    NotRestored,
    Operation,
    Progress,
    ProgressSink,
    Restored,
    StartAudit,
    Synced,
)
from ..templates.service import Templates
from .prewarm import Prewarm

if TYPE_CHECKING:
    from ..fleet.restore import Restoration


@dataclass(slots=True)
class BackgroundWork:
    """Starts operations. Calls `on_mirrors_changed` after a mirror was added or removed."""

    operations: Operations
    mirrors: Mirrors
    bundles: Bundles
    datasets: Datasets
    audits: Audits
    heals: Heals
    templates: Templates
    environments: Environments
    prewarm: Prewarm
    on_mirrors_changed: Callable[[], Awaitable[None]]

    async def add_mirror(self, repo: str, url: str | None, *, owner_uid: int = 0) -> Operation:
        """Register a mirror and sync it for the first time.

        In a fleet, the store is first asked whether it has the mirror.
        """

        async def register() -> MirrorRow:
            row = await self.mirrors.add(repo, url)
            await self.on_mirrors_changed()
            return row

        registering = await patiently(register())
        if registering.done():
            name = registering.result().name
            return self.sync(name, kind="mirror.add", owner_uid=owner_uid)

        async def run(progress: ProgressSink) -> Message:
            return await self._sync((await registering).name, progress)

        return self.operations.start("mirror.add", repo, run, owner_uid=owner_uid)

    def sync(
        self,
        name: MirrorName,
        *,
        kind: str = "mirror.sync",
        accept_loss: bool = False,
        retry_faults: bool = False,
        owner_uid: int = 0,
    ) -> Operation:
        run = partial(self._sync, name, accept_loss=accept_loss, retry_faults=retry_faults)
        return self.operations.start(kind, str(name), run, owner_uid=owner_uid)

    async def _sync(
        self,
        name: MirrorName,
        progress: ProgressSink,
        *,
        accept_loss: bool = False,
        retry_faults: bool = False,
    ) -> Synced:
        result = await self.mirrors.sync(
            name, progress, accept_loss=accept_loss, retry_faults=retry_faults
        )
        pinned = await self.datasets.repin(name)  # commits that upstream lacked before
        return replace(result, pinned=pinned)

    def set_url(
        self, name: MirrorName, url: str, *, accept_loss: bool = False, owner_uid: int = 0
    ) -> Operation:
        """Follow another upstream, and sync with it."""

        async def run(progress: ProgressSink) -> Message:
            await self.mirrors.set_url(name, url, accept_loss=accept_loss)
            return await self.mirrors.sync(name, progress)

        return self.operations.start("mirror.set-url", str(name), run, owner_uid=owner_uid)

    def maintain(self, name: MirrorName) -> Operation:
        run = partial(self.mirrors.maintain, name)
        return self.operations.start("mirror.maintain", str(name), run)

    def restore_refs(self, name: MirrorName, record: str, *, owner_uid: int = 0) -> Operation:
        async def run(_: ProgressSink) -> object:
            return await self.mirrors.refs_restore(name, record)

        return self.operations.start("refs.restore", str(name), run, owner_uid=owner_uid)

    async def import_bundle(
        self, path: Path, *, mirror: str | None, owner_uid: int = 0
    ) -> Operation:
        """Import an uploaded bundle, and remove the file."""

        async def run(progress: ProgressSink) -> Message:
            result = await self.bundles.import_file(
                path, mirror=mirror, owner_uid=owner_uid, progress=progress
            )
            result = replace(result, needs=await self.datasets.recompose(result.datasets))
            self.datasets.rows_changed(result.datasets)
            await self.on_mirrors_changed()
            return result

        return await self._start_with(path, "bundle.import", mirror or "a bundle", run, owner_uid)

    async def restore(self, names: Sequence[str], *, owner_uid: int = 0) -> Operation:
        """Restore mirrors from the store, by default all, and audit them.

        Raises InvalidRequestError without a store, InvalidUrlError, StoreUnavailableError.
        """
        url = self.mirrors.settings().store.url
        if not url:
            hint = "set [store] url in the configuration and restart the daemon"
            raise InvalidRequestError(
                "cannot restore from the store: no store is configured", hint=hint
            )
        store = await anyio.to_thread.run_sync(_open_restoration, url, self.bundles)

        async def run(progress: ProgressSink) -> Message:
            await self.mirrors.room.ensure("restore mirrors")
            restored: list[BundleImported] = []
            failed: list[NotRestored] = []
            try:
                async for outcome in store.restore_all(names, owner_uid, progress):
                    if isinstance(outcome, BundleImported):
                        restored.append(outcome)
                    else:
                        failed.append(outcome)
            finally:
                # what came before the store went away counts
                changed = {name for outcome in restored for name in outcome.datasets}
                await self.datasets.recompose(changed)
                self.datasets.rows_changed(changed)
            await self.on_mirrors_changed()
            audit = None
            if restored:
                mirrors = [outcome.mirror for outcome in restored]
                request = StartAudit(mirrors=mirrors, level=AuditLevel.CLOSURE, heal=False)
                audit = await self.audits.run(request, progress)
            return Restored(mirrors=restored, failed=failed, audit=audit)

        subject = ", ".join(names) or "everything in the store"
        return self.operations.start("restore", subject, run, owner_uid=owner_uid)

    async def remove_mirror(self, name: MirrorName, *, owner_uid: int) -> Operation | None:
        """Remove a mirror and everything built from it. Raises ConflictError."""

        async def run(progress: ProgressSink) -> None:
            progress(Progress(total=1, unit="mirrors", note=f"wait for other work on {name}"))
            try:
                await self._forget(name, self.mirrors.remove)
            finally:  # a cancelled one may have removed it
                await self.on_mirrors_changed()

        return await self.operations.patiently("mirror.remove", str(name), run, owner_uid=owner_uid)

    async def forget_mirror(self, name: MirrorName) -> None:
        """Remove the local data of a mirror that another daemon removed."""
        await self._forget(name, self.mirrors.discard)

    async def _forget(
        self, name: MirrorName, remove: Callable[[MirrorName], Awaitable[None]]
    ) -> None:
        async with self.prewarm.paused(name):
            await remove(name)
            await self.templates.remove_mirror(name)

    async def import_upload(
        self, file: DatasetFile, *, dry_run: bool = False, owner_uid: int = 0
    ) -> Operation:
        """Import an uploaded dataset file, or with `dry_run` compare it, and remove the file."""

        async def compare(_: ProgressSink) -> Message:
            return await self.datasets.compare_file(file)

        run: Work = compare if dry_run else partial(self._import, file)
        kind = "dataset.compare" if dry_run else "dataset.import"
        return await self._start_with(file.path, kind, file.name or file.source, run, owner_uid)

    def import_watched(self, path: Path) -> Operation:
        """Import a file of the watched directory, without removing it."""
        run = partial(self._import, DatasetFile(path, path.name))
        return self.operations.start("dataset.import", path.name, run)

    async def _import(self, file: DatasetFile, progress: ProgressSink) -> object:
        await self.mirrors.room.ensure(f"import {file.source}")
        try:
            return await self.datasets.import_file(file, progress)
        finally:  # a cancelled one, too, leaves the mirrors that it has synced
            if not self.operations.is_stopping:
                await self.on_mirrors_changed()

    async def audit(
        self, request: StartAudit, *, kind: str = "audit", resume: bool = False, owner_uid: int = 0
    ) -> Operation:
        """Audit; with `resume`, continue an interrupted one.

        Raises MirrorNotFoundError and NotFoundError before it starts.
        """
        names = [(await self.mirrors.get(text)).name for text in request.mirrors]
        if request.dataset:
            await self.datasets.get(request.dataset)
        subject = ", ".join(map(str, names)) or request.dataset or "everything recorded"
        run = partial(self.audits.run, request, resume=resume)
        return self.operations.start(kind, subject, run, owner_uid=owner_uid)

    async def prepare_dataset(
        self, name: DatasetName, instances: Collection[str], *, owner_uid: int = 0
    ) -> Operation:
        """Prepare templates for these instances of a dataset, or for all.

        Raises NotFoundError and InstanceNotFoundError before it starts.
        """
        await self.datasets.get(name)
        bases = []
        for identity in instances:
            row = await self.datasets.find_instance(identity, name)
            if row is None:
                raise InstanceNotFoundError(
                    f"cannot prepare instance {shown(identity)}: dataset {name} has no such"
                    " instance",
                    hint=f"`mirrord dataset export {name}` prints its instances",
                )
            if row.base_commit is not None:
                bases.append((row.mirror, row.base_commit))

        async def run(progress: ProgressSink) -> object:
            commits = bases if instances else await self.prewarm.list_bases(name)
            return await self.prewarm.run(name, await self.prewarm.ordered(commits), progress)

        return self.operations.start("dataset.prepare", name, run, owner_uid=owner_uid)

    async def build_environments(
        self, request: BuildEnvironments, *, owner_uid: int = 0
    ) -> Operation:
        """Build environments. Raises before it starts if a name is unknown."""
        await self.mirrors.room.ensure("build environments")
        rows = await self.environments.row_images.plan(request)
        plans, refused = ([], []) if rows is not None else await self.environments.plan(request)
        names = ", ".join(request.names[:5]) + (" and others" if len(request.names) > 5 else "")

        async def run(progress: ProgressSink) -> Message:
            if rows is not None:
                prepares = bool(request.names) or request.prewarm
                return await self.environments.row_images.build(
                    rows, prepares, request.jobs, progress
                )
            return await self.environments.build(plans, refused, request.again, progress)

        subject = names or str(request.dataset)
        return self.operations.start("environment.build", subject, run, owner_uid=owner_uid)

    async def import_image(
        self, request: ImportImage, upload: Path | None, *, owner_uid: int = 0
    ) -> Operation:
        """Import an image, and remove the uploaded file."""
        run = partial(self.environments.images.add, request, upload)
        kind, subject = "environment.import", key_of_image(request)
        if upload is None:
            return self.operations.start(kind, subject, run, owner_uid=owner_uid)
        return await self._start_with(upload, kind, subject, run, owner_uid)

    async def heal_with(self, bundle: Path, mirror: str, *, owner_uid: int = 0) -> Operation:
        """Heal a mirror with an uploaded bundle as another donor, and remove the file.

        Raises MirrorNotFoundError and InvalidBundleError.
        """
        async with self._removed_on_error(bundle):
            name = (await self.mirrors.get(mirror)).name
            await anyio.to_thread.run_sync(read_header, bundle)
        request = StartAudit(mirrors=[str(name)], level=AuditLevel.CONTENT, heal=True)

        async def run(progress: ProgressSink) -> object:
            with self.mirrors.quarantine.holding(bundle), self.heals.lending(bundle):
                return await self.audits.run(request, progress)

        return await self._start_with(bundle, "heal", str(name), run, owner_uid)

    async def _start_with(
        self, path: Path, kind: str, subject: str, run: Work, owner_uid: int
    ) -> Operation:
        """Start work on an uploaded file, which is removed at its end or if it cannot start."""

        async def run_and_remove(progress: ProgressSink) -> object:
            try:
                return await run(progress)
            finally:
                # a cancelled operation too: an upload may have 256 GiB
                with anyio.CancelScope(shield=True):
                    await self.mirrors.quarantine.remove(path)

        async with self._removed_on_error(path):
            return self.operations.start(kind, subject, run_and_remove, owner_uid=owner_uid)

    @asynccontextmanager
    async def _removed_on_error(self, path: Path) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self.mirrors.quarantine.remove(path)
            raise


def _open_restoration(url: str, bundles: Bundles) -> Restoration:
    with with_obstore():
        from ..fleet.restore import restoration  # noqa: PLC0415  (an extra)
    return restoration(url, bundles)
