"""The composition root: builds all parts of the daemon, and closes them in reverse order.

Owns the settings in force, status and reload. A part is opened after everything that it may call.
If opening fails, the opened parts are closed.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from .. import __version__, config, telemetry
from ..audit.readiness import ReadinessCount
from ..audit.service import Audits
from ..bundles.service import Bundles
from ..catalog import Catalog
from ..checkouts.overlay import find_overlay
from ..checkouts.volumes import Volumes
from ..config import Settings
from ..datasets.service import Datasets
from ..environments.building import Builds
from ..environments.images.importing import Images
from ..environments.leaks import Leaks
from ..environments.probing import Probes
from ..environments.service import Environments
from ..errors import (
    BackendUnavailableError,
    CatalogUnavailableError,
    InvalidConfigError,
    MirrordError,
    StoppingError,
)
from ..fleet.claims import Claims
from ..git.command import Git
from ..grading.service import Grading
from ..heal.service import Heals
from ..host.namespaces import home
from ..host.namespaces.place import find_place
from ..host.peers import Access
from ..host.room import Room
from ..host.trash import Trash, remove_trees
from ..jobs.clock import WallClock
from ..jobs.events import Events
from ..jobs.operations import Operations
from ..jobs.watch import Watch, signature_of
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import default_url
from ..model import Backend, CommitId, History, MirrorName, utc_now
from ..places import Layout, how_to_get
from ..protocol import (
    Activity,
    Configuration,
    DatasetSummary,
    Mirror,
    Progress,
    ProgressSink,
    ReloadAnswer,
    Status,
)
from ..templates.builder import StoreBuilder
from ..templates.environments import EnvironmentStore
from ..templates.service import Templates
from ..units import when
from ..workers.gate import Gate
from ..workers.pool import Workers
from ..workers.turns import HOUSEKEEPING, Askers
from .activity import ActivityMonitor, HealthMonitor, HealthReport, Traffic
from .composition import compose_checkouts
from .dataset_watch import DatasetWatch
from .prewarm import Prewarm
from .storage import Storage
from .sync_errors import SyncErrors
from .timetable import Cleanup, Schedule, Timetable
from .work import BackgroundWork

if TYPE_CHECKING:
    from ..fleet.service import Fleet


class Engine:
    """The parts of one daemon. Those that need the disk or a process exist after `open`.

    `load` reads the settings again, with the options of the daemon's command line.
    """

    def __init__(
        self, settings: Settings, *, config_path: Path | None, load: Callable[[], Settings]
    ) -> None:
        self._settings = settings
        self._config_path = config_path
        self._load = load
        self.is_open, self._opening_ended = False, asyncio.Event()
        self._closing = AsyncExitStack()
        self._config_fault: str | None = None
        self._reloading = asyncio.Lock()
        self._on_reload: list[Callable[[], Awaitable[None]]] = []
        self.clock, self._began_s = WallClock(), time.monotonic()
        self.started_at = self.clock()
        # what the catalog listed last, which is all that there is while it cannot be reached
        self._listed: tuple[list[Mirror], list[DatasetSummary], str] = [], [], "unknown"
        self.layout = Layout(settings.state_dir)
        self.access = Access(self.settings)
        self.events = Events()
        self.gate = Gate(lambda: self._settings.access)
        self.operations = Operations(self.events)
        self.traffic = Traffic()
        self.room = Room(self.layout.root, lambda: self._settings.checkouts.disk_reserve)
        here = find_place(settings.socket.parent / "mount.sock")
        self.health = HealthMonitor(
            self.layout.root, self.access, self.room, here, is_open=lambda: self.is_open
        )

    def settings(self) -> Settings:
        """Return the settings in force. Parts keep this function, not its result."""
        return self._settings

    async def wait_until_open(self) -> None:
        """Raises StoppingError if opening fails."""
        await self._opening_ended.wait()
        if not self.is_open:
            raise StoppingError("the daemon cannot open its state", hint="its log says why")

    async def open(self) -> None:
        """Build and open every part."""
        try:
            await self._open_stores()
            await self._open_templates()
            await self._open_checkouts()
            await self._open_environments()
            await self._open_audits()
            await self._open_jobs()
            await self._open_watches()
            self._closing.callback(self.room.release)
            self.room.hold((self.layout.root, self.layout.mirrors, self.layout.checkouts))
            self.is_open = True
        finally:
            # after a failure too: a request that waits is told at once, not at the end of a drain
            self._opening_ended.set()
        duration_s = time.monotonic() - self._began_s
        self.events.publish("daemon.opened", duration_s=round(duration_s, 6))

    async def close(self) -> None:
        """Close what was opened, in reverse."""
        await self._closing.aclose()

    async def _open_stores(self) -> None:
        """Open catalog, mirrors and datasets."""
        await self.room.look_for_fault()  # for health; a read-only disk stops no start
        self.git = Git(home=self.layout.home)
        self.workers = Workers(on_start=self._configure_log(), charge=self.gate.charge)
        self._closing.push_async_callback(self.workers.close)
        # the catalog first: opening the mirrors adapts it to their refs
        place = self._settings.catalog.url or self.layout.catalog
        self.catalog = await Catalog.open(place, self.workers)
        self._closing.push_async_callback(self.catalog.close)
        self.trash = Trash(self._remove_in_worker, lambda: tuple(Askers.present().uids))
        self.mirrors = Mirrors(
            settings=self.settings, git=self.git, workers=self.workers, catalog=self.catalog,
            events=self.events, trash=self.trash, room=self.room,
        )  # fmt: skip
        self._closing.push_async_callback(self.mirrors.close)
        self.bundles, self.datasets = Bundles(self.mirrors), Datasets(self.mirrors)
        self.fleet = await self._join_fleet()
        await self.mirrors.open()
        # datasets remove stale pins when they open, so mirrors and catalog have to agree before
        await self.datasets.open()
        self.health.warn_by(lambda: home.refusals)
        self.health.warn_by(self.datasets.warnings)
        self.health.warn_by(lambda: [self._config_fault] if self._config_fault else [])
        self.health.warn_by(self.mirrors.warnings)
        self.health.degrade_by(self.mirrors.outages)
        self.health.degrade_by(self.catalog.outages)

    async def _join_fleet(self) -> "Fleet | None":
        """With a store, join the fleet; without one, claim a shared catalog for this daemon."""
        if not self._settings.store.url:
            if self.catalog.is_shared:
                # a limit by host, which this claim does not have
                claims = Claims(self.catalog, lambda: 0)
                hold = await claims.take_catalog()
                keeping = asyncio.create_task(claims.renew_forever())
                # in reverse at the end: renewals stop before the claim is given back
                self._closing.push_async_callback(claims.give_back, [hold])
                self._closing.callback(keeping.cancel)
            return None
        try:
            # an extra, which takes 0.1 s to load
            from ..fleet.objects import ObjectStore  # noqa: PLC0415
            from ..fleet.service import Fleet, read_node  # noqa: PLC0415
        except ImportError as error:
            fact = "cannot use [store] url: obstore is not installed"
            raise InvalidConfigError(fact, hint=how_to_get("fleet")) from error
        self.catalog.node = await anyio.to_thread.run_sync(read_node, self.layout.root)
        store = await anyio.to_thread.run_sync(ObjectStore, self._settings.store.url)
        fleet = Fleet(store, self.bundles)
        self.mirrors.sharing = fleet
        await fleet.open()
        self._closing.push_async_callback(fleet.close)
        self.health.degrade_by(fleet.outages)
        self.on_reload(fleet.apply)
        return fleet

    def _configure_log(self) -> Callable[[], None]:
        """Configure the log. Return a function that does the same in another process."""
        settings = self._settings.log
        configure = partial(telemetry.configure, settings.level, settings.format)
        configure(buffered=True)
        return configure

    async def _remove_in_worker(self, paths: list[Path]) -> dict[Path, str]:
        """Remove trees that clients wrote to, in a worker that is not counted for any user."""
        Askers(HOUSEKEEPING).bind()
        # an rmdir takes up to 2 ms on ext4 with `discard`: 100,000 directories are minutes
        return await self.workers.run(remove_trees, paths)

    async def _use_objects(self, keys: Collection[str]) -> None:
        """Write the trees of mirrors anew, because LFS objects arrived."""
        if keys:
            # spare trees have pointers where the objects belong
            self.checkouts.pool.spares.drop(timedelta())
            await self.templates.make_again(keys)

    async def _open_templates(self) -> None:
        """Open what checkouts are made from: sealed stores, templates and environments."""

        async def recorded(name: MirrorName) -> set[CommitId]:
            return await self.catalog.list_named(name.key)

        self.stores = StoreBuilder(
            state_dir=self.layout.root, git=self.git, workers=self.workers,
            mirrors_path=self.mirrors.path, trash=self.trash, recorded=recorded,
            room=self.room, shared=self.fleet.closures if self.fleet else None,
            composition_of=self.datasets.find_composition,
        )  # fmt: skip
        self._closing.push_async_callback(self.stores.close)
        await self.stores.open()
        self.datasets.on_composed = self.stores.recompose
        self.datasets.on_objects = self._use_objects
        self.templates = Templates(
            settings=self.settings, state_dir=self.layout.root, workers=self.workers,
            mirrors_path=self.mirrors.path, stores=self.stores, events=self.events,
            trash=self.trash,
        )  # fmt: skip
        self._closing.push_async_callback(self.templates.close)
        await self.templates.open()
        self.environment_store = EnvironmentStore(self.layout.root, self.trash)
        await anyio.to_thread.run_sync(self.environment_store.open)
        self.leaks = Leaks(store=self.environment_store, mirrors=self.mirrors)
        self._closing.push_async_callback(self.leaks.close)

    async def _open_checkouts(self) -> None:
        """Adopt the checkouts of an earlier daemon."""
        overlay = await find_overlay(
            state_dir=self.layout.root, service=self._settings.socket.parent / "mount.sock",
            templates=self.templates, workers=self.workers, mirrors_path=self.mirrors.path,
            trash=self.trash, environments=self.environment_store,
        )  # fmt: skip
        # leases are adopted once the templates under their trees are known
        self.checkouts = compose_checkouts(
            settings=self.settings, state_dir=self.layout.root, git=self.git, workers=self.workers,
            mirrors=self.mirrors, datasets=self.datasets, templates=self.templates, overlay=overlay,
            environments=self.environment_store, access=self.access, events=self.events,
            clock=self.clock,
            # made below
            environment_of=lambda row: self.environments.name_for(row),  # noqa: PLW0108
            cover_of=self.leaks.cover_of, trash=self.trash,
            prepare_image=lambda *named: self.environments.image_trees.ensure(*named),  # noqa: PLW0108
        )  # fmt: skip
        self._closing.push_async_callback(self.checkouts.close)
        self.clock.on_step(self.checkouts.leasing.expiry.follow)
        self.clock.on_step(self.templates.follow)
        self.volumes = Volumes(self.checkouts.leasing, self.checkouts.checkout, self.checkouts.fork)
        self.health.warn_by(self.checkouts.quotas.warnings)
        # a lease that could not be read may stand on any of them
        self.templates.evict_only_if(lambda: self.checkouts.leases.knows_all)
        await self.checkouts.open()
        self.health.degrade_by(self.checkouts.leases.problems)
        self.health.degrade_by(SyncErrors(self.checkouts.leases).problems)
        self.health.degrade_by(self._backend_faults)

    async def _open_environments(self) -> None:
        """Open what works in checkouts: builds of environments, and grading."""
        place, service = self.layout.environments, self._settings.socket.parent / "build.sock"
        builds = Builds(
            place=place, service=service,
            store=self.environment_store, checkouts=self.checkouts, mirrors=self.mirrors,
        )  # fmt: skip
        await anyio.to_thread.run_sync(builds.open)
        self.environments = Environments(
            builds=builds, recipes=place / "recipes", datasets=self.datasets, leaks=self.leaks,
            images=Images(place=place, store=self.environment_store, mirrors=self.mirrors),
        )  # fmt: skip
        self._closing.push_async_callback(self.environments.close)
        self.grading = Grading(
            settings=self.settings, state_dir=self.layout.root, workers=self.workers,
            mirrors=self.mirrors, datasets=self.datasets, layers=self.checkouts.layers,
            leasing=self.checkouts.leasing, resolver=self.checkouts.resolver,
            patches=self.checkouts.patches, environments=self.environments,
            probes=Probes(service),
        )  # fmt: skip

    @property
    def backend(self) -> Backend:
        """The default backend of requests."""
        try:
            return self.checkouts.backend
        except BackendUnavailableError:  # leases of the other backend are still served
            return self._settings.checkouts.backend

    def _backend_faults(self) -> list[str]:
        try:
            _ = self.checkouts.backend
        except BackendUnavailableError as error:
            return [error.message]
        return []

    async def _open_audits(self) -> None:
        self.heals = Heals(self.mirrors)
        await self.heals.open()
        # an audit passes its findings to the heals, and has the mirror's templates scrubbed
        self.audits = Audits(self.mirrors, self.heals.repair, self.templates.scrub_mirror)
        await self.audits.open()
        self.readiness = ReadinessCount(self.mirrors, self.audits)
        self.health.degrade_by(self.readiness.reasons)

    async def _open_jobs(self) -> None:
        """Add configured mirrors and start the schedule. It uses all parts."""
        self.storage = Storage(
            layout=self.layout, mirrors=self.mirrors, templates=self.templates,
            checkouts=self.checkouts, environments=self.environments,
        )  # fmt: skip
        self.monitor = ActivityMonitor(
            settings=self.settings, started_at=self.started_at, room=self.room,
            traffic=self.traffic, health=self.health, operations=self.operations, gate=self.gate,
            workers=self.workers, checkouts=self.checkouts, trash=self.trash,
            templates=self.templates, stores=self.stores,
        )  # fmt: skip
        prewarm = Prewarm(
            self.settings, self.catalog, self.operations, self._prepare,
            self.stores.oldest_first, self._is_full,
        )  # fmt: skip
        self.datasets.on_change(prewarm.start)
        self.work = BackgroundWork(
            self.operations, self.mirrors, self.bundles, self.datasets, self.audits, self.heals,
            self.templates, self.environments, prewarm,
            on_mirrors_changed=lambda: self.schedule.reconcile(),  # noqa: PLW0108 - made below
        )  # fmt: skip
        # the mirrors first: datasets remove pins that mirrors adopt
        cleanup = Cleanup([self.mirrors.clean_up, self.trash.retry, self.datasets.clean_up])
        jobs = Timetable(
            self.started_at, self.checkouts, self.work, cleanup, self.storage,
            self.monitor.sample,
        )  # fmt: skip
        self.schedule = Schedule(jobs.table, clock=self.clock)
        await self._add_configured_mirrors()
        self._closing.push_async_callback(self.schedule.close)
        await self.schedule.open()
        await self._move_mirrors()
        if self.fleet:
            from ..fleet.rounds import Rounds  # noqa: PLC0415  (an extra)

            rounds = Rounds(
                fleet=self.fleet, datasets=self.datasets, operations=self.operations,
                on_gone=self.work.forget_mirror, on_mirrors=self.schedule.reconcile,
            )  # fmt: skip
            await rounds.open()
            self._closing.push_async_callback(rounds.close)

    async def _open_watches(self) -> None:
        """Follow the files that people change: those of datasets, and the configuration."""
        self.dataset_watch = DatasetWatch(
            self.settings, self.layout.datasets, self.catalog, self.operations, self.events,
            self.work.import_watched,
        )  # fmt: skip
        self._closing.push_async_callback(self.dataset_watch.close)
        await self.dataset_watch.apply()
        self.on_reload(self.dataset_watch.apply)
        self.health.warn_by(self.dataset_watch.warnings)
        if file := self._config_path:
            signature = await anyio.to_thread.run_sync(signature_of, file)
            watch = Watch(
                # the directory: editors replace the file, and a watch of it would end
                file.parent, file.name.__eq__, lambda _: self.reload(),
                known={file: signature} if signature else {}, quiet=timedelta(seconds=0.2),
            )  # fmt: skip
            self._closing.push_async_callback(watch.close)
            await watch.open()

    async def _is_full(self) -> bool:
        """Return whether further templates would evict others, or find no room on the disk."""
        return bool(self.room.measure().shortage) or await self.templates.is_full()

    async def _prepare(self, name: MirrorName, commit: CommitId, history: History) -> None:
        """Make checkouts of this commit warm. Raises MirrorNotFoundError."""
        await self.mirrors.resolve(name, commit)  # the mirror may be removed, or not fetched yet
        limit = await self.datasets.find_history_limit(name, commit)
        if limit is not None and not history.is_within(limit):
            history = limit
        await self.templates.ensure(name, commit, history)

    async def _add_configured_mirrors(self, progress: ProgressSink | None = None) -> None:
        """Add what is missing of the settings' mirrors; publish an event for each refused one."""
        present = {name.key for name in self.mirrors.names()}
        mirrors = [
            mirror
            for mirror in self._settings.mirror
            if MirrorName.parse(mirror.repo).key not in present
        ]
        for count, mirror in enumerate(mirrors):
            if progress:
                now = Progress(done=count, total=len(mirrors), unit="mirrors", note=mirror.repo)
                progress(now)
            try:
                await self.mirrors.add(mirror.repo)
            except MirrordError as error:
                self.events.publish(
                    "mirror.refused", repo=mirror.repo, code=error.code, detail=error.message
                )

    async def _move_mirrors(self) -> None:
        """Follow what the configuration says now, since when it said something else.

        That may have changed while no daemon ran. A mirror with a URL of its own stays there,
        unless a table [[mirror]] has another one.
        """
        tables = {
            MirrorName.parse(mirror.repo).key for mirror in self._settings.mirror if mirror.url
        }
        for row in await self.catalog.list_mirrors():
            now = default_url(self._settings, row.name)
            follows = row.url == row.configured_url or row.name.key in tables
            if follows and now != row.configured_url:
                self.work.set_url(row.name, now)

    def on_reload(self, apply: Callable[[], Awaitable[None]]) -> None:
        """Call `apply` at each reload, after the new settings are in force."""
        self._on_reload.append(apply)

    async def reload(self, progress: ProgressSink | None = None) -> ReloadAnswer:
        """Read the configuration again, and apply the settings that need no restart.

        Raises InvalidConfigError for an invalid file, and then changes nothing.
        """
        await self.wait_until_open()
        if progress and self._reloading.locked():
            progress(Progress(note="wait for another reload"))
        async with self._reloading:
            return await self._reload(progress)

    async def _reload(self, progress: ProgressSink | None) -> ReloadAnswer:
        try:
            new = await anyio.to_thread.run_sync(self._load)
        except InvalidConfigError as error:
            fact = error.message.splitlines()[0]
            self._config_fault = f"the previous settings stay in effect: {fact}"
            self.health.refresh()
            self.events.publish("config.refused", detail=error.message)
            raise
        self._config_fault = None
        self.health.refresh()
        old = self._settings
        applied, refused = config.compare(old, new)
        self._settings = config.merge_live(self._settings, new)
        self.workers.prepare_by(self._configure_log())
        self.access.refresh()
        # every time: a reload that was cancelled, or without its store, has left some out
        await self._add_configured_mirrors(progress)
        await self._move_mirrors()
        await self.schedule.reconcile()
        for apply in self._on_reload:
            await apply()
        self.events.publish("config.reloaded", applied=applied, refused=refused)
        return ReloadAnswer(applied=applied, refused=refused)

    async def current_health(self) -> HealthReport:
        """Return the health, with what cannot be served by now."""
        if self.is_open and await self.readiness.refresh():
            self.health.refresh()
        return self.health.report()

    def configuration(self) -> Configuration:
        path = str(self._config_path) if self._config_path else None
        # URLs of upstreams, catalog and store may have passwords in them
        settings = json.loads(telemetry.masked(self._settings.model_dump_json()))
        return Configuration(path=path, settings=settings)

    async def status(self) -> Status:
        health = (await self.current_health()).health
        try:
            listed = await self.mirrors.list_mirrors(), await self.catalog.summarise_datasets()
            self._listed = (*listed, f"as of {when(utc_now())}")
        except CatalogUnavailableError:
            told = [f"mirrors and datasets are {self._listed[2]}: the catalog has them"]
            health = replace(health, reasons=[*health.reasons, *told])
        mirrors, datasets, _ = self._listed
        return Status(
            version=__version__, pid=os.getpid(), uid=os.geteuid(), started_at=self.started_at,
            state_dir=str(self.layout.root),
            config_path=str(self._config_path) if self._config_path else None,
            backend=self.backend,
            health=health,
            mirrors=mirrors,
            datasets=[self.readiness.describe(summary) for summary in datasets],
            checkout_count=len(self.checkouts.leases),
            checkout_max=self._settings.checkouts.max,
            operations_running=self.operations.running_count,
            operations_queued=self.operations.queued_count,
            last_audit=self.audits.last,
            jobs=self.schedule.states(),
        )  # fmt: skip

    def activity(self, uid: int | None = None, *, history: bool = False) -> Activity:
        """Return the daemon's activity, or what the user `uid` sees of it. Reads only memory."""
        return self.monitor.report(uid, history=history)
