"""Import, look up and remove datasets.

An import reads the file in a worker into a private spool, pins every recorded commit, then replaces
the dataset in the catalog in one transaction, and last removes the pins of deleted rows. A crash
leaves the old dataset whole with all its pins and at worst some extra ones, which the next start
removes. A dataset never claims a pin it lacks.
"""

import builtins
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio

from .. import errors
from ..catalog import ALL_COMMITS, Composition, DatasetHead, PinRow
from ..jobs.operations import task_group
from ..mirrors.pins import ADOPTED
from ..mirrors.quarantine import SPOOL_PREFIX
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import parse_upstream
from ..model import (
    CommitId,
    CommitRole,
    DatasetName,
    MirrorName,
    parse_dataset_name,
    shown,
    utc_now,
)
from ..presence import matching
from ..protocol import (
    Dataset,
    DatasetDiff,
    DatasetImported,
    DatasetNeeds,
    MissingSubmodule,
    Progress,
    ProgressSink,
)
from ..quoting import quote_name
from ..telemetry import log
from .fields import Columns
from .hosts import Hosts
from .lookups import Lookups
from .pinning import (
    PinKeys,
    PinOutcome,
    Standing,
    list_standing,
    owner_of,
    pin_all,
    pin_key,
    read_journals,
    unpin,
    write_journal,
)
from .reading import ReadResult, read_dataset
from .submodules import Composed, Key, compose_all


