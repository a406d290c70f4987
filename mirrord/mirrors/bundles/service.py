"""Bundles of a daemon: a mirror with all that is known of it as one file, and such a file as a mirror again.

Making one writes nothing but the records, in quarantine, and streams. Taking one indexes it in quarantine, proves every closure,
and only then touches the mirror: the catalog's rows first, then objects, then one transaction of refs. So a bad bundle changes
nothing, and a crash in between leaves what the same import finishes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio

from ...catalog import Catalog, MirrorRow, PinRow
from ...errors import InvalidBundleError, MirrorNotFoundError
from ...git.command import Git
from ...git.packs import PackIndex
from ...host.files import full_disk_named, sync_directory, sync_tree
from ...jobs.events import Events
from ...model import CommitId, MirrorName, utc_now
from ...protocol import ProgressSink
from ..history import columns_of, find_record, list_records, read_refs
from ..maintenance import size_bytes
from ..quarantine import accept_objects
from ..refs import summarise, theirs
from ..repository import HISTORY, KEPT, PINS, Refs, Repository
from ..service import Mirrors
from ..stale_files import remove_stale_files
from ..transaction import commit
from .format import (
    Records,
    read_header,
    read_records,
    records_of,
    stream_bundle,
    unbundle,
    verify_closures,
    write_records,
)
from .merge import (
    RECORDS,
    Contents,
    Merge,
    Spools,
    merge,
    merge_datasets,
    must_be_history,
    sort_refs,
    spool_datasets,
)

_LATE = "dataset/"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A bundle on its way out. `record` is the newest ref record in it: what a later bundle may be made since."""

    mirror: MirrorName
    record: str | None
    content: AsyncGenerator[bytes]


@dataclass(slots=True)
class Imported:
    """What an import did. `pins_taken_over` are pins of datasets that could not be restored: they belong to the importer now."""

    mirror: str
    created: bool
    summary: str
    kept: list[str]
    pins: int = 0
    pins_taken_over: int = 0
    datasets: dict[str, int] = field(default_factory=dict)
    datasets_refused: list[str] = field(default_factory=list)


