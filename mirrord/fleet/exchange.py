"""One mirror to the store and from it: publish a generation, follow one.

Both are harmless where they end early. What was uploaded before a publication is named by nothing
until the catalog takes it; what was downloaded waits in quarantine, and refs move in one
transaction when every object is there. The caller holds the mirror's lock.
"""

import hashlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread

from ..catalog import Generation
from ..errors import ClaimLostError, StoreDamagedError
from ..git.command import lines_of, low_priority
from ..git.packs import PackIndex, pack_trailer
from ..host.files import full_disk_named
from ..mirrors.quarantine import Quarantine, accept_objects
from ..mirrors.refs import Moves, classify, commit, compare, recover, theirs, write_durably
from ..mirrors.repository import HISTORY, KEPT, Refs, Repository
from ..model import MirrorName
from ..telemetry import log
from .generations import (
    GenerationManifest,
    PublishedPack,
    generation_file,
    index_key,
    pack_key,
    put_manifest,
    read_generation,
    read_manifest,
)
from .objects import Blob, ObjectStore

_LONGEST_TAIL = 16  # packs after the first one, each of which costs every git a look
Accept = Callable[[Generation], Awaitable[bool]]
"""Makes a generation the newest one in the catalog, or answers that it may not be."""
Record = Callable[[Path], Awaitable[Refs]]
"""Writes what the catalog knows into an object directory; answers the ref that names it."""


async def record_nothing(_: Path) -> Refs:
    return {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """The store as seen by one daemon."""

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
        record: Record = record_nothing,
        is_whole: bool = True,
    ) -> Generation | None:
        """Publish `refs`, all objects of which are in the mirror, as the next generation.

        None where they are those of `previous`. Where that `is_whole` no longer in the store, or
        its manifest is not, everything is uploaded again. Raises ClaimLostError where `accept` says
        that another node has published meanwhile; then nobody sees what was uploaded.
        """
        name, old = repository.name, None
        if previous is not None and is_whole:
            try:
                old = await to_thread.run_sync(read_manifest, self.store, name, previous)
            except StoreDamagedError as error:
                log.warning("store.damaged", mirror=str(name), detail=error.message)
        async with self.quarantine.directory("publish") as directory:
            await self.quarantine.room.ensure(f"publish mirror {name}")
            refs = refs | await record(directory)
            # into the mirror: the next generation is packed without them
            await to_thread.run_sync(accept_objects, directory, repository.objects)
            if old and (old.refs, old.head) == (refs, head):
                return None
            number = previous.number + 1 if previous else 1
            packs = [*old.packs] if old else []
            known = set(old.refs.values()) if old else set[str]()
            if old and _is_scattered(packs):
                packs = await self._upload(repository, directory, known, (), old.number)
            fresh = set(refs.values()) - known
            packs += await self._upload(repository, directory, fresh, known, number)
        manifest = GenerationManifest(str(name), url, epoch, number, head, refs, tuple(packs))
        generation = await to_thread.run_sync(put_manifest, self.store, name, manifest)
        if not await accept(generation):
            raise ClaimLostError(
                f"cannot publish mirror {name}: another node has claimed it meanwhile",
                hint="nothing was changed; the mirror follows what that node publishes",
            )
        return generation

    async def _upload(
        self,
        repository: Repository,
        directory: Path,
        tips: Collection[str],
        known: Collection[str],
        upto: int,
    ) -> list[PublishedPack]:
        """Put what `tips` reach and `known` do not into the store, as one pack or none."""
        if not tips:
            return []
        revisions = [*sorted(tips), *(f"^{oid}" for oid in sorted(known))]
        is_again = not known and upto > 1  # what the store has of that name may be damaged
        with low_priority():
            made = await repository.run(
                "-c", "pack.writeReverseIndex=false", "pack-objects", "--revs", "--non-empty",
                "--delta-base-offset", "-q", str(directory / "published"),
                stdin=lines_of(revisions),
                doing=f"pack mirror {repository.name} for the store",
            )  # fmt: skip
        paths = [directory / f"published-{name}.pack" for name in made.lines]
        return await to_thread.run_sync(
            lambda: [put_pack(self.store, repository.name, it, upto, is_again) for it in paths]
        )

    # -- from the store -------------------------------------------------------------------------

    async def prove(self, name: MirrorName, generation: Generation) -> None:
        """Download a generation, and keep nothing; raises StoreDamagedError."""
        manifest = await to_thread.run_sync(read_manifest, self.store, name, generation)
        await self.quarantine.room.ensure(f"prove what the store has of mirror {name}")
        async with self.quarantine.directory("prove") as directory:
            packs = directory / "pack"
            await to_thread.run_sync(download_packs, self.store, name, manifest.packs, packs)

    async def follow(self, repository: Repository, generation: Generation) -> GenerationManifest:
        """Bring a mirror, which may be empty, to a generation; what it has besides is kept.

        Pins stay as they are: the catalog says which there are. Raises StoreDamagedError where
        the store lacks something, and changes no ref then.
        """
        await recover(repository)
        manifest = await self.fetch(repository, generation)
        await _move(repository, manifest)
        await to_thread.run_sync(write_durably, *generation_file(repository.path, generation))
        return manifest

    async def fetch(self, repository: Repository, generation: Generation) -> GenerationManifest:
        """Bring all objects of a generation into a repository, and prove that none is missing."""
        manifest = await to_thread.run_sync(read_manifest, self.store, repository.name, generation)
        at = await to_thread.run_sync(read_generation, repository.path)
        packs = [it for it in manifest.packs if at is None or it.upto > at.number]
        await self._take(repository, packs)
        try:
            await _must_be_whole(repository, manifest)
        except StoreDamagedError:
            if len(packs) == len(manifest.packs):
                raise
            await self._take(repository, manifest.packs)  # it was at another line of generations
            await _must_be_whole(repository, manifest)
        return manifest

    async def _take(self, repository: Repository, packs: Collection[PublishedPack]) -> None:
        if not packs:
            return
        await self.quarantine.room.ensure(f"download mirror {repository.name}")
        async with self.quarantine.directory("download") as objects:
            await to_thread.run_sync(
                download_packs, self.store, repository.name, packs, objects / "pack"
            )
            with full_disk_named(f"mirror {repository.name}"):
                await to_thread.run_sync(accept_objects, objects, repository.objects)


