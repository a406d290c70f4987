"""The donors of a heal, the cheapest first.

A donor lends a repository that may have some of the objects; `Transfer` takes those that it has and
checks them. Checkouts are no donors, because others write in them. A bundle is opened only when
objects are missing. Never writes to a mirror, and only reads damaged packs.
"""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from ..audit.connectivity import MissingObjects
from ..audit.defects import TIMEOUT
from ..audit.stand_in import borrow_from, make_repository
from ..bundles.bundle_file import BundleHeader, index_bundle, read_header
from ..bundles.merging import BundleRefs, sort_refs
from ..catalog import MirrorRow
from ..errors import CorruptObjectError, MirrordError, StoppingError, full_disk_named
from ..fleet import with_obstore
from ..git.packs import PackIndex, pack_is_whole, pack_trailer
from ..mirrors.quarantine import DAMAGED, within_room
from ..mirrors.repository import Repository
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import Upstream
from ..model import CommitId, MirrorName
from ..places import Layout
from ..presence import exists, is_dir, is_file, matching
from ..protocol import ProgressSink
from ..quoting import quote_name
from ..telemetry import log
from .damaged_packs import may_hold, salvage

if TYPE_CHECKING:
    from ..fleet.restore import StoreDonor

_LENT = "the bundle that was sent"
STORE = "the store"
SALVAGED = "the intact part of "


class Donor(NamedTuple):
    """A source of objects. `lend` opens a repository to take from, or None where it has none."""

    name: str
    lend: Callable[[MissingObjects], AbstractAsyncContextManager[Path | None]]


class DonorBundle(NamedTuple):
    """A bundle with a readable header; `is_own` if it is of the mirror to heal."""

    number: int
    name: str
    path: Path
    header: BundleHeader
    refs: BundleRefs
    is_own: bool


