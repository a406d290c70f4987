"""Mirrors again from the store, with what the catalog knew of them.

A generation holds all refs, pins among them, and the records of the catalog as a bundle has them:
its reader trusts nothing, proves every closure, and merges into what is there.
"""

from dataclasses import dataclass

from anyio import to_thread

from ..catalog import Generation
from ..host.files import full_disk_named
from ..mirrors.bundles import Bundles, sort_refs
from ..mirrors.refs import write_durably
from ..mirrors.repository import Repository
from ..model import MirrorName
from ..protocol import BundleImported
from .exchange import Exchange
from .generations import generation_file, list_published
from .objects import ObjectStore


def list_mirrors(store: ObjectStore) -> dict[str, Generation]:
    """The newest generation in the store of each mirror that it has, by the mirror's key."""
    keys = store.directories("mirrors/")
    found = {key: list_published(store, MirrorName.parse(key)) for key in keys}
    return {key: published[-1] for key, published in found.items() if published}


@dataclass(frozen=True, slots=True)
class Restoration:
    """Restores one mirror after the other, without a catalog that knows them."""

    exchange: Exchange
    bundles: Bundles

    async def restore(self, key: str, generation: Generation, owner_uid: int) -> BundleImported:
        """Restore a mirror, its pins, its datasets' rows; what is there already stays.

        Raises StoreDamagedError where the store lacks something.
        """
        mirrors = self.bundles.mirrors
        async with mirrors.quarantine.directory("restore") as directory:
            scratch = Repository(mirrors.git, MirrorName.parse(key), directory / "repository")
            await scratch.create()
            manifest = await self.exchange.fetch(scratch, generation)
            scratch = Repository(mirrors.git, MirrorName.parse(manifest.mirror), scratch.path)
            tip = manifest.refs.get(manifest.head or "")
            refs = manifest.refs | ({"HEAD": tip} if tip else {})
            result = await self.bundles.take(scratch, sort_refs(refs), owner_uid)
        path = mirrors.path(scratch.name)
        with full_disk_named(f"mirror {scratch.name}"):
            await to_thread.run_sync(write_durably, *generation_file(path, generation))
        return result
