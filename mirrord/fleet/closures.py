"""Closure packs that daemons share: packed by one, proven by its digest, taken by the others.

A pack and its index are objects named by their content, as those of generations are; what they hold
and their digests stand in the catalog, which only daemons write. One that nobody used for a month
is dropped.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from anyio import to_thread

from ..catalog import Catalog
from ..errors import StoreDamagedError
from ..model import CommitId, MirrorName
from .exchange import download_packs, put_pack
from .generations import PublishedPack, index_key, pack_key
from .objects import Blob, ObjectStore

UNUSED = timedelta(days=30)
_DOWNLOADS = 8  # at a time


@dataclass(frozen=True, slots=True)
class SharedClosures:
    """The closure packs of a fleet. `noting` remembers for health whether the store answers,
    `is_away` says that it did not.
    """

    catalog: Catalog
    store: ObjectStore
    noting: Callable[[], AbstractContextManager[None]]
    is_away: Callable[[], bool]

    async def find(self, name: MirrorName) -> dict[CommitId, dict[str, Any]]:
        """What is said of each layer, by commit; nothing while the store is away."""
        if self.is_away():
            return {}
        rows = await self.catalog.list_closures(name.key)
        return {CommitId(commit): dict(document["layer"]) for commit, document in rows.items()}

    async def take(self, name: MirrorName, places: Mapping[CommitId, Path]) -> None:
        """Download the pack of each commit, and its index, into a directory.

        Raises CatalogUnavailableError, StoreUnavailableError; StoreDamagedError where the store
        has something else, or nothing: then nobody looks for these again.
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
            if not (places[commit] / document["layer"]["pack"]).exists():
                raise StoreDamagedError(f"{failure}: what is there of {commit} is another pack")

        def download_all() -> None:
            with ThreadPoolExecutor(_DOWNLOADS) as threads:
                list(threads.map(download, places))

        try:
            with self.noting():
                await to_thread.run_sync(download_all)
        except StoreDamagedError:
            await self.catalog.drop_closures(name.key, commits=list(places))
            # else the same pack would not be written again
            await to_thread.run_sync(self.store.delete, _objects(name, rows.values()))
            raise

    async def offer(
        self, name: MirrorName, layers: Collection[tuple[Mapping[str, Any], Path]]
    ) -> None:
        """Share layers by what is said of them and their packs, each after its base."""
        for layer, pack in layers:
            with self.noting():
                put = await to_thread.run_sync(put_pack, self.store, name, pack, 0)
            document = {"layer": dict(layer), "pack": [*put.pack], "index": [*put.index]}
            await self.catalog.put_closure(name.key, layer["commit"], document)


def published_pack(document: Mapping[str, Any]) -> PublishedPack:
    """The pack of a closure, from what the catalog says of it."""
    return PublishedPack(Blob(*document["pack"]), Blob(*document["index"]), 0)


async def list_needed(catalog: Catalog, name: MirrorName) -> set[str]:
    """The objects of a mirror's closures, after those that nobody used for long were dropped."""
    await catalog.drop_closures(name.key, unused=UNUSED)
    return {*_objects(name, (await catalog.list_closures(name.key)).values())}


def _objects(name: MirrorName, documents: Iterable[Mapping[str, Any]]) -> list[str]:
    packs = map(published_pack, documents)
    return [key(name, pack) for pack in packs for key in (pack_key, index_key)]
