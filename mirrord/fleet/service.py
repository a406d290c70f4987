"""A daemon in a fleet: its claims of mirrors, the generations it publishes and follows.

The catalog lists the mirrors, the store has them all, this disk has those that were asked for here.
Without the catalog or the store a daemon serves what is on its disk, and health reports it.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio import to_thread

from .. import errors, protocol
from ..bundles.service import Bundles
from ..catalog import MIRROR, REPAIR, Generation, HeldClaim, MirrorRow
from ..host.files import read_plain
from ..mirrors.refs import followed_refs, lasting_refs, write_durably
from ..mirrors.repository import HISTORY, Repository
from ..mirrors.sharing import MirrorClaim, Sharing
from ..mirrors.upstreams.upstream import parse_upstream
from ..model import CommitId, MirrorName
from ..presence import exists
from ..protocol import Progress, ProgressSink
from ..telemetry import log
from .claims import Claims, Hold
from .exchange import Exchange, SharedClosures
from .generations import is_before, list_published, read_generation, write_generation
from .objects import ObjectStore


def read_node(state_dir: Path) -> str:
    """Return the id of this state directory's node, made at its first start."""
    path = state_dir / "node"
    with suppress(FileNotFoundError):
        # an empty file, as a power cut may leave one, is no id
        if node := read_plain(path).decode("ascii").strip():
            return node
    made = secrets.token_hex(8)
    write_durably(path, f"{made}\n".encode())
    return made


@dataclass(eq=False, slots=True)
class FleetMirrorClaim(MirrorClaim):
    """Held until the catalog gives the work to another daemon."""

    fleet: "Fleet"
    name: MirrorName
    hold: Hold

    async def publish(self, repository: Repository) -> None:
        await self.fleet.publish(self, repository)

    def defers_recording(self, row: MirrorRow) -> bool:
        if self.hold.unchanged is None:
            return False
        self.hold.unchanged.append(row.name.key)
        return True


