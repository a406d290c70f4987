"""The mirrors of a daemon: the one class that the rest of it talks to.

Owns `mirrors/` and `quarantine/` of the state directory and the mirrors' rows of the catalog. One lock for each mirror: a sync, a
pin, maintenance, a heal and a removal exclude each other; readers take none, because objects are only added and refs move as a
whole. A first clone is built in quarantine and renamed, so a mirror that exists is complete. The refs are the truth: a start
finishes what a crash interrupted and brings the catalog in line.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import anyio
import structlog

from ..catalog import Catalog, MirrorRow, PinRow
from ..config import Settings
from ..errors import (
    AccessError,
    CommitNotFoundError,
    InvalidNameError,
    MirrordError,
    MirrorExistsError,
    MirrorInUseError,
    MirrorNotFoundError,
)
from ..git.command import Git
from ..git.errors import masked_url
from ..git.objects import resolve
from ..git.workers import Workers
from ..host.files import sync_directory
from ..host.trash import Trash
from ..jobs.events import Events
from ..model import CommitId, MirrorName, Resolved, shown, utc_now
from ..protocol import (
    QUEUED,
    Mirror,
    Pin,
    Problem,
    Progress,
    ProgressSink,
    RefDiff,
    RefFault,
    RefRecord,
)
from . import history, pins
from .cleanup import Mending
from .coalesce import Coalescer, Flight
from .maintenance import maintain, size_bytes
from .quarantine import Quarantine
from .refs import is_followed
from .repository import PINS, Repository
from .sources import Sources
from .startup import follow_pins, reconcile
from .sync import SyncResult, move_refs
from .upstream import Upstream, parse_upstream

_RESOLVE_TIMEOUT = timedelta(seconds=30)

log = structlog.get_logger()


class Mirrors:
    """All mirrors. Its methods take the locks they need; `lock` is for work of others on a mirror's objects."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        git: Git,
        workers: Workers,
        catalog: Catalog,
        events: Events,
        trash: Trash,
    ) -> None:
        self._settings = settings
        self._git = git
        self._workers = workers
        self._catalog = catalog
        self._events = events
        self._root = settings().state_dir / "mirrors"
        self._quarantine = Quarantine(settings().state_dir / "quarantine", trash)
        self._sources = Sources(settings=settings, git=git, quarantine=self._quarantine)
        self._names: dict[str, MirrorName] = {}
        self._unsynced: dict[str, str] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._mending = Mending(catalog, self.repository, self.lock)
        self._syncs: Coalescer[SyncResult] = Coalescer()

    async def open(self) -> None:
        """Finish or remove what a crash left, then bring disk and catalog in line."""
        for path in (self._root, self._quarantine.root):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._quarantine.clean()
        await self._remove_stubs()
        self._mending.note(
            await reconcile(self._catalog, self._root, self.repository, self._sources.default_url)
        )
        rows = await self._catalog.list_mirrors()
        self._names = {row.name.key: row.name for row in rows}
        self._unsynced = {row.name.key: str(row.error["detail"]) for row in rows if row.error}

    async def _remove_stubs(self) -> None:
        """Work on a mirror that was removed may have left a directory; adopted, it would be a mirror that is damaged for ever."""
        for path in await anyio.to_thread.run_sync(lambda: list(self._root.iterdir())):
            if Repository(self._git, MirrorName("", path.name), path).is_stub():
                log.warning("mirror.stub_removed", path=path.name)
                await self._quarantine.discard(path)

    async def close(self) -> None:
        """Cancel running syncs; each leaves its mirror as it was."""
        await self._syncs.close()

    # -- which mirrors there are --------------------------------------------------------------------------------------

    async def add(self, repo: str, url: str | None = None) -> MirrorRow:
        """Register a mirror; the first sync fills it. The same again answers the row that exists.

        Raises InvalidNameError, InvalidUrlError, MirrorExistsError when it exists with another URL.
        """
        name = MirrorName.parse(repo)
        upstream = parse_upstream(url or self._sources.default_url(name))
        async with self.lock(name):
            found = await self._catalog.find_mirror(name.key)
            if found is None:
                row = MirrorRow(name=name, url=upstream.url, added_at=utc_now())
                await self._catalog.put_mirror(row)
                self._names[name.key] = name
                self._events.publish("mirror.added", mirror=str(name), url=upstream.shown)
                return row
        if url is not None and found.url != upstream.url:
            raise MirrorExistsError(
                f"cannot add mirror {name}: it exists with another upstream",
                hint=f"remove it first, or sync it as it is: `mirrord mirror show {found.name}`",
                mirror=str(found.name),
            )
        return found

    async def get(self, text: str) -> MirrorRow:
        """A mirror by any spelling; raises MirrorNotFoundError."""
        found = await self._catalog.find_mirror(self.get_name(text).key)
        if found is None:
            raise _not_found(text)
        return found

    def get_name(self, text: str) -> MirrorName:
        """The name a mirror is kept under, by any spelling and from memory; raises MirrorNotFoundError."""
        try:
            return self._names[MirrorName.parse(text).key]
        except (InvalidNameError, KeyError) as error:
            raise _not_found(text) from error

    def path(self, name: MirrorName) -> Path:
        """The bare repository of a mirror, by any spelling."""
        return self._root / str(self._names.get(name.key, name))

    async def list(self) -> builtins.list[Mirror]:
        counts = await self._catalog.count_pins()
        return [
            shown_mirror(row, counts.get(row.name.key, 0))
            for row in await self._catalog.list_mirrors()
        ]

    async def describe(self, name: MirrorName) -> Mirror:
        row = await self.get(str(name))
        return shown_mirror(row, (await self._catalog.count_pins()).get(row.name.key, 0))

    async def remove(self, name: MirrorName) -> None:
        """Delete a mirror with everything in it. Refused while a dataset records it, a pin keeps it or a worktree is linked."""
        row = await self.get(str(name))
        async with self.lock(row.name):
            await self._must_be_unused(row)
            path = self.path(row.name)
            await self._catalog.delete_mirror(row.name.key)
            try:
                if path.exists():
                    await self._quarantine.discard(path)
            except OSError:  # the disk does not let it go: it is not removed
                await self._catalog.put_mirror(row)
                raise
            self._names.pop(row.name.key, None)
            self._unsynced.pop(row.name.key, None)
        self._events.publish("mirror.removed", mirror=str(row.name))

    async def _must_be_unused(self, row: MirrorRow) -> None:
        datasets = sorted(
            {recorded.dataset for recorded in await self._catalog.list_recorded(row.name.key)}
        )
        owners = sorted({pin.owner for pin in await self._catalog.list_pins(row.name.key)})
        worktrees = self.path(row.name) / "worktrees"
        linked = worktrees.is_dir() and any(worktrees.iterdir())
        used = [
            *(f"dataset {name} records it" for name in datasets),
            *(f"{owner} pins it" for owner in owners),
        ]
        used += ["a linked checkout uses it"] if linked else []
        if used:
            raise MirrorInUseError(
                f"cannot remove mirror {row.name}: {used[0]}",
                hint="remove the dataset, the pins and the linked checkouts first",
                mirror=str(row.name),
                used_by=used,
            )

    @property
    def quarantine(self) -> Quarantine:
        return self._quarantine

    def repository(self, name: MirrorName) -> Repository:
        """The repository of a mirror, which need not be there yet."""
        return Repository(self._git, name, self.path(name))

    @asynccontextmanager
    async def lock(self, name: MirrorName) -> AsyncIterator[None]:
        """Exclude syncs, pins, maintenance, heals and removal of one mirror. What fails meanwhile is looked over by `clean_up`."""
        async with self._locks.setdefault(name.key, anyio.Lock()):
            with self._mending.watched(name):
                yield

    def is_busy(self, name: MirrorName) -> bool:
        """Whether somebody holds the lock of a mirror."""
        return name.key in self._locks and self._locks[name.key].locked()

    async def clean_up(self) -> bool:
        """Bring in line what failed, and remove what could not be removed, as a start does; answers whether nothing is left."""
        cleaned = await self._quarantine.clean()
        return await self._mending.run() and cleaned

    # -- following upstream -------------------------------------------------------------------------------------------

    async def sync(
        self, name: MirrorName, progress: ProgressSink | None = None, *, accept_loss: bool = False
    ) -> SyncResult:
        """Bring a mirror up to date with what upstream has now; joins a sync that has yet to ask it.

        Raises the UpstreamError that also lands in its row. An upstream that lost most of what it had is an UpstreamLossError,
        unless the loss is accepted.
        """
        found = self.get_name(str(name))
        key = f"{found.key}{' accepted' if accept_loss else ''}"
        return await self._syncs.join(
            key, lambda flight: self._sync(found, flight, accept_loss=accept_loss), progress
        )

    async def _sync(
        self, name: MirrorName, flight: Flight[SyncResult], *, accept_loss: bool
    ) -> SyncResult:
        started_at = utc_now()

        def begin() -> None:
            flight.depart()
            flight.tell(Progress(unit="syncs", note="ask upstream for its refs"))

        flight.tell(Progress(unit="syncs", note=QUEUED))
        try:
            async with self.lock(name):
                row = await self.get(str(name))
                path = self.path(row.name)
                if await anyio.to_thread.run_sync(self.repository(row.name).is_stub):
                    await self._quarantine.discard(path)
                if path.exists():
                    await self.repository(row.name).must_be_ours()
                result = await self._sources.sync(
                    row, path, flight.tell, asking=begin, accept_loss=accept_loss
                )
                await self._record(row, result)
        except MirrordError as error:
            await self._catalog.update_mirror(
                name.key, attempted_at=started_at, error=error.problem()
            )
            self._unsynced[name.key] = error.message
            self._events.publish(
                "mirror.failed", mirror=str(name), code=error.code, detail=error.message
            )
            raise
        if result.redirected_to:
            self._events.publish(
                "mirror.redirected",
                mirror=str(row.name),
                url=masked_url(row.url),
                to=result.redirected_to,
            )
        self._events.publish(
            "mirror.synced",
            mirror=str(row.name),
            changed=result.changed,
            summary=result.summary,
            faults=len(result.faults),
            duration_s=round((utc_now() - started_at).total_seconds(), 3),
        )
        return result

    def outages(self) -> builtins.list[str]:
        """Why nothing is up to date: the last sync of every mirror failed."""
        if not self._names or not self._names.keys() <= self._unsynced.keys():
            return []
        name = next(iter(self._names))
        return [
            f"no mirror can be synced ({len(self._names)} of {len(self._names)} fail); {name}: {self._unsynced[name]}"
        ]

    async def _record(self, row: MirrorRow, result: SyncResult) -> None:
        self._unsynced.pop(row.name.key, None)
        now = utc_now()
        columns = {"ref_count": result.ref_count, "kept_count": result.kept_count}
        if result.changed or row.history is None:
            columns = await history.columns_of(self.repository(row.name), row.history)
        await self._catalog.update_mirror(
            row.name.key,
            **columns,
            default_branch=result.default_branch,
            size_bytes=await anyio.to_thread.run_sync(size_bytes, self.path(row.name)),
            synced_at=now,
            attempted_at=now,
            error=None,
            ref_faults=[fault.to_json() for fault in result.faults],
        )

    async def maintain(self, name: MirrorName, progress: ProgressSink | None = None) -> None:
        """Pack a mirror, and remove leftovers."""
        row = await self.get(str(name))
        if not self.path(row.name).exists():
            return
        await self._quarantine.clean()
        async with self.lock(row.name):
            await self.repository(row.name).must_be_ours()
            await maintain(self.repository(row.name), progress)
        size = await anyio.to_thread.run_sync(size_bytes, self.path(row.name))
        await self._catalog.update_mirror(row.name.key, size_bytes=size)
        self._events.publish("mirror.maintained", mirror=str(row.name), size_bytes=size)

    # -- commits ------------------------------------------------------------------------------------------------------

    async def resolve(self, name: MirrorName, commitish: str) -> Resolved:
        """What a branch, tag or id names; raises CommitNotFoundError."""
        row = await self._synced(name)
        found: Resolved = await self._workers.run(
            resolve, self.path(row.name), commitish, timeout=_RESOLVE_TIMEOUT
        )
        return found

    async def resolve_public(self, name: MirrorName, commitish: str) -> Resolved:
        """What a name means that is not one of ours, where a ref that follows upstream reaches it.

        A commit that only our refs reach, or none, is answered as one that is not there.
        """
        ref = re.split(r"[~^]", commitish, maxsplit=1)[0]
        if not is_followed(ref if ref.startswith("refs/") else f"refs/{ref}"):
            raise AccessError(
                f"cannot check out {shown(commitish)}: it is no name of a branch, a tag or a commit",
                hint="the daemon's own refs are for administrators",
            )
        try:
            found = await self.resolve(name, commitish)
        except CommitNotFoundError:
            found = None
        if found is None or not await self.repository(name).is_public(found.commit):
            raise CommitNotFoundError(
                f"cannot resolve commit {shown(commitish)}: no branch or tag of {name} has that name or reaches that id",
                hint="sync the mirror, check the spelling, or give the whole id",
            )
        return found

    async def ensure_commits(
        self, name: MirrorName, commits: Collection[CommitId], progress: ProgressSink | None = None
    ) -> dict[CommitId, str]:
        """Fetch by id what is absent, from upstream and then from the fallbacks; answers those still missing with the reason."""
        row = await self._synced(name, progress)
        async with self.lock(row.name):
            return await self._sources.fetch_commits(
                row, self.repository(row.name), commits, progress
            )

    def upstreams(self, row: MirrorRow) -> builtins.list[Upstream]:
        """The upstream of a mirror, then its fallbacks."""
        return self._sources.upstreams(row)

    async def fetch_into(
        self,
        row: MirrorRow,
        path: Path,
        upstream: Upstream,
        oids: Collection[CommitId],
        progress: ProgressSink | None = None,
    ) -> dict[CommitId, str]:
        """Fetch objects by id into a repository of the caller's; answers those that did not come, each with the reason."""
        return await self._sources.fetch_from(
            upstream, Repository(self._git, row.name, path), sorted(oids), progress
        )

    # -- pins ---------------------------------------------------------------------------------------------------------

    async def pin(
        self, name: MirrorName, commits: Collection[CommitId], *, owner: str, reason: str
    ) -> dict[CommitId, str]:
        """Keep commits alive for an owner, once all they reach was found here; answers those refused with the reason."""
        pins.check_owner(owner)
        row = await self._synced(name)
        repository = self.repository(row.name)
        async with self.lock(row.name):
            await repository.must_be_ours()
            refused = await pins.verify(repository, commits)
            proven = sorted(set(commits) - refused.keys())
            before = {
                pin.commit: pin for pin in await self._catalog.list_pins(row.name.key, owner=owner)
            }
            new = [PinRow(row.name, commit, owner, reason, utc_now()) for commit in proven]
            rows = [_renewed(before.get(pin.commit, pin), reason) for pin in new]
            await pins.keep(repository, self._catalog, rows, owner, self._mending.debts(row.name))
        if proven:
            self._events.publish(
                "commits.pinned",
                mirror=str(row.name),
                owner=owner,
                count=len(proven),
                refused=len(refused),
            )
        return refused

    async def make_empty(self, name: MirrorName) -> None:
        """Put an empty repository where a mirror was, for a heal to fill."""
        async with self.lock(name), self._quarantine.directory("clone") as directory:
            building = directory / "repository"
            await Repository(self._git, name, building).create()
            building.rename(self.path(name))
            await anyio.to_thread.run_sync(sync_directory, self._root)

    async def restore_pins(self, name: MirrorName) -> None:
        """Make lost pins again: those that the catalog has, and those of what datasets record now, each once it is proven.
        Pins that the catalog does not have are adopted, as at a start."""
        repository = self.repository(name)
        async with self.lock(name):
            if not self._mending.debts(name):
                await follow_pins(self._catalog, repository)
            refs = await repository.all_refs()
            unpinned = await self._catalog.list_recorded(name.key, unpinned=True)
            recorded = [
                PinRow(name, commit, f"dataset/{dataset}", "recorded by the dataset", utc_now())
                for dataset, commit in sorted({(row.dataset, row.commit) for row in unpinned})
            ]
            said = await self._catalog.list_pins(name.key)
            lost = [row for row in said if f"{PINS}{row.owner}/{row.commit}" not in refs] + recorded
            refused = await pins.verify(repository, {row.commit for row in lost})
            for owner in sorted({row.owner for row in lost}):
                rows = [row for row in lost if row.owner == owner and row.commit not in refused]
                await pins.keep(repository, self._catalog, rows, owner, self._mending.debts(name))
            await self.give_up_unrecorded(name, recorded)
        if lost:
            self._events.publish(
                "pins.restored", mirror=str(name), count=len(lost), refused=len(refused)
            )

    async def give_up_unrecorded(self, name: MirrorName, rows: Collection[PinRow]) -> None:
        """Give up those of the pins just made whose dataset was removed meanwhile. The caller holds the mirror's lock."""
        repository, debts = self.repository(name), self._mending.debts(name)
        await pins.give_up_unrecorded(repository, self._catalog, rows, debts)

    async def unpin(self, name: MirrorName, commits: Collection[CommitId], *, owner: str) -> None:
        """Give pins of an owner up."""
        pins.check_owner(owner)
        row = await self.get(str(name))
        async with self.lock(row.name):
            await pins.give_up(
                self.repository(row.name),
                self._catalog,
                commits,
                owner,
                self._mending.debts(row.name),
            )
        self._events.publish(
            "commits.unpinned", mirror=str(row.name), owner=owner, count=len(commits)
        )

    async def list_pins(self, name: MirrorName | None = None) -> builtins.list[Pin]:
        rows = await self._catalog.list_pins(name.key if name else None)
        return [
            Pin(
                mirror=str(row.mirror),
                commit=row.commit,
                owner=row.owner,
                reason=row.reason,
                created_at=row.created_at,
            )
            for row in rows
        ]

    # -- ref history --------------------------------------------------------------------------------------------------

    async def refs_log(self, name: MirrorName) -> builtins.list[RefRecord]:
        """The newest first."""
        row = await self._synced(name)
        return await history.list_records(self.repository(row.name))

    async def refs_diff(self, name: MirrorName, a: str, b: str) -> RefDiff:
        """What changed between two records, each named by id or time."""
        row = await self._synced(name)
        repository = self.repository(row.name)
        old = await history.find_record(repository, a)
        new = await history.find_record(repository, b)
        changes = await history.diff_records(
            repository, old.id, new.id, await repository.all_refs()
        )
        return RefDiff(mirror=str(row.name), a=old.id, b=new.id, changes=changes)

    async def refs_restore(
        self, name: MirrorName, at: str, progress: ProgressSink | None = None
    ) -> RefDiff:
        """Put the refs back to a record. Nothing is lost: the tips they leave are kept. The next sync follows upstream again."""
        row = await self._synced(name)
        repository = self.repository(row.name)
        async with self.lock(row.name):
            record = await history.find_record(repository, at)
            before = await history.find_record(repository, "latest")
            refs, head = await history.read_refs(repository, record.id)
            changes = await move_refs(repository, refs, head, why=f"restore {record.id[:12]}")
            columns = await history.columns_of(repository, row.history)
            await self._catalog.update_mirror(row.name.key, **columns)
        self._events.publish(
            "refs.restored", mirror=str(row.name), at=record.id, changes=len(changes)
        )
        return RefDiff(mirror=str(row.name), a=before.id, b=record.id, changes=changes)

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _synced(self, name: MirrorName, progress: ProgressSink | None = None) -> MirrorRow:
        """The row of a mirror that is on disk; one that is not yet is synced now, unless somebody is at it."""
        row = await self.get(str(name))
        if not self.path(row.name).exists():
            async with self.lock(row.name):
                is_filled = self.path(row.name).exists()
            if not is_filled:
                await self.sync(row.name, progress)
        return row


def _renewed(pin: PinRow, reason: str) -> PinRow:
    """A pin that is made again; without a reason it keeps the one that it has."""
    return replace(pin, reason=reason or pin.reason)


def _not_found(text: str) -> MirrorNotFoundError:
    return MirrorNotFoundError(
        f"cannot find mirror {shown(text)}: nobody added it", hint="`mirrord mirror list` shows all"
    )


def shown_mirror(row: MirrorRow, pin_count: int) -> Mirror:
    return Mirror(
        name=str(row.name),
        repo=row.name.repo,
        url=masked_url(row.url),
        state=_state(row),
        default_branch=row.default_branch,
        ref_count=row.ref_count,
        pin_count=pin_count,
        kept_count=row.kept_count,
        size_bytes=row.size_bytes,
        synced_at=row.synced_at,
        attempted_at=row.attempted_at,
        error=Problem.from_json(row.error) if row.error else None,
        ref_faults=[RefFault.from_json(fault) for fault in row.ref_faults],
    )


def _state(row: MirrorRow) -> Literal["empty", "ready", "failed"]:
    if row.error:
        return "failed"
    return "ready" if row.synced_at else "empty"
