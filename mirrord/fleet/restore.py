"""Restore mirrors, and what the catalog knew of them, from the store; a donor of heals.

A generation holds all refs, pins among them, and the catalog's records as a bundle does. They are
not trusted: every closure is proven, then merged into the mirror. The catalog knows the generation
once everything of it is merged. After a crash, the rounds or the same restoration finish the work.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import to_thread

from .. import errors
from ..bundles.merging import sort_refs
from ..bundles.service import Bundles
from ..catalog import Generation
from ..errors import host_error
from ..git.packs import PackIndex, pack_trailer
from ..host.room import Room
from ..mirrors.quarantine import Quarantine
from ..mirrors.refs import followed_refs
from ..mirrors.repository import Repository
from ..mirrors.upstreams.upstream import public_url
from ..model import MirrorName
from ..presence import exists
from ..protocol import BundleImported, NotRestored, Problem, Progress, ProgressSink
from ..telemetry import log
from .exchange import Exchange
from .generations import (
    GenerationManifest,
    PublishedPack,
    index_key,
    is_before,
    list_published,
    pack_key,
    read_generation,
    read_manifest,
    write_generation,
)
from .objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Restoration:
    """Restores mirrors that the catalog need not know, one after the other."""

    exchange: Exchange
    bundles: Bundles

    async def restore_all(
        self, names: Collection[str], owner_uid: int, progress: ProgressSink
    ) -> AsyncIterator[BundleImported | NotRestored]:
        """Restore these mirrors, or all of the store, to their newest undamaged generation.

        Yields each result, before it the damage of a newer generation. A failure does not stop the
        others. Raises StoreUnavailableError where the store is away for two mirrors in a row.
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
                cause = host_error(error, "restore") if isinstance(error, OSError) else error
                if cause is None or (is_away and isinstance(cause, errors.StoreUnavailableError)):
                    raise
                is_away = isinstance(cause, errors.StoreUnavailableError)
                log.warning("mirror.not_restored", mirror=key, detail=cause.message)
                yield NotRestored(mirror=key, error=Problem.from_json(cause.problem()))
            else:
                is_away = False
                if damage:
                    log.warning("store.damaged", mirror=key, detail=damage.message)
                    yield NotRestored(mirror=key, error=Problem.from_json(damage.problem()))
                yield restored

    async def _restore_newest(
        self, key: str, published: Sequence[Generation], owner_uid: int
    ) -> tuple[BundleImported, errors.StoreDamagedError | None]:
        """Restore the newest whole generation; return the damage of a newer one with it."""
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
                failure = (
                    f"cannot restore generation {wanted} of mirror {key}, restored {made} instead"
                )
                return restored, errors.StoreDamagedError(f"{failure}: {first.message}")
        assert first
        raise first

    async def restore(
        self, key: str, generation: Generation, owner_uid: int, epoch: int = 0
    ) -> BundleImported:
        """Merge a generation into a mirror: refs, pins, datasets' rows.

        It becomes the catalog's newest one, unless that knows a newer one. `epoch` is the last one
        in the store; later publications get a higher one. Raises StoreDamagedError where the store
        lacks something.
        """
        mirrors, name = self.bundles.mirrors, MirrorName.parse(key)
        manifest = await to_thread.run_sync(read_manifest, self.exchange.store, name, generation)
        row = await mirrors.catalog.find_mirror(key)
        name = row.name if row else MirrorName.parse(manifest.mirror)
        is_new = not exists(mirrors.path(name))
        await mirrors.make_again(name, lambda new: self.exchange.follow(new, generation))
        async with mirrors.lock(name):
            repository = mirrors.repository(name)
            await self.exchange.fetch(repository, generation)
            if is_before(await to_thread.run_sync(read_generation, repository.path), generation):
                await to_thread.run_sync(write_generation, repository, generation)
        if row is None:
            await mirrors.add(str(name), public_url(manifest.url), adopt=False)
        try:
            result = await self._merge(name, manifest, owner_uid)
        except errors.InvalidBundleError as error:
            fact = error.message.partition(": ")[2]
            raise errors.StoreDamagedError(f"cannot restore mirror {name}: {fact}") from error
        # not before: what is published meanwhile would lack pins and rows that are not merged yet
        await mirrors.catalog.adopt_generation(mirrors.catalog.node, key, generation, epoch)
        mirrors.sharing.records_changed([key])
        summary = (
            f"{len(followed_refs(manifest.refs))} created"  # by make_again, so the merge found them
        )
        return replace(result, summary=summary) if is_new else result

    async def _merge(
        self, name: MirrorName, manifest: GenerationManifest, owner_uid: int
    ) -> BundleImported:
        """Merge refs, pins and rows after proving what they need."""
        mirrors = self.bundles.mirrors
        async with mirrors.quarantine.directory("restore") as directory:
            scratch = Repository(mirrors.git, name, directory / "repository")
            await scratch.create(lender=mirrors.repository(name))
            tip = manifest.refs.get(manifest.head or "")
            refs = manifest.refs | ({"HEAD": tip} if tip else {})
            return await self.bundles.take(scratch, sort_refs(refs), owner_uid, publish=False)