@dataclass(slots=True)
class Donors:
    """The donors of the mirror of `row`.

    `lent` are bundles that came with a request, `work` is the heal's directory, `refusals` says why
    donors failed, `store` is the mirror's generation in the store.
    """

    mirrors: Mirrors
    row: MirrorRow
    lent: Collection[Path]
    work: Path
    progress: ProgressSink | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    store: "StoreDonor | None" = None

    @property
    def layout(self) -> Layout:
        return Layout(self.mirrors.settings().state_dir)

    @property
    def stand_in(self) -> Path:
        """The mirror's good objects, on which deltas and incremental bundles build."""
        return self.work / "stand-in"

    async def all(self, tips: Collection[str]) -> list[Donor]:
        """List every donor, the cheapest first; a fetch of a whole upstream asks for `tips`."""
        own = self.row.name.key
        rows = await self.mirrors.catalog.list_mirrors()
        names = sorted((row.name for row in rows), key=lambda name: (name.key != own, name.key))
        others = [name for name in names if name.key != own]
        upstreams = [(f"upstream {one.shown}", one) for one in self.mirrors.upstreams(self.row)]
        bundles = await anyio.to_thread.run_sync(self.bundles)
        lent = [bundle for bundle in bundles if bundle.name == _LENT]
        dropped = [bundle for bundle in bundles if bundle.name != _LENT]
        return [
            *(Donor(f"closure packs of {one}", partial(self._closure_packs, one)) for one in names),
            *map(self.donor_of, lent),
            *(Donor(f"mirror {one}", partial(lend, self.mirrors.path(one))) for one in others),
            *([Donor(STORE, self._from_store)] if self.mirrors.settings().store.url else []),
            *(Donor(name, partial(self._by_id, one)) for name, one in upstreams),
            *(self.donor_of(bundle) for bundle in dropped if bundle.is_own),
            *(
                Donor(f"{name}, fetched whole", partial(self._whole, one, tips))
                for name, one in upstreams
            ),
            *(self.donor_of(bundle) for bundle in dropped if not bundle.is_own),
        ]

    @asynccontextmanager
    async def _closure_packs(
        self, name: MirrorName, missing: MissingObjects
    ) -> AsyncIterator[Path | None]:
        into, templates = self.work / f"packs-{name}", self.layout.templates / str(name)
        is_there = exists(into) or await anyio.to_thread.run_sync(
            _gather_packs, templates, missing.all, into
        )
        yield into if is_there else None

    @asynccontextmanager
    async def _from_store(self, missing: MissingObjects) -> AsyncIterator[Path | None]:
        """Lend packs of the store on top of the stand-in; after an error, no more of them."""
        into = self.work / "published"
        if STORE not in self.refusals:
            try:
                await self._download(missing, into)
            except StoppingError:
                raise
            except MirrordError as error:
                fields = {"donor": STORE, "code": error.code, "detail": error.message}
                log.warning("donor.failed", **fields)
                self.refusals[STORE] = error.message
        yield into if exists(into) else None

    async def _download(self, missing: MissingObjects, into: Path) -> None:
        self.store = self.store or await open_store(self.mirrors, self.row.name)
        if self.store is None:
            return
        if not exists(into):
            make_repository(into)
            borrow_from(into, self.stand_in)
        packs, room = into / "objects/pack", self.mirrors.room
        await anyio.to_thread.run_sync(self.store.take, missing.all, packs, room)
        if self.store.damage:
            self.refusals[STORE] = self.store.damage

    @asynccontextmanager
    async def _by_id(self, upstream: Upstream, missing: MissingObjects) -> AsyncIterator[Path]:
        """Fetch trees and blobs into an empty repository, and commits on top of whole ones here.

        So upstream sends only what is new of the commits.
        """
        async with self.mirrors.quarantine.directory("donor") as directory:
            fetched = directory / "repository"
            make_repository(fetched, {f"refs/whole/{oid}": oid for oid in missing.whole})
            borrow_from(fetched, self.stand_in)
            if missing.others:
                alone = directory / "alone"
                make_repository(alone)
                await self._fetch(upstream, alone, missing.others)
                borrow_from(fetched, self.stand_in, alone)
            if missing.commits:
                await self._fetch(upstream, fetched, missing.commits)
            yield fetched

    @asynccontextmanager
    async def _whole(
        self, upstream: Upstream, tips: Collection[str], missing: MissingObjects
    ) -> AsyncIterator[Path | None]:
        """Fetch everything, for objects that upstream does not give by id."""
        if missing.all <= set(tips):
            yield None
            return
        async with self.mirrors.quarantine.directory("donor") as directory:
            make_repository(directory / "repository")
            await self._fetch(upstream, directory / "repository", tips)
            yield directory / "repository"

    async def _fetch(self, upstream: Upstream, into: Path, oids: Collection[str]) -> None:
        wanted = [CommitId(oid) for oid in sorted(oids)]
        unfetched = await self.mirrors.fetch_into(self.row, into, upstream, wanted, self.progress)
        if unfetched:
            self.refusals[f"upstream {upstream.shown}"] = min(unfetched.values())

    def bundles(self) -> list[DonorBundle]:
        """List the bundles that can be read, those without prerequisites first."""
        directory = self.layout.bundles
        files = [(path, _LENT) for path in self.lent]
        for path in sorted(directory.iterdir()) if is_dir(directory) else []:
            if is_file(path) and not path.name.startswith("."):
                name = quote_name(path.name)
                files.append((path, f"bundle {name}"))
        bundles = []
        for number, (path, name) in enumerate(files):
            try:
                header = read_header(path)
                refs = sort_refs(header.refs)
                mirror = refs.mirror and MirrorName.parse(refs.mirror).key
                is_own = mirror == self.row.name.key
                bundles.append(DonorBundle(number, name, path, header, refs, is_own))
            except MirrordError as error:
                self.refusals[name] = error.message
            except OSError as error:
                self.refusals[name] = f"cannot read the bundle: {error.strerror}"
        return sorted(
            bundles, key=lambda bundle: (bool(bundle.header.prerequisites), bundle.number)
        )

    def donor_of(self, bundle: DonorBundle) -> Donor:
        return Donor(bundle.name, partial(self._unpacked, bundle))

    @asynccontextmanager
    async def _unpacked(self, bundle: DonorBundle, _missing: MissingObjects) -> AsyncIterator[Path]:
        """Lend the objects of a bundle on top of the stand-in, unpacked once in a heal.

        A bundle that fails is tried again later: it may build on what the next donor gives.
        """
        into = self.work / f"bundle-{bundle.number}"
        if not exists(into):
            async with self.mirrors.quarantine.directory("donor") as directory:
                building = directory / "repository"
                make_repository(building)
                borrow_from(building, self.stand_in)
                repository = Repository(self.mirrors.git, self.row.name, building)
                doing = "open the bundle"
                await index_bundle(
                    repository, bundle.path, bundle.header,
                    progress=within_room(self.mirrors.room, self.progress, doing), doing=doing,
                )  # fmt: skip
                building.rename(into)
        yield into

    def damaged_packs(self) -> list[Donor]:
        """List the packs of earlier heals, the latest first.

        They may hold a missing object as a delta on one that a donor has now.
        """
        directory = self.mirrors.quarantine.root / DAMAGED / str(self.row.name)
        packs = sorted(matching(directory, "*/objects/pack/*.pack"), reverse=True)
        return [
            Donor(f"{SALVAGED}{pack.name} in quarantine", partial(self._salvaged, pack, number))
            for number, pack in enumerate(packs)
        ]

    @asynccontextmanager
    async def _salvaged(
        self, pack: Path, number: int, missing: MissingObjects
    ) -> AsyncIterator[Path | None]:
        into = self.work / f"kept-{number}"
        try:
            is_useful = exists(into) or await anyio.to_thread.run_sync(may_hold, pack, missing.all)
            if is_useful and not exists(into):
                with full_disk_named("quarantine"):
                    await self.mirrors.workers.run(salvage, pack, into, timeout=TIMEOUT)
                borrow_from(into, self.stand_in)
        except OSError as error:  # a person may have removed the pack, or changed its mode
            reason = f"cannot salvage {pack.name} in quarantine: {error.strerror}"
            raise CorruptObjectError(reason) from error
        yield into if is_useful else None


