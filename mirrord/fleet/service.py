"""A daemon in a fleet: its turns at mirrors, what it publishes, what it follows.

The catalog says what there is, the store has it, this disk has what was asked for here. Every few
seconds each daemon looks at what changed, and one of them claims what is due to be synced. Without
the catalog or the store a daemon serves what it has, and says so in health.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from .. import __version__, protocol
from ..catalog import MIRROR, PINS, Generation, HeldClaim, MirrorRow
from ..datasets.service import Datasets
from ..errors import (
    CatalogUnavailableError,
    DiskFullError,
    MirrordError,
    StoreDamagedError,
    StoreUnavailableError,
    UpstreamAuthError,
    UpstreamNotFoundError,
)
from ..host.files import full_disk_named
from ..jobs.operations import Operations, Work
from ..mirrors.bundles import Bundles
from ..mirrors.refs import theirs, write_durably
from ..mirrors.repository import HISTORY, KEPT, Repository
from ..mirrors.repository import PINS as PIN_REFS
from ..mirrors.sharing import Sharing, Turn
from ..mirrors.upstream import parse_upstream
from ..model import MirrorName, utc_now
from ..protocol import Progress, ProgressSink
from ..telemetry import log
from .claims import Claims, Hold
from .collect import clock_of, collect
from .exchange import Exchange
from .generations import generation_file, list_published, read_generation
from .objects import ObjectStore

LOOK = timedelta(seconds=5)
"""Between two looks at what other daemons changed."""
_HEARTBEAT = 3  # looks
_ROUND = 250  # mirrors that one daemon claims at a time
_PATIENCE = timedelta(seconds=10)  # until a mirror is synced by a daemon that does not have it
_COLLECTION = "store/collect"
_COLLECTION_INTERVAL = timedelta(hours=24)
_RETRY = timedelta(minutes=1)
_NEVER_FOUND_INTERVAL = timedelta(days=7)


def read_node(state_dir: Path) -> str:
    """The id of this state directory's daemon in a fleet, made at its first start."""
    path = state_dir / "node"
    with suppress(FileNotFoundError):
        if known := path.read_text(encoding="ascii").strip():
            return known
    made = secrets.token_hex(8)
    write_durably(path, f"{made}\n".encode())
    return made


@dataclass(eq=False, slots=True)
class FleetTurn(Turn):
    """A turn while its claim is held."""

    fleet: "Fleet"
    name: MirrorName
    hold: Hold
    is_fresh: bool = False
    is_synced: bool = False

    @property
    def row(self) -> MirrorRow | None:  # type: ignore[override]
        return self.hold.row

    async def publish(self, repository: Repository) -> None:
        await self.fleet.publish(self, repository)

    def is_noted(self, row: MirrorRow) -> bool:
        if self.hold.unchanged is None:
            return False
        self.hold.unchanged.append(row.name.key)
        return True


