"""The periodic work of a daemon in a fleet: follow the others, sync what is due, tidy the store.

Every few seconds each daemon polls the catalog for changes, and claims a round of the work that is
due. It claims the next round once everything in this one has begun, so that the longest sync keeps
no other mirror waiting. A later poll repeats what failed. Without the catalog nothing runs, and
health reports it.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import anyio
from anyio import to_thread

from .. import __version__, errors
from ..catalog import MIRROR, PINS, REPAIR, RESTORED, MirrorRow
from ..datasets.service import Datasets
from ..jobs.operations import Operations, Work, task_group, together
from ..model import MirrorName, utc_now
from ..protocol import Progress, ProgressSink
from ..telemetry import log
from .claims import Hold
from .collection import clock_of, collect
from .exchange import list_needed
from .generations import is_before
from .restore import Restoration
from .service import Fleet

# how late a daemon learns of another one's changes, and begins syncs that are due; one indexed
# query for each node
POLL_INTERVAL = timedelta(seconds=5)
# 15 s: a poll reads, a heartbeat writes
_HEARTBEAT_POLLS = 3
_ROUND_SIZE = 250  # mirrors that one daemon claims at a time
_SYNC_GRACE = timedelta(seconds=10)  # until a daemon that lacks a mirror syncs it
_REPAIR_AFTER = timedelta(minutes=10)  # until the store is repaired from a mirror that is behind
_RECORD_INTERVAL = timedelta(seconds=10)  # of mirrors that did not change
_COLLECTION = "store/collect"
# objects are kept for a day after they were replaced, so once a day is enough
_COLLECTION_INTERVAL = timedelta(hours=24)
# doubles with each failure, up to the interval of the work
_RETRY = timedelta(minutes=1)
# as of a daemon alone (`engine.timetable`)
_NEVER_FOUND_INTERVAL = timedelta(days=7)


@dataclass(eq=False, kw_only=True)
class Rounds:
    """Opened last of all.

    `on_gone` forgets what was built from a mirror that another daemon removed; `on_mirrors` is
    called after mirrors were added or removed.
    """

    fleet: Fleet
    datasets: Datasets
    operations: Operations
    on_gone: Callable[[MirrorName], Awaitable[None]]
    on_mirrors: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self.mirrors, self.catalog = self.fleet.mirrors, self.fleet.catalog
        self._news: set[str] = set()  # mirrors of which more was heard since they were followed
        self._unbegun: set[str] = set()  # claims of mirrors that wait for a connection
        self._slots = anyio.CapacityLimiter(1)
        self._polls = 0
        self._adopt_any_at = 0  # the poll from which mirrors that are not here are adopted too
        self._work: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Begin to follow other daemons, and to sync what is due."""
        await self.catalog.enrol({_COLLECTION: ""})
        for key in await self._list_on_disk():
            repository = self.mirrors.repository(MirrorName.parse(key))
            if newer := await self.fleet.find_lost(repository):
                self.fleet.lost[key] = newer
        self._hear({key for key in self.fleet.generations if self.fleet.is_on_disk(key)})
        self._polling = asyncio.create_task(self._poll_forever())

    async def close(self) -> None:
        tasks = [self._polling, *self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- polls ----------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self._poll()
            except errors.CatalogUnavailableError:
                pass  # reported by health
            except errors.MirrordError as error:
                log.warning("fleet.failed", detail=error.message)
            except Exception:
                log.exception("fleet.crashed")
            # syncs begin at a poll: with an interval of 3 s they would begin every 5
            interval = self.fleet.settings().sync.interval or POLL_INTERVAL
            await anyio.sleep(min(interval, POLL_INTERVAL).total_seconds())

    async def _poll(self) -> None:
        on_disk = await self._list_on_disk()
        if self._polls % _HEARTBEAT_POLLS == 0:
            fleet, name = self.fleet, socket.gethostname()
            state = {"mirrors": len(on_disk), "behind": len(fleet.behind), "fault": fleet.fault}
            state["holder"] = fleet.claims.holder
            with suppress(errors.CatalogFullError):  # it can still be read
                await self.catalog.put_node(self.catalog.node, name, __version__, state)
            await self.mirrors.refresh_errors()
        self._polls += 1
        await self._read_changes()
        if self.fleet.lost:
            self._begin("adopt", self._adopt)
        self._begin("follow", self._catch_up)
        if self.fleet.fault:
            self._begin("store", self._mend_store)
        else:
            self._begin("records", self._publish_records)
            self._begin("unfinished", self._sync_unfinished)
        if not self._unbegun:
            await self._claim_round(on_disk)

    async def _list_on_disk(self) -> set[str]:
        """List the keys of the mirrors on this disk."""
        keys = {str(name): name.key for name in self.mirrors.names()}
        paths = await to_thread.run_sync(os.listdir, self.mirrors.root)
        return {keys[path] for path in paths if path in keys}

    async def _mend_store(self) -> None:
        """Clear the fault of the store once it takes what it refused, which may be large."""
        refusals = self.fleet.refusals
        with suppress(errors.StoreUnavailableError), self.fleet.noting():
            await to_thread.run_sync(self.fleet.store.probe_write)
            await self._publish_records()
            await self._sync_unfinished()
            # another refusal meanwhile keeps the fault
            if refusals == self.fleet.refusals:
                self.fleet.fault = None

    async def _read_changes(self) -> None:
        version, topics = await self.catalog.list_changes(self.fleet.version)
        if version < self.fleet.version:
            await self.catalog.note_restored(self.fleet.version)
        if version < self.fleet.version or RESTORED in topics:
            await self._read_all()
            return
        if not topics:
            return
        kinds = {kind: {it.removeprefix(kind) for it in topics if it.startswith(kind)}
                 for kind in (MIRROR, PINS)}  # fmt: skip
        if "mirrors" in topics:
            await self._read_mirrors()
        if kinds[MIRROR]:
            await self.fleet.refresh(kinds[MIRROR])
        if any(it.startswith("dataset/") for it in topics):
            self.datasets.expire_cache()
        self._hear({key for key in kinds[MIRROR] | kinds[PINS] if self.fleet.is_on_disk(key)})
        self.fleet.version = version

    def _hear(self, keys: Collection[str]) -> None:
        """Note that generations or pins of mirrors are new, also for those being followed now."""
        self.fleet.behind |= {*keys}
        self._news |= {*keys}

    async def _read_mirrors(self) -> None:
        for name in await self.mirrors.refresh(self.fleet.lost):
            log.info("mirror.removed_elsewhere", mirror=str(name))
            self.fleet.generations.pop(name.key, None)
            await self.on_gone(name)
        await self.on_mirrors()

    async def _read_all(self) -> None:
        """Read a catalog that went back to an older state, and note what it has lost."""
        version, _ = await self.catalog.list_changes(-1)
        before, now = self.fleet.generations, await self.catalog.list_generations()
        lost = {key: old for key, old in before.items() if is_before(now.get(key), old)}
        log.warning("catalog.went_back", seen=self.fleet.version, mirrors=len(lost))
        self.fleet.lost |= lost
        self.fleet.generations = now
        self._adopt_any_at = self._polls + _HEARTBEAT_POLLS
        await self.catalog.enrol({_COLLECTION: ""})
        await self._read_mirrors()
        self.datasets.expire_cache()
        self._hear(await self._list_on_disk())
        self.fleet.version = version

    async def _adopt(self) -> None:
        """Restore what the catalog has lost of mirrors, their pins and rows, from the store.

        One daemon does it for each mirror: one that has it on disk, or later any.
        """
        restoration = Restoration(self.fleet.exchange, self.fleet.bundles)
        for key, generation in sorted(self.fleet.lost.items()):
            if not self.fleet.is_on_disk(key) and self._polls < self._adopt_any_at:
                continue
            try:
                async with self.fleet.exclusive(f"adopt/{key}"):
                    now = (await self.catalog.list_generations([key])).get(key)
                    if is_before(now, generation):
                        restored = await restoration.restore(key, generation, 0)
                        self.datasets.rows_changed(restored.datasets)
                        log.warning("mirror.adopted", mirror=restored.mirror)
                del self.fleet.lost[key]
            except errors.CatalogUnavailableError:
                raise
            except (errors.MirrordError, OSError) as error:  # the next poll tries again
                log.warning("mirror.not_adopted", mirror=key, detail=str(error))

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run work beside the polls, one of each name at a time."""
        if name in self._work:
            return

        async def run() -> None:
            try:
                await work()
            except errors.CatalogUnavailableError:
                pass
            except Exception:
                log.exception("fleet.crashed", work=name)
            finally:
                del self._work[name]

        self._work[name] = asyncio.create_task(run())

    async def _catch_up(self) -> None:
        """Follow the generations and pins of the mirrors here."""
        for key in sorted(self.fleet.behind - self.fleet.lost.keys()):
            name = MirrorName.parse(key)
            try:
                async with self.mirrors.lock(name):
                    # before the work: what is heard during it needs another turn
                    self._news.discard(key)
                    if self.fleet.is_on_disk(key) and not await self.mirrors.catch_up(name):
                        await self.mirrors.pins.follow(self.mirrors.repository(name))
                if key not in self._news:
                    self.fleet.behind.discard(key)
            except errors.CatalogUnavailableError:
                raise
            except (errors.MirrordError, OSError) as error:  # the next poll tries again
                log.warning("mirror.behind", mirror=str(name), detail=str(error))
                if isinstance(error, errors.StoreUnavailableError | errors.DiskFullError):
                    return

    async def _publish_records(self) -> None:
        for key in sorted(self.fleet.unrecorded):
            # before the work, so that what changes meanwhile is published by the next poll
            self.fleet.unrecorded.discard(key)
            name = MirrorName.parse(key)
            try:
                async with self.fleet.claim(name) as claim, self.mirrors.lock(name):
                    if self.fleet.is_on_disk(key):
                        await claim.publish(self.mirrors.repository(name))
            except (errors.MirrordError, OSError) as error:
                log.warning("mirror.unpublished", mirror=str(name), detail=str(error))
                self.fleet.unrecorded.add(key)
                if isinstance(error, errors.StoreUnavailableError):
                    return

    async def _sync_unfinished(self) -> None:
        """Repeat the syncs that an outage ended, once it is over."""
        for key in sorted(self.fleet.unfinished):
            self.fleet.unfinished.discard(key)
            try:
                name = (await self.mirrors.sync(MirrorName.parse(key))).mirror
                await self.datasets.repin(MirrorName.parse(name))
            except (errors.CatalogUnavailableError, errors.StoreUnavailableError):
                self.fleet.unfinished.add(key)
                return
            except (errors.MirrordError, OSError):
                pass  # the row has the error, and the claim the time of the next try

    # -- rounds ---------------------------------------------------------------------------------

    async def _claim_round(self, on_disk: set[str]) -> None:
        past = time.monotonic() - _REPAIR_AFTER.total_seconds()
        long_damaged = {key for key, since in self.fleet.damaged.items() if since < past}
        able_to_repair = on_disk - (self.fleet.behind - long_damaged)
        local = {f"{MIRROR}{key}" for key in on_disk} | {f"{REPAIR}{key}" for key in able_to_repair}
        has_syncs = bool(self.fleet.settings().sync.interval)
        syncs = []
        due = await self.fleet.claims.claim_due(
            most=_ROUND_SIZE, local=local, grace=_SYNC_GRACE, with_syncs=has_syncs
        )
        for hold in due:
            if hold.claim.key == _COLLECTION:
                hold.after = _COLLECTION_INTERVAL
                work = partial(self._operate, "store.collect", "the store", self._collect)
                self._begin("collection", partial(self._round, [hold], work))
            elif hold.claim.key.startswith(REPAIR):
                name = self.mirrors.get_name(hold.claim.key.removeprefix(REPAIR))
                repair = partial(self._repair, hold, name)
                work = partial(self._operate, "store.repair", str(name), repair)
                self._begin(hold.claim.key, partial(self._round, [hold], work))
            else:
                syncs.append(hold)
        if syncs:
            first, count = syncs[0].claim.key.removeprefix(MIRROR), len(syncs)
            subject = first if count == 1 else f"{count} mirrors"
            run = partial(self._sync_all, syncs)  # removes from the list what it gives back
            work = partial(self._operate, "mirror.sync", subject, run)
            self._unbegun = {hold.claim.key for hold in syncs}
            self._begin(f"round {syncs[0].claim}", partial(self._round, syncs, work))

    async def _operate(self, kind: str, subject: str, run: Work) -> None:
        await self.operations.wait(self.operations.start(kind, subject, run).id)

    async def _round(self, holds: list[Hold], work: Callable[[], Awaitable[None]]) -> None:
        """Work under claims, then give back those that are left in `holds`."""
        keys = {hold.claim.key for hold in holds}
        try:
            await work()
        finally:
            self._unbegun -= keys
            with anyio.CancelScope(shield=True):
                await self._end(holds)

    async def _end(self, holds: list[Hold]) -> None:
        for hold in holds:
            hold.users -= 1
        ended = [hold for hold in holds if not hold.users]
        holds.clear()
        await self.fleet.claims.give_back(ended)

    async def _sync_all(self, holds: list[Hold], progress: ProgressSink) -> dict[str, int]:
        """Sync mirrors; those that did not change are recorded in one statement."""
        rows = {row.name.key: row for row in await self.catalog.list_mirrors()}
        await self.fleet.refresh([hold.claim.key.removeprefix(MIRROR) for hold in holds])
        waiting, unchanged = await self.datasets.list_waiting(), list[str]()
        self._slots.total_tokens = self.fleet.settings().sync.concurrency
        counts, total = {"done": 0, "failed": 0}, len(holds)

        async def sync(hold: Hold) -> None:
            async with self._slots:
                self._unbegun.discard(hold.claim.key)
                row = rows.get(hold.claim.key.removeprefix(MIRROR))
                if row is None:
                    return  # removed since
                hold.row, hold.unchanged = row, unchanged
                try:
                    result = await self.mirrors.sync(row.name)
                    if result.changed or row.name.key in waiting:
                        # at once: others may wait for the claim, and repin takes a dataset's
                        holds.remove(hold)
                        await self._end([hold])
                        await self.datasets.repin(row.name)
                except (errors.MirrordError, OSError) as error:
                    counts["failed"] += 1
                    hold.after, hold.has_failed = await self._retry_after(hold, row, error), True
            counts["done"] += 1
            note = row.name.repo
            progress(Progress(done=counts["done"], total=total, unit="mirrors", note=note))

        async def record() -> None:
            if keys := {*unchanged}:
                await self.catalog.record_unchanged(keys, utc_now())
                # in place: every hold of the round appends to this list
                unchanged[:] = [key for key in unchanged if key not in keys]
                ended = [hold for hold in holds if hold.claim.key.removeprefix(MIRROR) in keys]
                for hold in ended:
                    holds.remove(hold)
                await self._end(ended)

        async def record_some() -> None:
            """Give claims back during the round, because clients may wait for them."""
            while True:
                await anyio.sleep(_RECORD_INTERVAL.total_seconds())
                with suppress(errors.CatalogUnavailableError):
                    await record()

        try:
            async with task_group() as beside:
                recording = beside.create_task(record_some())
                # a copy: syncs take their holds from the list
                await together(map(sync, [*holds]))
                recording.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await record()
        return counts

    async def _repair(
        self, hold: Hold, name: MirrorName, progress: ProgressSink
    ) -> dict[str, bool]:
        """Repair a mirror in the store from the one here."""
        progress(Progress(done=0, total=1, unit="mirrors", note=name.repo))
        try:
            async with self.fleet.claim(name) as claim, self.mirrors.lock(name):
                is_damaged = await self.fleet.repair(claim, self.mirrors.repository(name))
            await self.catalog.finish(hold.claim)
        except (errors.MirrordError, OSError):
            failures = await self.catalog.count_failures(hold.claim.key)
            # at most 17 hours: there is no interval that would bound it
            hold.after, hold.has_failed = _RETRY * 2.0 ** min(failures, 10), True
            raise
        return {"was_damaged": is_damaged}

    async def _retry_after(self, hold: Hold, row: MirrorRow, error: Exception) -> timedelta:
        interval = self.fleet.settings().sync.interval
        unknown = errors.UpstreamNotFoundError | errors.UpstreamAuthError
        if isinstance(error, unknown) and not row.synced_at:  # probably a mistyped name
            return _NEVER_FOUND_INTERVAL
        failures = await self.catalog.count_failures(hold.claim.key)
        asked = error.facts.get("retry_after_s") if isinstance(error, errors.MirrordError) else None
        # beyond 16 it is above any interval, and at last more than a timedelta holds
        pause: timedelta = min(_RETRY * 2.0 ** min(failures, 16), interval)
        return max(pause, timedelta(seconds=asked or 0))

    async def _collect(self, progress: ProgressSink) -> dict[str, int]:
        """Drop from the store what the mirrors' generations no longer need."""
        now, objects, size = await to_thread.run_sync(clock_of, self.fleet.store), 0, 0
        keys = await to_thread.run_sync(self.fleet.store.directories, "mirrors/")
        for number, key in enumerate(keys):
            progress(Progress(done=number, total=len(keys), unit="mirrors", note=key))
            row = await self.catalog.find_mirror(key)
            if row is None:
                continue  # of a removed mirror, or of a lost catalog
            async with self.fleet.claim(row.name):
                newest = self.fleet.generations.get(key)
                kept = await list_needed(self.catalog, row.name)
                work = partial(collect, self.fleet.store, row.name, newest, now, kept=kept)
                try:
                    with self.fleet.noting():
                        dropped = await to_thread.run_sync(work)
                except errors.StoreDamagedError as error:
                    log.warning("store.damaged", mirror=str(row.name), detail=error.message)
                    await self.fleet.ask_for_repair(key)
                    continue
            if dropped.lost:
                await self.fleet.ask_for_repair(key)
            objects, size = objects + dropped.objects, size + dropped.size_bytes
        return {"objects": objects, "size_bytes": size}
