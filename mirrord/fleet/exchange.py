"""Packs to the store and from it: the generations of one mirror, and closure packs.

A publication or a download may end at any moment. Until the catalog takes a generation, nothing
names what was uploaded for it. A download waits in quarantine, and refs move in one transaction
once every object is there. The caller holds the mirror's lock.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import to_thread

from ..catalog import Catalog, Generation
from ..errors import (
    ClaimLostError,
    CorruptObjectError,
    GitFailedError,
    StoreDamagedError,
    StoreUnavailableError,
    full_disk_named,
)
from ..git.command import lines_of, low_priority
from ..git.packs import PackIndex, pack_trailer
from ..mirrors.quarantine import Quarantine, accept_objects
from ..mirrors.refs import Moves, classify, commit, compare, followed_refs, recover
from ..mirrors.repository import HISTORY, KEPT, Refs, Repository
from ..model import CommitId, MirrorName
from ..presence import exists
from ..telemetry import log
from .generations import (
    GenerationManifest,
    PublishedPack,
    index_key,
    pack_key,
    put_manifest,
    read_generation,
    read_manifest,
    write_generation,
)
from .objects import Blob, ObjectStore

# make a generation the newest one in the catalog; False where it may not be
Accept = Callable[[Generation], Awaitable[bool]]
# write what the catalog knows into an object directory; return the ref that names it
RecordWriter = Callable[[Path], Awaitable[Refs]]


T = TypeVar("T")


async def _ask(request: Callable[[], T]) -> T:
    """Make a request of a publication, which a cancellation leaves: the store may be silent."""
    return await to_thread.run_sync(request, abandon_on_cancel=True)


async def record_nothing(_: Path) -> Refs:
    return {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """The mirrors of one daemon and the store."""

    store: ObjectStore
    quarantine: Quarantine

    # -- to the store ---------------------------------------------------------------------------

    async def publish(
        self,
        repository: Repository,
        refs: Refs,
        head: str | None,
        *,
        url: str,
        epoch: int,
        previous: Generation | None,
        accept: Accept,
        record: RecordWriter = record_nothing,
        is_whole: bool = True,
    ) -> Generation | None:
        """Publish `refs`, whose objects the mirror has, as the next generation.

        Returns None where they equal those of `previous`. Uploads everything again where `previous`
        is not whole in the store (`is_whole`), or its manifest is damaged. Raises ClaimLostError
        where `accept` refuses, because another node has published meanwhile; no catalog names the
        upload then.
        """
        name, old = repository.name, None
        if previous is not None and is_whole:
            try:
                old = await _ask(partial(read_manifest, self.store, name, previous))
            except StoreDamagedError as error:
                log.warning("store.damaged", mirror=str(name), detail=error.message)
        async with self.quarantine.directory("publish") as directory:
            await self.quarantine.room.ensure(f"publish mirror {name}")
            refs = refs | await record(directory)
            # the next generation is then packed without these objects
            await to_thread.run_sync(accept_objects, directory, repository.objects)
            if old and (old.refs, old.head) == (refs, head):
                return None
            number = previous.number + 1 if previous else 1
            packs = [*old.packs] if old else []
            old_tips = set(old.refs.values()) if old else set[str]()
            if old and _has_long_tail(packs):
                # apart from what is new: a follower that has the generation before skips this pack
                packs = await self._upload(repository, directory, old_tips, (), old.number)
            fresh = set(refs.values()) - old_tips
            packs += await self._upload(repository, directory, fresh, old_tips, number)
        manifest = GenerationManifest(str(name), url, epoch, number, head, refs, tuple(packs))
        generation = await _ask(partial(put_manifest, self.store, name, manifest))
        if not await accept(generation):
            raise ClaimLostError(
                f"cannot publish mirror {name}: another node has claimed it meanwhile",
                hint="nothing was changed; this mirror will follow that node's generation",
            )
        return generation

    async def _upload(
        self,
        repository: Repository,
        directory: Path,
        tips: Collection[str],
        excluded: Collection[str],
        upto: int,
    ) -> list[PublishedPack]:
        """Upload what `tips` reach and `excluded` do not, as one pack or none."""
        if not tips:
            return []
        revisions = [*sorted(tips), *(f"^{oid}" for oid in sorted(excluded))]
        replace = not excluded and upto > 1  # an object of that name in the store may be damaged
        with low_priority():
            made = await repository.run(
                # git 2.41 writes a .rev file beside each pack, which is not published
                # --non-empty: refs may have moved to objects that are there
                "-c", "pack.writeReverseIndex=false", "pack-objects", "--revs", "--non-empty",
                "--delta-base-offset", "-q", str(directory / "published"),
                stdin=lines_of(revisions),
                doing=f"pack mirror {repository.name} for the store",
            )  # fmt: skip
        paths = [directory / f"published-{name}.pack" for name in made.lines]
        return await _ask(
            lambda: [put_pack(self.store, repository.name, it, upto, replace) for it in paths]
        )

    # -- from the store -------------------------------------------------------------------------

    async def prove(self, name: MirrorName, generation: Generation) -> None:
        """Download and check a generation, and keep nothing of it; raises StoreDamagedError."""
        manifest = await to_thread.run_sync(read_manifest, self.store, name, generation)
        await self.quarantine.room.ensure(f"check mirror {name} in the store")
        async with self.quarantine.directory("prove") as directory:
            packs = directory / "pack"
            await to_thread.run_sync(download_packs, self.store, name, manifest.packs, packs)

    async def follow(self, repository: Repository, generation: Generation) -> GenerationManifest:
        """Bring a mirror, which may be empty, to a generation; tips that refs leave are kept.

        Pins stay as they are, because they follow the catalog. Raises StoreDamagedError where the
        store lacks something, before any ref moves.
        """
        # a move of refs that a kill interrupted is finished first
        await recover(repository)
        manifest = await self.fetch(repository, generation)
        await _move_refs(repository, manifest)
        # after the refs: a kill before it repeats the whole, which then finds nothing to do
        await to_thread.run_sync(write_generation, repository, generation)
        return manifest

    async def fetch(self, repository: Repository, generation: Generation) -> GenerationManifest:
        """Download the objects of a generation that a repository lacks, and prove it whole."""
        manifest = await to_thread.run_sync(read_manifest, self.store, repository.name, generation)
        own = await to_thread.run_sync(read_generation, repository.path)
        packs = [it for it in manifest.packs if own is None or it.upto > own.number]
        await self._download(repository, packs)
        try:
            await _must_be_whole(repository, manifest)
        except StoreDamagedError:
            if len(packs) == len(manifest.packs):
                raise
            await self._download(repository, manifest.packs)  # its generation was of another line
            await _must_be_whole(repository, manifest)
        return manifest

    async def _download(self, repository: Repository, packs: Collection[PublishedPack]) -> None:
        if not packs:
            return
        await self.quarantine.room.ensure(f"download mirror {repository.name}")
        async with self.quarantine.directory("download") as objects:
            await to_thread.run_sync(
                download_packs, self.store, repository.name, packs, objects / "pack"
            )
            with full_disk_named(f"mirror {repository.name}"):
                await to_thread.run_sync(accept_objects, objects, repository.objects)


_MAX_TAIL = 16  # packs after the first one: every git opens them all


def _has_long_tail(packs: Collection[PublishedPack]) -> bool:
    """True if the packs after the first one are many, or have half of its bytes."""
    first, *tail = (it.pack.size_bytes for it in packs)
    return len(tail) > _MAX_TAIL or (len(tail) > 1 and 2 * sum(tail) > first)


def put_pack(
    store: ObjectStore, name: MirrorName, path: Path, upto: int, replace: bool = False
) -> PublishedPack:
    """Upload a pack with its index."""

    def blob(path: Path) -> Blob:
        with path.open("rb") as file:
            return Blob(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)

    index = path.with_suffix(".idx")
    pack = PublishedPack(blob(path), blob(index), upto)
    store.put_file(pack_key(name, pack), path, replace=replace)
    store.put_file(index_key(name, pack), index, replace=replace)
    return pack


def download_packs(
    store: ObjectStore, name: MirrorName, packs: Collection[PublishedPack], into: Path
) -> None:
    """Download packs with their indexes; raises StoreDamagedError for other bytes."""
    into.mkdir(mode=0o700)
    for pack in packs:
        path = into / "download.pack"
        store.download(pack_key(name, pack), path, pack.pack)
        store.download(index_key(name, pack), path.with_suffix(".idx"), pack.index)
        # each has the bytes that the manifest says, and yet they may not belong together
        checksum = PackIndex(path.with_suffix(".idx")).pack_checksum
        if checksum != pack_trailer(path):
            fact = "its index is of another pack"
            raise StoreDamagedError(f"cannot use {pack_key(name, pack)} of the store: {fact}")
        for file in (path, path.with_suffix(".idx")):  # the name that git gives, as audits want
            file.rename(into / f"pack-{checksum.hex()}{file.suffix}")


async def _must_be_whole(repository: Repository, manifest: GenerationManifest) -> None:
    """Prove that nothing is missing of what a generation reaches beyond the mirror's own refs.

    A mirror without refs has every pack of the manifest, which its publisher proved whole. Only the
    refs are looked up there.
    """
    tips, failure = set(manifest.refs.values()), f"cannot follow mirror {repository.name}"
    if absent := await repository.absent(tips):
        fact = f"the packs of its generation lack {min(absent)}"
        hint = "`mirrord audit` on another node finds it"
        raise StoreDamagedError(f"{failure}: {fact}", hint=hint)
    present = set((await repository.all_refs()).values())
    new = tips - present
    if not present or not new:
        return
    try:
        await repository.verify_closure(sorted(new), present)
    except (GitFailedError, CorruptObjectError) as error:
        fact = error.message.partition(": ")[2]
        raise StoreDamagedError(f"{failure}: {fact}") from error


async def _move_refs(repository: Repository, manifest: GenerationManifest) -> None:
    """Move refs and HEAD to the manifest's in one transaction; keep every tip that they leave."""
    present, target = await repository.all_refs(), manifest.refs
    changes = await classify(repository, compare(followed_refs(present), followed_refs(target)))
    moves: Moves = {change.ref: (change.old, change.new) for change in changes}
    kept_tips = {str(change.old) for change in changes if change.kept}
    old, new = present.get(HISTORY), target.get(HISTORY)
    if old and old != new and not (new and await repository.is_ancestor(old, new)):
        kept_tips.add(old)
    private = {ref: oid for ref, oid in target.items() if ref.startswith(KEPT) or ref == HISTORY}
    private |= {f"{KEPT}{oid}": oid for oid in kept_tips}
    moves |= {
        ref: (present.get(ref), oid) for ref, oid in private.items() if present.get(ref) != oid
    }
    head = manifest.head if manifest.head != await repository.head() else None
    await commit(repository, moves, head)