class DatasetFile(NamedTuple):
    """A file to import.

    `source` is its name in messages, and names the dataset by default. `format` is a format's name
    or a mapping; by default the columns decide.
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
        return quote_name(Path(self.source).name or self.source)


def _bases(read: ReadResult, key: str, outcome: PinOutcome) -> set[CommitId]:
    """Return the base commits of one mirror that were pinned."""
    named = read.commits.get(key, {})
    bases = {commit for commit, reason in named.items() if CommitRole.BASE in reason.split(", ")}
    bases = {outcome.found.get(commit, commit) for commit in bases}
    bases |= {commit for name, commit in outcome.found.items() if name not in named}
    return set() if ALL_COMMITS in outcome.refused else bases - outcome.refused.keys()


_NAMED_REASONS = 100


def _needs_of(composed: Composed) -> DatasetNeeds:
    every = composed.found.values()
    reasons = Counter(pair for composition in every for pair in composition.missing)
    return DatasetNeeds(
        submodules=sum(len(composition.modules) for composition in every),
        missing=[
            MissingSubmodule(path=path, reason=reason, commits=count)
            for (path, reason), count in reasons.most_common(_NAMED_REASONS)
        ],
        missing_count=reasons.total(),
        lfs_pointers=sum(composition.pointers for composition in every),
        lfs_commits=sum(bool(composition.pointers) for composition in every),
        lfs_missing=sum(composition.lfs_missing for composition in every),
        lfs_reasons=list(composed.lfs_reasons[:_NAMED_REASONS]),
    )


async def _nothing(_keys: Collection[str]) -> None:
    return None


class Datasets(Lookups):
    """The datasets of one daemon. Work on one dataset is serial, on different ones concurrent."""

    def __init__(self, mirrors: Mirrors) -> None:
        super().__init__(mirrors.catalog)
        self._mirrors, self._quarantine = mirrors, mirrors.quarantine
        self._uncleaned: dict[str, PinKeys] = {}  # owners of stale pins, and the pins to keep
        self._lost: set[str] = set()  # datasets of which only pins are left
        self._templates = mirrors.settings().state_dir / "templates"
        self.on_composed: Callable[[Mapping[Key, Composition]], None] = lambda _: None
        self.on_objects: Callable[[Collection[str]], Awaitable[None]] = _nothing
        self._locks: dict[str, anyio.Lock] = {}
        self._listeners: list[Callable[[DatasetName], None]] = []

    async def open(self) -> None:
        """Undo killed imports: remove their pins, then their spools.

        Other pins of a dataset that the catalog lacks may be all that is left of a lost catalog:
        they stay until that dataset is imported or removed.
        """
        root = self._quarantine.root
        journals = await anyio.to_thread.run_sync(read_journals, root)
        if journals:  # a worker of the killed daemon may be committing the dataset
            with suppress(errors.ResourceError):  # a full disk has no writer
                await self._catalog.wait_for_writer()
        stale: dict[str, list[PinRow]] = {}
        for row in await self._catalog.list_stale_pins():
            stale.setdefault(row.owner, []).append(row)
        for owner, rows in sorted(stale.items()):
            before = journals.get(owner)
            kept = [row for row in rows if before is None or pin_key(row) in before]
            if len(kept) < len(rows):
                log.warning("import.undone", owner=owner, pins=len(rows) - len(kept))
            is_lost = any(row.reason == ADOPTED for row in kept)
            if is_lost:
                self._lost.add(owner.removeprefix(owner_of("")))
            keep = frozenset(map(pin_key, kept)) if is_lost else frozenset()
            if self._mirrors.sharing.is_fleet:  # another daemon may be importing it now
                self._uncleaned[owner] = keep
            else:
                await self._remove_stale_pins(owner, keep)
        if self._lost:
            log.warning("datasets.unknown", datasets=sorted(self._lost))
        for path in await anyio.to_thread.run_sync(matching, root, f"{SPOOL_PREFIX}*"):
            await self._quarantine.remove(path)

    async def clean_up(self) -> bool:
        """Retry failed removals of pins. Return whether all are done."""
        for owner, keep in list(self._uncleaned.items()):
            async with self._exclusive(owner):
                await self._remove_stale_pins(owner, keep)
        return not self._uncleaned

    def warnings(self) -> builtins.list[str]:
        """Return health warnings about datasets of which only pins are left."""
        if not self._lost:
            return []
        names = ", ".join(sorted(self._lost))
        return [f"commits are pinned for datasets that the catalog lacks; import again: {names}"]

    def on_change(self, listener: Callable[[DatasetName], None]) -> None:
        """Call `listener` with the name of each dataset that is imported or removed."""
        self._listeners.append(listener)

    # -- import and removal -----------------------------------------------------------------------

    async def import_file(
        self, file: DatasetFile, progress: ProgressSink | None = None
    ) -> DatasetImported:
        """Replace the dataset by the rows of the file.

        Commits that mirrors lack are in the dataset's `unpinned`. Raises InvalidDatasetError,
        InvalidNameError, ResourceError.
        """
        dataset = file.dataset
        source = quote_name(file.source)
        async with self._exclusive(owner_of(dataset)), self._import_directory() as directory:
            spool = directory / "rows.jsonl"
            async with task_group() as beside:
                # other workers look while one reads: an unchanged import is little else
                looking = beside.create_task(list_standing(self._mirrors, dataset))
                read = await self._read(file, spool)
            standing = looking.result()
            return await self._replace(dataset, read, source, spool, progress, standing)

    async def _read(self, file: DatasetFile, spool: Path) -> ReadResult:
        settings = self._mirrors.settings()
        urls = {row.name.key: row.url for row in await self._catalog.list_mirrors()}
        urls = {MirrorName.parse(m.repo).key: m.url for m in settings.mirror if m.url} | urls
        default = parse_upstream(settings.upstream.url).host
        hosts = Hosts(default, {key: parse_upstream(url).host for key, url in urls.items()})
        arguments = (file.path, file.label, file.format, spool, hosts)
        return await self._mirrors.workers.run(read_dataset, *arguments, timeout=timedelta(hours=1))

    def _import_directory(self) -> AbstractAsyncContextManager[Path]:
        return self._quarantine.directory(SPOOL_PREFIX.rstrip("-"))

    async def _replace(
        self,
        dataset: DatasetName,
        read: ReadResult,
        source: str,
        spool: Path,
        progress: ProgressSink | None,
        standing: Standing,
    ) -> DatasetImported:
        owner = owner_of(dataset)
        before = frozenset(map(pin_key, await self._catalog.list_pins(owner=owner)))
        await anyio.to_thread.run_sync(write_journal, spool.parent, owner, before)
        try:
            outcomes = await pin_all(
                self._mirrors, dataset, read.names, read.commits, read.revisions, progress,
                urls=read.urls, standing=standing,
            )  # fmt: skip
            head = DatasetHead(
                name=dataset,
                format=read.format,
                source=source,
                sha256=read.sha256,
                imported_at=utc_now(),
                fault_count=read.fault_count,
                faults=read.faults,
                rules=read.rules,
                refused={
                    key: outcome.refused for key, outcome in outcomes.items() if outcome.refused
                },
            )
            resolved = {key: outcome.found for key, outcome in outcomes.items()}
            bases = {key: _bases(read, key, outcome) for key, outcome in outcomes.items()}
            composed = await compose_all(self._mirrors, dataset, bases, self._templates, progress)
            await self.on_objects(composed.changed)  # first: the catalog tells a second import
            change = await self._catalog.replace_dataset(head, spool, resolved, composed.found)
            self._mirrors.sharing.records_changed(read.names)
            self.on_composed(composed.found)
        # also a cancelled import: the old dataset stays, with its pins and no others
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._remove_stale_pins(owner, keep=before)
            raise
        finally:
            self.expire_cache()
        await self._remove_stale_pins(owner)
        ambiguous = await self._catalog.list_ambiguous(dataset)
        imported = await self.get(dataset)
        counts = {kind: len(getattr(change, kind)) for kind in ("added", "changed", "removed")}
        counts |= {"faults": read.fault_count, "ambiguous": len(ambiguous)}
        self._changed("dataset.imported", dataset, **counts, unpinned=imported.unpinned_count)
        return DatasetImported(
            dataset=imported,
            change=change,
            needs=_needs_of(composed),
            ambiguous=ambiguous[:1000],
            ambiguous_count=len(ambiguous),
        )

    # -- whole datasets ---------------------------------------------------------------------------

    async def compare_file(self, file: DatasetFile) -> DatasetDiff:
        """Return what an import of the file would change. Raises the errors of `import_file`."""
        dataset = file.dataset
        async with self._quarantine.directory("compare") as directory:
            spool = directory / "rows.jsonl"
            read = await self._read(file, spool)
            change = await self._catalog.compare_dataset(dataset, spool)
        mirrored = {row.name.key for row in await self._catalog.list_mirrors()}
        return DatasetDiff(
            a=dataset,
            b=file.label,
            change=change,
            format=read.format,
            fault_count=read.fault_count,
            faults=read.faults,
            new_mirrors=sorted(str(n) for key, n in read.names.items() if key not in mirrored),
        )

    async def compare(self, a: str, b: str) -> DatasetDiff:
        """Return the difference from dataset `a` to `b`. Raises NotFoundError."""
        for name in (a, b):
            await self.get(name)
        async with self._quarantine.directory("compare") as directory:
            spool = directory / "rows.jsonl"
            await self._catalog.spool_rows(b, None, spool)
            return DatasetDiff(a=a, b=b, change=await self._catalog.compare_dataset(a, spool))

    @asynccontextmanager
    async def exported(self, name: str) -> AsyncIterator[Path]:
        """Export the rows as canonical lines into a file, removed after the block.

        Raises NotFoundError.
        """
        await self.get(name)
        async with self._quarantine.directory("export") as directory:
            await self._catalog.export_dataset(name, directory / "rows.jsonl")
            yield directory / "rows.jsonl"

    async def repin(self, name: MirrorName) -> int:
        """After a sync, pin commits and resolve branches that the mirror lacked before.

        Covers all datasets. Return how many commits were pinned.
        """
        key, pinned = name.key, 0
        rows = await self._catalog.list_recorded(key, unpinned=True)
        waiting = await self._catalog.list_unresolved(key)
        for dataset in sorted(
            {DatasetName(row.dataset) for row in rows} | {d for d, *_ in waiting}
        ):
            async with self._exclusive(owner_of(dataset)):
                # read again: an import or a removal may have held the lock until now
                roles: dict[CommitId, set[str]] = {}
                for row in await self._catalog.list_recorded(key, dataset, unpinned=True):
                    roles.setdefault(row.commit, set()).add(str(row.role))
                waiting = await self._catalog.list_unresolved(key, dataset)
                revisions = {revision for *_, revision in waiting}
                reasons = {commit: ", ".join(sorted(words)) for commit, words in roles.items()}
                request = ({key: name}, {key: reasons}, {key: revisions})
                outcomes = await pin_all(self._mirrors, dataset, *request, None, is_synced=True)
                refused, resolved = outcomes[key]
                await self._catalog.put_refused(dataset, key, refused)
                pinned += 0 if ALL_COMMITS in refused else len(roles) + len(resolved) - len(refused)
                if resolved:
                    count = await self._catalog.resolve_instances(dataset, key, resolved)
                    self.expire_cache()
                    self._changed("dataset.resolved", dataset, instances=count)
        return pinned

    async def recompose(self, names: Collection[str]) -> DatasetNeeds:
        """Find what the base commits of these datasets need in the mirrors that are here.

        A bundle or a restore brought them, maybe where no upstream can be asked.
        """
        every = Composed({})
        for dataset in sorted(map(DatasetName, names)):
            async with self._exclusive(owner_of(dataset)):
                bases: dict[str, set[CommitId]] = {}
                for row in await self._catalog.list_recorded(None, dataset):
                    if row.role is CommitRole.BASE:
                        bases.setdefault(row.mirror.key, set()).add(row.commit)
                composed = await compose_all(
                    self._mirrors, dataset, bases, self._templates, None, asks=False
                )
                await self.on_objects(composed.changed)
                await self._catalog.replace_compositions(dataset, composed.found)
                self.on_composed(composed.found)
            reasons = {*every.lfs_reasons, *composed.lfs_reasons}
            every = Composed(every.found | composed.found, lfs_reasons=tuple(sorted(reasons)))
        self.expire_cache()
        return _needs_of(every)

    async def list_waiting(self) -> set[str]:
        """Return the keys of mirrors with a recorded commit or branch that is not pinned yet."""
        recorded = await self._catalog.list_recorded(unpinned=True)
        unresolved = await self._catalog.list_unresolved_mirrors()
        return {row.mirror.key for row in recorded} | unresolved

    def rows_changed(self, names: Iterable[str]) -> None:
        """Publish that a bundle brought rows of these datasets."""
        self.expire_cache()
        for name in names:
            self._changed("dataset.restored", parse_dataset_name(name))

    async def remove(self, name: str, progress: ProgressSink | None = None) -> None:
        """Delete a dataset and remove its pins. Raises NotFoundError."""
        dataset = parse_dataset_name(name)
        if progress:
            progress(Progress(unit="mirrors", note="wait for other work on the dataset"))
        async with self._exclusive(owner_of(dataset)):
            if not await self._catalog.delete_dataset(dataset):
                raise _not_found(name)
            self.expire_cache()
            try:
                await self._remove_stale_pins(owner_of(dataset), progress=progress)
            finally:  # where that is cancelled, `clean_up` removes the pins
                self._changed("dataset.removed", dataset)

    # -- look-ups ---------------------------------------------------------------------------------

    async def list(self) -> list[Dataset]:
        return await self._catalog.list_datasets()

    async def get(self, name: str) -> Dataset:
        """Raises NotFoundError."""
        dataset = await self._catalog.find_dataset(name)
        if dataset is None:
            raise _not_found(name)
        return dataset

    async def list_instance_ids(self, name: str | None = None) -> builtins.list[str]:
        """Return the ids of a dataset's instances, or of all. Raises NotFoundError."""
        if name is not None:
            await self.get(name)
        return await self._catalog.list_instance_ids(name)

    # -- locks and stale pins ---------------------------------------------------------------------

    @asynccontextmanager
    async def _exclusive(self, owner: str) -> AsyncIterator[None]:
        """Exclude other work on the dataset, here and on other daemons."""
        sharing = self._mirrors.sharing
        async with self._locks.setdefault(owner, anyio.Lock()), sharing.exclusive(owner):
            yield

    async def _remove_stale_pins(
        self, owner: str, keep: PinKeys = frozenset(), progress: ProgressSink | None = None
    ) -> None:
        """Remove the dataset's pins of commits that it does not record. Needs the dataset's lock.

        The import or removal itself is done, so a failure is not raised but left for `clean_up`.
        """
        keep &= self._uncleaned.get(owner, keep)
        self._uncleaned[owner] = keep
        try:
            rows = [row for row in await self._catalog.list_stale_pins() if row.owner == owner]
            unkept = [row for row in rows if pin_key(row) not in keep]
            if unkept:
                # without a journal, a kill between their rows and refs looks like a lost catalog
                async with self._import_directory() as directory:
                    kept = keep & {*map(pin_key, rows)}
                    await anyio.to_thread.run_sync(write_journal, directory, owner, kept)
                    if not await unpin(self._mirrors, unkept, progress):
                        return
        except errors.StoppingError:
            raise
        except (errors.MirrordError, OSError) as error:
            log.warning("pins.left", owner=owner, detail=str(error))
            return
        self._uncleaned.pop(owner, None)

    def _changed(self, event: str, dataset: DatasetName, **fields: int) -> None:
        self._mirrors.events.publish(event, dataset=dataset, **fields)
        self._lost.discard(dataset)
        for listener in self._listeners:
            listener(dataset)


_SUFFIXES = re.compile(r"(?:\.(?:jsonl|ndjson|json|parquet|gz|zst))+$", re.IGNORECASE)


def name_from(source: str) -> DatasetName:
    """Derive a dataset's name from its file's. Raises InvalidNameError."""
    stem = _SUFFIXES.sub("", Path(source).name)
    name = re.sub(r"\.{2,}|[^A-Za-z0-9._-]+", "-", stem).lstrip("._-").rstrip(".")[:100]
    try:
        return parse_dataset_name(name)
    except errors.InvalidNameError as error:
        raise errors.InvalidNameError(
            f"cannot name a dataset after {shown(source)}: it has no characters for a name",
            hint="choose a name with --name",
        ) from error


def _not_found(name: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        f"cannot find dataset {shown(name)}: no dataset has that name",
        hint="`mirrord dataset list` shows the datasets",
        kind="dataset",
    )
