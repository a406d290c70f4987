"""The database of mirrors, pins, datasets, instances, recorded commits and audits.

As the daemon sees it: a table of queries, each one transaction, each in a thread.

Never on a warm checkout's path. With SQLite never the truth about pins: those are refs in the
mirrors, and the catalog follows; on PostgreSQL, which a fleet shares, it is, and refs follow.
Committed means durable: a crash loses nothing and halves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    nullcontext,
)
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
from sqlalchemy import Connection

from .. import errors
from ..git.workers import Workers
from ..protocol import DatasetChange, RowsChange
from ..telemetry import log
from . import datasets, fleet, mirrors, spool
from .database import Database, Mode, migrate, prepare
from .datasets import EVERY, Servable
from .fleet import MIRROR, REPAIR, RESTORED
from .mirrors import PINS
from .schema import (
    Claim,
    DatasetHead,
    Generation,
    HeldClaim,
    InstanceRow,
    JudgementRow,
    MirrorRow,
    NodeRow,
    PinRow,
    ReceiptRow,
    RecordedRow,
)
from .spool import digest_of, roles_of, spooled, unspooled

__all__ = [
    "EVERY", "MIRROR", "PINS", "REPAIR", "RESTORED", "Catalog", "Claim", "DatasetHead",
    "Generation", "HeldClaim", "InstanceRow", "JudgementRow", "MirrorRow", "NodeRow", "PinRow",
    "ReceiptRow", "RecordedRow", "Servable", "digest_of", "roles_of", "spooled", "unspooled",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
Query = Callable[Concatenate[Connection, P], T]
Method = Callable[Concatenate["Catalog", P], Coroutine[Any, Any, T]]

_THREADS = 4
_PATIENCE = timedelta(seconds=10)  # for one statement of the daemon itself
_TRIES = 5  # of a write that met another one
_RETRY_S = 2.0
_FULL_S = 30.0  # what small writes find room for, a large one may not


def _reads(query: Query[P, T]) -> Method[P, T]:
    """A method that runs the query on one snapshot."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._database.read, lambda c: query(c, *args, **kwargs))

    return method


