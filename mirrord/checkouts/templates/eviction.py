"""Evict templates: least recently used first over `template_bytes`, and those unused for
`template_ttl`.

A sealed store goes, and with it the layers and the closure packs that no other store needs; never
what a checkout holds. The last store of a mirror outlives its time, so that the next checkout is
not a very first one. All of it can be made again from the mirror.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

import anyio.to_thread

from ...config import Settings
from ...jobs.events import Events
from ...model import MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import SealedStore, note_uses
from .registry import MirrorTemplates, TemplateRegistry

_NEW_S = 600.0  # a younger layer without a store may have one that is being built
_STORE_BYTES = 64 * 1024  # directories and small files of a store, a block each


class Eviction:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        registry: TemplateRegistry,
        stores: StoreBuilder,
        events: Events,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._stores = stores
        self._events = events
        self._noted_at = time.time()

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`."""
        used = sum(each.size_bytes for each in await self._inventories())
        return used > self._settings().checkouts.template_bytes * 0.9

    async def evict(self) -> set[Path]:
        """Evict what is over the bounds; answers the stores that went."""
        evicted = set[Path]()
        while gone := await self._evict_once():  # again: shared files weigh more than was guessed
            evicted |= gone
        return evicted

    async def _evict_once(self) -> set[Path]:
        inventories = await self._inventories()
        stores = [(each, *found) for each in inventories for found in each.used_at.items()]
        # for the next daemon
        used = {each.stores[path]: at for each, path, at in stores if at > self._noted_at}
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)

        settings = self._settings().checkouts
        oldest = time.time() - settings.template_ttl.total_seconds()
        evicted = set[Path]()
        for each, path, used_at in sorted(stores, key=itemgetter(2)):
            is_late = used_at < oldest and len(each.stores) > 1
            if not is_late and sum(e.size_bytes for e in inventories) <= settings.template_bytes:
                continue
            async with each.templates.changes.turn():
                is_used = each.templates.used_at.get(path, 0.0) > used_at
                if is_used or path in self._registry.held:
                    continue
                each.templates.used_at.pop(path, None)
                store = each.remove(path)
                retired = self._stores.discard(store)
                self._retire_layers(each, store.tree)
            evicted.add(path)
            await self._stores.remove(retired)
            await self._registry.sweep()
        for each in inventories:
            await self._evict_strays(each)
            if evicted & each.all_stores:
                await self._stores.evict_packs(each.name)
        if evicted:
            left = sum(each.size_bytes for each in inventories)
            self._events.publish("templates.evicted", count=len(evicted), size_bytes=left)
        return evicted

    async def _evict_strays(self, inventory: _Inventory) -> None:
        """Evict layers without a store: of a build that failed, or of a store that is gone."""
        templates, before = inventory.templates, time.time() - _NEW_S
        for tree in [tree for tree in templates.layers if not inventory.needed[tree]]:
            async with templates.changes.turn():
                files = templates.files.get(tree)
                if files is not None and templates.used_at.get(files, 0.0) < before:
                    self._retire_layers(inventory, tree)
        await self._registry.sweep()

    def _retire_layers(self, inventory: _Inventory, tree: str | None) -> None:
        """Take a layer out of use, and those below it, as far down as no store needs them."""
        templates = inventory.templates
        while (
            tree is not None
            and tree in templates.layers
            and not inventory.needed[tree]
            and not templates.layers.carries(tree)
            and templates.files[tree] not in self._registry.held
        ):
            base = templates.layers[tree].base
            self._registry.retire(templates, tree)
            tree = base

    async def _inventories(self) -> list[_Inventory]:
        await self._registry.weigh()
        found = []
        for name in self._registry.names():
            templates, stores = self._registry.get(name), await self._stores.list_stores(name)
            found.append(await anyio.to_thread.run_sync(_Inventory, name, templates, stores))
        return found


class _Inventory:
    """The stores of one mirror, their last uses, and how many stores need a layer or a pack.

    Made in a thread: it looks at everything. `needed` counts by tree of a layer and name of a pack.
    """

    def __init__(
        self,
        name: MirrorName,
        templates: MirrorTemplates,
        stores: Sequence[tuple[SealedStore, float]],
    ) -> None:
        self.name = name
        self.templates = templates
        self.stores = {store.path: store for store, _ in stores}
        self.all_stores = frozenset(self.stores)
        last = templates.used_at
        self.used_at = {store.path: max(at, last.get(store.path, 0.0)) for store, at in stores}
        self.needed: Counter[str | None] = Counter()
        self._packs_bytes = 0
        for store, _ in stores:
            for pack, size in zip(store.packs, store.pack_sizes, strict=True):
                self._packs_bytes += 0 if self.needed[pack] else size
                self.needed[pack] += 1
            self.needed.update(self._trees(store))

    @property
    def size_bytes(self) -> int:
        return self.templates.size_bytes + self._packs_bytes + len(self.stores) * _STORE_BYTES

    def remove(self, path: Path) -> SealedStore:
        store = self.stores.pop(path)
        self.needed.subtract([*self._trees(store), *store.packs])
        sizes = zip(store.packs, store.pack_sizes, strict=True)
        self._packs_bytes -= sum(size for pack, size in sizes if not self.needed[pack])
        return store

    def _trees(self, store: SealedStore) -> list[str]:
        try:
            return [layer.tree for layer in self.templates.chain(store.tree)]
        except KeyError:  # never made, or out of use
            return []