def restoration(url: str, bundles: Bundles) -> Restoration:
    return Restoration(Exchange(ObjectStore(url), bundles.mirrors.quarantine), bundles)


# -- a donor of heals: the packs of the newest generation that are needed --------------------------
#
# No pack is thin, so each is of use alone, and its index lists its objects.


class StoreDonor:
    """One generation of a mirror in the store. `damage` says which part of it is unusable."""

    damage = ""

    def __init__(self, store: ObjectStore, name: MirrorName, generation: Generation) -> None:
        self.store, self.name, self.generation = store, name, generation
        self._indexes: dict[PublishedPack, PackIndex] | None = None
        self._left: set[PublishedPack] = set()

    async def fill(self, quarantine: Quarantine, repository: Repository) -> None:
        """Bring an empty repository to the generation."""
        await Exchange(self.store, quarantine).follow(repository, self.generation)

    def take(self, wanted: Collection[str], packs: Path, room: Room) -> None:
        """Download the packs with some of `wanted` into a directory; at a second call, all packs.

        Blocks. Where a pack is damaged, it takes all others too: objects that the wanted ones refer
        to may be in them. Raises StoreUnavailableError, also for a full disk, because other donors
        may need less room.
        """
        try:
            room.must_suffice(f"download packs of mirror {self.name}")
            if self._indexes is None:
                manifest = read_manifest(self.store, self.name, self.generation)
                read = {pack: self._read_index(pack, packs) for pack in manifest.packs}
                self._indexes = {pack: index for pack, index in read.items() if index}
                self._left = {*self._indexes}
            ids, indexes = [bytes.fromhex(oid) for oid in wanted], self._indexes.items()
            having = {pack for pack, index in indexes if any(oid in index for oid in ids)}
            is_first = len(self._left) == len(self._indexes)
            # the wanted ones first: only if one of them is damaged are the others needed
            for pack in sorted(self._left, key=lambda it: (it not in having, it.pack.size_bytes)):
                if pack in having or (having and (self.damage or not is_first)):
                    room.must_suffice(f"download packs of mirror {self.name}")
                    self._download(pack, self._indexes[pack])
        except errors.DiskFullError as error:
            raise errors.StoreUnavailableError(error.message, hint=error.hint) from error

    def _read_index(self, pack: PublishedPack, packs: Path) -> PackIndex | None:
        # as many digits as git gives the name of a pack
        path = packs / f"pack-{pack.pack.sha256[:40]}.idx"
        try:
            self.store.download(index_key(self.name, pack), path, pack.index)
            return PackIndex(path)
        except errors.StoreDamagedError as error:
            self.damage = error.message
            return None

    def _download(self, pack: PublishedPack, index: PackIndex) -> None:
        """Download a pack, and rename it once it is proven, so that git sees it."""
        self._left.discard(pack)
        key, part = pack_key(self.name, pack), index.path.with_suffix(".part")
        try:
            self.store.download(key, part, pack.pack)
            if index.pack_checksum != pack_trailer(part):
                raise errors.StoreDamagedError(f"the index of {key} is of another pack")
            part.rename(index.path.with_suffix(".pack"))
        except errors.StoreDamagedError as error:
            self.damage = error.message
        finally:
            part.unlink(missing_ok=True)


def find_donor(url: str, name: MirrorName, generation: Generation | None) -> StoreDonor | None:
    """Open the generation that the catalog knows, or else the newest one in the store."""
    store = ObjectStore(url)
    published = [generation] if generation else list_published(store, name)
    return StoreDonor(store, name, published[-1]) if published else None
