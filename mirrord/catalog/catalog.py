"""The catalog as the daemon sees it: async methods, each one transaction, each in a thread.

Owns the database of mirrors, pins, datasets, instances and audits. Never on the checkout's hot path, and never the truth about
pins: those are refs in the mirrors, and the catalog follows. Committed means durable: a crash loses nothing and halves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
from sqlalchemy import Connection

from ..errors import DiskFullError
from ..git.workers import Workers
from ..model import AuditLevel, CommitId
from ..protocol import AmbiguousInstance, Audit, Dataset, DatasetChange, DatasetSummary
from . import audits, datasets, mirrors
from .database import Database, Way, migrate, prepare
from .schema import DatasetHead, InstanceRow, JudgementRow, MirrorRow, PinRow, RecordedRow
from .spool import merge_dataset, replace_dataset, spool_rows

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 4
_LONG = timedelta(hours=1)


class Catalog:
    """One database. Writers of this process wait in line, so that none of them waits inside SQLite's busy loop."""

    def __init__(self, database: Database, workers: Workers | None) -> None:
        self._database = database
        self._workers = workers
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._writer = anyio.Lock()
        self._widening = anyio.Lock()

    @classmethod
    async def open(cls, place: str | Path, workers: Workers | None = None) -> Self:
        """Open the SQLite file or the database URL; makes it where it is not, migrates it where it is old.

        `workers` run migrations and imports; without them a thread does. Raises CorruptCatalogError, CatalogTooNewError,
        ResourceError.
        """
        catalog = cls(await anyio.to_thread.run_sync(Database.at, place), workers)
        try:
            if await anyio.to_thread.run_sync(prepare, catalog._database):
                await catalog._long(migrate, catalog._place)
        except BaseException:
            catalog._database.close()
            raise
        return catalog

    async def close(self) -> None:
        await anyio.to_thread.run_sync(self._database.close)

    # -- mirrors ------------------------------------------------------------------------------------------------------

    async def put_mirror(self, row: MirrorRow) -> None:
        """Insert a mirror, or replace the one of that name."""
        await self._write(mirrors.put_mirror, row)

    async def find_mirror(self, key: str) -> MirrorRow | None:
        return await self._read(mirrors.find_mirror, key)

    async def list_mirrors(self) -> list[MirrorRow]:
        return await self._read(mirrors.list_mirrors)

    async def update_mirror(self, key: str, **columns: Any) -> bool:
        """Set columns of a mirror; answers whether there is such a mirror."""
        return await self._write(mirrors.update_mirror, key, columns)

    async def delete_mirror(self, key: str) -> bool:
        """Delete a mirror and its pins; what datasets record of it stays, unpinned."""
        return await self._write(mirrors.delete_mirror, key)

    # -- pins ---------------------------------------------------------------------------------------------------------

    async def put_pins(self, rows: Iterable[PinRow]) -> None:
        await self._write(mirrors.put_pins, rows)

    async def delete_pins(self, key: str, commits: Collection[CommitId], owner: str) -> None:
        await self._write(mirrors.delete_pins, key, commits, owner)

    async def list_pins(
        self, key: str | None = None, commit: CommitId | None = None, owner: str | None = None
    ) -> list[PinRow]:
        return await self._read(mirrors.list_pins, key, commit, owner)

    async def count_pins(self) -> dict[str, int]:
        """How many commits are pinned, by mirror key."""
        return await self._read(mirrors.count_pins)

    async def list_stale_pins(self, key: str | None = None) -> list[PinRow]:
        """Pins of all or of one mirror owned by a dataset that does not record their commit, or that does not exist."""
        return await self._read(mirrors.list_stale_pins, key)

    # -- datasets -----------------------------------------------------------------------------------------------------

    async def replace_dataset(self, head: DatasetHead, spool: Path) -> DatasetChange:
        """Make the dataset what `head` and the spooled rows say, in one transaction."""
        async with self._writer:
            return await self._long(replace_dataset, self._place, head, spool)

    async def spool_rows(self, dataset: str, key: str, spool: Path) -> int:
        """Write the rows of a dataset that name one mirror, as `replace_dataset` reads them; answers how many."""
        return await self._long(spool_rows, self._place, dataset, key, spool)

    async def merge_dataset(self, head: DatasetHead, spool: Path) -> int | None:
        """Add the spooled rows that are missing; answers how many, or None where another dataset has the name."""
        async with self._writer:
            return await self._long(merge_dataset, self._place, head, spool)

    async def find_dataset(self, name: str) -> Dataset | None:
        return await self._read(datasets.find_dataset, name)

    async def list_datasets(self) -> list[Dataset]:
        return await self._read(datasets.list_datasets)

    async def summarise_datasets(self) -> list[DatasetSummary]:
        """Every dataset by its counts alone: what a status needs."""
        return await self._read(datasets.summarise_datasets)

    async def delete_dataset(self, name: str) -> bool:
        """Delete a dataset with its instances; its pins are the caller's to remove."""
        return await self._write(datasets.delete_dataset, name)

    async def put_refused(self, name: str, key: str, refused: dict[str, str]) -> None:
        """Say anew why commits of one mirror (`*`: all of them) have no pin of this dataset."""
        await self._write(datasets.put_refused, name, key, refused)

    async def find_instance(self, identity: str, dataset: str | None = None) -> InstanceRow | None:
        """An instance by its exact id, of one dataset or of any. Raises InstanceAmbiguousError where any may be several."""
        return await self._read(datasets.find_instance, identity, dataset)

    async def list_ambiguous(self, dataset: str) -> list[AmbiguousInstance]:
        """Instances of a dataset of which another one records another repository or base commit."""
        return await self._read(datasets.list_ambiguous, dataset)

    async def list_instance_ids(self, dataset: str | None = None) -> list[str]:
        return await self._read(datasets.list_instance_ids, dataset)

    async def list_recorded(
        self, key: str | None = None, dataset: str | None = None, *, unpinned: bool = False
    ) -> list[RecordedRow]:
        """Recorded commits of all, of one mirror, of one dataset; with `unpinned`, those that their dataset has no pin of."""
        return await self._read(datasets.list_recorded, key, dataset, unpinned)

    async def find_base_commit(self, key: str, digits: str) -> CommitId | None:
        """The one base commit of a mirror's instances that begins with these digits."""
        return await self._read(datasets.find_base_commit, key, digits)

    async def instances_of(self, key: str, commit: CommitId) -> list[str]:
        """Ids of all instances that record a commit, in whatever role."""
        return await self._read(datasets.instances_of, key, commit)

    # -- audits -------------------------------------------------------------------------------------------------------

    async def put_audit(self, audit: Audit) -> None:
        await self._write(audits.put_audit, audit)

    async def find_audit(self, identity: str) -> Audit | None:
        return await self._read(audits.find_audit, identity)

    async def list_audits(self, limit: int = 50) -> list[Audit]:
        """The newest first."""
        return await self._read(audits.list_audits, limit)

    async def put_judgement(self, row: JudgementRow) -> None:
        await self._write(audits.put_judgement, row)

    async def list_judgements(self, level: AuditLevel) -> list[JudgementRow]:
        """The last judgement of each mirror by an audit of everything at `level`, the oldest first."""
        return await self._read(audits.list_judgements, level)

    # -- how ----------------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        """What a worker opens the same database by."""
        database = self._database
        return (
            str(database.url.database)
            if database.is_sqlite
            else database.url.render_as_string(hide_password=False)
        )

    async def _read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def run() -> T:
            with self._database.read() as connection:
                return query(connection, *args, **kwargs)

        return await anyio.to_thread.run_sync(run, limiter=self._threads)

    async def _write(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def run() -> T:
            with self._database.write() as connection:
                return query(connection, *args, **kwargs)

        async with self._writer:
            await self._widen()
            return await anyio.to_thread.run_sync(run, limiter=self._threads)

    async def _widen(self) -> None:
        """Open the database as it should be, where a full disk had no room for that: perhaps there is some now."""
        if self._database.way is Way.SHARED:
            return
        async with self._widening, AsyncExitStack() as stack:
            for _ in range(_THREADS):
                reader = object()
                await self._threads.acquire_on_behalf_of(reader)
                stack.callback(self._threads.release_on_behalf_of, reader)
            await anyio.to_thread.run_sync(self._database.widen)

    async def _long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In another process, which has to open the database too."""
        await self._widen()
        if self._database.way is not Way.SHARED:
            raise DiskFullError(
                f"cannot write the catalog {self._database.label}: there is no room beside it",
                hint="make room; nothing was changed",
            )
        if self._workers is not None:
            return await self._workers.call(work, *args, timeout=_LONG, **kwargs)
        return await anyio.to_thread.run_sync(partial(work, *args, **kwargs))
