"""The store as a donor of heals: of the newest generation of a mirror, the packs that are needed.

No pack is thin, so each is of use alone, and its index says what it has.
"""

from collections.abc import Collection
from pathlib import Path

from ..catalog import Generation
from ..errors import DiskFullError, StoreDamagedError, StoreUnavailableError
from ..git.packs import PackIndex, pack_trailer
from ..host.room import Room
from ..mirrors.quarantine import Quarantine
from ..mirrors.repository import Repository
from ..model import MirrorName
from .exchange import Exchange
from .generations import PublishedPack, index_key, list_published, pack_key, read_manifest
from .objects import Blob, ObjectStore


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
        except DiskFullError as error:
            raise StoreUnavailableError(error.message, hint=error.hint) from error

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
        except StoreDamagedError as error:
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
