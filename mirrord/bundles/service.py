"""Bundles: a mirror with the catalog's records of it written to one file, and read back.

Writing changes nothing. A file that is read is indexed in quarantine and every closure is proven.
Only then the mirror changes: the catalog's rows, then objects, then one transaction of refs. So a
bad bundle changes nothing, and the same import finishes what a crash interrupted. docs/backup.md
has the form of the file.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from ..catalog import MirrorRow, PinRow
from ..errors import InvalidBundleError, MirrorNotFoundError, full_disk_named
from ..git.command import lines_of
from ..git.packs import PackIndex
from ..host.files import sync_directory, sync_tree
from ..mirrors import history, lfs
from ..mirrors.maintenance import remove_stale_files, size_bytes
from ..mirrors.quarantine import accept_objects, within_room
from ..mirrors.refs import commit, lasting_refs, summarise
from ..mirrors.repository import HISTORY, Refs, Repository
from ..mirrors.service import Mirrors
from ..model import CommitId, MirrorName, utc_now
from ..presence import exists, matching
from ..protocol import BundleImported, ProgressSink
from ..quoting import unquote_name
from . import bundle_file
from .merging import RECORDS, BundleRefs, MergePlan, must_be_history, plan_merge, sort_refs
from .records import BundleRecords, read_records, records_of, spool_datasets, write_records


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A bundle being sent. `record` is its newest ref record, for `since` of a later bundle."""

    mirror: MirrorName
    record: str | None
    content: AsyncGenerator[bytes]


