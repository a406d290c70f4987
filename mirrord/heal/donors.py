"""Where missing objects come from, nearest first: our closure packs, other mirrors of this host, upstream and fallbacks by id,
bundles, then upstream and fallbacks whole. Checkouts are never asked: others write in them.

A donor lends a repository that may have some of what is missing; whether it has, and whether it is what it says, is not
decided here. Owns only directories below the heal's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from ..audit.connectivity import Missing
from ..audit.object_files import TIMEOUT
from ..audit.stand_in import borrow_from, make_repository
from ..catalog import MirrorRow
from ..errors import CorruptObjectError, MirrordError
from ..git.command import Git
from ..git.packs import PackIndex, pack_is_whole, pack_trailer
from ..git.workers import Workers
from ..host.files import full_disk_named
from ..mirrors.bundles.format import BundleHeader, index_bundle, read_header
from ..mirrors.bundles.merge import Contents, sort_refs
from ..mirrors.quarantine import DAMAGED, Quarantine
from ..mirrors.repository import Repository
from ..mirrors.service import Mirrors
from ..mirrors.upstream import Upstream
from ..model import CommitId, MirrorName
from ..protocol import ProgressSink
from .transfer import SALVAGED, may_hold, salvage

_CLOSURE_PACKS = ("packs/*/pack-*.pack", "gits/*/.git/objects/pack/pack-*.pack")

Lend = Callable[[Missing], AbstractAsyncContextManager[Path | None]]


@dataclass(frozen=True, slots=True)
class Donor:
    """`lend` opens a repository to take from, or None where it has nothing to say."""

    name: str
    lend: Lend


@dataclass(frozen=True, slots=True)
class Donors:
    """The donors of one mirror; `names` are all mirrors. `work` is the heal's own directory, `view` what the mirror has that is
    good. `refusals` says of those that failed why.
    """

    mirrors: Mirrors
    row: MirrorRow
    names: list[MirrorName]
    templates: Path
    work: Path
    view: Path
    shelf: Shelf
    progress: ProgressSink | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    async def all(self, tips: Collection[str]) -> list[Donor]:
        """Every donor, the cheapest first; a bundle of another repository is the last. `tips` are what a whole fetch asks for."""
        names = sorted(self.names, key=lambda name: (name.key != self.row.name.key, name.key))
        packs = [
            Donor(f"closure packs of {name}", self._packs(self.templates / str(name)))
            for name in names
        ]
        others = [
            Donor(f"mirror {name}", lying_at(self.mirrors.path(name)))
            for name in names
            if name.key != self.row.name.key
        ]
        upstreams = self.mirrors.upstreams(self.row)
        by_id = [
            Donor(f"upstream {upstream.shown}", self._by_id(upstream)) for upstream in upstreams
        ]
        whole = [
            Donor(f"upstream {upstream.shown}, fetched whole", self._whole(upstream, tips))
            for upstream in upstreams
        ]
        files = await self.bundles()
        lent = [self.opening(file) for file in files if file.is_lent]
        own = [
            self.opening(file) for file in files if not file.is_lent and file.is_of(self.row.name)
        ]
        foreign = [
            self.opening(file)
            for file in files
            if not file.is_lent and not file.is_of(self.row.name)
        ]
        return [*packs, *lent, *others, *by_id, *own, *whole, *foreign]

    async def bundles(self) -> list[BundleFile]:
        found, refused = await self.shelf.look()
        self.refusals.update(refused)
        return found

    def opening(self, file: BundleFile) -> Donor:
        return Donor(file.name, lambda _missing: self.shelf.open(file, self.progress))

    def _packs(self, templates: Path) -> Lend:
        @asynccontextmanager
        async def lend(missing: Missing) -> AsyncIterator[Path | None]:
            into = self.work / f"packs-{templates.name}"
            there = into.exists() or await anyio.to_thread.run_sync(
                _gather_packs, templates, missing.all, into
            )
            yield into if there else None

        return lend

    def _by_id(self, upstream: Upstream) -> Lend:
        """Trees and blobs as if nothing were here; commits from where ours are whole, so that only what is new comes."""

        @asynccontextmanager
        async def lend(missing: Missing) -> AsyncIterator[Path | None]:
            async with self.mirrors.quarantine.directory("donor") as directory:
                fetched = directory / "repository"
                make_repository(fetched, {f"refs/whole/{oid}": oid for oid in missing.whole})
                borrow_from(fetched, self.view)
                if missing.others:
                    alone = directory / "alone"
                    make_repository(alone)
                    await self._fetch(upstream, alone, missing.others)
                    borrow_from(fetched, self.view, alone)
                if missing.commits:
                    await self._fetch(upstream, fetched, missing.commits)
                yield fetched

        return lend

    def _whole(self, upstream: Upstream, tips: Collection[str]) -> Lend:
        """Everything anew, for a hole that upstream does not fill by id."""

        @asynccontextmanager
        async def lend(missing: Missing) -> AsyncIterator[Path | None]:
            if missing.all <= set(tips):
                yield None
                return
            async with self.mirrors.quarantine.directory("donor") as directory:
                make_repository(directory / "repository")
                await self._fetch(upstream, directory / "repository", tips)
                yield directory / "repository"

        return lend

    async def _fetch(self, upstream: Upstream, into: Path, oids: Collection[str]) -> None:
        wanted = [CommitId(oid) for oid in sorted(oids)]
        unfetched = await self.mirrors.fetch_into(self.row, into, upstream, wanted, self.progress)
        if unfetched:
            self.refusals[f"upstream {upstream.shown}"] = min(unfetched.values())


def lying_at(path: Path) -> Lend:
    """Lend what is there as it is."""

    @asynccontextmanager
    async def lend(_missing: Missing) -> AsyncIterator[Path | None]:
        yield path if path.is_dir() else None

    return lend


def _gather_packs(templates: Path, wanted: Collection[str], into: Path) -> bool:
    """Lend the closure packs that are sound, if one of them has something of what is wanted."""
    packs = {pack.name: pack for pattern in _CLOSURE_PACKS for pack in templates.glob(pattern)}
    sound = [pack for pack in packs.values() if _is_sound(pack)]
    ids = [bytes.fromhex(oid) for oid in wanted]
    if not any(_has_one(pack, ids) for pack in sound):
        return False
    make_repository(into)
    for pack in sound:
        for file in (pack, pack.with_suffix(".idx")):
            (into / "objects/pack" / file.name).symlink_to(file)
    return True


def _is_sound(pack: Path) -> bool:
    index = pack.with_suffix(".idx")
    try:
        return (
            PackIndex(index).pack_checksum == pack_trailer(pack)
            and pack_is_whole(pack)
            and pack_is_whole(index)
        )
    except (OSError, CorruptObjectError):
        return False


def _has_one(pack: Path, ids: Collection[bytes]) -> bool:
    index = PackIndex(pack.with_suffix(".idx"))
    return any(oid in index for oid in ids)


LENT = "the bundle that was sent"


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A bundle whose head could be read."""

    number: int
    name: str
    path: Path
    header: BundleHeader
    contents: Contents
    is_lent: bool

    def is_of(self, name: MirrorName) -> bool:
        """Whether it was made of the mirror, and not only of a relative."""
        return (
            self.contents.mirror is not None
            and MirrorName.parse(self.contents.mirror).key == name.key
        )


