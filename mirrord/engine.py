"""The composition root: builds every part of the daemon, in an order with reasons, and closes them in reverse.

Owns the settings in force and what is asked of the daemon as a whole: health, status, figures, reload. Knows no HTTP. Each part
is opened only when everything it may call is open; a failure on the way closes what was opened and is the caller's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import anyio.to_thread
import structlog

from . import __version__, config, telemetry
from .audit.service import Audits
from .catalog import Catalog
from .checkouts.overlay.probe import find_overlay
from .checkouts.service import Checkouts
from .checkouts.stores.builder import StoreBuilder
from .checkouts.templates.store import Templates
from .config import Settings
from .datasets.service import Datasets
from .errors import BackendUnavailableError, InvalidConfigError, MirrordError
from .git.command import Git
from .git.turns import HOUSEKEEPING, Askers
from .git.workers import Workers
from .heal import Heals
from .health import HealthMonitor
from .host.peers import Access
from .host.trash import Trash, remove_trees
from .jobs.events import Events
from .jobs.operations import Operations
from .jobs.schedule import Schedule
from .jobs.watch import Signature, Watch, is_complete_name, signature_of
from .layout import Layout
from .mirrors.bundles.service import Bundles
from .mirrors.service import Mirrors
from .model import Backend, CommitId, CommitState, History, MirrorName, utc_now
from .protocol import Audit, AuditSummary, Configuration, ReloadAnswer, Status
from .timetable import Cleanup, Timetable
from .work import BackgroundWork, Prewarm

log = structlog.get_logger()

_REMOVAL_TIMEOUT = timedelta(minutes=10)
_CONFIG_QUIET = timedelta(seconds=0.2)


class Engine:
    """The parts of one daemon. What needs the disk or another process exists once `open` has ended.

    `load` reads the settings again, as the command line that started the daemon would have it.
    """

    def __init__(
        self, settings: Settings, *, config_path: Path | None, load: Callable[[], Settings]
    ) -> None:
        self._settings = settings
        self._config_path = config_path
        self._load = load
        self._opened = asyncio.Event()
        self._refused_files: dict[Path, str] = {}
        self._config_fault: str | None = None
        self._closing = AsyncExitStack()
        self.started_at = utc_now()
        self.layout = Layout(settings.state_dir)
        self.access = Access(self.settings)
        self.events = Events()
        self.operations = Operations(self.events)
        self.health = HealthMonitor(self.layout.root, self.access, is_open=self._opened.is_set)

    def settings(self) -> Settings:
        """The settings in force now; parts keep this function, not its answer."""
        return self._settings

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def wait_until_open(self) -> None:
        if not self._opened.is_set():
            await self._opened.wait()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Build and open every part."""
        await self._open_stores()
        await self._open_checkouts()
        await self._open_audits()
        await self._open_jobs()
        self._opened.set()
        self.events.publish(
            "daemon.opened", duration_s=(utc_now() - self.started_at).total_seconds()
        )

    async def close(self) -> None:
        """Close what was opened, in reverse."""
        await self._closing.aclose()

    async def _open_stores(self) -> None:
        """What is recorded, and the mirrors that hold it."""
        log_settings = self._settings.log
        self.git = Git(home=self.layout.home)
        self.workers = Workers(
            on_start=partial(telemetry.configure, log_settings.level, log_settings.format)
        )
        self._closing.push_async_callback(self.workers.close)
        # the catalog first: opening the mirrors brings it in line with their refs
        self.catalog = await Catalog.open(self.layout.catalog, self.workers)
        self._closing.push_async_callback(self.catalog.close)
        self.trash = Trash(self._remove_in_worker)
        self.mirrors = Mirrors(
            settings=self.settings,
            git=self.git,
            workers=self.workers,
            catalog=self.catalog,
            events=self.events,
            trash=self.trash,
        )
        self._closing.push_async_callback(self.mirrors.close)
        await self.mirrors.open()
        self.bundles = Bundles(
            mirrors=self.mirrors, catalog=self.catalog, git=self.git, events=self.events
        )
        # datasets drop stale pins when they open, which needs mirrors in line with the catalog
        self.datasets = Datasets(
            settings=self.settings,
            catalog=self.catalog,
            mirrors=self.mirrors,
            workers=self.workers,
            events=self.events,
        )
        await self.datasets.open()
        self.health.warn_by(self.datasets.warnings)
        self.health.warn_by(self._file_warnings)
        self.health.warn_by(lambda: [self._config_fault] if self._config_fault else [])
        self.health.degrade_by(self.mirrors.outages)

    async def _remove_in_worker(self, paths: list[Path]) -> dict[Path, str]:
        """Remove trees that clients wrote to, for nobody's turn: released by many, they go in batches."""
        Askers(HOUSEKEEPING).bind()
        return await self.workers.run(remove_trees, paths, timeout=_REMOVAL_TIMEOUT)

    async def _open_checkouts(self) -> None:
        """What checkouts are made from, then the checkouts that an earlier daemon left."""
        self.gitdirs = StoreBuilder(
            state_dir=self.layout.root,
            git=self.git,
            workers=self.workers,
            mirrors_path=self.mirrors.path,
            trash=self.trash,
            recorded=self._recorded_commits,
        )
        self._closing.push_async_callback(self.gitdirs.close)
        await self.gitdirs.open()
        self.templates = Templates(
            settings=self.settings,
            state_dir=self.layout.root,
            workers=self.workers,
            mirrors_path=self.mirrors.path,
            gitdirs=self.gitdirs,
            events=self.events,
            trash=self.trash,
        )
        self._closing.push_async_callback(self.templates.close)
        await self.templates.open()
        overlay = await find_overlay(
            state_dir=self.layout.root,
            service=self._settings.socket.parent / "mount.sock",
            templates=self.templates,
            workers=self.workers,
            mirrors_path=self.mirrors.path,
            trash=self.trash,
        )
        # leases are adopted when all that their trees are made from is there
        self.checkouts = Checkouts(
            settings=self.settings,
            state_dir=self.layout.root,
            workers=self.workers,
            mirrors=self.mirrors,
            datasets=self.datasets,
            gitdirs=self.gitdirs,
            overlay=overlay,
            access=self.access,
            events=self.events,
            trash=self.trash,
        )
        self._closing.push_async_callback(self.checkouts.close)
        await self.checkouts.open()
        self._note_backend()

    def _note_backend(self) -> None:
        """A backend that was asked for and that this host lacks is degraded, not refused: the other one's leases go on."""
        try:
            self.backend = self.checkouts.backend
        except BackendUnavailableError as error:
            self.backend = self._settings.checkouts.backend
            self.health.note("backend", error.message)

    async def _open_audits(self) -> None:
        """What looks for damage, and what repairs it."""
        self.heals = Heals(
            settings=self.settings,
            mirrors=self.mirrors,
            catalog=self.catalog,
            git=self.git,
            workers=self.workers,
            events=self.events,
        )
        await self.heals.open()
        # an audit that may heal hands what it found to the heals, and has what checkouts are made from looked at
        self.audits = Audits(
            settings=self.settings,
            mirrors=self.mirrors,
            catalog=self.catalog,
            workers=self.workers,
            events=self.events,
            repair=self.heals.repair,
            scrub=self.templates.scrub_mirror,
        )

    async def _open_jobs(self) -> None:
        """Last, because jobs use everything: configured mirrors, the clock, the watched places."""
        prewarm = Prewarm(
            settings=self.settings,
            catalog=self.catalog,
            operations=self.operations,
            prepare=self._prepare,
            oldest_first=self.gitdirs.oldest_first,
            room=self.templates,
        )
        self.work = BackgroundWork(
            operations=self.operations,
            mirrors=self.mirrors,
            bundles=self.bundles,
            datasets=self.datasets,
            audits=self.audits,
            heals=self.heals,
            templates=self.templates,
            gitdirs=self.gitdirs,
            prewarm=prewarm,
            on_mirrors_changed=self._mirrors_changed,
        )
        self.datasets.on_change(prewarm.start)
        watches = await self._watches()
        jobs = Timetable(
            settings=self.settings,
            started_at=self.started_at,
            catalog=self.catalog,
            templates=self.templates,
            checkouts=self.checkouts,
            operations=self.operations,
            work=self.work,
            heals=self.heals,
            prewarm=prewarm,
            cleanup=Cleanup(
                [self.mirrors.clean_up, self.datasets.clean_up, self.trash.retry]
            ),  # datasets drop pins that mirrors adopt
            find_unfinished=self.audits.find_unfinished,
            watches=watches,
        )
        self.schedule = Schedule(jobs.table)
        await self._add_configured_mirrors()
        self._closing.push_async_callback(self.schedule.close)
        await self.schedule.open()
        for watch in watches:
            self._closing.push_async_callback(watch.close)
            await watch.open()

    async def _prepare(self, name: MirrorName, commit: CommitId, history: History) -> None:
        """Make a checkout of this commit warm. Raises MirrorNotFoundError where the mirror was removed since it was asked for."""
        self.mirrors.get_name(str(name))
        if self.backend is Backend.OVERLAY:
            await self.templates.ensure(name, commit, history)
        else:
            await self.gitdirs.ensure(name, commit, history)

    async def _mirrors_changed(self) -> None:
        await self.schedule.reconcile()

    async def _recorded_commits(self, name: MirrorName) -> set[CommitId]:
        return {row.commit for row in await self.catalog.list_recorded(name.key)}

    async def _add_configured_mirrors(self) -> None:
        """One that cannot be added is told, and the others are."""
        for mirror in self._settings.mirror:
            try:
                await self.mirrors.add(mirror.repo, mirror.url)
            except MirrordError as error:
                self.events.publish(
                    "mirror.refused", repo=mirror.repo, code=error.code, detail=error.message
                )

    # -- the watched places -------------------------------------------------------------------------------------------

    async def _watches(self) -> list[Watch]:
        watches = []
        if self._settings.datasets.watch:
            places = {self.layout.datasets: is_complete_name}
            watches.append(Watch(places, self._import_watched, known=await self._known_files()))
        if self._config_path is not None:
            path = self._config_path
            known = await anyio.to_thread.run_sync(signature_of, path)
            watches.append(
                Watch(
                    {path.parent: path.name.__eq__},
                    self._reload_changed,
                    known={path: known} if known else {},
                    quiet=_CONFIG_QUIET,
                )
            )
        return watches

    async def _known_files(self) -> dict[Path, Signature]:
        """Files that were imported since they last changed: a restart does not import them again."""
        imported = {
            dataset.source: dataset.imported_at.timestamp()
            for dataset in await self.catalog.list_datasets()
        }
        known = {}
        for source, at in imported.items():
            path = self.layout.datasets / Path(source).name
            signature = await anyio.to_thread.run_sync(signature_of, path)
            if signature and signature.changed_at < at:
                known[path] = signature
        return known

    async def _import_watched(self, path: Path) -> None:
        """A file that cannot be imported is a warning for as long as it is there."""
        ended = await self.operations.wait(self.work.import_watched(path).id)
        if ended.error is None:
            self._refused_files.pop(path, None)
        else:
            self._refused_files[path] = ended.error.detail
            self.events.publish(
                "dataset.refused", file=path.name, code=ended.error.code, detail=ended.error.detail
            )

    def _file_warnings(self) -> list[str]:
        return [
            f"{path.name} in datasets: {fact}"
            for path, fact in self._refused_files.items()
            if path.exists()
        ]

    async def _reload_changed(self, _path: Path) -> None:
        await self.reload()

    # -- the whole ----------------------------------------------------------------------------------------------------

    async def reload(self) -> ReloadAnswer:
        """Read the configuration again and apply what is live. A bad file raises, and changes nothing."""
        try:
            new = await anyio.to_thread.run_sync(self._load)
        except InvalidConfigError as error:
            self._config_fault = (
                f"the settings from before are in force: {error.message.splitlines()[0]}"
            )
            self.events.publish("config.refused", detail=error.message)
            raise
        self._config_fault = None
        applied, refused = config.compare(self._settings, new)
        self._settings = config.merge_live(self._settings, new)
        telemetry.configure(self._settings.log.level, self._settings.log.format)
        self.access.refresh()
        if "mirror" in applied:
            await self._add_configured_mirrors()
        await self.schedule.reconcile()
        self.events.publish("config.reloaded", applied=applied, refused=refused)
        return ReloadAnswer(applied=applied, refused=refused)

    def configuration(self) -> Configuration:
        path = str(self._config_path) if self._config_path else None
        return Configuration(
            path=path, settings=json.loads(telemetry.masked(self._settings.model_dump_json()))
        )

    async def status(self) -> Status:
        audits = await self.audits.list(1)
        return Status(
            version=__version__,
            pid=os.getpid(),
            uid=os.geteuid(),
            started_at=self.started_at,
            state_dir=str(self.layout.root),
            config_path=str(self._config_path) if self._config_path else None,
            backend=self.backend,
            health=self.health.report().health,
            mirrors=await self.mirrors.list(),
            datasets=await self.catalog.summarise_datasets(),
            checkout_count=self.checkouts.count,
            checkout_max=self._settings.checkouts.max,
            operations_running=self.operations.running_count,
            operations_queued=self.operations.queued_count,
            last_audit=_summary(audits[0]) if audits else None,
            jobs=self.schedule.states(),
        )

    async def figures(self) -> Figures:
        """What the metrics show."""
        mirrors = await self.catalog.list_mirrors()
        audits = await self.audits.list(1)
        return Figures(
            started_at=self.started_at,
            degraded=self.health.report().is_degraded,
            mirrors=len(mirrors),
            mirrors_failed=sum(row.error is not None for row in mirrors),
            mirror_bytes=sum(row.size_bytes or 0 for row in mirrors),
            datasets=len(await self.catalog.summarise_datasets()),
            unservable=_unservable(audits[0]) if audits else 0,
            checkouts=self.checkouts.count,
            checkouts_max=self._settings.checkouts.max,
            operations_running=self.operations.running_count,
            disk_free_bytes=self.health.disk_free_bytes,
            events=dict(self.events.counts),
        )


def _summary(audit: Audit) -> AuditSummary:
    return AuditSummary(
        id=audit.id,
        level=audit.level,
        finished_at=audit.finished_at,
        counts=audit.counts,
        affected_count=len(audit.affected),
        finding_count=len(audit.findings),
        open_count=audit.open_count,
        left_count=len(audit.left),
    )


def _unservable(audit: Audit) -> int:
    servable = {CommitState.OK, CommitState.UNPINNED}
    return sum(count for state, count in audit.counts.items() if state not in servable)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the metrics show of the engine at one moment."""

    started_at: datetime
    degraded: bool
    mirrors: int
    mirrors_failed: int
    mirror_bytes: int
    datasets: int
    unservable: int
    checkouts: int
    checkouts_max: int
    operations_running: int
    disk_free_bytes: int
    events: dict[str, int]