@dataclass(frozen=True, slots=True)
class Bundles:
    """Reads and writes mirrors through `Mirrors` and its locks."""

    mirrors: Mirrors

    # -- out ------------------------------------------------------------------------------------

    async def create(self, name: str, since: str | None = None) -> Outgoing:
        """Open a bundle of a mirror; with `since`, only what came after that ref record.

        The content must be read or closed. Takes no lock, because nothing that a ref reaches is
        ever dropped.
        """
        row = await self.mirrors.get(name)
        repository = self.mirrors.repository(row.name)
        if not exists(repository.path):
            failure = f"cannot bundle mirror {row.name}: it was never synced"
            raise MirrorNotFoundError(failure, hint="sync it first")
        present = lasting_refs(await repository.all_refs())
        prerequisites: set[str] = set()
        if since:  # the reader has that record, and all that its refs reach
            record = await history.get_record(repository, since)
            refs = (await history.read_record(repository, record.id)).followed
            prerequisites = {*await repository.commits_of(refs.values()), record.id}
        content = self._write(row, repository, present, frozenset(prerequisites))
        first = [await anext(content), await anext(content)]  # raises where an object is missing

        async def chunks() -> AsyncGenerator[bytes]:
            try:
                for chunk in first:
                    yield chunk
                async for chunk in content:
                    yield chunk
            finally:
                await content.aclose()

        return Outgoing(row.name, present.get(HISTORY), chunks())

    async def _write(
        self, row: MirrorRow, repository: Repository, refs: Refs, prerequisites: frozenset[str]
    ) -> AsyncGenerator[bytes]:
        async with self.mirrors.quarantine.directory("bundle") as directory:
            objects = directory / "objects"
            objects.mkdir()
            head = refs.get(await repository.head() or "")
            refs = refs | await self._write_catalog(row, repository, objects)
            refs |= {"HEAD": head} if head else {}
            refs |= await self._write_modules(row.name, objects)
            header = bundle_file.header_bytes(prerequisites, refs)
            size = len(header)
            yield header
            # git counts before it writes, so a missing object is an error before the next chunk
            tips = [*sorted({*refs.values()}), *(f"^{oid}" for oid in sorted(prerequisites))]
            async with self.mirrors.git.stream(
                "pack-objects", "--revs", "--stdout", "--thin", "--delta-base-offset", "-q",
                git_dir=repository.path,
                stdin=lines_of(tips),
                quarantine_objects=objects,
                # with -q, git says nothing while it counts objects and looks for deltas
                quiet_timeout=timedelta(hours=1),
                doing=f"bundle mirror {repository.name}",
            ) as pack:  # fmt: skip
                async for chunk in pack:
                    size += len(chunk)
                    yield chunk
        made = {"refs": len(refs), "size_bytes": size}
        self.mirrors.events.publish("bundle.created", mirror=str(row.name), **made)

    async def _write_catalog(self, row: MirrorRow, repository: Repository, objects: Path) -> Refs:
        made = await self.write_records(row, repository, objects)
        return made | await lfs.write_objects(repository, objects)

    async def _write_modules(self, name: MirrorName, objects: Path) -> Refs:
        """Return the refs of the mirrors of submodules, and let `objects` borrow theirs."""
        compositions = await self.mirrors.catalog.list_compositions([name.key])
        keys = {sub.mirror.lower() for needs in compositions.values() for sub in needs.modules}
        refs, lenders = dict[str, str](), list[str]()
        for key in sorted(keys - {name.key}):
            row = await self.mirrors.catalog.find_mirror(key)
            if row and exists((repository := self.mirrors.repository(row.name)).path):
                own = lasting_refs(await repository.all_refs())
                own |= await self._write_catalog(row, repository, objects)
                refs |= bundle_file.part_of(row.name, own)
                lenders.append(f"{repository.objects}\n")
        if lenders:
            (objects / "info").mkdir(exist_ok=True)
            (objects / "info/alternates").write_text("".join(lenders), encoding="utf-8")
        return refs

    async def write_records(self, row: MirrorRow, repository: Repository, objects: Path) -> Refs:
        """Write the catalog's records of a mirror into an object directory; return their ref."""
        key, catalog = row.name.key, self.mirrors.catalog
        datasets, rows = [], {}
        async with self.mirrors.quarantine.directory("records") as directory:
            for name in sorted({recorded.dataset for recorded in await catalog.list_recorded(key)}):
                if dataset := await catalog.find_dataset(name):
                    datasets.append(dataset)
                    rows[name] = directory / f"{name}.jsonl"
                    await catalog.spool_rows(name, key, rows[name])
            records = records_of(row, await catalog.list_pins(key), datasets)
            made = await write_records(repository, objects, records, rows)
        return {f"{RECORDS}{row.name}": made}

    # -- in -------------------------------------------------------------------------------------

    async def import_file(
        self,
        path: Path,
        *,
        mirror: str | None = None,
        owner_uid: int = 0,
        progress: ProgressSink | None = None,
    ) -> BundleImported:
        """Import a bundle file into its own mirror, or into `mirror`.

        Raises InvalidBundleError where it is damaged, hostile, names no mirror, or builds on
        missing commits.
        """
        catalog, quarantine = self.mirrors.catalog, self.mirrors.quarantine
        with quarantine.holding(path):
            async with quarantine.directory("import") as directory:
                refs = (await to_thread.run_sync(bundle_file.read_header, path)).refs
                bundle, (_, modules) = sort_refs(refs), bundle_file.split_parts(refs)
                text = mirror or bundle.mirror
                if text is None:
                    raise InvalidBundleError(
                        "cannot import the bundle: it does not name its mirror",
                        hint="name it with --mirror owner/name",
                    )
                name = MirrorName.parse(text)
                # as the mirror is spelt: a key has lower case alone
                if row := await catalog.find_mirror(name.key):
                    name = row.name
                scratch = Repository(self.mirrors.git, name, directory / "repository")
                lender = self.mirrors.repository(name)
                await scratch.create(lender=lender if exists(lender.path) else None)
                sink = within_room(self.mirrors.room, progress, "import the bundle")
                await bundle_file.unbundle(scratch, path, sink)
                parts = {part: sort_refs(inner) for part, inner in modules.items()}
                count = 0
                for part, inside in parts.items():
                    taken = await self._take_part(
                        scratch, MirrorName.parse(part), inside, owner_uid
                    )
                    count += taken.lfs_objects
                # the scratch repository has objects then that are not this mirror's
                if parts or bundle.lfs:
                    result = await self._take_part(scratch, name, bundle, owner_uid)
                else:
                    result = await self.take(scratch, bundle, owner_uid)
                result = replace(
                    result, submodules=[*parts], lfs_objects=count + result.lfs_objects
                )
        counts = {"created": result.created, "pins": result.pins}
        self.mirrors.events.publish("bundle.imported", mirror=result.mirror, **counts)
        return result

    async def _take_part(
        self, source: Repository, name: MirrorName, bundle: BundleRefs, owner_uid: int
    ) -> BundleImported:
        """Take one of the mirrors in a bundle, without the objects of the others."""
        row = await self.mirrors.catalog.find_mirror(name.key)
        async with self.mirrors.quarantine.directory("import") as directory:
            part = Repository(self.mirrors.git, row.name if row else name, directory / "repository")
            lender = self.mirrors.repository(part.name)
            await part.create(lender=lender if exists(lender.path) else None)
            await bundle_file.take_part(source, part, bundle.tips.values())
            result = await self.take(part, bundle, owner_uid)
            if bundle.lfs:
                taken = directory / "lfs"
                count = await lfs.take_objects(self.mirrors, source, bundle.lfs, part.name, taken)
                result = replace(result, lfs_objects=count)
        return result

    async def take(
        self, scratch: Repository, bundle: BundleRefs, owner_uid: int, *, publish: bool = True
    ) -> BundleImported:
        """Prove the bundle in a repository in quarantine, then merge it into its mirror.

        The catalog is written first: rows without pins are reported, pins without rows removed.
        """
        name = scratch.name
        await bundle_file.verify_closures(scratch, bundle.tips)
        if bundle.history is not None:
            await must_be_history(scratch, bundle.history)
        records = BundleRecords(mirror=str(name))
        if bundle.records:
            records = await read_records(scratch, bundle.records)
        spools = await spool_datasets(scratch, bundle.records, records)
        row = await self.mirrors.catalog.find_mirror(name.key)
        if row is None:
            await self.mirrors.add(str(name), records.url)
        # without a sync, an earlier import was interrupted after it registered the mirror
        is_new = row is None or row.synced_at is None
        async with self.mirrors.sharing.claim(name) as claim, self.mirrors.lock(name):
            await self.mirrors.catch_up(name)
            restored: dict[str, int] = {}
            for dataset, (head, spool) in spools.items():
                if (added := await self.mirrors.catalog.merge_dataset(head, spool)) is not None:
                    restored[dataset] = added
            pins, taken_over = _pin_rows(name, bundle, records, restored, owner_uid)
            plan = await self._move(scratch, bundle, pins, records.default_branch)
            await self.mirrors.catalog.put_pins(pins)
            await self.mirrors.pins.remove_unrecorded(self.mirrors.repository(name), pins)
            if publish:
                await claim.publish(self.mirrors.repository(name))
            await self._record(name, is_new=is_new)
        return BundleImported(
            mirror=str(name),
            created=is_new,
            summary=summarise(plan.changes),
            kept=sorted(plan.kept),
            pins=len(pins),
            pins_taken_over=taken_over,
            datasets=restored,
            datasets_refused=sorted({head.name for head in records.datasets} - restored.keys()),
        )

    async def _move(
        self, scratch: Repository, bundle: BundleRefs, pins: list[PinRow], branch: str | None
    ) -> MergePlan:
        """Rename a new repository into place, or move its objects and refs into the mirror."""
        owners = [(pin.owner, pin.commit) for pin in pins]
        repository = self.mirrors.repository(scratch.name)
        if not exists(repository.path):
            head = f"refs/heads/{unquote_name(branch)}" if branch else bundle.head
            plan = await plan_merge(scratch, bundle, owners, head)
            await commit(scratch, plan.moves)
            if head in plan.target:
                await scratch.set_head(head)
            await scratch.pack_refs()
            # git only warns of files that it cannot remove
            await to_thread.run_sync(remove_stale_files, scratch.path, timedelta())
            await to_thread.run_sync(sync_tree, scratch.path)
            scratch.path.rename(repository.path)
            await to_thread.run_sync(sync_directory, repository.path.parent)
            return plan
        with anyio.CancelScope(shield=True):
            # where all are here, the pack would be a second copy of them
            if await repository.absent(await _packed_objects(scratch, bundle)):
                with full_disk_named(f"mirror {scratch.name}"):
                    await to_thread.run_sync(accept_objects, scratch.objects, repository.objects)
            plan = await plan_merge(repository, bundle, owners, await repository.head())
            await commit(repository, plan.moves)
        return plan

    async def _record(self, name: MirrorName, *, is_new: bool) -> None:
        repository = self.mirrors.repository(name)
        columns = await history.columns_of(repository, (await self.mirrors.get(str(name))).history)
        columns["size_bytes"] = await to_thread.run_sync(size_bytes, repository.path)
        if is_new:
            head = await repository.head()
            newest = await history.list_records(repository, limit=1)
            is_born = head in await repository.all_refs()
            columns["default_branch"] = (
                head.removeprefix("refs/heads/") if head and is_born else None
            )
            # the last sync of the mirror that was bundled
            columns["synced_at"] = newest[0].at if newest else utc_now()
        await self.mirrors.catalog.update_mirror(name.key, **columns)