async def open_store(mirrors: Mirrors, name: MirrorName) -> "StoreDonor | None":
    """Open the generation of a mirror in the store; None without one, or without a store."""
    url = mirrors.settings().store.url
    if not url:
        return None
    with with_obstore():
        from ..fleet.restore import find_donor  # noqa: PLC0415  (an extra)
    generation = (await mirrors.catalog.list_generations([name.key])).get(name.key)
    return await anyio.to_thread.run_sync(find_donor, url, name, generation)


@asynccontextmanager
async def lend(repository: Path, _missing: MissingObjects) -> AsyncIterator[Path | None]:
    yield repository if is_dir(repository) else None


def _gather_packs(templates: Path, wanted: Collection[str], into: Path) -> bool:
    """Link the sound closure packs into a repository; False if none has a wanted object."""
    patterns = ("packs/*/pack-*.pack", "gits/*/.git/objects/pack/pack-*.pack")
    packs = {pack.name: pack for pattern in patterns for pack in matching(templates, pattern)}
    sound: dict[Path, PackIndex] = {}
    for pack in packs.values():
        try:
            index = PackIndex(pack.with_suffix(".idx"))
            is_sound = index.pack_checksum == pack_trailer(pack)
            if is_sound and pack_is_whole(pack) and pack_is_whole(index.path):
                sound[pack] = index
        except (OSError, CorruptObjectError):
            continue
    ids = [bytes.fromhex(oid) for oid in wanted]
    if not any(oid in index for index in sound.values() for oid in ids):
        return False
    make_repository(into)
    for pack, index in sound.items():
        for file in (pack, index.path):
            (into / "objects/pack" / file.name).symlink_to(file)
    return True
