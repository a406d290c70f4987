"""Datasets of the daemon: import, look up, remove.

An import reads the file in a worker into a private spool, makes every commit it records servable and pinned, and only then
replaces the dataset in the catalog, in one transaction; pins of rows that went away are removed last. So a crash at any moment
leaves the old dataset whole with all its pins, at worst with pins too many, and the next start removes exactly those; where the
disk does not let them go, that is tried again. Importing again repairs whatever is missing. A dataset never claims a pin it has
not: which commits are unpinned is what the pins say.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import structlog

from ..catalog import Catalog, DatasetHead, InstanceRow, PinRow
from ..config import Settings
from ..errors import (
    DatasetNotFoundError,
    InstanceNotFoundError,
    InvalidNameError,
    MirrordError,
    StoppingError,
)
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.pins import ADOPTED
from ..mirrors.service import Mirrors
from ..model import (
    CommitId,
    CommitRole,
    DatasetName,
    MirrorName,
    parse_dataset_name,
    shown,
    utc_now,
)
from ..protocol import Dataset, FormatInfo, Instance, ProgressSink, RecordedCommit
from .cache import BaseCommits, InstanceCache
from .formats import format_infos
from .import_journal import Before, Spools, place_of, record
from .pinning import Pinner, Refused, in_short, owner_of
from .reading import ReadResult, read_dataset

_READ_TIMEOUT = timedelta(hours=1)
_SHOWN_AMBIGUOUS = 1000
_SUFFIXES = re.compile(r"(?:\.(?:jsonl|ndjson|json|parquet|gz|zst))+$", re.IGNORECASE)

log = structlog.get_logger()


class Datasets:
    """All datasets of one daemon. Work on one dataset waits in line; different ones go side by side."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        catalog: Catalog,
        mirrors: Mirrors,
        workers: Workers,
        events: Events,
        state_dir: Path,
    ) -> None:
        self._catalog = catalog
        self._workers = workers
        self._events = events
        self._spools = Spools(mirrors.quarantine)
        self._left: dict[str, Before] = {}
        self._unknown: set[str] = set()
        self._pinner = Pinner(
            catalog=catalog, mirrors=mirrors, concurrency=lambda: settings().sync.concurrency
        )
        self._cache = InstanceCache(catalog.find_instance)
        self._base_commits = BaseCommits(catalog.find_base_commit)
        self._locks: dict[str, anyio.Lock] = {}
        self._listeners: list[Callable[[DatasetName], None]] = []

    async def open(self) -> None:
        """Undo imports that were killed: their pins, then their spools.

        Other pins of a dataset that were found in a mirror may be all that is left of a lost catalog: they stay until that
        dataset is imported or removed.
        """
        begun = await anyio.to_thread.run_sync(self._spools.begun)
        stale = await self._catalog.list_stale_pins()
        undone = [
            row for row in stale if row.owner in begun and place_of(row) not in begun[row.owner]
        ]
        adopted = {row.owner for row in stale if row.reason == ADOPTED and row not in undone}
        for owner in sorted({row.owner for row in stale}):
            but = (
                [row for row in stale if row.owner == owner and row not in undone]
                if owner in adopted
                else []
            )
            await self._drop_stale_pins(owner, frozenset(map(place_of, but)))
        self._unknown = {owner.removeprefix(owner_of("")) for owner in adopted}
        if self._unknown:
            log.warning("datasets.unknown", datasets=sorted(self._unknown))
        if undone:
            log.warning(
                "import.undone", owners=sorted({row.owner for row in undone}), pins=len(undone)
            )
        await self._spools.clear()

    async def clean_up(self) -> bool:
        """Remove the pins that could not be removed before; answers whether none is left."""
        for owner, but in list(self._left.items()):
            async with self._locked(owner):
                await self._drop_stale_pins(owner, but)
        return not self._left

    def warnings(self) -> builtins.list[str]:
        """What a person should know: datasets of which only pins are left."""
        names = ", ".join(sorted(self._unknown))
        return (
            [f"commits are pinned for what the catalog does not record; import again: {names}"]
            if names
            else []
        )

    def on_change(self, listener: Callable[[DatasetName], None]) -> None:
        """Call `listener` with the name of each dataset that was imported or removed."""
        self._listeners.append(listener)

    # -- import and removal -------------------------------------------------------------------------------------------

    async def import_file(
        self,
        path: Path,
        *,
        name: str | None,
        format: str | None,  # noqa: A002
        source: str,
        progress: ProgressSink | None = None,
    ) -> dict[str, Any]:
        """Make the dataset what the file says. `source` is what its owner calls the file; without `name` it names the dataset.

        Answers `dataset` and `change` as JSON values. Raises InvalidDatasetError, InvalidNameError, ResourceError; what a
        mirror lacks is no error but is in the dataset's `unpinned`.
        """
        dataset = parse_dataset_name(name) if name else name_from(source)
        source = _storable(source)
        async with self._locked(owner_of(dataset)), self._spools.directory() as directory:
            spool = directory / "rows.jsonl"
            read = await self._workers.call(
                read_dataset,
                path,
                Path(source).name or source,
                format,
                spool,
                timeout=_READ_TIMEOUT,
            )
            return await self._take(dataset, read, source, spool, progress)

    async def _take(
        self,
        dataset: DatasetName,
        read: ReadResult,
        source: str,
        spool: Path,
        progress: ProgressSink | None,
    ) -> dict[str, Any]:
        owner = owner_of(dataset)
        before = frozenset(map(place_of, await self._catalog.list_pins(owner=owner)))
        await anyio.to_thread.run_sync(record, spool.parent, owner, before)
        try:
            refused = await self._pinner.pin_all(dataset, read.names, read.commits, progress)
            change = await self._catalog.replace_dataset(
                _head(dataset, read, source, refused), spool
            )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._drop_stale_pins(owner, but=before)
            raise
        finally:
            self._forget()
        await self._drop_stale_pins(owner)
        ambiguous = await self._catalog.list_ambiguous(dataset)
        self._changed(
            "dataset.imported",
            dataset,
            added=len(change.added),
            changed=len(change.changed),
            removed=len(change.removed),
            faults=read.fault_count,
            ambiguous=len(ambiguous),
            unpinned=sum(map(len, refused.values())),
        )
        taken = await self.get(dataset)
        return {
            "dataset": taken.to_json(),
            "change": change.to_json(),
            "ambiguous": [instance.to_json() for instance in ambiguous[:_SHOWN_AMBIGUOUS]],
            "ambiguous_count": len(ambiguous),
        }

    async def repin(self, name: MirrorName) -> int:
        """Try again what a mirror refused to pin, for all datasets: worth it after a sync. Answers how many are pinned now."""
        rows = await self._catalog.list_recorded(name.key, unpinned=True)
        return sum(
            [
                await self._repin(DatasetName(dataset), name)
                for dataset in sorted({row.dataset for row in rows})
            ]
        )

    async def _repin(self, dataset: DatasetName, name: MirrorName) -> int:
        async with self._locked(
            owner_of(dataset)
        ):  # an import or a removal may have ended before it was ours
            roles: dict[CommitId, set[str]] = {}
            for row in await self._catalog.list_recorded(name.key, dataset, unpinned=True):
                roles.setdefault(row.commit, set()).add(str(row.role))
            commits = {commit: ", ".join(sorted(words)) for commit, words in roles.items()}
            if not commits:
                return 0
            refused = (
                await self._pinner.pin_all(dataset, {name.key: name}, {name.key: commits}, None)
            ).get(name.key, {})
            await self._catalog.put_refused(
                dataset, name.key, {str(commit): why for commit, why in refused.items()}
            )
        return len(commits) - len(refused)

    def rows_changed(self, names: Iterable[str]) -> None:
        """Somebody else put rows of these datasets into the catalog: a bundle."""
        self._forget()
        for name in names:
            self._changed("dataset.restored", parse_dataset_name(name))

    async def remove(self, name: str) -> None:
        """Forget a dataset and remove its pins. Raises DatasetNotFoundError."""
        dataset = parse_dataset_name(name)
        async with self._locked(owner_of(dataset)):
            if not await self._catalog.delete_dataset(dataset):
                raise _no_dataset(name)
            self._forget()
            await self._drop_stale_pins(owner_of(dataset))
        self._changed("dataset.removed", dataset)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def formats(self) -> list[FormatInfo]:
        """The formats that are read."""
        return format_infos()

    async def list(self) -> list[Dataset]:
        return await self._catalog.list_datasets()

    async def get(self, name: str) -> Dataset:
        """Raises DatasetNotFoundError."""
        found = await self._catalog.find_dataset(name)
        if found is None:
            raise _no_dataset(name)
        return found

    async def list_instance_ids(self, name: str | None = None) -> builtins.list[str]:
        """The ids of one dataset's instances, or of all. Raises DatasetNotFoundError."""
        if name is not None:
            await self.get(name)
        return await self._catalog.list_instance_ids(name)

    async def find_instance(self, identity: str, dataset: str | None = None) -> InstanceRow | None:
        """An instance by its exact id, from memory when it was asked for lately.

        Ids are case-sensitive. Raises InstanceAmbiguousError where no dataset is named, and several record the id with different
        repositories or base commits; of several that record the same, the one that was imported first answers.
        """
        return await self._cache.find(identity, dataset)

    async def find_base_commit(self, name: MirrorName, digits: str) -> CommitId | None:
        """The one base commit of the mirror's instances that begins with these digits.

        From memory when it was asked for lately.
        """
        return await self._base_commits.find(name, digits)

    async def instance(self, identity: str, grader: bool, dataset: str | None = None) -> Instance:
        """What the socket tells of an instance; its answer only to a grader. Raises InstanceNotFoundError."""
        row = await self.find_instance(identity, dataset)
        if row is None:
            raise InstanceNotFoundError(
                f"cannot find instance {shown(identity)}: no dataset has that id",
                hint="ids are case-sensitive; `mirrord dataset list` shows the datasets; a commit is asked for as NAME@SHA",
            )
        return _grader_view(row) if grader else _agent_view(row)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._cache.forget()
        self._base_commits.forget()

    @asynccontextmanager
    async def _locked(self, owner: str) -> AsyncIterator[None]:
        async with self._locks.setdefault(owner, anyio.Lock()):
            yield

    async def _drop_stale_pins(self, owner: str, but: Before = frozenset()) -> None:
        """Remove the dataset's pins of commits that it does not record. The dataset's lock must be held.

        Whatever happened to the dataset has happened: pins that cannot be removed now are noted, and no error.
        """
        but &= self._left.get(owner, but)
        self._left[owner] = but
        try:
            stale = [row for row in await self._catalog.list_stale_pins() if row.owner == owner]
            is_done = await self._unpin(
                owner,
                [row for row in stale if place_of(row) not in but],
                but & {*map(place_of, stale)},
            )
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            log.warning("pins.left", owner=owner, detail=str(error))
            return
        if is_done:
            self._left.pop(owner, None)

    async def _unpin(self, owner: str, doomed: Collection[PinRow], left: Before) -> bool:
        """Remove pins, on record: killed between their rows and their refs, they would look like those of a lost catalog."""
        if not doomed:
            return True
        async with self._spools.directory() as directory:
            await anyio.to_thread.run_sync(record, directory, owner, left)
            return await self._pinner.unpin(doomed)

    def _changed(self, event: str, dataset: DatasetName, **fields: int) -> None:
        self._events.publish(event, dataset=dataset, **fields)
        self._unknown.discard(dataset)
        for listener in self._listeners:
            listener(dataset)


