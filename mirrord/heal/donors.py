"""Where a heal finds missing objects, the nearest donor first.

A donor lends a repository that may have some of them; `transfer.py` decides whether it has, and
whether they are what it says. Checkouts are never asked: others write in them. A bundle is opened
only when a heal misses something, and never changed. Owns only directories below the heal's own.
"""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio

from ..audit.connectivity import Missing
from ..audit.examine import borrow_from, make_repository
from ..audit.object_files import TIMEOUT
from ..catalog import MirrorRow
from ..errors import CorruptObjectError, MirrordError
from ..git.packs import PackIndex, pack_is_whole, pack_trailer
from ..host.files import full_disk_named
from ..mirrors.bundle_file import BundleHeader, index_bundle, read_header
from ..mirrors.bundles import BundleRefs, sort_refs
from ..mirrors.quarantine import DAMAGED, within_room
from ..mirrors.repository import Repository
from ..mirrors.service import Mirrors
from ..mirrors.upstream import Upstream
from ..model import CommitId, MirrorName
from ..places import Layout
from ..protocol import ProgressSink
from .transfer import SALVAGED, may_hold, salvage

_LENT = "the bundle that was sent"


class Donor(NamedTuple):
    """`lend` opens a repository to take from, or None where it has nothing."""

    name: str
    lend: Callable[[Missing], AbstractAsyncContextManager[Path | None]]


class DonorBundle(NamedTuple):
    """A bundle whose header could be read; `is_own`: it was made of the mirror to heal."""

    number: int
    name: str
    path: Path
    header: BundleHeader
    contents: BundleRefs
    is_own: bool


