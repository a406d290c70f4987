"""Datasets of the daemon: import, look up, remove.

An import reads the file in a worker into a private spool, pins every commit it records, and only
then replaces the dataset in the catalog, in one transaction; last it removes the pins of rows that
went away. So a crash leaves the old dataset whole with all its pins, at worst with pins too many,
which the next start removes. A removal of pins that fails is retried. Importing again repairs
missing pins. A dataset never claims a pin it lacks: the pins say which commits are unpinned.
"""

import builtins
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import anyio

from .. import errors
from ..catalog import EVERY, DatasetHead, InstanceRow, PinRow
from ..mirrors.pins import ADOPTED
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.service import Mirrors
from ..model import (
    CommitId,
    CommitRole,
    DatasetName,
    History,
    MirrorName,
    parse_dataset_name,
    shown,
    utc_now,
)
from ..protocol import Dataset, DatasetDiff, Instance, ProgressSink, RecordedCommit
from ..telemetry import log
from .fields import Columns
from .pinning import (
    PinKeys,
    owner_of,
    pin_all,
    pin_key,
    read_journals,
    unpin,
    write_journal,
)
from .reading import ReadResult, read_dataset

K = TypeVar("K")
T = TypeVar("T")
_SUFFIXES = re.compile(r"(?:\.(?:jsonl|ndjson|json|parquet|gz|zst))+$", re.IGNORECASE)


class DatasetFile(NamedTuple):
    """A file to be read. Messages call it `source`, and without `name` the dataset is named after
    that; without `format`, a name or a mapping, it is found by the columns.
    """

    path: Path
    source: str
    name: str | None = None
    format: str | Columns | None = None

    @property
    def dataset(self) -> DatasetName:
        return parse_dataset_name(self.name) if self.name else name_from(self.source)

    @property
    def label(self) -> str:
        return Path(self.source).name or self.source


class Answers(Generic[K, T]):
    """What the catalog answered lately, so that a warm checkout needs none. Of one event loop.

    A change of any dataset has each asked for again; while the catalog cannot be reached the former
    answer counts. Over its limit it evicts the least recently used.
    """

    def __init__(
        self,
        load: Callable[[K], Awaitable[T]],
        weigh: Callable[[T], int] = lambda found: 200 * (found is not None),
        *,
        limit_bytes: int = 16 * 1024**2,
    ) -> None:
        """What weighs nothing is not kept."""
        self._load, self._weigh, self._limit_bytes = load, weigh, limit_bytes
        self._kept: dict[K, tuple[T, int, int]] = {}  # with its weight and the round of changes
        self._size_bytes = self._round = 0

    async def find(self, key: K) -> T:
        since, known = self._round, self._kept.pop(key, None)
        if known:
            self._kept[key] = known  # the last one now
            if known[2] == since:
                return known[0]
        try:
            found = await self._load(key)
        except errors.CatalogUnavailableError:
            if known is None:
                raise
            return known[0]
        self._size_bytes -= self._kept.pop(key, (None, 0, 0))[1]
        size = self._weigh(found)
        if 0 < size <= self._limit_bytes // 16:
            self._kept[key] = found, size, since
            self._size_bytes += size
        while self._size_bytes > self._limit_bytes:
            self._size_bytes -= self._kept.pop(next(iter(self._kept)))[1]
        return found

    def outdate(self) -> None:
        """Ask for each again; also for those that are being asked for."""
        self._round += 1


def _weigh(row: InstanceRow | None) -> int:
    if row is None:  # anybody can ask for what is not there without end
        return 0
    tests = sum(len(test) + 60 for test in (*row.fail_to_pass, *row.pass_to_pass))
    return 1000 + len(row.patch or "") + len(row.test_patch or "") + tests