def _writes(query: Query[P, T]) -> Method[P, T]:
    """A method that runs the query as one write transaction."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.is_shared:  # other daemons write too, and a long import must not delay a claim
            return await self._run(self._database.write, lambda c: query(c, *args, **kwargs))
        async with self._writer:
            await self._reopen()
            return await self._run(self._database.write, lambda c: query(c, *args, **kwargs))

    return method


class _Outage:
    """Remembers that the database cannot be reached: it is tried every 2 s, the rest fails.

    One without room for a write is still read, and written where there is room.
    """

    def __init__(self) -> None:
        self.error: errors.CatalogUnavailableError | None = None
        self._retry_at = 0.0
        self._full_until = 0.0

    @property
    def is_full(self) -> bool:
        """Whether a write found no room a moment ago."""
        return time.monotonic() < self._full_until

    def check(self) -> None:
        if (error := self.error) is None:
            return
        if time.monotonic() < self._retry_at:
            raise errors.CatalogUnavailableError(error.message, hint=error.hint, **error.facts)
        self._retry_at = time.monotonic() + _RETRY_S

    def begin(self, error: errors.CatalogUnavailableError) -> None:
        if isinstance(error, errors.CatalogFullError):
            if not self.is_full:
                log.warning("catalog.full", detail=error.message)
            self._full_until = time.monotonic() + _FULL_S
            return
        if self.error is None:
            log.warning("catalog.lost", detail=error.message)
        self.error, self._retry_at = error, time.monotonic() + _RETRY_S

    def end(self) -> None:
        if self.error is not None:
            self.error = None
            log.info("catalog.found")


class Catalog:
    """One database. Writers of this process queue here instead of in SQLite's busy loop.

    `node` is the daemon's id in a fleet, otherwise empty.
    """

    node = ""

    def __init__(self, database: Database, workers: Workers | None) -> None:
        self._database = database
        self._outage = _Outage()
        self._workers = workers
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._writer = anyio.Lock()
        self._reopening = anyio.Lock()

    @classmethod
    async def open(cls, place: str | Path, workers: Workers | None = None) -> Self:
        """Open the SQLite file or the database URL; create or migrate it where needed.

        `workers` run migrations and imports; without them a thread does. Raises
        CorruptCatalogError, CatalogTooNewError, ResourceError.
        """
        catalog = cls(await anyio.to_thread.run_sync(Database, place, _PATIENCE), workers)
        try:
            if await anyio.to_thread.run_sync(prepare, catalog._database):
                await catalog._run_long(migrate, catalog._place)
        except BaseException:
            catalog._database.close()
            raise
        return catalog

    async def close(self) -> None:
        await anyio.to_thread.run_sync(self._database.close)

    @property
    def is_shared(self) -> bool:
        """Whether other daemons may use it at the same time: PostgreSQL."""
        return not self._database.is_sqlite

    def outages(self) -> list[str]:
        """Why requests that need the catalog are refused; health tells this to everybody."""
        if self._outage.error is not None:
            return ["the catalog's database cannot be reached; what is on this machine is served"]
        if self._outage.is_full:
            return ["the catalog's database has no room; what it has can be read"]
        return []

    put_mirror = _writes(mirrors.put_mirror)
    find_mirror = _reads(mirrors.find_mirror)
    list_mirrors = _reads(mirrors.list_mirrors)
    update_mirror = _writes(mirrors.update_mirror)
    delete_mirror = _writes(mirrors.delete_mirror)
    record_unchanged = _writes(mirrors.record_unchanged)

    put_pins = _writes(mirrors.put_pins)
    delete_pins = _writes(mirrors.delete_pins)
    list_pins = _reads(mirrors.list_pins)
    list_pin_keys = _reads(mirrors.list_pin_keys)
    count_pins = _reads(mirrors.count_pins)
    list_stale_pins = _reads(mirrors.list_stale_pins)

    find_dataset = _reads(datasets.find_dataset)
    list_datasets = _reads(datasets.list_datasets)
    summarise_datasets = _reads(datasets.summarise_datasets)
    weigh_datasets = _reads(datasets.weigh_datasets)
    count_rows = _reads(datasets.count_rows)
    delete_dataset = _writes(datasets.delete_dataset)
    put_refused = _writes(datasets.put_refused)

    find_instance = _reads(datasets.find_instance)
    count_servable = _reads(datasets.count_servable)
    list_servable = _reads(datasets.list_servable)
    list_public_ids = _reads(datasets.list_public_ids)
    list_ambiguous = _reads(datasets.list_ambiguous)
    list_instance_ids = _reads(datasets.list_instance_ids)
    list_recorded = _reads(datasets.list_recorded)
    list_unresolved = _reads(datasets.list_unresolved)
    list_unresolved_mirrors = _reads(datasets.list_unresolved_mirrors)
    resolve_instances = _writes(spool.resolve_instances)
    find_base_commit = _reads(datasets.find_base_commit)
    find_history_limit = _reads(datasets.find_history_limit)
    instances_of = _reads(datasets.instances_of)

    put_audit = _writes(mirrors.put_audit)
    find_audit = _reads(mirrors.find_audit)
    list_audits = _reads(mirrors.list_audits)
    put_report = _writes(mirrors.put_report)
    find_report = _reads(mirrors.find_report)
    list_reports = _reads(mirrors.list_reports)
    put_receipt = _writes(mirrors.put_receipt)
    find_receipt = _reads(mirrors.find_receipt)
    list_receipts = _reads(mirrors.list_receipts)
    put_judgement = _writes(mirrors.put_judgement)
    list_judgements = _reads(mirrors.list_judgements)
    find_newest_judgement = _reads(mirrors.find_newest_judgement)

    list_changes = _reads(fleet.list_changes)
    note_restored = _writes(fleet.note_restored)
    enrol = _writes(fleet.enrol)
    claim = _writes(fleet.claim)
    claim_due = _writes(fleet.claim_due)
    renew = _writes(fleet.renew)
    release = _writes(fleet.release)
    finish = _writes(fleet.finish)
    hasten = _writes(fleet.hasten)
    count_failures = _reads(fleet.count_failures)
    find_holder = _reads(fleet.find_holder)
    list_claims = _reads(fleet.list_claims)
    publish_generation = _writes(fleet.publish_generation)
    adopt_generation = _writes(fleet.adopt_generation)
    list_generations = _reads(fleet.list_generations)
    put_closure = _writes(fleet.put_closure)
    list_closures = _reads(fleet.list_closures)
    use_closures = _writes(fleet.use_closures)
    drop_closures = _writes(fleet.drop_closures)
    put_node = _writes(fleet.put_node)
    list_nodes = _reads(fleet.list_nodes)
    delete_node = _writes(fleet.delete_node)

    async def replace_dataset(
        self, head: DatasetHead, rows: Path, found: spool.Found | None = None
    ) -> DatasetChange:
        """Replace the dataset by `head` and the spooled rows, in one transaction.

        `found` are the commits that the rows' revisions are at.
        """
        async with self._writing():
            return await self._run_long(spool.replace_dataset, self._place, head, rows, found)

    async def merge_dataset(self, head: DatasetHead, rows: Path) -> int | None:
        """Add the missing rows; answers how many, or None where another dataset has the name."""
        async with self._writing():
            return await self._run_long(spool.merge_dataset, self._place, head, rows)

    async def spool_rows(self, dataset: str, key: str | None, rows: Path) -> int:
        """Write the rows of a dataset, or those that name one mirror; answers how many."""
        return await self._run_long(spool.spool_rows, self._place, dataset, key, rows)

    async def export_dataset(self, name: str, file: Path) -> None:
        """Write the rows of a dataset as canonical lines into a new file."""
        await self._run_long(spool.export_dataset, self._place, name, file)

    async def compare_dataset(self, name: str, rows: Path) -> RowsChange:
        """What becomes of a dataset's rows, if it has any, if spooled ones take their place."""
        return await self._run_long(spool.compare_dataset, self._place, name, rows)

    @property
    def _place(self) -> str:
        """The same database, as a worker opens it. Never logged: it may hold the password."""
        url = self._database.url
        if self._database.is_sqlite:
            return str(url.database)
        return url.render_as_string(hide_password=False)

    async def _run(
        self,
        transaction: Callable[[], AbstractContextManager[Connection]],
        query: Callable[[Connection], T],
    ) -> T:
        def run() -> T:
            for left in reversed(range(_TRIES)):
                self._outage.check()
                try:
                    with transaction() as connection:
                        answer = query(connection)
                    self._outage.end()
                    return answer
                except errors.CatalogConflictError:
                    if not left:
                        raise
                except errors.CatalogUnavailableError as error:
                    self._outage.begin(error)
                    raise
            raise AssertionError

        return await anyio.to_thread.run_sync(run, limiter=self._threads)

    def _writing(self) -> AbstractAsyncContextManager[object]:
        return nullcontext() if self.is_shared else self._writer

    async def _reopen(self) -> None:
        """Try the shared mode again where a full disk had no room for it, with no reader inside."""
        if self._database.mode is Mode.SHARED:
            return
        async with self._reopening, AsyncExitStack() as stack:
            for _ in range(_THREADS):
                reader = object()
                await self._threads.acquire_on_behalf_of(reader)
                stack.callback(self._threads.release_on_behalf_of, reader)
            await anyio.to_thread.run_sync(self._database.reopen)

    async def _run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run in a worker, which has to open the database too."""
        self._outage.check()
        await self._reopen()
        if self._database.mode is not Mode.SHARED:
            raise errors.DiskFullError(
                f"cannot write the catalog {self._database.label}: the disk has no room beside it",
                hint="make room; nothing was changed",
            )
        try:
            if self._workers is not None:
                return await self._workers.run(work, *args, timeout=timedelta(hours=1), **kwargs)
            return await anyio.to_thread.run_sync(partial(work, *args, **kwargs))
        except errors.CatalogUnavailableError as error:
            self._outage.begin(error)
            raise
