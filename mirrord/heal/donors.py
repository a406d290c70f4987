"""The donors of a heal, the cheapest first, and the transfer of missing objects from them.

A donor lends a repository that may have some of the objects; `Transfer` takes those that it has and
checks them. Checkouts are no donors, because others write in them. A bundle is opened only when
objects are missing. Never writes to a mirror, and only reads damaged packs.
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

from ..audit.connectivity import Missing
from ..audit.damage import unreadable
from ..audit.defects import TIMEOUT
from ..audit.examine import borrow_from, make_repository
from ..audit.reading import OBJECT_ID, object_kinds
from ..bundles.bundle_file import BundleHeader, index_bundle, read_header
from ..bundles.service import BundleRefs, sort_refs
from ..catalog import MirrorRow
from ..errors import (
    CorruptObjectError,
    GitFailedError,
    MirrordError,
    StoppingError,
    full_disk_named,
)
from ..fleet import with_obstore
from ..git.command import Git, GitResult, lines_of, run_git_sync
from ..git.fsck import STRICT
from ..git.packs import PackIndex, pack_is_whole, pack_trailer
from ..mirrors.quarantine import DAMAGED, within_room
from ..mirrors.repository import Repository
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import Upstream
from ..model import CommitId, MirrorName
from ..places import Layout
from ..protocol import ProgressSink
from ..quoting import quote_name
from ..telemetry import log
from ..workers.pool import Workers

if TYPE_CHECKING:
    from ..fleet.restore import StoreDonor

_LENT = "the bundle that was sent"
STORE = "the store"


class Donor(NamedTuple):
    """A source of objects. `lend` opens a repository to take from, or None where it has none."""

    name: str
    lend: Callable[[Missing], AbstractAsyncContextManager[Path | None]]


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
        self, name: MirrorName, missing: Missing
    ) -> AsyncIterator[Path | None]:
        into, templates = self.work / f"packs-{name}", self.layout.templates / str(name)
        is_there = into.exists() or await anyio.to_thread.run_sync(
            _gather_packs, templates, missing.all, into
        )
        yield into if is_there else None

    @asynccontextmanager
    async def _from_store(self, missing: Missing) -> AsyncIterator[Path | None]:
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
        self, upstream: Upstream, tips: Collection[str], missing: Missing
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
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            if path.is_file() and not path.name.startswith("."):
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
    async def _unpacked(self, bundle: DonorBundle, _missing: Missing) -> AsyncIterator[Path]:
        """Lend the objects of a bundle on top of the stand-in, unpacked once in a heal.

        A bundle that fails is tried again later: it may build on what the next donor gives.
        """
        into = self.work / f"bundle-{bundle.number}"
        if not into.exists():
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
        packs = sorted(directory.glob("*/objects/pack/*.pack"), reverse=True)
        return [
            Donor(f"{SALVAGED}{pack.name} in quarantine", partial(self._salvaged, pack, number))
            for number, pack in enumerate(packs)
        ]

    @asynccontextmanager
    async def _salvaged(
        self, pack: Path, number: int, missing: Missing
    ) -> AsyncIterator[Path | None]:
        into = self.work / f"kept-{number}"
        try:
            is_useful = into.exists() or await anyio.to_thread.run_sync(may_hold, pack, missing.all)
            if is_useful and not into.exists():
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
async def lend(repository: Path, _missing: Missing) -> AsyncIterator[Path | None]:
    yield repository if repository.is_dir() else None


def _gather_packs(templates: Path, wanted: Collection[str], into: Path) -> bool:
    """Link the sound closure packs into a repository; False if none has a wanted object."""
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


# -- the transfer of objects into a heal's stand-in ------------------------------------------------
#
# A donor's repository packs exactly the missing objects that it has, and `index-pack` hashes each
# again. A pack with any other object is discarded.

SALVAGED = "the intact part of "


@dataclass(slots=True)
class Transfer:
    """The packs in `stand_in` that came from donors, and the count of objects from each donor."""

    git: Git
    workers: Workers
    stand_in: Path
    work: Path
    packs: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    async def take_missing(self, name: str, donor: Path, missing: Missing) -> int:
        """Take the missing objects that the donor has, and what they reach; return the count."""
        wanted = await self._find_present(donor, missing.all)
        if not wanted:
            return 0
        whole = await self._find_present(donor, missing.whole) if missing.whole else set()
        tips = lines_of([*sorted(wanted), *(f"^{oid}" for oid in sorted(whole))])
        # with a commit-graph git (2.39) does not notice that a commit is missing
        walk = ("-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names")
        try:
            walked = await self._git(donor, "walk a donor", *walk, "--stdin", stdin=tips)
            wanted.update(walked.lines)
        except (CorruptObjectError, GitFailedError):
            pass  # the donor lacks objects itself
        return await self._take(name, donor, wanted)

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that the stand-in lacks, but for the `bad` ones."""
        command = ("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
        listing = await self._git(donor, "list intact objects", *command, "--buffer")
        return await self._take(name, donor, set(listing.lines) - set(bad))

    async def _git(self, git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
        return await self.git.run(*args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)

    async def _find_present(self, repository: Path, oids: Iterable[str]) -> set[str]:
        kinds = await self.workers.run(object_kinds, repository, sorted(oids), timeout=TIMEOUT)
        return {oid for oid, kind in kinds.items() if kind}

    async def _take(self, name: str, donor: Path, wanted: set[str]) -> int:
        oids = sorted(wanted - await self._find_present(self.stand_in, wanted))
        if not oids:
            return 0
        try:
            taken = await self._pack(donor, oids)
        except (CorruptObjectError, GitFailedError):
            bad = await self.workers.run(unreadable, donor, oids, timeout=TIMEOUT)
            oids = [oid for oid in oids if oid not in bad]
            if not oids:
                raise
            # git (2.39) copies packed objects unchecked to --stdout; with --no-reuse-object it
            # checks them, and uses a good copy elsewhere
            taken = await self._pack(donor, oids, *(() if bad else ("--no-reuse-object",)))
        self.packs.append(taken)
        self.counts[name] = self.counts.get(name, 0) + len(oids)
        return len(oids)

    async def _pack(self, donor: Path, oids: Collection[str], *options: str) -> Path:
        """Add a pack of exactly `oids` to the stand-in; raises CorruptObjectError for others."""
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
            raise CorruptObjectError("cannot take objects from a donor: their ids do not match")
        return pack

    async def prove(self, final: Path, *, whole: bool) -> None:
        """Index every pack that was taken into `final`, which borrows from the stand-in.

        With `whole`, nothing is missing any more, so fsck checks each object and its references.
        """
        command = ("index-pack", *((STRICT,) if whole else ()), "--stdin")
        for pack in self.packs:
            await self._git(final, "check what donors gave", *command, stdin=pack)


# -- damaged packs, in a worker --------------------------------------------------------------------


def may_hold(pack: Path, oids: Collection[str]) -> bool:
    """True if the index of a pack has one of `oids`, or is no good."""
    if pack.is_dir():
        return False
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        return True
    return any(bytes.fromhex(oid) in index for oid in oids)


def salvage(pack: Path, into: Path) -> set[str]:
    """Make `into` a repository of what can be read of `pack`; return the bad objects in it.

    With an index, a copy of the pack gets a right header and trailer, so that git opens it; fsck
    names the bad objects, which are then made unreadable. Without an index, git unpacks the pack
    from its start.
    """
    make_repository(into)

    def git(doing: str, *args: str, stdin: Path | None = None) -> GitResult:
        # negative where a signal ended git: index-pack (2.39) aborts on some damaged packs
        any_status = range(-64, 256)
        return run_git_sync(
            *args, git_dir=into, stdin=stdin, ok=any_status, timeout=TIMEOUT, doing=doing
        )

    if git("index a pack again", "index-pack", "--stdin", stdin=pack).status == 0:
        return set()  # only the index was damaged
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        # -r goes on after a damaged object
        git("unpack a damaged pack", "unpack-objects", "-r", "-q", stdin=pack)
        return set()
    copy = into / "objects/pack" / pack.name
    shutil.copyfile(pack, copy)
    shutil.copyfile(index.path, copy.with_suffix(".idx"))
    # git refuses a pack whose header or trailer do not fit its index, and dies where an object
    # would begin after the end
    end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
    with copy.open("r+b") as file:
        file.write(struct.pack(">4sII", b"PACK", 2, index.count))
        file.truncate(file.seek(end if last < end else last + 4096))
        file.write(index.pack_checksum)
    fsck = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    # among them objects whose packed bytes changed and still unpack to the same content
    named = OBJECT_ID.findall(git("look for intact objects", *fsck).stderr)
    bad = unreadable(into, sorted(set(named)))
    # Break bad objects that are no deltas, or deltas would build on them instead of a good copy. A
    # damaged index may give a bad object the offset of a good one; that offset stays.
    ids = {bytes.fromhex(oid) for oid in bad}
    offsets = list(zip(index, index.offsets(), strict=True))
    good = {offset for oid, offset in offsets if oid not in ids}
    with copy.open("r+b") as file:
        for offset in {offset for oid, offset in offsets if oid in ids} - good:
            file.seek(offset)
            # gitformat-pack: 1 to 4 are whole objects, 6 and 7 deltas, and 0 is invalid
            if 1 <= int.from_bytes(file.read(1)) >> 4 & 7 <= 4:  # not a delta
                file.seek(offset)
                file.write(b"\0")
    return bad