class Datasets:
    """All datasets of one daemon. Work on one dataset is serial, on different ones concurrent."""

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = mirrors
        self._catalog, self._quarantine = mirrors.catalog, mirrors.quarantine
        self._uncleaned: dict[str, PinKeys] = {}  # owners of stale pins, and the pins to keep
        self._unknown: set[str] = set()
        catalog = self._catalog
        self._instances = Answers[tuple[str, str | None], InstanceRow | None](
            lambda key: catalog.find_instance(*key), _weigh
        )
        self._base_commits = Answers[tuple[str, str], CommitId | None](
            lambda key: catalog.find_base_commit(*key)
        )
        self._limits = Answers[tuple[str, CommitId], History | None](
            lambda key: catalog.find_history_limit(*key), lambda _: 200
        )
        self._locks: dict[str, anyio.Lock] = {}
        self._listeners: list[Callable[[DatasetName], None]] = []

    async def open(self) -> None:
        """Undo killed imports: remove their pins, then their spools.

        Other pins found in a mirror whose dataset is unknown may be all that is left of a lost
        catalog: they stay until that dataset is imported or removed.
        """
        root = self._quarantine.root
        journals = await anyio.to_thread.run_sync(read_journals, root)
        stale: dict[str, list[PinRow]] = {}
        for row in await self._catalog.list_stale_pins():
            stale.setdefault(row.owner, []).append(row)
        for owner, rows in sorted(stale.items()):
            before = journals.get(owner)
            kept = [row for row in rows if before is None or pin_key(row) in before]
            if len(kept) < len(rows):
                log.warning("import.undone", owner=owner, pins=len(rows) - len(kept))
            is_unknown = any(row.reason == ADOPTED for row in kept)
            if is_unknown:
                self._unknown.add(owner.removeprefix(owner_of("")))
            but = frozenset(map(pin_key, kept)) if is_unknown else frozenset()
            if self._mirrors.sharing.is_fleet:  # another daemon may be importing it now
                self._uncleaned[owner] = but
            else:
                await self._remove_stale_pins(owner, but)
        if self._unknown:
            log.warning("datasets.unknown", datasets=sorted(self._unknown))
        for path in await anyio.to_thread.run_sync(lambda: [*root.glob(f"{SPOOL_PREFIX}*")]):
            await self._quarantine.remove(path)

    async def clean_up(self) -> bool:
        """Remove the pins that could not be removed before; answers whether none is left."""
        for owner, kept in list(self._uncleaned.items()):
            async with self._sole(owner):
                await self._remove_stale_pins(owner, kept)
        return not self._uncleaned

    def warnings(self) -> builtins.list[str]:
        """Health warnings: datasets of which only pins are left."""
        if not self._unknown:
            return []
        names = ", ".join(sorted(self._unknown))
        return [f"commits are pinned for datasets that the catalog lacks; import again: {names}"]

    def on_change(self, listener: Callable[[DatasetName], None]) -> None:
        """Call `listener` with the name of each dataset that was imported or removed."""
        self._listeners.append(listener)

    # -- import and removal -----------------------------------------------------------------------

    async def import_file(
        self, file: DatasetFile, progress: ProgressSink | None = None
    ) -> dict[str, Any]:
        """Make the dataset what the file says.

        Answers `dataset` and `change` as JSON values; commits that mirrors lack are in the
        dataset's `unpinned`. Raises InvalidDatasetError, InvalidNameError, ResourceError.
        """
        dataset, kind = file.dataset, SPOOL_PREFIX.rstrip("-")
        # a file name that is not UTF-8 has surrogates in Python, which no database takes
        source = file.source.encode("utf-8", "backslashreplace").decode().replace("\0", "")
        file = file._replace(source=source)
        async with self._sole(owner_of(dataset)), self._quarantine.directory(kind) as directory:
            spool = directory / "rows.jsonl"
            read = await self._read(file, spool)
            return await self._replace(dataset, read, source, spool, progress)

    async def _read(self, file: DatasetFile, spool: Path) -> ReadResult:
        what = (file.path, file.label, file.format, spool)
        return await self._mirrors.workers.run(read_dataset, *what, timeout=timedelta(hours=1))

    async def _replace(
        self,
        dataset: DatasetName,
        read: ReadResult,
        source: str,
        spool: Path,
        progress: ProgressSink | None,
    ) -> dict[str, Any]:
        owner = owner_of(dataset)
        before = frozenset(map(pin_key, await self._catalog.list_pins(owner=owner)))
        await anyio.to_thread.run_sync(write_journal, spool.parent, owner, before)
        try:
            wanted = (read.names, read.commits, read.revisions)
            outcomes = await pin_all(self._mirrors, dataset, *wanted, progress)
            same = ("format", "sha256", "fault_count", "faults", "rules")
            head = DatasetHead(
                name=dataset,
                source=source,
                imported_at=utc_now(),
                refused={key: its.refused for key, its in outcomes.items() if its.refused},
                **{each: getattr(read, each) for each in same},
            )
            found = {key: its.found for key, its in outcomes.items()}
            change = await self._catalog.replace_dataset(head, spool, found)
            self._mirrors.sharing.records_changed(read.names)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._remove_stale_pins(owner, but=before)
            raise
        finally:
            self.forget()
        await self._remove_stale_pins(owner)
        ambiguous = await self._catalog.list_ambiguous(dataset)
        counts = {kind: len(getattr(change, kind)) for kind in ("added", "changed", "removed")}
        counts |= {"faults": read.fault_count, "ambiguous": len(ambiguous)}
        taken = await self.get(dataset)
        self._changed("dataset.imported", dataset, **counts, unpinned=taken.unpinned_count)
        return {
            "dataset": taken.to_json(),
            "change": change.to_json(),
            "ambiguous": [instance.to_json() for instance in ambiguous[:1000]],
            "ambiguous_count": len(ambiguous),
        }

    # -- whole datasets ---------------------------------------------------------------------------

    async def compare_file(self, file: DatasetFile) -> DatasetDiff:
        """What an import of the file would change. Raises what that raises."""
        dataset = file.dataset
        async with self._quarantine.directory("compare") as directory:
            spool = directory / "rows.jsonl"
            read = await self._read(file, spool)
            change = await self._catalog.compare_dataset(dataset, spool)
        known = {row.name.key for row in await self._catalog.list_mirrors()}
        return DatasetDiff(
            a=dataset,
            b=file.label,
            change=change,
            format=read.format,
            fault_count=read.fault_count,
            faults=read.faults,
            new_mirrors=sorted(str(n) for key, n in read.names.items() if key not in known),
        )

    async def compare(self, a: str, b: str) -> DatasetDiff:
        """What differs from one dataset to another. Raises DatasetNotFoundError."""
        for name in (a, b):
            await self.get(name)
        async with self._quarantine.directory("compare") as directory:
            spool = directory / "rows.jsonl"
            await self._catalog.spool_rows(b, None, spool)
            return DatasetDiff(a=a, b=b, change=await self._catalog.compare_dataset(a, spool))

    @asynccontextmanager
    async def exported(self, name: str) -> AsyncIterator[Path]:
        """The rows as canonical lines, in a file that is gone after the block.

        Raises DatasetNotFoundError.
        """
        await self.get(name)
        async with self._quarantine.directory("export") as directory:
            await self._catalog.export_dataset(name, directory / "rows.jsonl")
            yield directory / "rows.jsonl"

    async def repin(self, name: MirrorName) -> int:
        """Retry what a mirror refused to pin or lacked the branch of, as after a sync.

        For all datasets; answers how many commits are pinned now.
        """
        key, pinned = name.key, 0
        rows = await self._catalog.list_recorded(key, unpinned=True)
        waiting = await self._catalog.list_unresolved(key)
        for dataset in sorted(
            {DatasetName(row.dataset) for row in rows} | {d for d, *_ in waiting}
        ):
            async with self._sole(owner_of(dataset)):
                # read again: an import or a removal may have ended before the lock was free
                roles: dict[CommitId, set[str]] = {}
                for row in await self._catalog.list_recorded(key, dataset, unpinned=True):
                    roles.setdefault(row.commit, set()).add(str(row.role))
                waiting = await self._catalog.list_unresolved(key, dataset)
                revisions = {revision for *_, revision in waiting}
                reasons = {commit: ", ".join(sorted(words)) for commit, words in roles.items()}
                wanted = ({key: name}, {key: reasons}, {key: revisions})
                outcomes = await pin_all(self._mirrors, dataset, *wanted, None, is_synced=True)
                refused, found = outcomes[key]
                await self._catalog.put_refused(dataset, key, refused)
                pinned += 0 if EVERY in refused else len(roles) + len(found) - len(refused)
                if found:
                    count = await self._catalog.resolve_instances(dataset, key, found)
                    self.forget()
                    self._changed("dataset.resolved", dataset, instances=count)
        return pinned

    async def list_waiting(self) -> set[str]:
        """The keys of mirrors of which some recorded commit or branch is not pinned yet."""
        recorded = await self._catalog.list_recorded(unpinned=True)
        unresolved = await self._catalog.list_unresolved_mirrors()
        return {row.mirror.key for row in recorded} | unresolved

    def forget(self) -> None:
        """Ask for rows again: some were changed, perhaps by another daemon."""
        for answers in (self._instances, self._base_commits, self._limits):
            answers.outdate()

    def rows_changed(self, names: Iterable[str]) -> None:
        """A bundle put rows of these datasets into the catalog."""
        self.forget()
        for name in names:
            self._changed("dataset.restored", parse_dataset_name(name))

    async def remove(self, name: str) -> None:
        """Delete a dataset and remove its pins. Raises DatasetNotFoundError."""
        dataset = parse_dataset_name(name)
        async with self._sole(owner_of(dataset)):
            if not await self._catalog.delete_dataset(dataset):
                raise _not_found(name)
            self.forget()
            await self._remove_stale_pins(owner_of(dataset))
        self._changed("dataset.removed", dataset)

    # -- looking up -------------------------------------------------------------------------------

    async def list(self) -> list[Dataset]:
        return await self._catalog.list_datasets()

    async def get(self, name: str) -> Dataset:
        """Raises DatasetNotFoundError."""
        found = await self._catalog.find_dataset(name)
        if found is None:
            raise _not_found(name)
        return found

    async def list_instance_ids(self, name: str | None = None) -> builtins.list[str]:
        """The ids of one dataset's instances, or of all. Raises DatasetNotFoundError."""
        if name is not None:
            await self.get(name)
        return await self._catalog.list_instance_ids(name)

    async def find_instance(self, identity: str, dataset: str | None = None) -> InstanceRow | None:
        """An instance by its exact id, from memory when it was asked for lately.

        Of several datasets that record the same, the first imported one answers. Raises
        InstanceAmbiguousError where they record other repositories or base commits.
        """
        return await self._instances.find((identity, dataset))

    async def find_base_commit(self, name: MirrorName, digits: str) -> CommitId | None:
        """The one base commit of the mirror's instances that begins with these digits."""
        return await self._base_commits.find((name.key, digits))

    async def find_history_limit(self, name: MirrorName, commit: CommitId) -> History | None:
        """How much of a base commit's past agents may see, by the datasets that record it."""
        return await self._limits.find((name.key, commit))

    async def instance(self, identity: str, grader: bool, dataset: str | None = None) -> Instance:
        """An instance, with its answer only for a grader. Raises InstanceNotFoundError."""
        row = await self.find_instance(identity, dataset)
        if row is None:
            raise errors.InstanceNotFoundError(
                f"cannot find instance {shown(identity)}: no dataset has that id",
                hint="ids are case-sensitive; `mirrord dataset list` shows the datasets; name a"
                " commit as NAME@SHA",
            )
        commits = [RecordedCommit(commit=commit, role=role) for commit, role in row.commits]
        agents = Instance(
            id=row.public_id,
            dataset=row.dataset,
            mirror=str(row.mirror),
            repo=row.repo,
            base_commit=row.base_commit,
            commits=[each for each in commits if each.role is CommitRole.BASE],
        )
        if not grader:
            return agents
        same = (
            *("id", "public_id", "direction", "patch", "test_patch", "environment"),
            *("python_version", "version", "created_at", "history", "revision"),
        )
        more: dict[str, Any] = {name: getattr(row, name) for name in same}
        for name in ("fail_to_pass", "pass_to_pass", "rules"):
            more[name] = list(getattr(row, name))
        return replace(agents, commits=commits, **more)

    # -- how --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _sole(self, owner: str) -> AsyncIterator[None]:
        """Do other work on the dataset neither here nor on other daemons."""
        async with self._locks.setdefault(owner, anyio.Lock()), self._mirrors.sharing.sole(owner):
            yield

    async def _remove_stale_pins(self, owner: str, but: PinKeys = frozenset()) -> None:
        """Remove the dataset's pins of commits that it does not record. Needs the dataset's lock.

        The import or removal itself has happened: pins that cannot be removed now are no error but
        left for `clean_up`.
        """
        but &= self._uncleaned.get(owner, but)
        self._uncleaned[owner] = but
        try:
            rows = [row for row in await self._catalog.list_stale_pins() if row.owner == owner]
            doomed = [row for row in rows if pin_key(row) not in but]
            if doomed:
                # On record: killed between their rows and refs, they look like a lost catalog's.
                async with self._quarantine.directory(SPOOL_PREFIX.rstrip("-")) as directory:
                    kept = but & {*map(pin_key, rows)}
                    await anyio.to_thread.run_sync(write_journal, directory, owner, kept)
                    if not await unpin(self._mirrors, doomed):
                        return
        except errors.StoppingError:
            raise
        except (errors.MirrordError, OSError) as error:
            log.warning("pins.left", owner=owner, detail=str(error))
            return
        self._uncleaned.pop(owner, None)

    def _changed(self, event: str, dataset: DatasetName, **fields: int) -> None:
        self._mirrors.events.publish(event, dataset=dataset, **fields)
        self._unknown.discard(dataset)
        for listener in self._listeners:
            listener(dataset)


def name_from(source: str) -> DatasetName:
    """A dataset's name from its file's. Raises InvalidNameError."""
    stem = _SUFFIXES.sub("", Path(source).name)
    name = re.sub(r"\.{2,}|[^A-Za-z0-9._-]+", "-", stem).lstrip("._-").rstrip(".")[:100]
    try:
        return parse_dataset_name(name)
    except errors.InvalidNameError as error:
        raise errors.InvalidNameError(
            f"cannot name a dataset after {shown(source)}: it has no characters for a name",
            hint="choose a name with --name",
        ) from error


def _not_found(name: str) -> errors.DatasetNotFoundError:
    return errors.DatasetNotFoundError(
        f"cannot find dataset {shown(name)}: no dataset has that name",
        hint="`mirrord dataset list` shows the datasets",
    )
