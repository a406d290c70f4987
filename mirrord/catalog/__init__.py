"""The database of mirrors, pins, datasets, instances, recorded commits and audits.

`Catalog` is its table of queries. Each is one transaction in a thread; bulk work runs in a worker.
With SQLite the refs of the mirrors decide which pins exist, and the catalog follows; with
PostgreSQL, which a fleet shares, the catalog decides, and refs follow.
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
from ..telemetry import log
from ..workers.pool import Workers
from . import audits, changes, claims, datasets, fleet, mirrors, needs, spool
from .audits import KEPT
from .changes import MIRROR, RESTORED
from .claims import REPAIR
from .database import Database, Mode, migrate, no_room, prepare
from .datasets import ALL_COMMITS, Choice, Servable
from .mirrors import PINS
from .schema import (
    Claim,
    Composition,
    DatasetHead,
    Generation,
    HeldClaim,
    InstanceRow,
    JudgementRow,
    MirrorRow,
    Module,
    NodeRow,
    PinRow,
    ReceiptRow,
    RecordedRow,
)
from .spool import decode_row, encode_row, row_digest

__all__ = [
    "ALL_COMMITS", "KEPT", "MIRROR", "PINS", "REPAIR", "RESTORED", "Catalog", "Choice",
    "Claim", "Composition", "DatasetHead", "Generation", "HeldClaim", "InstanceRow",
    "JudgementRow", "MirrorRow", "Module", "NodeRow", "PinRow", "ReceiptRow", "RecordedRow",
    "Servable", "decode_row", "encode_row", "row_digest",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
Query = Callable[Concatenate[Connection, P], T]
BulkWork = Callable[Concatenate[str, P], T]
Method = Callable[Concatenate["Catalog", P], Coroutine[Any, Any, T]]


def _reads(query: Query[P, T]) -> Method[P, T]:
    """Make a method that runs the query on one snapshot."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._database.read, lambda c: query(c, *args, **kwargs))

    return method


def _writes(query: Query[P, T]) -> Method[P, T]:
    """Make a method that runs the query as one write transaction."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._writing():
            await self._reopen()
            return await self._run(self._database.write, lambda c: query(c, *args, **kwargs))

    return method


def _reads_in_worker(work: BulkWork[P, T]) -> Method[P, T]:
    """Make a method that runs bulk work in a worker."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run_in_worker(work, self._place, *args, **kwargs)

    return method