@dataclass(frozen=True, slots=True)
class Donors:
    """The donors of the mirror of `row`.

    `lent` are bundles that a request lends for its own time, `work` is the heal's directory.
    `refusals` says why donors failed.
    """

    mirrors: Mirrors
    row: MirrorRow
    lent: Collection[Path]
    work: Path
    progress: ProgressSink | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return Layout(self.mirrors.settings().state_dir)

    @property
    def stand_in(self) -> Path:
        """The mirror's good objects: deltas, thin packs and incremental bundles build on them."""
        return self.work / "stand-in"

    async def all(self, tips: Collection[str]) -> list[Donor]:
        """Every donor, the cheapest first; a fetch of a whole upstream asks for `tips`."""
        own = self.row.name.key
        rows = await self.mirrors.catalog.list_mirrors()
        names = sorted((row.name for row in rows), key=lambda name: (name.key != own, name.key))
        others = [name for name in names if name.key != own]
        upstreams = [(f"upstream {one.shown}", one) for one in self.mirrors.upstreams(self.row)]
        bundles = [(file, self.bundle(file)) for file in await self.bundles()]
        dropped = [(file, donor) for file, donor in bundles if donor.name != _LENT]
        whole = [
            Donor(f"{name}, fetched whole", partial(self._whole, one, tips))
            for name, one in upstreams
        ]
        return [
            *(Donor(f"closure packs of {one}", partial(self._closure_packs, one)) for one in names),
            *(donor for _, donor in bundles if donor.name == _LENT),
            *(Donor(f"mirror {one}", partial(lend, self.mirrors.path(one))) for one in others),
            *(Donor(name, partial(self._by_id, one)) for name, one in upstreams),
            *(donor for file, donor in dropped if file.is_own),
            *whole,
            *(donor for file, donor in dropped if not file.is_own),
        ]

    @asynccontextmanager
    async def _closure_packs(
        self, name: MirrorName, missing: Missing
    ) -> AsyncIterator[Path | None]:
        into, templates = self.work / f"packs-{name}", self.layout.templates / str(name)
        is_there = into.exists() or await anyio.to_thread.run_sync(
            _gather_packs, templates, missing.all, into
        )
        yield into if is_there else None

    @asynccontextmanager
    async def _by_id(self, upstream: Upstream, missing: Missing) -> AsyncIterator[Path]:
        """Trees and blobs into an empty repository, commits on top of ours that are whole.

        So of commits only what is new comes.
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
        self, upstream: Upstream, tips: Collection[str], missing: Missing
    ) -> AsyncIterator[Path | None]:
        """Everything, for a hole that upstream does not fill by id."""
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

    async def bundles(self) -> list[DonorBundle]:
        return await anyio.to_thread.run_sync(self._read_bundles)

    def _read_bundles(self) -> list[DonorBundle]:
        """The bundles that can be read, those that build on nothing first."""
        directory = self.layout.bundles
        files = [(path, _LENT) for path in self.lent]
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            if path.is_file() and not path.name.startswith("."):
                name = path.name.encode("utf-8", "replace").decode()  # it need not be text
                files.append((path, f"bundle {name}"))
        found = []
        for number, (path, name) in enumerate(files):
            try:
                header = read_header(path)
                contents = sort_refs(header.refs)
                mirror = contents.mirror and MirrorName.parse(contents.mirror).key
                is_own = mirror == self.row.name.key
                found.append(DonorBundle(number, name, path, header, contents, is_own))
            except MirrordError as error:
                self.refusals[name] = error.message
            except OSError as error:
                self.refusals[name] = f"cannot read the bundle: {error.strerror}"
        return sorted(found, key=lambda file: (len(file.header.prerequisites) > 0, file.number))

    def bundle(self, file: DonorBundle) -> Donor:
        return Donor(file.name, partial(self._opened, file))

    @asynccontextmanager
    async def _opened(self, file: DonorBundle, _missing: Missing) -> AsyncIterator[Path]:
        """A repository with the objects of the bundle and of the stand-in, made once for a heal.

        It has its name when it is whole: a bundle that cannot be opened yet may build on what the
        next donor gives.
        """
        into = self.work / f"bundle-{file.number}"
        if not into.exists():
            async with self.mirrors.quarantine.directory("donor") as directory:
                building = directory / "repository"
                make_repository(building)
                borrow_from(building, self.stand_in)
                repository = Repository(self.mirrors.git, self.row.name, building)
                doing = "open the bundle"
                await index_bundle(
                    repository, file.path, file.header,
                    progress=within_room(self.mirrors.room, self.progress, doing), doing=doing,
                )  # fmt: skip
                building.rename(into)
        yield into

    def damaged_packs(self) -> list[Donor]:
        """The latest first: each may hold a missing object as a delta on what a donor has now."""
        directory = self.mirrors.quarantine.root / DAMAGED / str(self.row.name)
        packs = sorted(directory.glob("*/objects/pack/pack-*.pack"), reverse=True)
        return [
            Donor(f"{SALVAGED}{pack.name} in quarantine", partial(self._salvaged, pack, number))
            for number, pack in enumerate(packs)
        ]

    @asynccontextmanager
    async def _salvaged(
        self, pack: Path, number: int, missing: Missing
    ) -> AsyncIterator[Path | None]:
        """A person may have removed the pack, or denied it to the daemon."""
        into = self.work / f"kept-{number}"
        is_there = into.exists()
        try:
            if not is_there and await anyio.to_thread.run_sync(may_hold, pack, missing.all):
                with full_disk_named("quarantine"):
                    await self.mirrors.workers.run(salvage, pack, into, timeout=TIMEOUT)
                borrow_from(into, self.stand_in)
                is_there = True
        except OSError as error:
            reason = f"cannot salvage {pack.name} in quarantine: {error.strerror}"
            raise CorruptObjectError(reason) from error
        yield into if is_there else None


@asynccontextmanager
async def lend(repository: Path, _missing: Missing) -> AsyncIterator[Path | None]:
    """A repository as it is."""
    yield repository if repository.is_dir() else None


def _gather_packs(templates: Path, wanted: Collection[str], into: Path) -> bool:
    """Link the closure packs that are sound, if one of them has some of what is wanted."""
    patterns = ("packs/*/pack-*.pack", "gits/*/.git/objects/pack/pack-*.pack")
    packs = {pack.name: pack for pattern in patterns for pack in templates.glob(pattern)}
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