def name_from(source: str) -> DatasetName:
    """A dataset's name from its file's. Raises InvalidNameError."""
    stem = _SUFFIXES.sub("", Path(source).name)
    name = re.sub(r"\.{2,}|[^A-Za-z0-9._-]+", "-", stem).lstrip("._-").rstrip(".")[:100]
    try:
        return parse_dataset_name(name)
    except InvalidNameError as error:
        raise InvalidNameError(
            f"cannot name a dataset after {shown(source)}: nothing of it is left as a name",
            hint="choose a name with --name",
        ) from error


def _storable(source: str) -> str:
    """A file name as text: one that is not UTF-8 has surrogates in Python, which no database takes."""
    return source.encode("utf-8", "backslashreplace").decode().replace("\0", "")


def _head(
    dataset: DatasetName, read: ReadResult, source: str, refused: dict[str, Refused]
) -> DatasetHead:
    return DatasetHead(
        name=dataset,
        format=read.format,
        source=source,
        sha256=read.sha256,
        imported_at=utc_now(),
        fault_count=read.fault_count,
        faults=read.faults,
        rules=read.rules,
        refused={key: in_short(reasons, read.commits[key]) for key, reasons in refused.items()},
    )


def _no_dataset(name: str) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"cannot find dataset {shown(name)}: there is none of that name",
        hint="`mirrord dataset list` shows those there are",
    )


def _agent_view(row: InstanceRow) -> Instance:
    return Instance(
        id=row.id,
        dataset=row.dataset,
        mirror=str(row.mirror),
        repo=row.repo,
        base_commit=row.base_commit,
        commits=[RecordedCommit(commit=row.base_commit, role=CommitRole.BASE)],
    )


def _grader_view(row: InstanceRow) -> Instance:
    return replace(
        _agent_view(row),
        direction=row.direction,
        commits=[RecordedCommit(commit=commit, role=role) for commit, role in row.commits],
        patch=row.patch,
        test_patch=row.test_patch,
        fail_to_pass=list(row.fail_to_pass),
        pass_to_pass=list(row.pass_to_pass),
    )