def _is_scattered(packs: Collection[PublishedPack]) -> bool:
    """Whether the packs after the first one are many, or have half of its bytes."""
    first, *tail = (it.pack.size_bytes for it in packs)
    return len(tail) > _LONGEST_TAIL or (len(tail) > 1 and 2 * sum(tail) > first)


def put_pack(
    store: ObjectStore, name: MirrorName, path: Path, upto: int, is_again: bool = False
) -> PublishedPack:
    index = path.with_suffix(".idx")
    pack = PublishedPack(_blob(path), _blob(index), upto)
    store.put_file(pack_key(name, pack), path, replace=is_again)
    store.put_file(index_key(name, pack), index, replace=is_again)
    return pack


def _blob(path: Path) -> Blob:
    with path.open("rb") as file:
        return Blob(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def download_packs(
    store: ObjectStore, name: MirrorName, packs: Collection[PublishedPack], into: Path
) -> None:
    """Download packs with their indexes, each proven to be what its manifest says."""
    into.mkdir(mode=0o700)
    for pack in packs:
        path = into / "download.pack"
        store.download(pack_key(name, pack), path, pack.pack)
        store.download(index_key(name, pack), path.with_suffix(".idx"), pack.index)
        checksum = PackIndex(path.with_suffix(".idx")).pack_checksum
        if checksum != pack_trailer(path):
            fact = "its index is of another pack"
            raise StoreDamagedError(f"cannot use {pack_key(name, pack)} of the store: {fact}")
        for file in (path, path.with_suffix(".idx")):  # the name that git gives it, for audits
            file.rename(into / f"pack-{checksum.hex()}{file.suffix}")


async def _must_be_whole(repository: Repository, manifest: GenerationManifest) -> None:
    """Prove that all a generation reaches beyond the refs of the mirror is there.

    A mirror without refs took every pack of the manifest, whose maker proved that they are whole:
    there only the refs are looked up.
    """
    tips, failure = set(manifest.refs.values()), f"cannot follow mirror {repository.name}"
    if absent := await repository.absent(tips):
        fact = f"the packs of its generation lack {min(absent)}"
        raise StoreDamagedError(
            f"{failure}: {fact}", hint="`mirrord audit` on another node finds it"
        )
    present = set((await repository.all_refs()).values())
    fresh = tips - present
    if not present or not fresh:
        return
    walked = await repository.run(
        "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", "--stdin",
        stdin=lines_of([*sorted(fresh), *(f"^{oid}" for oid in sorted(present))]),
        ok=(0, 1, 128),
        doing=f"prove the generation of mirror {repository.name}",
    )  # fmt: skip
    if walked.status:
        fact = walked.stderr.strip().partition("\n")[0]
        raise StoreDamagedError(f"{failure}: {fact}")


async def _move(repository: Repository, manifest: GenerationManifest) -> None:
    """Move refs and HEAD to those of the manifest in one transaction; keep every tip they leave."""
    present, target = await repository.all_refs(), manifest.refs
    changes = await classify(repository, compare(theirs(present), theirs(target)))
    moves: Moves = {change.ref: (change.old, change.new) for change in changes}
    left = {str(change.old) for change in changes if change.kept}
    old, new = present.get(HISTORY), target.get(HISTORY)
    if old and old != new and not (new and await repository.is_ancestor(old, new)):
        left.add(old)
    ours = {ref: oid for ref, oid in target.items() if ref.startswith(KEPT) or ref == HISTORY}
    ours |= {f"{KEPT}{oid}": oid for oid in left}
    moves |= {ref: (present.get(ref), oid) for ref, oid in ours.items() if present.get(ref) != oid}
    head = manifest.head if manifest.head != await repository.head() else None
    await commit(repository, moves, head)