@dataclass(eq=False, kw_only=True)
class Fleet(Sharing):
    """Opened before the mirrors are; started when everything is open.

    `on_gone` forgets what was built from a mirror that another daemon removed, `on_mirrors` is
    called when mirrors came or went.
    """

    store: ObjectStore
    bundles: Bundles
    datasets: Datasets
    operations: Operations
    on_gone: Callable[[MirrorName], Awaitable[None]]
    on_mirrors: Callable[[], Awaitable[None]]
    is_fleet = True
    _generations: dict[str, Generation] = field(default_factory=dict)
    _version: int = -1
    _behind: set[str] = field(default_factory=set)
    _repinned: set[str] = field(default_factory=set)  # of those, mirrors whose pins changed
    _unrecorded: set[str] = field(default_factory=set)  # mirrors whose records are to be published
    _fault: str | None = None
    _looks: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _work: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mirrors = self.bundles.mirrors
        self.catalog, self.settings = self.mirrors.catalog, self.mirrors.settings
        self.exchange = Exchange(self.store, self.mirrors.quarantine)
        self.claims = Claims(self.catalog, lambda: self.settings().sync.concurrency)

    async def open(self) -> None:
        """Read what there is; from now on claims are kept."""
        self._version, _ = await self.catalog.list_changes(-1)
        self._generations = await self.catalog.list_generations()
        await self.catalog.enrol({_COLLECTION: ""})
        self._tasks.append(asyncio.create_task(self.claims.keep()))

    def start(self) -> None:
        """Begin to follow other daemons, and to sync what is due."""
        self._behind = {key for key in self._generations if self._is_here(key)}
        self._repinned = {*self._behind}
        self._tasks.append(asyncio.create_task(self._look_forever()))

    async def close(self) -> None:
        """End, and give back what this daemon claimed."""
        for task in (*self._tasks, *self._work.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._work.values(), return_exceptions=True)
        await self.claims.give_back([*self.claims.held.values()])
        with suppress(CatalogUnavailableError):
            await self.catalog.delete_node(self.catalog.node)

    async def apply(self) -> None:
        """Have mirrors due no later than the settings say now."""
        if interval := self.settings().sync.interval:
            await self.catalog.hasten(interval)

    def outages(self) -> list[str]:
        """Why what is new cannot be published or followed."""
        return [self._fault] if self._fault else []

    async def status(self) -> protocol.FleetStatus:
        """The daemons of the fleet, what they claim, and how far this one is."""
        nodes = await self.catalog.list_nodes()
        held = await self.catalog.list_claims()
        return protocol.FleetStatus(
            node=self.catalog.node,
            store=self.store.shown,
            fault=self._fault,
            generations=len(self._generations),
            behind=sorted(self._behind),
            nodes=[
                protocol.FleetNode(
                    id=it.id, name=it.name, version=it.version, age_s=round(it.age_s, 1),
                    mirrors=it.document.get("mirrors", 0), behind=it.document.get("behind", 0),
                    holder=it.document.get("holder", ""), fault=it.document.get("fault"),
                )
                for it in nodes
            ],
            claims=[
                protocol.FleetClaim(
                    work=it.key, holder=it.node, epoch=it.epoch, left_s=round(it.left_s, 1)
                )
                for it in held
            ],
        )  # fmt: skip

    # -- turns ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(
        self, name: MirrorName, progress: ProgressSink | None = None
    ) -> AsyncIterator[Turn]:
        def wait(holder: HeldClaim | None) -> None:
            if progress:
                note = f"another daemon has {name}" if holder else "its host has enough connections"
                progress(Progress(unit="syncs", note=note))

        key, work = name.key, f"{MIRROR}{name.key}"
        is_sync = progress is not None and work not in self.claims.held
        before = await self.catalog.find_mirror(key) if is_sync else None
        async with self.claims.holding(work, wait) as (hold, is_second):
            turn = FleetTurn(self, name, hold)
            if hold.row is None:
                await self._refresh([key])
            if is_second and before and (after := await self.catalog.find_mirror(key)):
                turn.is_fresh = after.synced_at != before.synced_at and not after.error
            yield turn
            if turn.is_synced:
                hold.after, hold.has_failed = self.settings().sync.interval or None, False

    @asynccontextmanager
    async def sole(self, work: str) -> AsyncIterator[None]:
        async with self.claims.holding(work):
            yield

    async def publish(self, turn: "FleetTurn", repository: Repository) -> None:
        """Make what a mirror has its next generation."""
        name, epoch = turn.name, turn.hold.claim.epoch
        if await self.is_behind(repository):
            await self.follow(repository)
        row = turn.row or await self.catalog.find_mirror(name.key)
        if row is None:
            return  # removed
        present, previous = await repository.all_refs(), self._generations.get(name.key)
        kinds = (KEPT, PIN_REFS, HISTORY)
        ours = {ref: oid for ref, oid in present.items() if ref.startswith(kinds)}

        async def accept(new: Generation) -> bool:
            holder = self.claims.holder
            return await self.catalog.publish_generation(holder, name.key, new, previous)

        with self._noting():
            made = await self.exchange.publish(
                repository, theirs(present) | ours, await repository.head(),
                url=row.url, epoch=epoch, previous=previous, accept=accept,
                record=partial(self.bundles.write_records, row, repository),
            )  # fmt: skip
        if made is None:
            return
        self._generations[name.key] = made
        await self._write(repository, made)
        log.info("mirror.published", mirror=str(name), epoch=made.epoch, number=made.number)

    # -- generations ----------------------------------------------------------------------------

    async def is_behind(self, repository: Repository, *, ask: bool = False) -> bool:
        key = repository.name.key
        if ask:
            await self._refresh([key])
        newest = self._generations.get(key)
        if newest is None:
            return False
        at = await to_thread.run_sync(read_generation, repository.path)
        return at is None or at[:2] < newest[:2]

    async def is_known(self, repository: Repository) -> bool:
        return await to_thread.run_sync(read_generation, repository.path) is not None

    async def follow(self, repository: Repository) -> None:
        with self._noting():
            await self.exchange.follow(repository, self._generations[repository.name.key])
        self._behind.discard(repository.name.key)

    async def _refresh(self, keys: Collection[str]) -> None:
        found = await self.catalog.list_generations(keys)
        for key in keys:
            self._generations.pop(key, None)
        self._generations |= found

    async def _write(self, repository: Repository, generation: Generation) -> None:
        with full_disk_named(f"mirror {repository.name}"):
            await to_thread.run_sync(write_durably, *generation_file(repository.path, generation))

    async def enrol(self, rows: Collection[MirrorRow]) -> None:
        hosts = {}
        for row in rows:
            upstream = parse_upstream(row.url)
            hosts[f"{MIRROR}{row.name.key}"] = "" if upstream.is_local else upstream.host
        await self.catalog.enrol(hosts)

    async def find_published(self, name: MirrorName) -> Generation | None:
        with self._noting():
            found = await to_thread.run_sync(list_published, self.store, name)
        return found[-1] if found else None

    def is_kept_elsewhere(self, key: str) -> bool:
        return key in self._generations and not self._is_here(key)

    def records_changed(self, keys: Collection[str]) -> None:
        self._unrecorded |= set(keys)

    def _is_here(self, key: str) -> bool:
        return self.mirrors.path(MirrorName.parse(key)).exists()

    async def _list_here(self) -> set[str]:
        """The keys of mirrors on this disk."""
        known = {str(name): name.key for name in self.mirrors.names()}
        paths = await to_thread.run_sync(os.listdir, self.mirrors.root)
        return {known[path] for path in paths if path in known}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Remember for health whether the store could be used."""
        try:
            yield
        except (StoreUnavailableError, StoreDamagedError) as error:
            if isinstance(error, StoreUnavailableError):
                self._fault = "the store cannot be reached; what is on this machine is served"
            raise
        self._fault = None

    # -- what runs all the time -----------------------------------------------------------------

    async def _look_forever(self) -> None:
        while True:
            try:
                await self._look()
            except CatalogUnavailableError:
                pass  # health says so
            except MirrordError as error:
                log.warning("fleet.failed", detail=error.message)
            except Exception:
                log.exception("fleet.crashed")
            await anyio.sleep(LOOK.total_seconds())

    async def _look(self) -> None:
        here = await self._list_here()
        if self._looks % _HEARTBEAT == 0:
            state = {"mirrors": len(here), "behind": len(self._behind), "fault": self._fault}
            state["holder"] = self.claims.holder
            name = socket.gethostname()
            await self.catalog.put_node(self.catalog.node, name, __version__, state)
        self._looks += 1
        await self._read_changes()
        self._begin("follow", self._catch_up)
        self._begin("records", self._publish_records)
        if self._fault:
            self._begin("store", self._try_store)
        if "round" not in self._work and self.settings().sync.interval:
            await self._claim_round(here)

    async def _try_store(self) -> None:
        """So that health does not wait for the next sync."""
        with suppress(StoreUnavailableError), self._noting():
            await to_thread.run_sync(partial(self.store.get, "checks/none", limit_bytes=1))

    async def _read_changes(self) -> None:
        version, topics = await self.catalog.list_changes(self._version)
        if not topics:
            return
        kinds = {kind: {it.removeprefix(kind) for it in topics if it.startswith(kind)}
                 for kind in (MIRROR, PINS)}  # fmt: skip
        if "mirrors" in topics:
            for name in await self.mirrors.refresh():
                log.info("mirror.removed_elsewhere", mirror=str(name))
                self._generations.pop(name.key, None)
                await self.on_gone(name)
            await self.on_mirrors()
        if kinds[MIRROR]:
            await self._refresh(kinds[MIRROR])
        if any(it.startswith("dataset/") for it in topics):
            self.datasets.forget()
        self._behind |= {key for key in kinds[MIRROR] | kinds[PINS] if self._is_here(key)}
        self._repinned |= self._behind & kinds[PINS]
        self._version = version

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Have work done beside the looks, one of each kind at a time."""
        if name in self._work:
            return

        async def run() -> None:
            try:
                await work()
            except CatalogUnavailableError:
                pass
            except Exception:
                log.exception("fleet.crashed", work=name)
            finally:
                del self._work[name]

        self._work[name] = asyncio.create_task(run())

    async def _catch_up(self) -> None:
        """Follow what was published of the mirrors here, and their pins."""
        for key in sorted(self._behind):
            name = MirrorName.parse(key)
            try:
                async with self.mirrors.lock(name):
                    has_pins = key in self._repinned
                    self._repinned.discard(key)
                    if self._is_here(key) and not await self.mirrors.catch_up(name) and has_pins:
                        await self.mirrors.pins.follow(self.mirrors.repository(name))
                self._behind.discard(key)
            except CatalogUnavailableError:
                self._repinned.add(key)
                raise
            except (MirrordError, OSError) as error:  # again at the next look
                self._repinned.add(key)
                log.warning("mirror.behind", mirror=str(name), detail=str(error))
                if isinstance(error, StoreUnavailableError | DiskFullError):
                    return

    async def _publish_records(self) -> None:
        keys, self._unrecorded = self._unrecorded, set()
        for key in sorted(keys):
            name = MirrorName.parse(key)
            try:
                async with self.turn(name) as turn, self.mirrors.lock(name):
                    if self._is_here(key):
                        await turn.publish(self.mirrors.repository(name))
            except (MirrordError, OSError) as error:
                log.warning("mirror.unpublished", mirror=str(name), detail=str(error))
                self._unrecorded.add(key)

    # -- what is due ----------------------------------------------------------------------------

    async def _claim_round(self, here: set[str]) -> None:
        holds = await self.claims.claim_due(most=_ROUND, here=here, patience=_PATIENCE)
        for hold in holds:
            if hold.claim.key == _COLLECTION:
                hold.after = _COLLECTION_INTERVAL
                work = partial(self._operate, "store.collect", "the store", self._collect)
                self._begin("collection", partial(self._round, [hold], work))
        if syncs := [hold for hold in holds if hold.claim.key != _COLLECTION]:
            first, count = syncs[0].claim.key.removeprefix(MIRROR), len(syncs)
            subject = first if count == 1 else f"{count} mirrors"
            run = partial(self._sync_all, syncs)  # takes out what it gives back
            work = partial(self._operate, "mirror.sync", subject, run)
            self._begin("round", partial(self._round, syncs, work))

    async def _operate(self, kind: str, subject: str, run: Work) -> None:
        await self.operations.wait(self.operations.start(kind, subject, run).id)

    async def _round(self, holds: list[Hold], work: Callable[[], Awaitable[None]]) -> None:
        """Do work under claims that were due, and give those back that it has not given back."""
        try:
            await work()
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(holds)

    async def _end(self, holds: list[Hold]) -> None:
        for hold in holds:
            hold.users -= 1
        ended = [hold for hold in holds if not hold.users]
        holds.clear()
        await self.claims.give_back(ended)

    async def _sync_all(self, holds: list[Hold], progress: ProgressSink) -> dict[str, int]:
        """Sync mirrors that are due; those that did not change are recorded together."""
        rows = {row.name.key: row for row in await self.catalog.list_mirrors()}
        await self._refresh([hold.claim.key.removeprefix(MIRROR) for hold in holds])
        waiting, unchanged = await self.datasets.list_waiting(), list[str]()
        slots = anyio.CapacityLimiter(self.settings().sync.concurrency)
        counts, total = {"done": 0, "failed": 0}, len(holds)

        async def sync(hold: Hold) -> None:
            row = rows.get(hold.claim.key.removeprefix(MIRROR))
            if row is None:
                return  # removed since
            hold.row, hold.unchanged = row, unchanged
            async with slots:
                try:
                    result = await self.mirrors.sync(row.name)
                    if result.changed or row.name.key in waiting:
                        # others may wait for it; and who has a dataset's claim may, too
                        holds.remove(hold)
                        await self._end([hold])
                        await self.datasets.repin(row.name)
                except (MirrordError, OSError) as error:
                    counts["failed"] += 1
                    hold.after, hold.has_failed = await self._retry_after(hold, row, error), True
            counts["done"] += 1
            note = row.name.repo
            progress(Progress(done=counts["done"], total=total, unit="mirrors", note=note))

        try:
            async with anyio.create_task_group() as tasks:
                for hold in [*holds]:
                    tasks.start_soon(sync, hold)
        finally:
            with anyio.CancelScope(shield=True):
                if unchanged:
                    await self.catalog.record_unchanged(unchanged, utc_now())
        return counts

    async def _retry_after(self, hold: Hold, row: MirrorRow, error: Exception) -> timedelta:
        """A mirror never synced and unknown upstream is probably a mistyped name."""
        interval = self.settings().sync.interval
        if isinstance(error, UpstreamNotFoundError | UpstreamAuthError) and not row.synced_at:
            return _NEVER_FOUND_INTERVAL
        failures = await self.catalog.count_failures(hold.claim.key)
        asked = error.facts.get("retry_after_s") if isinstance(error, MirrordError) else None
        pause: timedelta = min(_RETRY * 2.0 ** min(failures, 16), interval)
        return max(pause, min(timedelta(seconds=asked or 0), timedelta(days=1)))

    async def _collect(self, progress: ProgressSink) -> dict[str, int]:
        """Drop what no generation needs any more from the store, of the mirrors there are."""
        now, objects, size = await to_thread.run_sync(clock_of, self.store), 0, 0
        keys = await to_thread.run_sync(self.store.directories, "mirrors/")
        for number, key in enumerate(keys):
            progress(Progress(done=number, total=len(keys), unit="mirrors", note=key))
            row = await self.catalog.find_mirror(key)
            if row is None:
                continue  # what is left of a removed mirror, or of a catalog that is lost
            async with self.turn(row.name):
                newest = self._generations.get(key)
                try:
                    with self._noting():
                        dropped = await to_thread.run_sync(
                            collect, self.store, row.name, newest, now
                        )
                except StoreDamagedError as error:
                    log.warning("store.damaged", mirror=str(row.name), detail=error.message)
                    continue
            objects, size = objects + dropped.objects, size + dropped.size_bytes
        return {"objects": objects, "size_bytes": size}
