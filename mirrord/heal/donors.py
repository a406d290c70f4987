"""Where a heal finds missing objects, the nearest donor first.

A donor lends a repository that may have some of them; `Transfer` decides whether it has, and
whether they are what it says. Checkouts are never asked: others write in them. A bundle is opened
only when a heal misses something. Never writes to a mirror, and only reads damaged packs.
"""

import shutil
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from ..audit.connectivity import OBJECT_ID, Missing, object_kinds, unreadable
from ..audit.examine import borrow_from, make_repository
from ..audit.object_files import TIMEOUT
from ..catalog import MirrorRow
from ..errors import CorruptObjectError, GitFailedError, MirrordError, StoppingError
from ..fleet import load
from ..git.command import Git, GitResult, lines_of, run_git_sync
from ..git.packs import PackIndex, pack_is_whole, pack_trailer
from ..git.process import STRICT
from ..git.workers import Workers
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
from ..telemetry import log

if TYPE_CHECKING:
    from ..fleet.restore import StoreDonor

_LENT = "the bundle that was sent"
STORE = "the store"


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


@dataclass(slots=True)
class Donors:
    """The donors of the mirror of `row`.

    `lent` are bundles that a request lends for its own time, `work` is the heal's directory.
    `refusals` says why donors failed, `store` is what the store has of the mirror.
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
        """The mirror's good objects: deltas, thin packs and incremental bundles build on them."""
        return self.work / "stand-in"

    async def all(self, tips: Collection[str]) -> list[Donor]:
        """Every donor, the cheapest first; a fetch of a whole upstream asks for `tips`."""
        own = self.row.name.key
        rows = await self.mirrors.catalog.list_mirrors()
        names = sorted((row.name for row in rows), key=lambda name: (name.key != own, name.key))
        others = [name for name in names if name.key != own]
        upstreams = [(f"upstream {one.shown}", one) for one in self.mirrors.upstreams(self.row)]
        bundles = [
            (file, self.bundle(file)) for file in await anyio.to_thread.run_sync(self.bundles)
        ]
        dropped = [(file, donor) for file, donor in bundles if donor.name != _LENT]
        whole = [
            Donor(f"{name}, fetched whole", partial(self._whole, one, tips))
            for name, one in upstreams
        ]
        return [
            *(Donor(f"closure packs of {one}", partial(self._closure_packs, one)) for one in names),
            *(donor for _, donor in bundles if donor.name == _LENT),
            *(Donor(f"mirror {one}", partial(lend, self.mirrors.path(one))) for one in others),
            *([Donor(STORE, self._published)] if self.mirrors.settings().store.url else []),
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
    async def _published(self, missing: Missing) -> AsyncIterator[Path | None]:
        """A repository with packs of the store and the objects of the stand-in.

        A store that failed is not asked again in this heal.
        """
        into = self.work / "published"
        if STORE not in self.refusals:
            try:
                await self._download(missing, into)
            except StoppingError:
                raise
            except MirrordError as error:
                facts = {"donor": STORE, "code": error.code, "detail": error.message}
                log.warning("donor.failed", **facts)
                self.refusals[STORE] = error.message
        yield into if into.exists() else None

    async def _download(self, missing: Missing, into: Path) -> None:
        self.store = self.store or await open_store(self.mirrors, self.row.name)
        if self.store is None:
            return
        if not into.exists():
            make_repository(into)
            borrow_from(into, self.stand_in)
        packs, room = into / "objects/pack", self.mirrors.room
        await anyio.to_thread.run_sync(self.store.take, missing.all, packs, room)
        if self.store.damage:
            self.refusals[STORE] = self.store.damage

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

    def bundles(self) -> list[DonorBundle]:
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


async def open_store(mirrors: Mirrors, name: MirrorName) -> "StoreDonor | None":
    """What the store has of a mirror; None where that is nothing, or there is no store."""
    url = mirrors.settings().store.url
    if not url:
        return None
    donor = load("restore")
    known = (await mirrors.catalog.list_generations([name.key])).get(name.key)
    found: StoreDonor | None = await anyio.to_thread.run_sync(donor.find_donor, url, name, known)
    return found


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


# -- objects moved into a heal's stand-in ----------------------------------------------------------
#
# A donor lists and packs exactly what is missing, and `index-pack` hashes every object again: a
# pack with any other object than those asked for is thrown away.

SALVAGED = "the intact part of "


@dataclass(slots=True)
class Transfer:
    """Packs in `stand_in` that came from donors, and how many objects from each."""

    git: Git
    workers: Workers
    stand_in: Path
    work: Path
    packs: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    async def take_missing(self, name: str, donor: Path, missing: Missing) -> int:
        """Take what the donor has of what is missing, and all behind that; answers the count."""
        wanted = await self._there(donor, missing.all)
        if not wanted:
            return 0
        whole = await self._there(donor, missing.whole) if missing.whole else set()
        tips = lines_of([*sorted(wanted), *(f"^{oid}" for oid in sorted(whole))])
        walk = ("-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names")
        try:
            walked = await self._git(donor, "walk a donor", *walk, "--stdin", stdin=tips)
            wanted.update(walked.lines)
        except (CorruptObjectError, GitFailedError):
            pass  # the donor has holes itself
        return await self._take(name, donor, wanted)

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that is not here but for the `bad` ones."""
        command = ("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
        listing = await self._git(donor, "list intact objects", *command, "--buffer")
        return await self._take(name, donor, set(listing.lines) - set(bad))

    async def _git(self, git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
        return await self.git.run(*args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)

    async def _there(self, repository: Path, oids: Iterable[str]) -> set[str]:
        kinds = await self.workers.run(object_kinds, repository, sorted(oids), timeout=TIMEOUT)
        return {oid for oid, kind in kinds.items() if kind}

    async def _take(self, name: str, donor: Path, wanted: set[str]) -> int:
        oids = sorted(wanted - await self._there(self.stand_in, wanted))
        if not oids:
            return 0
        try:
            taken = await self._pack(donor, oids)
        except (CorruptObjectError, GitFailedError):
            bad = await self.workers.run(unreadable, donor, oids, timeout=TIMEOUT)
            oids = [oid for oid in oids if oid not in bad]
            if not oids:
                raise
            # with --stdout git (2.39) copies what is packed unchecked, but with --no-reuse-object:
            # then a good copy elsewhere is used
            taken = await self._pack(donor, oids, *(() if bad else ("--no-reuse-object",)))
        self.packs.append(taken)
        self.counts[name] = self.counts.get(name, 0) + len(oids)
        return len(oids)

    async def _pack(self, donor: Path, oids: Collection[str], *options: str) -> Path:
        """Have exactly `oids` as a pack in the stand-in; other bytes are a CorruptObjectError."""
        stream = self.work / "stream.pack"
        await self._git(
            donor, "pack what is missing",
            "pack-objects", "--stdout", "--delta-base-offset", "-q", *options,
            stdin=lines_of(oids), stdout_path=stream,
        )  # fmt: skip
        index = ("index-pack", "--stdin")
        done = await self._git(self.stand_in, "index what a donor gave", *index, stdin=stream)
        stream.unlink()
        pack = self.stand_in / "objects/pack" / f"pack-{done.lines[-1].split()[-1]}.pack"
        if {oid.hex() for oid in PackIndex(pack.with_suffix(".idx"))} != set(oids):
            for file in pack.parent.glob(f"{pack.stem}.*"):
                file.unlink()
            raise CorruptObjectError(
                "cannot take objects from a donor: they are not what it calls them"
            )
        return pack

    async def prove(self, final: Path, *, whole: bool) -> None:
        """Index every taken pack once more, into `final`, which borrows from the stand-in.

        `whole`: nothing is missing any more, so fsck checks each object and all that it names.
        """
        command = ("index-pack", *((STRICT,) if whole else ()), "--stdin")
        for pack in self.packs:
            await self._git(final, "check what donors gave", *command, stdin=pack)


# -- damaged packs, in a worker --------------------------------------------------------------------


def may_hold(pack: Path, oids: Collection[str]) -> bool:
    """Whether one of `oids` is in a pack by its index; without a good index, any may be."""
    if pack.is_dir():
        return False
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        return True
    return any(bytes.fromhex(oid) in index for oid in oids)


def salvage(pack: Path, into: Path) -> set[str]:
    """Make `into` a repository of what can be read of `pack`; answers the bad objects in it.

    With an index, a copy of the pack gets both its ends right, so that git opens it, fsck names
    every bad object in it, and those are blotted out. Without one, git unpacks it from the front.
    """
    make_repository(into)

    def git(doing: str, *args: str, stdin: Path | None = None) -> GitResult:
        any_status = range(-64, 256)
        return run_git_sync(
            *args, git_dir=into, stdin=stdin, ok=any_status, timeout=TIMEOUT, doing=doing
        )

    if git("index a pack again", "index-pack", "--stdin", stdin=pack).status == 0:
        return set()  # the pack is whole, its index was the damage
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        git("unpack a damaged pack", "unpack-objects", "-r", "-q", stdin=pack)
        return set()
    copy = into / "objects/pack" / pack.name
    shutil.copyfile(pack, copy)
    shutil.copyfile(index.path, copy.with_suffix(".idx"))
    # git refuses a pack with another header or trailer than its index names, and dies where an
    # object would begin behind the end
    end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
    with copy.open("r+b") as file:
        file.write(struct.pack(">4sII", b"PACK", 2, index.count))
        file.truncate(file.seek(end if last < end else last + 4096))
        file.write(index.pack_checksum)
    # it names objects, too, whose packed bytes changed and still unpack to what they were
    fsck = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    named = OBJECT_ID.findall(git("look for intact objects", *fsck).stderr)
    bad = unreadable(into, sorted(set(named)))
    # Break bad objects that unpack by themselves: deltas would build on them, not on a good copy.
    # A damaged index may give the place of a good object to a bad one, too: that place stays.
    ids = {bytes.fromhex(oid) for oid in bad}
    places = list(zip(index, index.offsets(), strict=True))
    good = {place for oid, place in places if oid not in ids}
    with copy.open("r+b") as file:
        for place in {place for oid, place in places if oid in ids} - good:
            file.seek(place)
            if 1 <= int.from_bytes(file.read(1)) >> 4 & 7 <= 4:  # a whole object, no delta
                file.seek(place)
                file.write(b"\0")
    return bad
