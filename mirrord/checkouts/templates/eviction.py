"""Evict templates: least recently used first over `template_bytes`, and what was not used for `template_ttl`.

A sealed store is what goes, and with it the layers and the closure packs that no other store needs.
Only what no checkout holds; the last store of a mirror outlives its time, so that the next checkout
is not a very first one. All of it can be made again from the mirror.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import anyio.to_thread

from ...config import Settings
from ...jobs.events import Events
from ...model import MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import SealedStore, note_uses
from .registry import MirrorTemplates, TemplateRegistry

_FULL_SHARE = 0.9
_NEW = timedelta(minutes=10)  # a layer without a store may be one whose store is being built
_STORE_BYTES = 64 * 1024  # directories and small files of a store, a block each


class Eviction:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        shelves: TemplateRegistry,
        gitdirs: StoreBuilder,
        events: Events,
    ) -> None:
        self._settings = settings
        self._shelves = shelves
        self._gitdirs = gitdirs
        self._events = events
        self._noted_at = time.time()

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`."""
        used = sum(each.size_bytes for each in await self._inventories())
        return used > self._settings().checkouts.template_bytes * _FULL_SHARE

    async def evict(self) -> set[Path]:
        """Evict what is over the bounds; answers the stores that went."""
        inventories = await self._inventories()
        await self._note_uses(inventories)
        by_age = sorted(
            (used_at, number, path)
            for number, each in enumerate(inventories)
            for path, used_at in each.used_at.items()
        )
        settings = self._settings().checkouts
        oldest = time.time() - settings.template_ttl.total_seconds()
        evicted = set[Path]()
        for used_at, number, path in by_age:
            each = inventories[number]
            is_late = used_at < oldest and len(each.stores) > 1
            if is_late or sum(each.size_bytes for each in inventories) > settings.template_bytes:
                evicted |= await self._evict(each, each.stores[path])
        for each in inventories:
            await self._evict_strays(each)
            if evicted & each.former:
                await self._gitdirs.drop_unneeded_packs(each.name)
        if evicted:
            left = sum(each.size_bytes for each in inventories)
            self._events.publish("templates.evicted", count=len(evicted), size_bytes=left)
        return evicted

    async def _inventories(self) -> list[_Inventory]:
        await self._shelves.weigh()
        return [
            await anyio.to_thread.run_sync(
                _Inventory, name, self._shelves.get(name), await self._gitdirs.stores(name)
            )
            for name in self._shelves.names()
        ]

    async def _evict(self, inventory: _Inventory, store: SealedStore) -> set[Path]:
        """Remove a store with the layers that only it needs; nothing where a checkout uses it."""
        shelf = inventory.shelf
        async with self._shelves.lock(shelf):
            is_used = shelf.used_at.get(store.path, 0.0) > inventory.used_at[store.path]
            if is_used or store.path in self._shelves.holds:
                return set()
            inventory.remove(store)
            shelf.used_at.pop(store.path, None)
            gone = self._gitdirs.retire(store)
            self._retire_layers(inventory, store.tree)
        await self._gitdirs.remove(gone)
        await self._shelves.sweep()
        return {store.path}

    def _retire_layers(self, inventory: _Inventory, tree: str | None) -> None:
        """Take a layer out of use, and those it lies on, as far down as nobody needs them."""
        while tree and not inventory.needed[tree] and self._shelves.is_bare(inventory.shelf, tree):
            base = inventory.shelf.layers[tree].base
            self._shelves.take_out(inventory.shelf, tree)
            tree = base

    async def _evict_strays(self, inventory: _Inventory) -> None:
        """Remove layers of a build that failed, or of a store that somebody deleted."""
        shelf = inventory.shelf
        before = time.time() - _NEW.total_seconds()
        for tree in [tree for tree in shelf.layers if not inventory.needed[tree]]:
            async with self._shelves.lock(shelf):
                if tree in shelf.layers and shelf.used_at.get(shelf.files(tree), 0.0) < before:
                    self._retire_layers(inventory, tree)
        await self._shelves.sweep()

    async def _note_uses(self, inventories: Sequence[_Inventory]) -> None:
        """Keep for the next daemon what was used since the last time."""
        used = {
            each.stores[path]: at
            for each in inventories
            for path, at in each.used_at.items()
            if at > self._noted_at
        }
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)


class _Inventory:
    """The stores of one mirror, each with the time of its last use; how many need a layer or a pack.

    Made in a thread, because it looks at everything. `needed` counts by tree of a layer and by name
    of a pack.
    """

    def __init__(
        self, name: MirrorName, shelf: MirrorTemplates, stores: Sequence[tuple[SealedStore, float]]
    ) -> None:
        self.name = name
        self.shelf = shelf
        self.stores = {store.path: store for store, _ in stores}
        self.former = frozenset(self.stores)
        self.used_at = {
            store.path: max(at, shelf.used_at.get(store.path, 0.0)) for store, at in stores
        }
        self.needed: Counter[str] = Counter()
        self._packs_bytes = 0
        for store, _ in stores:
            for pack, size in zip(store.packs, store.pack_sizes, strict=True):
                self._packs_bytes += 0 if self.needed[pack] else size
                self.needed[pack] += 1
            self.needed.update(self._trees(store))

    @property
    def size_bytes(self) -> int:
        return self.shelf.size_bytes() + self._packs_bytes + len(self.stores) * _STORE_BYTES

    def remove(self, store: SealedStore) -> None:
        """Count a store no more."""
        del self.stores[store.path], self.used_at[store.path]
        self.needed.subtract([*self._trees(store), *store.packs])
        sizes = zip(store.packs, store.pack_sizes, strict=True)
        self._packs_bytes -= sum(size for pack, size in sizes if not self.needed[pack])

    def _trees(self, store: SealedStore) -> list[str]:
        try:
            return [layer.tree for layer in self.shelf.chain(store.tree)]
        except KeyError:  # never made, or out of use
            return []