class Bundles:
    """Reads and writes mirrors through `Mirrors` and its locks."""

    def __init__(self, *, mirrors: Mirrors, catalog: Catalog, git: Git, events: Events) -> None:
        self._mirrors = mirrors
        self._catalog = catalog
        self._git = git
        self._events = events

    # -- out ----------------------------------------------------------------------------------------------------------

    async def create(self, name: str, since: str | None = None) -> Outgoing:
        """Open a bundle of a mirror; with `since`, only what came after that ref record. The content must be read or closed.

        Readers take no lock: nothing that a ref reaches is ever dropped.
        """
        row = await self._mirrors.get(name)
        repository = self._mirrors.repository(row.name)
        if not repository.path.exists():
            raise MirrorNotFoundError(
                f"cannot bundle mirror {row.name}: it was never synced", hint="sync it first"
            )
        present = await repository.all_refs()
        prerequisites = await _prerequisites(repository, since) if since else frozenset[str]()
        content = self._content(row, repository, _bundled(present), prerequisites)
        first = [
            await anext(content),
            await anext(content),
        ]  # what is missing shows before the answer begins
        return Outgoing(row.name, present.get(HISTORY), _joined(first, content))

    async def _content(
        self, row: MirrorRow, repository: Repository, refs: Refs, prerequisites: frozenset[str]
    ) -> AsyncGenerator[bytes]:
        async with self._mirrors.quarantine.directory("bundle") as directory:
            objects = directory / "objects"
            objects.mkdir()
            commit = await self._write_records(row, repository, directory, objects)
            head = refs.get(await repository.head() or "")
            refs = refs | {f"{RECORDS}{row.name}": commit} | ({"HEAD": head} if head else {})
            size = 0
            async for chunk in stream_bundle(repository, objects, refs, prerequisites):
                size += len(chunk)
                yield chunk
        self._events.publish(
            "bundle.created", mirror=str(row.name), refs=len(refs), size_bytes=size
        )

    async def _write_records(
        self, row: MirrorRow, repository: Repository, directory: Path, objects: Path
    ) -> str:
        names = sorted(
            {recorded.dataset for recorded in await self._catalog.list_recorded(row.name.key)}
        )
        datasets = [found for name in names if (found := await self._catalog.find_dataset(name))]
        rows = {}
        for dataset in datasets:
            rows[dataset.name] = directory / f"{dataset.name}.jsonl"
            await self._catalog.spool_rows(dataset.name, row.name.key, rows[dataset.name])
        records = records_of(row, await self._catalog.list_pins(row.name.key), datasets)
        return await write_records(repository, objects, records, rows)

    # -- in -----------------------------------------------------------------------------------------------------------

    async def import_file(
        self,
        path: Path,
        *,
        mirror: str | None = None,
        owner_uid: int = 0,
        progress: ProgressSink | None = None,
    ) -> dict[str, Any]:
        """Take a bundle file into the mirror that it names, or into `mirror`; answers what changed.

        Raises InvalidBundleError where it is damaged, hostile, names no mirror, or builds on what is not here.
        """
        with self._mirrors.quarantine.holding(path):
            async with self._mirrors.quarantine.directory("import") as directory:
                incoming = _Incoming(path, directory / "repository", mirror, owner_uid)
                result = await self._import(incoming, progress)
        self._events.publish(
            "bundle.imported", mirror=result.mirror, created=result.created, pins=result.pins
        )
        return asdict(result)

    async def _import(self, incoming: _Incoming, progress: ProgressSink | None) -> Imported:
        contents = await incoming.contents()
        name = await self._spelling(incoming.name(contents))
        scratch = Repository(self._git, name, incoming.building)
        await scratch.create()
        if self._mirrors.path(name).exists():
            borrowed = self._mirrors.path(name) / "objects"
            (scratch.objects / "info/alternates").write_text(f"{borrowed}\n", encoding="utf-8")
        await unbundle(scratch, incoming.path, progress)
        await verify_closures(scratch, contents.tips)
        if contents.history is not None:
            await must_be_history(scratch, contents.history)
        records = (
            await read_records(scratch, contents.records)
            if contents.records
            else Records(mirror=str(name))
        )
        spools = await spool_datasets(scratch, contents.records, records)
        return await self._take(scratch, contents, records, spools, incoming.owner_uid)

    async def _spelling(self, name: MirrorName) -> MirrorName:
        try:
            return (await self._mirrors.get(str(name))).name
        except MirrorNotFoundError:
            return name

    async def _take(
        self,
        scratch: Repository,
        contents: Contents,
        records: Records,
        spools: Spools,
        owner_uid: int,
    ) -> Imported:
        """Everything is proven; from here on the mirror changes. The catalog goes first: rows without pins are told, pins
        without rows would be dropped."""
        name = scratch.name
        found = await self._catalog.find_mirror(name.key)
        if found is None:
            await self._mirrors.add(str(name), records.url)
        is_new = (
            found is None or found.synced_at is None
        )  # or a crash ended its first import after it was registered
        async with self._mirrors.lock(name):
            path = self._mirrors.path(name)
            restored, refused = await merge_datasets(self._catalog, records, spools)
            pins = _pin_rows(name, contents, records, refused, owner_uid)
            made = await self._move(scratch, path, contents, pins, records)
            await self._catalog.put_pins(pins)
            await self._mirrors.give_up_unrecorded(name, pins)
            await self._record(name, is_new=is_new)
        return Imported(
            mirror=str(name),
            created=is_new,
            summary=summarise(made.changes),
            kept=sorted(made.kept),
            pins=len(pins),
            pins_taken_over=sum(
                pin.owner == f"person/{owner_uid}" and pin.reason.startswith(_LATE) for pin in pins
            ),
            datasets=restored,
            datasets_refused=refused,
        )

    async def _move(
        self,
        scratch: Repository,
        path: Path,
        contents: Contents,
        pins: list[PinRow],
        records: Records,
    ) -> Merge:
        owners = [(pin.owner, pin.commit) for pin in pins]
        head = f"refs/heads/{records.default_branch}" if records.default_branch else contents.head
        if not path.exists():
            made = await merge(scratch, contents, owners, head)
            await commit(scratch, made.transaction)
            if head in made.target:
                await scratch.set_head(head)
            await scratch.pack_refs()
            await anyio.to_thread.run_sync(
                remove_stale_files, scratch.path, timedelta()
            )  # git only warns of what it cannot remove
            await anyio.to_thread.run_sync(sync_tree, scratch.path)
            scratch.path.rename(path)
            await anyio.to_thread.run_sync(sync_directory, path.parent)
            return made
        repository = self._mirrors.repository(scratch.name)
        with anyio.CancelScope(shield=True):
            if await repository.absent(await _offered(scratch, contents)):
                with full_disk_named(f"mirror {scratch.name}"):
                    await anyio.to_thread.run_sync(
                        accept_objects, scratch.objects, repository.objects
                    )
            made = await merge(repository, contents, owners, await repository.head())
            await commit(repository, made.transaction)
        return made

    async def _record(self, name: MirrorName, *, is_new: bool) -> None:
        repository = self._mirrors.repository(name)
        refs = await repository.all_refs()
        row = await self._mirrors.get(str(name))
        columns: dict[str, Any] = {
            **await columns_of(repository, row.history),
            "size_bytes": await anyio.to_thread.run_sync(size_bytes, repository.path),
        }
        if is_new:
            head = await repository.head()
            branch = head.removeprefix("refs/heads/") if head in refs else None
            columns |= {"default_branch": branch, "synced_at": await _seen_at(repository)}
        await self._catalog.update_mirror(name.key, **columns)