# -- closure packs that daemons share --------------------------------------------------------------
#
# A closure pack and its index are objects named by their content, as those of generations are. The
# catalog, which only daemons write, says what a pack holds, and its digests.

# of a closure pack in the store; the next first checkout of its commit makes it again
_UNUSED_TTL = timedelta(days=30)
_DOWNLOADS = 8  # at a time


@dataclass(frozen=True, slots=True)
class SharedClosures:
    """The closure packs of a fleet.

    `noting` wraps uses of the store and reports its outages to health; `is_away` during one.
    """

    catalog: Catalog
    store: ObjectStore
    noting: Callable[[], AbstractContextManager[None]]
    is_away: Callable[[], bool]

    async def find(self, name: MirrorName) -> dict[CommitId, dict[str, Any]]:
        """Return what the catalog has of each layer, by commit; nothing while the store is away."""
        if self.is_away():
            return {}
        rows = await self.catalog.list_closures(name.key)
        return {CommitId(commit): dict(document["layer"]) for commit, document in rows.items()}

    async def take(self, name: MirrorName, places: Mapping[CommitId, Path]) -> None:
        """Download the pack of each commit, and its index, into a directory.

        Raises CatalogUnavailableError, StoreUnavailableError; StoreDamagedError where the store
        lost or changed one of them, which removes them from the catalog.
        """
        rows = await self.catalog.use_closures(name.key, list(places))
        failure = f"cannot take closures of mirror {name}"
        if rows.keys() != places.keys():
            raise StoreDamagedError(f"{failure}: some were dropped meanwhile")

        def download(commit: CommitId) -> None:
            document, directory = rows[commit], places[commit] / "download"
            download_packs(self.store, name, [published_pack(document)], directory)
            for file in directory.iterdir():
                file.rename(places[commit] / file.name)
            directory.rmdir()
            if not exists(places[commit] / document["layer"]["pack"]):
                raise StoreDamagedError(f"{failure}: commit {commit} has another pack there")

        def download_all() -> None:
            with ThreadPoolExecutor(_DOWNLOADS) as threads:
                list(threads.map(download, places))

        try:
            with self.noting():
                await self._unless_silent(download_all)
        except StoreDamagedError:
            await self.catalog.drop_closures(name.key, commits=list(places))
            # a later upload of the same pack would not replace it
            await to_thread.run_sync(self.store.delete, _objects(name, rows.values()))
            raise

    async def _unless_silent(self, request: Callable[[], None]) -> None:
        """Make a request, and give it up where the store falls silent: packing takes seconds."""
        asking = asyncio.ensure_future(_ask(request))
        try:
            while not (await asyncio.wait([asking], timeout=1.0))[0]:
                if self.store.is_silent():
                    raise StoreUnavailableError(f"store {self.store.shown} does not answer")
            asking.result()
        finally:
            asking.cancel()

    async def offer(
        self, name: MirrorName, layers: Collection[tuple[Mapping[str, Any], Path]]
    ) -> None:
        """Share layers, each with its description and pack, bases first."""
        for layer, pack in layers:
            with self.noting():
                put = await to_thread.run_sync(put_pack, self.store, name, pack, 0)
            document = {"layer": dict(layer), "pack": [*put.pack], "index": [*put.index]}
            await self.catalog.put_closure(name.key, layer["commit"], document)


def published_pack(document: Mapping[str, Any]) -> PublishedPack:
    """Read the catalog's document of a closure pack."""
    return PublishedPack(Blob(*document["pack"]), Blob(*document["index"]), 0)


async def list_needed(catalog: Catalog, name: MirrorName) -> set[str]:
    """Drop closures that were not used for long; return the keys of the others' objects."""
    await catalog.drop_closures(name.key, unused=_UNUSED_TTL)
    return {*_objects(name, (await catalog.list_closures(name.key)).values())}


def _objects(name: MirrorName, documents: Iterable[Mapping[str, Any]]) -> list[str]:
    packs = map(published_pack, documents)
    return [key(name, pack) for pack in packs for key in (pack_key, index_key)]