@dataclass(frozen=True, slots=True)
class Shelf:
    """The bundles there are for one heal. `view` is what the mirror has that is good: incremental bundles build on it."""

    git: Git
    quarantine: Quarantine
    directory: Path
    lent: Collection[Path]
    name: MirrorName
    work: Path
    view: Path

    async def look(self) -> tuple[list[BundleFile], dict[str, str]]:
        """The bundles, those that build on nothing first, and why others cannot be read."""
        return await anyio.to_thread.run_sync(self._look)

    def _look(self) -> tuple[list[BundleFile], dict[str, str]]:
        found: list[BundleFile] = []
        refused: dict[str, str] = {}
        for number, (path, name) in enumerate(self._files()):
            try:
                header = read_header(path)
                found.append(
                    BundleFile(
                        number, name, path, header, sort_refs(header.refs), path in self.lent
                    )
                )
            except MirrordError as error:
                refused[name] = error.message
            except OSError as error:
                refused[name] = f"cannot read the bundle: {error.strerror}"
        return sorted(
            found, key=lambda file: (len(file.header.prerequisites) > 0, file.number)
        ), refused

    def _files(self) -> list[tuple[Path, str]]:
        lying = sorted(self.directory.iterdir()) if self.directory.is_dir() else []
        dropped = [path for path in lying if path.is_file() and not path.name.startswith(".")]
        return [
            *((path, LENT) for path in self.lent),
            *((path, f"bundle {_readable(path.name)}") for path in dropped),
        ]

    @asynccontextmanager
    async def open(self, file: BundleFile, progress: ProgressSink | None) -> AsyncIterator[Path]:
        """A repository with the objects of the bundle and of the view, made once for a heal."""
        into = self.work / f"bundle-{file.number}"
        if not into.exists():
            await self._index(file, into, progress)
        yield into

    async def _index(self, file: BundleFile, into: Path, progress: ProgressSink | None) -> None:
        """It has its name when it is whole: one that cannot be opened yet may build on what the next donor gives."""
        async with self.quarantine.directory("donor") as directory:
            building = directory / "repository"
            make_repository(building)
            borrow_from(building, self.view)
            repository = Repository(self.git, self.name, building)
            await index_bundle(
                repository, file.path, file.header, progress=progress, doing="open the bundle"
            )
            building.rename(into)


def _readable(name: str) -> str:
    """A file name need not be text."""
    return name.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a mirror in `quarantine`. `view` is what it has that is good: deltas build on it."""

    workers: Workers
    quarantine: Path
    name: MirrorName
    work: Path
    view: Path

    def donors(self) -> list[Donor]:
        """The latest first."""
        packs = enumerate(packs_taken(self.quarantine, self.name))
        return [
            Donor(f"{SALVAGED}{pack.name} in quarantine", self._of(pack, self.work / f"kept-{n}"))
            for n, pack in packs
        ]

    def _of(self, pack: Path, into: Path) -> Lend:
        @asynccontextmanager
        async def lend(missing: Missing) -> AsyncIterator[Path | None]:
            there = into.exists() or await self._salvage(pack, into, missing)
            yield into if there else None

        return lend

    async def _salvage(self, pack: Path, into: Path, missing: Missing) -> bool:
        """Whether it was worth it. A person may have removed the pack, or taken it away from us."""
        try:
            if not await anyio.to_thread.run_sync(may_hold, pack, missing.all):
                return False
            with full_disk_named("quarantine"):
                await self.workers.run(salvage, pack, into, timeout=TIMEOUT)
        except OSError as error:
            raise CorruptObjectError(
                f"cannot salvage {pack.name} in quarantine: {error.strerror}"
            ) from error
        borrow_from(into, self.view)
        return True


def packs_taken(quarantine: Path, name: MirrorName) -> list[Path]:
    """The packs that heals took out of a mirror, the latest first, with their indexes beside them."""
    return sorted(
        (quarantine / DAMAGED / str(name)).glob("*/objects/pack/pack-*.pack"), reverse=True
    )
