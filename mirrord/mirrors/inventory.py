"""The mirrors of a daemon: found, added, locked, reconciled, removed; shared in a fleet.

One lock for each mirror separates syncs, pins, maintenance, heals and removal. Readers need none,
because objects are only added and refs move in one transaction. The catalog follows the disk, at
the start and after a failed operation: unknown mirrors and pins are adopted.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from .. import errors
from ..catalog import Catalog, MirrorRow
from ..config import Settings
from ..errors import DamagedMirrorError, InvalidNameError, MirrordError, host_error
from ..git.command import Git
from ..host.files import sync_directory
from ..host.room import UNBOUNDED, Room
from ..host.trash import Trash
from ..jobs.events import Events
from ..jobs.operations import task_group, together
from ..model import MirrorName, shown, utc_now
from ..presence import exists, is_dir
from ..protocol import Mirror, Problem, RefFault
from ..telemetry import log, mask_url
from ..workers.pool import Workers
from . import maintenance
from .history import columns_of
from .pins import Pins, adopt_pins, is_sole_record
from .quarantine import Quarantine
from .refs import recover
from .repository import Repository
from .sharing import Sharing
from .survey import SURVEY_BATCH, OwnedCommits, survey
from .upstreams.fetching import unmark
from .upstreams.upstream import default_url, parse_upstream


@dataclass(kw_only=True, eq=False, repr=False)
class Inventory:
    """All mirrors. Methods take the locks that they need; `lock` is for work on objects elsewhere.

    What other daemons may have changed just now is read from the catalog.
    """

    settings: Callable[[], Settings]
    git: Git
    workers: Workers
    catalog: Catalog
    events: Events
    trash: Trash
    room: Room = UNBOUNDED
    sharing: Sharing = field(default_factory=Sharing)

    def __post_init__(self) -> None:
        state = self.settings().state_dir
        self.root = state / "mirrors"
        self.quarantine = Quarantine(state / "quarantine", self.trash, self.room)
        self.pins = Pins(self.catalog)
        self._names: dict[str, MirrorName] = {}
        self._unsynced: dict[str, str] = {}  # the error code of the last sync, where that failed
        self._locks: dict[str, anyio.Lock] = {}
        self._unclean: dict[str, MirrorName] = {}  # for `clean_up`

    async def open(self) -> None:
        """Finish or remove what a crash left, and bring the catalog in line with the disk.

        A mirror for which that fails is marked as failed and does not stop the others.
        """
        for directory in (self.root, self.quarantine.root):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self.quarantine.clean()
        rows = {row.name.key: row for row in await self.catalog.list_mirrors()}
        gone = dict(rows)
        pins = await self.catalog.list_pin_keys()
        limiter = anyio.CapacityLimiter(4)
        async with task_group() as tasks:
            for path, pinned in await self._survey():
                # work on a mirror that is being removed may make its directory again
                if pinned is None and Repository(self.git, MirrorName("", ""), path).is_stub():
                    log.warning("mirror.stub_removed", path=path.name)
                    await self.quarantine.discard(path)
                    continue
                try:
                    name = MirrorName.parse(path.name)
                except InvalidNameError:
                    log.warning("mirror.ignored", path=path.name)
                    continue
                row = gone.pop(name.key, None)
                if row is None and await self.sharing.is_known(Repository(self.git, name, path)):
                    log.warning("mirror.removed_elsewhere", mirror=str(name))
                    await self.quarantine.discard(path)
                    continue
                if row is None:
                    url = default_url(self.settings(), name)
                    row = MirrorRow(name=name, url=url, added_at=utc_now(), configured_url=url)
                    await self.catalog.put_mirror(row)
                    log.warning("mirror.adopted", mirror=str(name))
                if row.history is None or pinned != pins.get(name.key, set()):
                    tasks.create_task(self._reconcile_at_start(name, limiter))
        # never synced, or deleted by hand: the next sync clones it; in a fleet the first request
        for row in gone.values() if not self.sharing.is_fleet else ():
            for pin in await self.catalog.list_pins(row.name.key):
                if not is_sole_record(pin):
                    await self.catalog.delete_pins(row.name.key, [pin.commit], pin.owner)
            if row.synced_at is not None:
                log.warning("mirror.gone", mirror=str(row.name))
                state = dict.fromkeys(("synced_at", "ref_count", "kept_count", "size_bytes"))
                await self.catalog.update_mirror(row.name.key, **state)
        await self.refresh()

    async def refresh(self, keep: Collection[str] = ()) -> list[MirrorName]:
        """Read the catalog's mirrors again; return those that are gone, except `keep` (keys)."""
        listed = await self.catalog.list_mirrors()
        before, self._names = self._names, {row.name.key: row.name for row in listed}
        self._names |= {key: before[key] for key in keep if key in before}
        self._unsynced = {row.name.key: str(row.error["code"]) for row in listed if row.error}
        await self.sharing.enrol(listed)
        return [before[key] for key in before.keys() - self._names.keys()]

    async def refresh_errors(self) -> None:
        """Forget failed syncs of mirrors that another daemon has synced since."""
        if self._unsynced:
            for key in await self.catalog.list_synced([*self._unsynced]):
                self._unsynced.pop(key, None)

    async def _survey(self) -> list[tuple[Path, OwnedCommits | None]]:
        """Survey all directories of mirrors; None for one that has to be reconciled."""
        paths = sorted(await to_thread.run_sync(lambda: list(self.root.iterdir())))
        commits: dict[Path, OwnedCommits | None] = dict.fromkeys(paths)

        async def survey_batch(batch: Sequence[Path]) -> None:
            with suppress(MirrordError):
                pins = await self.workers.run(survey, batch)
                commits.update(zip(batch, pins, strict=True))

        firsts = range(0, len(paths), SURVEY_BATCH)
        await together(survey_batch(paths[first : first + SURVEY_BATCH]) for first in firsts)
        return list(commits.items())

    async def _reconcile_at_start(self, name: MirrorName, limiter: anyio.CapacityLimiter) -> None:
        of_files = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
        damage = (DamagedMirrorError, errors.GitFailedError, *of_files)
        try:
            async with limiter:
                await self._reconcile(self.repository(name))
        except (MirrordError, OSError) as error:
            problem: MirrordError | None
            if isinstance(error, OSError):
                problem, fact = host_error(error, f"open mirror {name}"), error.strerror
            else:
                problem, fact = error, error.message.partition(": ")[2]
            if isinstance(error, damage):
                hint = f"`mirrord heal {name}` repairs it"
                problem = DamagedMirrorError(f"cannot open mirror {name}: {fact}", hint=hint)
            if problem is None:
                raise
            self._unclean[name.key] = name
            await self.catalog.update_mirror(name.key, error=problem.problem())
            fields = {"code": problem.code, "detail": problem.message}
            log.warning("mirror.damaged", mirror=str(name), **fields)

    async def _reconcile(self, repository: Repository) -> None:
        """Finish what was interrupted in one mirror, and bring its rows in line.

        No git of this daemon runs in it, at the start or under its lock, so files that no process
        holds are stale at any age.
        """
        key = repository.name.key
        # first, because a stale lock would stop git
        await to_thread.run_sync(maintenance.remove_stale_files, repository.path, timedelta())
        await self.pins.settle(repository)
        await maintenance.repair_incomplete_packs(repository)
        await recover(repository)
        await unmark(repository)
        if await self.sharing.is_known(repository):
            await self.pins.follow(repository)
        else:
            await adopt_pins(self.catalog, repository)
        row = await self.catalog.find_mirror(key)
        if row is not None and row.history is None:
            await self.catalog.update_mirror(key, **await columns_of(repository, None))

    def names(self) -> list[MirrorName]:
        return [*self._names.values()]

    def get_name(self, text: str) -> MirrorName:
        """Return the name of a mirror by any spelling, from memory; raises MirrorNotFoundError."""
        try:
            return self._names[MirrorName.parse(text).key]
        except (InvalidNameError, KeyError) as error:
            raise _not_found(text) from error

    async def resolve_name(self, text: str) -> MirrorName:
        """Return the name of a mirror by any spelling; raises MirrorNotFoundError."""
        try:
            return self.get_name(text)
        except errors.MirrorNotFoundError:
            if not self.sharing.is_fleet:
                raise
            return (await self.get(text)).name

    async def get(self, text: str) -> MirrorRow:
        """Return the row of a mirror by any spelling; raises MirrorNotFoundError."""
        try:
            name = MirrorName.parse(text)
        except InvalidNameError as error:
            raise _not_found(text) from error
        row = await self.catalog.find_mirror(name.key)
        if row is None:
            raise _not_found(text)
        if self.sharing.is_fleet:
            self._names.setdefault(name.key, row.name)
        return row

    def path(self, name: MirrorName) -> Path:
        return self.root / str(self._names.get(name.key, name))

    def repository(self, name: MirrorName) -> Repository:
        """Return the repository of a mirror, which may not exist."""
        return Repository(self.git, name, self.path(name))

    @asynccontextmanager
    async def lock(self, name: MirrorName) -> AsyncIterator[None]:
        """Exclude syncs, pins, maintenance, heals and removal of one mirror.

        Where the block fails, `clean_up` reconciles the mirror, because a git lock, half a pack, a
        journal or a ref without a row may be left. An UpstreamError leaves nothing.
        """
        async with self._locks.setdefault(name.key, anyio.Lock()):
            await maintenance.remove_stale_locks(self.path(name))
            try:
                yield
            except errors.UpstreamError:
                raise
            except BaseException:
                self._unclean[name.key] = name
                raise

    def is_busy(self, name: MirrorName) -> bool:
        return name.key in self._locks and self._locks[name.key].locked()

    async def clean_up(self) -> bool:
        """Clean up after failed operations, as a start does; return whether nothing is left."""
        cleaned = await self.quarantine.clean()
        for name in list(self._unclean.values()):
            try:
                async with self.lock(name):
                    self._unclean.pop(name.key, None)
                    if exists(self.path(name)):
                        await self._reconcile(self.repository(name))
                        log.info("mirror.reconciled", mirror=str(name))
            except errors.StoppingError:
                raise
            except (MirrordError, OSError) as error:
                log.warning("mirror.cleanup_pending", mirror=str(name), detail=str(error))
        return cleaned and not self._unclean

    async def list_mirrors(self) -> list[Mirror]:
        counts = await self.catalog.count_pins()
        rows = await self.catalog.list_mirrors()
        return [_shown(row, counts.get(row.name.key, 0)) for row in rows]

    async def describe(self, name: MirrorName) -> Mirror:
        row = await self.get(str(name))
        return _shown(row, (await self.catalog.count_pins()).get(row.name.key, 0))

    async def add(self, repo: str, url: str | None = None, *, adopt: bool = True) -> MirrorRow:
        """Register a mirror, or return its row if it exists; the first sync fills it.

        With `adopt`, it continues from the newest generation in the store. Raises InvalidNameError,
        InvalidUrlError, ConflictError when it has another URL.
        """
        name = MirrorName.parse(repo)
        configured = default_url(self.settings(), name)
        upstream = parse_upstream(url or configured)
        async with self.lock(name):
            existing = await self.catalog.find_mirror(name.key)
            if existing is None:
                row = MirrorRow(
                    name=name, url=upstream.url, added_at=utc_now(), configured_url=configured
                )
                published = await self.sharing.find_published(name) if adopt else None
                await self.catalog.put_mirror(row)
                if published:  # the next publication continues from it
                    await self.catalog.adopt_generation(self.catalog.node, name.key, published)
                self._names[name.key] = name
                await self.sharing.enrol([row])
                self.events.publish("mirror.added", mirror=str(name), url=upstream.shown)
                return row
        if url is not None and existing.url != upstream.url:
            raise errors.ConflictError(
                f"cannot add mirror {name}: it exists with another upstream",
                hint=f"`mirrord mirror set-url {existing.name} URL` follows another;"
                f" `mirrord mirror show {existing.name}` shows it as it is",
                mirror=str(existing.name),
            )
        return existing

    async def remove(self, name: MirrorName) -> None:
        """Delete a mirror; raises ConflictError while something needs it."""
        row = await self.get(str(name))
        path = self.path(row.name)
        async with self.sharing.claim(row.name), self.lock(row.name):
            await self._must_be_unused(row.name)
            try:
                await self.catalog.delete_mirror(row.name.key)
                if exists(path):
                    await self.quarantine.discard(path)
            except BaseException:  # it cannot be moved away, or its removal was cancelled
                if exists(path):
                    with anyio.CancelScope(shield=True):
                        await self.catalog.put_mirror(row)
                raise
            self._names.pop(row.name.key, None)
            self._unsynced.pop(row.name.key, None)
        self.events.publish("mirror.removed", mirror=str(row.name))

    async def _must_be_unused(self, name: MirrorName) -> None:
        recorded = await self.catalog.list_recorded(name.key)
        pinned = await self.catalog.list_pins(name.key)
        used = [f"dataset {one} records it" for one in sorted({it.dataset for it in recorded})]
        used += [f"{owner} pins it" for owner in sorted({pin.owner for pin in pinned})]
        worktrees = self.path(name) / "worktrees"
        if is_dir(worktrees) and any(worktrees.iterdir()):
            used.append("a linked checkout uses it")
        if used:
            raise errors.ConflictError(
                f"cannot remove mirror {name}: {used[0]}",
                hint="remove the dataset, the pins and the linked checkouts first",
                mirror=str(name),
                used_by=used,
            )

    async def make_again(
        self, name: MirrorName, fill: Callable[[Repository], Awaitable[object]] | None = None
    ) -> None:
        """Create the repository of a mirror that is not on disk, empty or filled."""
        async with self.lock(name):
            if exists(self.path(name)):
                return
            async with self._building(name) as repository:
                if fill:
                    await fill(repository)

    async def discard(self, name: MirrorName) -> None:
        """Remove the files of a mirror that another daemon removed."""
        path = self.root / str(name)
        async with self.lock(name):
            if exists(path):
                await self.quarantine.discard(path)

    @asynccontextmanager
    async def _building(self, name: MirrorName) -> AsyncIterator[Repository]:
        """Create a repository in quarantine, renamed into its place when the block succeeds."""
        async with self.quarantine.directory("clone") as directory:
            building = Repository(self.git, name, directory / "repository")
            await building.create()
            yield building
            building.path.rename(self.path(name))
            await to_thread.run_sync(sync_directory, self.root)


def _shown(row: MirrorRow, pin_count: int) -> Mirror:
    """Return a mirror as clients see it: without the secrets of its URL."""
    return Mirror(
        name=str(row.name),
        repo=row.name.repo,
        url=mask_url(row.url),
        host=parse_upstream(row.url).host,
        state="failed" if row.error else "ready" if row.synced_at else "empty",
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


def _not_found(text: str) -> errors.MirrorNotFoundError:
    return errors.MirrorNotFoundError(
        f"cannot find mirror {shown(text)}: it was never added",
        hint="`mirrord mirror list` shows all",
    )