def _pin_rows(
    name: MirrorName,
    bundle: BundleRefs,
    records: BundleRecords,
    restored: dict[str, int],
    owner_uid: int,
) -> tuple[list[PinRow], int]:
    """Return the pins of the bundle, and how many went to the importing user.

    Those are the pins of datasets that were not restored.
    """
    recorded = {(pin.owner, pin.commit): pin for pin in records.pins}
    owners = {f"dataset/{dataset}" for dataset in restored}
    rows: dict[tuple[str, CommitId], PinRow] = {}
    taken_over = set()
    for owner, commit_id in bundle.pins:
        pin = recorded.get((owner, commit_id))
        reason, created_at = (pin.reason, pin.created_at) if pin else ("", utc_now())
        row = PinRow(name, CommitId(commit_id), owner, reason, created_at)
        if owner.startswith("dataset/") and owner not in owners:
            row = replace(row, owner=f"person/{owner_uid}", reason=f"{owner}: {reason}")
        if rows.setdefault((row.owner, row.commit), row) is row and row.owner != owner:
            taken_over.add(row.commit)
    return list(rows.values()), len(taken_over)


async def _packed_objects(scratch: Repository, bundle: BundleRefs) -> set[str]:
    """List the objects of a bundle, except the records, which a mirror does not keep."""

    def read_indexes() -> set[str]:
        indexes = matching(scratch.objects / "pack", "*.idx")
        return {oid.hex() for index in indexes for oid in PackIndex(index)}

    packed = await to_thread.run_sync(read_indexes)
    if bundle.records:
        words = ("rev-list", "--objects", bundle.records)
        listed = await scratch.run(*words, doing="list the records of a bundle")
        packed -= {line.partition(" ")[0] for line in listed.lines}
    return packed