def _writes_in_worker(work: BulkWork[P, T]) -> Method[P, T]:
    """Make a method that runs bulk work in a worker, beside no other writer of this process."""

    async def method(self: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._writing():
            return await self._run_in_worker(work, self._place, *args, **kwargs)

    return method


def _nothing(_: Connection) -> None:
    """Change nothing, in a transaction that waits for its turn."""


# after a failed attempt to reopen; queries in between fail at once instead of waiting in line
_RETRY_S = 2.0
_FULL_S = 30.0  # a later small write may succeed although a large one found no room


class _Outage:
    """Remembers that the database cannot be reached: queries fail at once, except one every 2 s.

    A database without room for a write is still read, and writes are still tried.
    """

    def __init__(self) -> None:
        self.error: errors.CatalogUnavailableError | None = None
        self._retry_at = 0.0
        self._full_until = 0.0

    @property
    def is_full(self) -> bool:
        """Return whether a write found no room within the last 30 s."""
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


# readers at a time, each with a connection; SQLite has one writer whatever this says
_THREADS = 4
# then the query fails, and with it what needs the catalog; bulk work has ten minutes
_STATEMENT_TIMEOUT = timedelta(seconds=10)
_ATTEMPTS = 5  # at a write that conflicts with another one


class Catalog:
    """The catalog. Writers of this process wait for a lock here, not in SQLite's busy loop.

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
        """Open the SQLite file or the database URL; create or migrate it if needed.

        Migrations and bulk work run in `workers`, or in threads without them. Raises
        CorruptCatalogError, ConflictError, ResourceError.
        """
        catalog = cls(await anyio.to_thread.run_sync(Database, place, _STATEMENT_TIMEOUT), workers)
        try:
            if await anyio.to_thread.run_sync(prepare, catalog._database):
                await catalog._run_in_worker(migrate, catalog._place)
        except BaseException:
            catalog._database.close()
            raise
        return catalog

    async def close(self) -> None:
        await anyio.to_thread.run_sync(self._database.close)

    @property
    def is_shared(self) -> bool:
        """Return whether other daemons may use it at the same time: PostgreSQL."""
        return not self._database.is_sqlite

    def outages(self) -> list[str]:
        """Return why queries fail. Public: health shows it to every peer."""
        if self._outage.error is not None:
            return ["the catalog's database cannot be reached; what is on this machine is served"]
        if self._outage.is_full:
            return ["the catalog's database has no room for writes; it can still be read"]
        return []

    # waits for a write of another process: SQLite has one write transaction at a time
    wait_for_writer = _writes(_nothing)

    put_mirror = _writes(mirrors.put_mirror)
    find_mirror = _reads(mirrors.find_mirror)
    list_mirrors = _reads(mirrors.list_mirrors)
    update_mirror = _writes(mirrors.update_mirror)
    delete_mirror = _writes(mirrors.delete_mirror)
    record_unchanged = _writes(mirrors.record_unchanged)
    list_synced = _reads(mirrors.list_synced)

    put_pins = _writes(mirrors.put_pins)
    delete_pins = _writes(mirrors.delete_pins)
    list_pins = _reads(mirrors.list_pins)
    list_pin_keys = _reads(mirrors.list_pin_keys)
    list_named = _reads(mirrors.list_named)
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
    choose_instance = _reads(datasets.choose_instance)
    list_ambiguous = _reads(datasets.list_ambiguous)
    list_instance_ids = _reads(datasets.list_instance_ids)
    list_recorded = _reads(datasets.list_recorded)
    list_unresolved = _reads(datasets.list_unresolved)
    list_unresolved_mirrors = _reads(datasets.list_unresolved_mirrors)
    resolve_instances = _writes(spool.resolve_instances)
    find_base_commit = _reads(datasets.find_base_commit)
    find_history_limit = _reads(datasets.find_history_limit)
    find_composition = _reads(needs.find_composition)
    list_compositions = _reads(needs.list_compositions)
    replace_compositions = _writes(needs.replace_compositions)

    put_audit = _writes(audits.put_audit)
    find_audit = _reads(audits.find_audit)
    list_audits = _reads(audits.list_audits)
    put_report = _writes(audits.put_report)
    find_report = _reads(audits.find_report)
    list_reports = _reads(audits.list_reports)
    put_receipts = _writes(audits.put_receipts)
    find_receipt = _reads(audits.find_receipt)
    list_receipts = _reads(audits.list_receipts)
    put_judgement = _writes(audits.put_judgement)
    list_judgements = _reads(audits.list_judgements)

    list_changes = _reads(changes.list_changes)
    note_restored = _writes(changes.note_restored)
    enrol = _writes(claims.enrol)
    claim = _writes(claims.claim)
    claim_due = _writes(claims.claim_due)
    renew = _writes(claims.renew)
    release = _writes(claims.release)
    finish = _writes(claims.finish)
    hasten = _writes(claims.hasten)
    count_failures = _reads(claims.count_failures)
    find_holder = _reads(claims.find_holder)
    list_claims = _reads(claims.list_claims)
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

    replace_dataset = _writes_in_worker(spool.replace_dataset)
    merge_dataset = _writes_in_worker(spool.merge_dataset)
    spool_rows = _reads_in_worker(spool.spool_rows)
    export_dataset = _reads_in_worker(spool.export_dataset)
    compare_dataset = _reads_in_worker(spool.compare_dataset)

    @property
    def _place(self) -> str:
        """The path or URL for a worker. Never logged: it may hold the password."""
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
            for attempts_left in reversed(range(_ATTEMPTS)):
                self._outage.check()
                try:
                    with transaction() as connection:
                        answer = query(connection)
                    self._outage.end()
                    return answer
                # the whole transaction again: PostgreSQL has rolled it back
                except errors.CatalogConflictError:
                    if not attempts_left:
                        raise
                except errors.CatalogUnavailableError as error:
                    self._outage.begin(error)
                    raise
            raise AssertionError

        return await anyio.to_thread.run_sync(run, limiter=self._threads)

    def _writing(self) -> AbstractAsyncContextManager[object]:
        """The turn of a writer. None on PostgreSQL, where a long import must not delay a claim."""
        return nullcontext() if self.is_shared else self._writer

    async def _reopen(self) -> None:
        """After a full disk, try mode SHARED again while no query runs."""
        if self._database.mode is Mode.SHARED:
            return
        async with self._reopening, AsyncExitStack() as stack:
            for _ in range(_THREADS):
                reader = object()
                await self._threads.acquire_on_behalf_of(reader)
                stack.callback(self._threads.release_on_behalf_of, reader)
            await anyio.to_thread.run_sync(self._database.reopen)

    async def _run_in_worker(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that opens the database itself."""
        self._outage.check()
        await self._reopen()
        # a worker opens the file itself, and in the other modes nobody else may
        if self._database.mode is not Mode.SHARED:
            raise no_room(self._database.label)
        try:
            if self._workers is not None:
                return await self._workers.run(work, *args, timeout=timedelta(hours=1), **kwargs)
            return await anyio.to_thread.run_sync(partial(work, *args, **kwargs))
        except errors.CatalogUnavailableError as error:
            self._outage.begin(error)
            raise
