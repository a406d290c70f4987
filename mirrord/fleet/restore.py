"""Mirrors again from the store, with what the catalog knew of them; a donor of heals.

A generation holds all refs, pins among them, and the records of the catalog as a bundle has them:
its reader trusts nothing, proves every closure, and merges into what is there. A crash leaves what
the same restoration finishes.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import to_thread

from .. import errors
from ..catalog import Generation
from ..git.packs import PackIndex, pack_trailer
from ..host.files import full_disk_named, host_error
from ..host.room import Room
from ..mirrors.bundles import Bundles, sort_refs
from ..mirrors.quarantine import Quarantine
from ..mirrors.refs import theirs, write_durably
from ..mirrors.repository import Repository
from ..mirrors.upstream import public_url
from ..model import MirrorName
from ..protocol import BundleImported, NotRestored, Problem, Progress, ProgressSink
from ..telemetry import log
from .exchange import Exchange
from .generations import (
    GenerationManifest,
    PublishedPack,
    generation_file,
    index_key,
    is_before,
    list_published,
    pack_key,
    read_generation,
    read_manifest,
)
from .objects import Blob, ObjectStore


@dataclass(frozen=True, slots=True)
class Restoration:
    """Restores one mirror after the other, without a catalog that knows them."""

    exchange: Exchange
    bundles: Bundles

    async def restore_all(
        self, names: Collection[str], owner_uid: int, progress: ProgressSink
    ) -> AsyncIterator[BundleImported | NotRestored]:
        """Restore these mirrors, or all of the store, to their newest generation there.

        Where that is damaged, to the newest one that is whole, and both are answered. One that
        fails does not stop the others. Raises StoreUnavailableError where the store cannot be
        reached for two in turn.
        """
        store, is_away = self.exchange.store, False
        keys = {MirrorName.parse(name).key for name in names}
        if not names:
            keys = {*await to_thread.run_sync(store.directories, "mirrors/")}
        for number, key in enumerate(sorted(keys)):
            progress(Progress(done=number, total=len(keys), unit="mirrors", note=key))
            try:
                name = MirrorName.parse(key)
                published = await to_thread.run_sync(list_published, store, name)
                if not published and not names:
                    continue  # packs of a publication that never ended
                if not published:
                    fact = "the store has nothing of that name"
                    raise errors.MirrorNotFoundError(f"cannot restore mirror {key}: {fact}")
                restored, damage = await self._restore_newest(key, published, owner_uid)
            except errors.StoppingError:
                raise
            except (errors.MirrordError, OSError) as error:
                known = host_error(error, "restore") if isinstance(error, OSError) else error
                if known is None or (is_away and isinstance(known, errors.StoreUnavailableError)):
                    raise
                is_away = isinstance(known, errors.StoreUnavailableError)
                log.warning("mirror.not_restored", mirror=key, detail=known.message)
                yield NotRestored(mirror=key, error=Problem.from_json(known.problem()))
            else:
                is_away = False
                if damage:
                    log.warning("store.damaged", mirror=key, detail=damage.message)
                    yield NotRestored(mirror=key, error=Problem.from_json(damage.problem()))
                yield restored

    async def _restore_newest(
        self, key: str, published: Sequence[Generation], owner_uid: int
    ) -> tuple[BundleImported, errors.StoreDamagedError | None]:
        """Restore the newest generation that is whole; answers why a newer one is not."""
        store, name, newest = self.exchange.store, MirrorName.parse(key), published[-1]
        first, damaged = None, set[str]()
        for generation in reversed(published):
            try:
                manifest = await to_thread.run_sync(read_manifest, store, name, generation)
                needed = {of(name, pack) for pack in manifest.packs for of in (pack_key, index_key)}
                if needed & damaged:
                    continue
                restored = await self.restore(key, generation, owner_uid, newest.epoch)
            except errors.StoreDamagedError as error:
                damaged.add(str(error.facts.get("object")))
                first = first or error
            else:
                if first is None:
                    return restored, None
                wanted, made = (f"{it.epoch}-{it.number}" for it in (newest, generation))
                failure = f"cannot restore generation {wanted} of mirror {key}, but {made}"
                return restored, errors.StoreDamagedError(f"{failure}: {first.message}")
        assert first
        raise first

    async def restore(
        self, key: str, generation: Generation, owner_uid: int, epoch: int = 0
    ) -> BundleImported:
        """Restore a mirror, its pins, its datasets' rows; what is there already stays.

        The generation becomes the catalog's, unless that knows a newer one; `epoch` is the last one
        in the store, which whatever is published later comes after. Raises StoreDamagedError where
        the store lacks something.
        """
        mirrors, name = self.bundles.mirrors, MirrorName.parse(key)
        manifest = await to_thread.run_sync(read_manifest, self.exchange.store, name, generation)
        row = await mirrors.catalog.find_mirror(key)
        name = row.name if row else MirrorName.parse(manifest.mirror)
        is_new = not mirrors.path(name).exists()
        await self._bring(name, generation)
        if row is None:
            await mirrors.add(str(name), public_url(manifest.url), at=generation)
        await mirrors.catalog.adopt_generation(mirrors.catalog.node, key, generation, epoch)
        try:
            result = await self._take(name, manifest, owner_uid)
        except errors.InvalidBundleError as error:
            fact = error.message.partition(": ")[2]
            raise errors.StoreDamagedError(f"cannot restore mirror {name}: {fact}") from error
        summary = f"{len(theirs(manifest.refs))} created"  # before the merge, which found them
        return replace(result, summary=summary) if is_new else result

    async def _bring(self, name: MirrorName, generation: Generation) -> None:
        """Have all objects of a generation in a mirror; one that is not there gets its refs too."""
        mirrors = self.bundles.mirrors
        repository = mirrors.repository(name)
        await mirrors.make_again(name, lambda new: self.exchange.follow(new, generation))
        async with mirrors.lock(name):
            await self.exchange.fetch(repository, generation)
            at = await to_thread.run_sync(read_generation, repository.path)
            if is_before(at, generation):
                with full_disk_named(f"mirror {name}"):
                    await to_thread.run_sync(
                        write_durably, *generation_file(repository.path, generation)
                    )

    async def _take(
        self, name: MirrorName, manifest: GenerationManifest, owner_uid: int
    ) -> BundleImported:
        """Merge refs, pins and rows, once everything that they need was proven."""
        mirrors = self.bundles.mirrors
        async with mirrors.quarantine.directory("restore") as directory:
            scratch = Repository(mirrors.git, name, directory / "repository")
            await scratch.create()
            alternates = scratch.objects / "info/alternates"
            alternates.write_text(f"{mirrors.repository(name).objects}\n", encoding="utf-8")
            tip = manifest.refs.get(manifest.head or "")
            refs = manifest.refs | ({"HEAD": tip} if tip else {})
            return await self.bundles.take(scratch, sort_refs(refs), owner_uid)


def restoration(url: str, bundles: Bundles) -> Restoration:
    """From the store of a URL."""
    return Restoration(Exchange(ObjectStore(url), bundles.mirrors.quarantine), bundles)


# -- a donor of heals: of the newest generation, the packs that are needed -------------------------
#
# No pack is thin, so each is of use alone, and its index says what it has.


class StoreDonor:
    """One generation of a mirror in the store. `damage` says what of it could not be used."""

    damage = ""

    def __init__(self, store: ObjectStore, name: MirrorName, generation: Generation) -> None:
        self.store, self.name, self.generation = store, name, generation
        self._indexes: dict[PublishedPack, PackIndex] | None = None
        self._left: set[PublishedPack] = set()

    async def fill(self, quarantine: Quarantine, repository: Repository) -> None:
        """Bring an empty repository to the generation."""
        await Exchange(self.store, quarantine).follow(repository, self.generation)

    def take(self, wanted: Collection[str], packs: Path, room: Room) -> None:
        """Download packs that have some of `wanted` into a directory; where asked again, all.

        Blocks. Objects behind those that are wanted may be in other packs: one that is damaged has
        all others taken too. Raises StoreUnavailableError, also for a full disk: other donors may
        need less room.
        """
        try:
            room.must_suffice(f"download packs of mirror {self.name}")
            self._take([bytes.fromhex(oid) for oid in wanted], packs, room)
        except errors.DiskFullError as error:
            raise errors.StoreUnavailableError(error.message, hint=error.hint) from error

    def _take(self, wanted: Collection[bytes], packs: Path, room: Room) -> None:
        if self._indexes is None:
            manifest = read_manifest(self.store, self.name, self.generation)
            self._left = {pack for pack in manifest.packs if self._has_index(pack, packs)}
            self._indexes = {pack: PackIndex(_path(packs, pack, ".idx")) for pack in self._left}
        having = {
            pack for pack, index in self._indexes.items() if any(oid in index for oid in wanted)
        }
        is_first = len(self._left) == len(self._indexes)
        for pack in sorted(self._left, key=lambda pack: (pack not in having, pack.pack.size_bytes)):
            if pack in having or (having and (self.damage or not is_first)):
                self._download(pack, packs, room)

    def _has_index(self, pack: PublishedPack, packs: Path) -> bool:
        path = _path(packs, pack, ".idx")
        return self._has(index_key(self.name, pack), path, pack.index)

    def _download(self, pack: PublishedPack, packs: Path, room: Room) -> None:
        """Take a pack, which git sees when it is whole."""
        self._left.discard(pack)
        room.must_suffice(f"download packs of mirror {self.name}")
        part, index = _path(packs, pack, ".part"), _path(packs, pack, ".idx")
        try:
            if self._has(pack_key(self.name, pack), part, pack.pack):
                if PackIndex(index).pack_checksum == pack_trailer(part):
                    part.rename(part.with_suffix(".pack"))
                else:
                    self.damage = f"the index of {pack_key(self.name, pack)} is of another pack"
        finally:
            part.unlink(missing_ok=True)

    def _has(self, key: str, path: Path, blob: Blob) -> bool:
        try:
            self.store.download(key, path, blob)
        except errors.StoreDamagedError as error:
            self.damage = error.message
            return False
        return True


def _path(packs: Path, pack: PublishedPack, suffix: str) -> Path:
    return packs / f"pack-{pack.pack.sha256[:40]}{suffix}"


def find_donor(url: str, name: MirrorName, known: Generation | None) -> StoreDonor | None:
    """What the store has of a mirror: the generation that the catalog knows, or else the newest."""
    store = ObjectStore(url)
    published = [known] if known else list_published(store, name)
    return StoreDonor(store, name, published[-1]) if published else None