@dataclass(frozen=True, slots=True)
class _Incoming:
    """One import: the file, where its repository is built, the mirror that was asked for, who asks."""

    path: Path
    building: Path
    mirror: str | None
    owner_uid: int

    async def contents(self) -> Contents:
        return sort_refs((await anyio.to_thread.run_sync(read_header, self.path)).refs)

    def name(self, contents: Contents) -> MirrorName:
        text = self.mirror or contents.mirror
        if text is None:
            raise InvalidBundleError(
                "cannot import the bundle: it does not say which mirror it is of",
                hint="say it with --mirror owner/name",
            )
        return MirrorName.parse(text)


def _bundled(present: Refs) -> Refs:
    """Everything but the marks of a fetch that runs now."""
    ours = {
        ref: oid for ref, oid in present.items() if ref.startswith((KEPT, PINS)) or ref == HISTORY
    }
    return theirs(present) | ours


async def _prerequisites(repository: Repository, since: str) -> frozenset[str]:
    """The commits that whoever has that record has: what its refs reached, and the record, unless they may know it as another."""
    record = await find_record(repository, since)
    refs, _ = await read_refs(repository, record.id)
    return frozenset(await repository.commits_of(refs.values())) | (
        {record.id} if not record.was else set()
    )


async def _joined(first: list[bytes], rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        for chunk in first:
            yield chunk
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()


def _pin_rows(
    name: MirrorName, contents: Contents, records: Records, refused: list[str], owner_uid: int
) -> list[PinRow]:
    """The pins of the bundle with what is known of them; those of datasets that are not here go to who imports."""
    known = {(pin.owner, pin.commit): pin for pin in records.pins}
    there = {f"dataset/{dataset.name}" for dataset in records.datasets} - {
        f"dataset/{dataset}" for dataset in refused
    }
    rows: dict[tuple[str, CommitId], PinRow] = {}
    for owner, commit_id in contents.pins:
        pin = known.get((owner, commit_id))
        row = PinRow(
            name,
            CommitId(commit_id),
            owner,
            pin.reason if pin else "",
            pin.created_at if pin else utc_now(),
        )
        if owner.startswith("dataset/") and owner not in there:
            row = replace(row, owner=f"person/{owner_uid}", reason=f"{owner}: {row.reason}")
        rows.setdefault((row.owner, row.commit), row)
    return list(rows.values())


async def _seen_at(repository: Repository) -> datetime:
    """When upstream was last seen as the mirror has it now."""
    records = await list_records(repository, limit=1)
    return records[0].at if records else utc_now()


async def _offered(scratch: Repository, contents: Contents) -> set[str]:
    """The objects that came, but for the records, of which a mirror keeps none."""
    offered = await anyio.to_thread.run_sync(_packed, scratch)
    if contents.records:
        doing = "list the records of a bundle"
        listed = await scratch.git.run(
            "rev-list", "--objects", contents.records, git_dir=scratch.path, doing=doing
        )
        offered -= {line.partition(" ")[0] for line in listed.lines}
    return offered


def _packed(repository: Repository) -> set[str]:
    """Every object in the packs of a repository, which may borrow others."""
    return {
        oid.hex()
        for index in (repository.objects / "pack").glob("*.idx")
        for oid in PackIndex(index)
    }