@dataclass(eq=False)
class Fleet(Sharing):
    """Opened before the mirrors are. `rounds` work on the sets of mirror keys."""

    store: ObjectStore
    bundles: Bundles
    is_fleet = True

    def __post_init__(self) -> None:
        self.mirrors = self.bundles.mirrors
        self.catalog, self.settings = self.mirrors.catalog, self.mirrors.settings
        self.exchange = Exchange(self.store, self.mirrors.quarantine)
        self.claims = Claims(self.catalog, lambda: self.settings().sync.concurrency)
        self.generations: dict[str, Generation] = {}
        self.version = -1  # of the catalog when the generations were read
        self.behind: set[str] = set()  # `rounds` alone ends it, once the pins are followed too
        self.unrecorded: set[str] = set()  # whose records are to be published
        self.damaged: dict[str, float] = {}  # since when the store lacks some of a generation
        self.unfinished: set[str] = set()  # whose claim an outage ended
        self.lost: dict[str, Generation] = {}  # generations that the catalog no longer knows
        self.fault: str | None = None  # of the store
        self.refusals = 0  # of the store since the start
        self.closures = SharedClosures(
            self.catalog, self.store, self.noting, lambda: bool(self.outages())
        )

    async def open(self) -> None:
        """Read the generations, and begin to renew claims."""
        self.version, _ = await self.catalog.list_changes(-1)
        self.generations = await self.catalog.list_generations()
        self._renewal = asyncio.create_task(self.claims.renew_forever())

    async def close(self) -> None:
        """Give back all claims."""
        self._renewal.cancel()
        await asyncio.gather(self._renewal, return_exceptions=True)
        await self.claims.give_back([*self.claims.held.values()])
        with suppress(errors.CatalogUnavailableError):
            await self.catalog.delete_node(self.catalog.node)

    async def apply(self) -> None:
        """Make syncs due within the configured interval, which a reload may have shortened."""
        if interval := self.settings().sync.interval:
            await self.catalog.hasten(interval)

    def outages(self) -> list[str]:
        """Return why nothing can be published or followed."""
        if not self.fault and self.store.is_silent():
            return ["the store does not answer; what is on this machine is served"]
        return [self.fault] if self.fault else []

    async def status(self) -> protocol.FleetStatus:
        """Without the catalog, say so in `fault`; nodes and claims are then empty."""
        try:
            nodes = await self.catalog.list_nodes()
            held = await self.catalog.list_claims()
        except errors.CatalogUnavailableError as error:
            nodes, held, lost = [], [], [error.message]
        else:
            lost = []
        return protocol.FleetStatus(
            node=self.catalog.node,
            store=self.store.shown,
            fault=next(iter([*self.outages(), *self.catalog.outages(), *lost]), None),
            generations=len(self.generations),
            behind=sorted(self.behind),
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

    # -- claims ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def claim(
        self, name: MirrorName, progress: ProgressSink | None = None
    ) -> AsyncIterator[FleetMirrorClaim]:
        def wait(holder: HeldClaim | None) -> None:
            if progress:
                fact = f"another daemon has {name}" if holder else "its host has enough connections"
                progress(Progress(unit="syncs", note=fact))

        key, work = name.key, f"{MIRROR}{name.key}"
        is_sync = progress is not None and work not in self.claims.held
        # who waited for another daemon's sync takes its result and asks no upstream
        before = await self.catalog.find_mirror(key) if is_sync else None
        async with self.claims.holding(work, wait) as (hold, was_claimed):
            claim = FleetMirrorClaim(self, name, hold)
            claim.row = hold.row
            if hold.row is None:
                await self.refresh([key])
            if was_claimed and before and (after := await self.catalog.find_mirror(key)):
                claim.is_fresh = after.synced_at != before.synced_at and not after.error
            try:
                yield claim
            except (errors.CatalogUnavailableError, errors.StoreUnavailableError):
                self.unfinished.add(key)
                raise
            except errors.ClaimLostError:  # tips that only this node has are kept by the next poll
                self.unrecorded.add(key)
                raise
            if claim.is_synced:
                hold.after, hold.has_failed = self.settings().sync.interval or None, False

    @asynccontextmanager
    async def exclusive(self, work: str) -> AsyncIterator[None]:
        async with self.claims.holding(work):
            yield

    async def publish(
        self, claim: FleetMirrorClaim, repository: Repository, *, is_whole: bool = True
    ) -> None:
        """Publish a mirror as its next generation; upload all of it if the last is not whole."""
        name, epoch = claim.name, claim.hold.claim.epoch
        # a generation replaces the one before, so it must have what others published
        if is_whole and await self.is_behind(repository):
            await self.follow(repository)
        row = claim.row or await self.catalog.find_mirror(name.key)
        if row is None:
            return  # removed
        previous = self.generations.get(name.key)
        if newer := await self.find_lost(repository):
            self.lost[name.key] = newer
            failure = f"cannot publish mirror {name}: the catalog has an older state"
            hint = "the catalog is being brought up to date; try again in a minute"
            raise errors.ClaimLostError(failure, hint=hint)

        async def accept(new: Generation) -> bool:
            holder = self.claims.holder
            return await self.catalog.publish_generation(holder, name.key, new, previous)

        with self.noting():
            made = await self.exchange.publish(
                repository, lasting_refs(await repository.all_refs()), await repository.head(),
                url=row.url, epoch=epoch, previous=previous, accept=accept,
                record=partial(self.bundles.write_records, row, repository), is_whole=is_whole,
            )  # fmt: skip
        if made is None:
            return
        self.generations[name.key] = made
        await to_thread.run_sync(write_generation, repository, made)
        log.info("mirror.published", mirror=str(name), epoch=made.epoch, number=made.number)

    async def repair(self, claim: FleetMirrorClaim, repository: Repository) -> bool:
        """Publish a mirror again if the store lacks some of it; return whether it did.

        A mirror that is behind then publishes less than the damaged generation had. A node with
        more keeps its objects and publishes them later.
        """
        newest = self.generations.get(repository.name.key)
        if newest is None:
            return False  # removed
        try:
            with self.noting():
                await self.exchange.prove(repository.name, newest)
        except errors.StoreDamagedError as error:
            log.warning("store.damaged", mirror=str(repository.name), detail=error.message)
        else:
            return False
        await self.publish(claim, repository, is_whole=False)
        return True

    async def ask_for_repair(self, key: str) -> None:
        """Let a daemon that has the whole mirror check and repair it in the store."""
        with suppress(errors.CatalogUnavailableError):
            # without the catalog: the daily collection finds the damage again
            await self.catalog.enrol({f"{REPAIR}{key}": ""})

    # -- generations ----------------------------------------------------------------------------

    async def is_behind(self, repository: Repository, *, ask: bool = False) -> bool:
        key = repository.name.key
        if ask:
            await self.refresh([key])
        newest = self.generations.get(key)
        if newest is None:
            return False
        return is_before(await to_thread.run_sync(read_generation, repository.path), newest)

    async def find_lost(self, repository: Repository) -> Generation | None:
        """Return the generation of a mirror on disk if it is newer than the catalog's."""
        own = await to_thread.run_sync(read_generation, repository.path)
        return own if own and is_before(self.generations.get(repository.name.key), own) else None

    async def is_known(self, repository: Repository) -> bool:
        return await to_thread.run_sync(read_generation, repository.path) is not None

    async def has_published(self, repository: Repository, commits: Collection[CommitId]) -> bool:
        key = repository.name.key
        own = await to_thread.run_sync(read_generation, repository.path)
        if own is None or own != self.generations.get(key):
            return False
        refs, row = await repository.all_refs(), await self.catalog.find_mirror(key)
        # a sync whose publication failed has moved the refs, and recorded nothing
        if row is None or row.history is None or row.history != refs.get(HISTORY):
            return False
        return await repository.reaches(followed_refs(refs).values(), commits)

    async def follow(self, repository: Repository) -> None:
        key = repository.name.key
        try:
            with self.noting():
                await self.exchange.follow(repository, self.generations[key])
        except errors.StoreDamagedError:
            self.damaged.setdefault(key, time.monotonic())
            await self.ask_for_repair(key)
            raise
        self.damaged.pop(key, None)

    async def refresh(self, keys: Collection[str]) -> None:
        generations = await self.catalog.list_generations(keys)
        for key in keys:
            self.generations.pop(key, None)
        self.generations |= generations

    async def enrol(self, rows: Collection[MirrorRow]) -> None:
        hosts = {}
        for row in rows:
            upstream = parse_upstream(row.url)
            hosts[f"{MIRROR}{row.name.key}"] = "" if upstream.is_local else upstream.host
        await self.catalog.enrol(hosts)

    async def find_published(self, name: MirrorName) -> Generation | None:
        with self.noting():
            published = await to_thread.run_sync(list_published, self.store, name)
        return published[-1] if published else None

    def is_kept_elsewhere(self, key: str) -> bool:
        return key in self.generations and not self.is_on_disk(key)

    def records_changed(self, keys: Collection[str]) -> None:
        self.unrecorded |= set(keys)

    def is_on_disk(self, key: str) -> bool:
        return exists(self.mirrors.path(MirrorName.parse(key)))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Report an outage of the store to health, until it takes what it refused."""
        try:
            yield
        except errors.StoreUnavailableError as error:
            is_full = isinstance(error, errors.StoreFullError)
            fact = "has no room" if is_full else "cannot be reached"
            self.fault = f"the store {fact}; what is on this machine is served"
            self.refusals += 1
            raise
