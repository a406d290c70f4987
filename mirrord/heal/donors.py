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

from ..audit.view import borrow_from, make_repository
from ..catalog import MirrorRow
from ..errors import CorruptObjectError
from ..git.packfile import PackIndex, pack_is_whole, pack_trailer
from ..mirrors.service import Mirrors
from ..mirrors.upstream import Upstream
from ..model import CommitId, MirrorName
from ..protocol import ProgressSink
from .bundles import BundleFile, Shelf
from .missing import Missing

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
