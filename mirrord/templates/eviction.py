"""Evict templates: least recently used first over `template_bytes` and on a nearly full disk, those
unused for `template_ttl`, those of a commit that nothing names once its last checkout has ended for
the `ttl` of a lease, and on request all that no checkout needs.

Evicting a sealed store also evicts the layers and closure packs that no other store needs; nothing
that a checkout holds is evicted. The last store of a mirror is exempt from both times, because the
first checkout of a mirror costs most. Whatever is evicted can be built again from the mirror.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from ..config import Settings
from ..errors import CatalogUnavailableError
from ..jobs.events import Events
from ..model import History, MirrorName
from .builder import StoreBuilder
from .layers import Layer, proven_at
from .registry import MirrorTemplates, TemplateRegistry
from .store import SealedStore, StoreKey, note_uses

_IN_USE_S = 600.0  # a store used since stays on a nearly full disk: it could not be built again
_STORE_BYTES = 64 * 1024  # directories and small files of a store, a block each


class TemplateWeight(NamedTuple):
    """The disk space of a store's template; `shared_bytes` are those that another one needs, too.

    A file that layers share counts with the layer that had it first.
    """

    store: SealedStore
    used_at: float
    is_needed: bool
    size_bytes: int
    shared_bytes: int


class MirrorWeight(NamedTuple):
    """The disk space of a mirror's templates; `collect` would free `free_bytes`."""

    name: MirrorName
    size_bytes: int
    free_bytes: int
    templates: list[TemplateWeight]


@dataclass(eq=False, repr=False)
class Eviction:
    """Decides which templates to evict. Belongs to the event loop's thread.

    `size_bytes` is the size of all templates when they were last counted, some minutes ago. Nothing
    is evicted while `knows_all` is false: a lease that could not be read may need any of them.
    """

    settings: Callable[[], Settings]
    registry: TemplateRegistry
    stores: StoreBuilder
    events: Events

    def __post_init__(self) -> None:
        self._noted_at = time.time()
        self.knows_all: Callable[[], bool] = lambda: True
        self.evicted = 0
        self.size_bytes: int | None = None

    def follow(self, step: timedelta) -> None:
        """Follow a step of the wall clock: what was used an hour ago still was."""
        self._noted_at += step.total_seconds()
        for path in self.stores.used_at:
            self.stores.used_at[path] += step.total_seconds()

    async def is_full(self) -> bool:
        """Return whether less than a tenth of `template_bytes` is free."""
        used = sum(inventory.size_bytes for inventory in await self._inventories())
        return used > self.settings().checkouts.template_bytes * 0.9

    async def evict(self, short_bytes: int = 0) -> int:
        """Evict stores over the bounds, and idle ones to free `short_bytes`; returns how many."""
        evicted = count = await self._evict_once(short_bytes)
        while count:  # shared files are larger than was estimated
            count = await self._evict_once()
            evicted += count
        return evicted

    async def _evict_once(self, short_bytes: int = 0) -> int:
        inventories = await self._inventories()
        stores = [(mirror, *use) for mirror in inventories for use in mirror.used_at.items()]
        # for the next daemon
        used = {mirror.stores[path]: when for mirror, path, when in stores if when > self._noted_at}
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)

        settings = self.settings().checkouts
        now, evicted = time.time(), 0
        oldest, idle = now - settings.template_ttl.total_seconds(), now - _IN_USE_S
        unnamed = await self._list_unnamed(inventories, now - settings.ttl.total_seconds())
        wanted_bytes = sum(e.size_bytes for e in inventories) - short_bytes
        for mirror, path, used_at in sorted(stores, key=itemgetter(2)):
            size_bytes = sum(e.size_bytes for e in inventories)
            is_late = (used_at < oldest or path in unnamed) and len(mirror.stores) > 1
            is_short = size_bytes > wanted_bytes and used_at < idle
            if not is_late and not is_short and size_bytes <= settings.template_bytes:
                continue
            if await self._evict_store(mirror, path, used_at) is not None:
                evicted += 1
        for mirror in inventories:
            await self._evict_orphans(mirror)
            if len(mirror.stores) < len(mirror.used_at):
                await self.stores.evict_packs(mirror.name)
        self._publish(inventories, evicted)
        return evicted

    async def _list_unnamed(
        self, inventories: "Sequence[_MirrorStores]", before: float
    ) -> set[Path]:
        """Return the stores last used `before` whose commit no dataset or pin names.

        Each may have a whole history of its own, because it cannot stand on packs of later commits.
        None where the catalog cannot tell.
        """
        unnamed = set[Path]()
        for mirror in inventories:
            old = [path for path, used_at in mirror.used_at.items() if used_at < before]
            if len(mirror.stores) > 1 and old:
                try:
                    named = await self.stores.recorded(mirror.name)
                except CatalogUnavailableError:
                    return set()
                unnamed.update(path for path in old if mirror.stores[path].commit not in named)
        return unnamed

    async def collect(self, keep: Collection[StoreKey]) -> dict[MirrorName, tuple[int, int]]:
        """Evict every template but those held, in `keep` or used since; returns count and bytes.

        Also evicts layers, packs and composed trees without a store.
        """
        began, collected = time.time(), dict[MirrorName, tuple[int, int]]()
        inventories = await self._inventories()
        for inventory in inventories:
            unused = inventory.unused(keep, ())  # `_evict_store` looks at what is held then
            stores = [
                (path, inventory.used_at[path])
                for path in unused
                if inventory.used_at[path] < began
            ]
            freed = [await self._evict_store(inventory, path, used_at) for path, used_at in stores]
            orphans_bytes = await self._evict_orphans(inventory)
            packs_bytes = await self.stores.evict_packs(inventory.name)
            if self.knows_all() and all(key != inventory.name.key for key, *_ in keep):
                packs_bytes += await self.stores.evict_composed(inventory.name)
            gone = [size for size in freed if size is not None]
            collected[inventory.name] = len(gone), sum(gone) + orphans_bytes + packs_bytes
        self._publish(inventories, sum(count for count, _ in collected.values()))
        return collected

    async def weigh(self, keep: Collection[StoreKey]) -> list[MirrorWeight]:
        """Return the disk space of each mirror's templates, and what `collect` would free."""
        weights = []
        for inventory in await self._inventories():
            packs = self.stores.known_packs(inventory.name)
            held = frozenset([*self.registry.held, *self.stores.held])
            weights.append(await anyio.to_thread.run_sync(_weighed, inventory, keep, held, packs))
        return weights

    async def _evict_store(
        self, inventory: "_MirrorStores", path: Path, used_at: float
    ) -> int | None:
        """Evict a store with its layers; returns their bytes, None where it was used or is held."""
        templates = inventory.templates
        async with templates.changes.turn():
            # asked again: a checkout may have begun since the stores were listed
            is_used = self.stores.used_at.get(path, used_at) != used_at
            is_held = path in self.registry.held or path in self.stores.held
            if is_used or is_held or not self.knows_all():
                return None
            before = templates.size_bytes
            store = inventory.remove(path)
            discarded = self.stores.discard(store)
            self._discard_layers(inventory, store.tree)
            freed = _STORE_BYTES + before - templates.size_bytes
            if store.history is History.SQUASHED:  # no other store has its pack
                freed += store.size_bytes
        await self.stores.remove(discarded)
        await self.registry.sweep()
        return freed

    async def _evict_orphans(self, inventory: "_MirrorStores") -> int:
        """Evict layers without a store, which a failed build left; returns their bytes."""
        templates, freed = inventory.templates, 0
        for layer in inventory.orphans() if self.knows_all() else ():
            async with templates.changes.turn():
                before = templates.size_bytes
                self._discard_layers(inventory, layer.tree)
                freed += before - templates.size_bytes
        await self.registry.sweep()
        return freed

    def _discard_layers(self, inventory: "_MirrorStores", tree: str | None) -> None:
        """Discard a layer and those below it, down to the first that is needed."""
        templates = inventory.templates
        while (
            tree is not None
            and tree in templates.layers
            and not inventory.needed[tree]
            and templates.above(tree) == {tree}
            and templates.files(tree) not in self.registry.held
        ):
            base = templates.layers[tree].base
            self.registry.discard(templates, tree)
            tree = base

    def _publish(self, inventories: "Sequence[_MirrorStores]", count: int) -> None:
        self.evicted += count
        if count:
            left = sum(inventory.size_bytes for inventory in inventories)
            self.events.publish("templates.evicted", count=count, size_bytes=left)

    async def _inventories(self) -> "list[_MirrorStores]":
        await self.registry.measure()
        inventories = []
        for name in self.registry.names():
            templates, stores = self.registry.get(name), await self.stores.list_stores(name)
            used_at = {store.path: self.stores.used_at[store.path] for store in stores}
            inventories.append(
                await anyio.to_thread.run_sync(_MirrorStores, name, templates, stores, used_at)
            )
        self.size_bytes = sum(inventory.size_bytes for inventory in inventories)
        return inventories


_NEW_S = 600.0  # the store of a younger layer may still be building


class _MirrorStores:
    """The stores of one mirror, their last uses, and how many stores need each layer and pack.

    `needed` counts by tree of a layer and name of a pack. Made in a thread: there may be many.
    """

    def __init__(
        self,
        name: MirrorName,
        templates: MirrorTemplates,
        stores: Sequence[SealedStore],
        used_at: Mapping[Path, float],
    ) -> None:
        self.name = name
        self.templates = templates
        self.stores = {store.path: store for store in stores}
        self.used_at = used_at
        self.needed: Counter[str | None] = Counter()
        self._packs_bytes = 0
        for store in stores:
            for pack, size in zip(store.packs, store.pack_sizes, strict=True):
                self._packs_bytes += 0 if self.needed[pack] else size
                self.needed[pack] += 1
            self.needed.update(layer.tree for layer in self.chain(store))

    @property
    def size_bytes(self) -> int:
        return self.templates.size_bytes + self._packs_bytes + len(self.stores) * _STORE_BYTES

    def remove(self, path: Path) -> SealedStore:
        store = self.stores.pop(path)
        self.needed.subtract([*(layer.tree for layer in self.chain(store)), *store.packs])
        sizes = zip(store.packs, store.pack_sizes, strict=True)
        self._packs_bytes -= sum(size for pack, size in sizes if not self.needed[pack])
        return store

    def unused(self, keep: Collection[StoreKey], held: Collection[Path]) -> list[Path]:
        """Return the stores neither in `keep` nor held, least recently used first."""
        return [
            path
            for path in sorted(self.stores, key=lambda path: self.used_at[path])
            if path not in held and self.stores[path].key not in keep
        ]

    def orphans(self) -> list[Layer]:
        """Return the layers without a store that are not new."""
        trees, before = self.templates.trees, time.time() - _NEW_S
        unneeded = [
            layer for layer in list(self.templates.layers.values()) if not self.needed[layer.tree]
        ]
        return [layer for layer in unneeded if proven_at(trees / layer.name) < before]

    def chain(self, store: SealedStore) -> list[Layer]:
        try:
            return self.templates.chain(store.tree)
        except KeyError:  # never built, or discarded
            return []


def _weighed(
    inventory: _MirrorStores,
    keep: Collection[StoreKey],
    held: Collection[Path],
    packs: Mapping[str, int],
) -> MirrorWeight:
    """Weigh by the records alone. `packs` has known closure packs, also those without a store."""
    unused = set(inventory.unused(keep, held))
    sizes, kept = dict(packs), set[str]()
    weighed = []
    for path, store in inventory.stores.items():
        parts = {
            layer.tree: layer.size_bytes + layer.shared_bytes for layer in inventory.chain(store)
        }
        parts |= zip(store.packs, store.pack_sizes, strict=True)
        sizes |= parts
        if path not in unused:
            kept |= parts.keys()
        shared = sum(size for part, size in parts.items() if inventory.needed[part] > 1)
        used_at, size = inventory.used_at[path], _STORE_BYTES + sum(parts.values())
        weighed.append(TemplateWeight(store, used_at, path not in unused, size, shared))
    for layer in inventory.orphans():
        sizes[layer.tree] = layer.size_bytes + layer.shared_bytes
    spare = sum(size for pack, size in packs.items() if not inventory.needed[pack])
    free = sum(size for part, size in sizes.items() if part not in kept)
    total = inventory.size_bytes + spare
    return MirrorWeight(inventory.name, total, free + _STORE_BYTES * len(unused), weighed)
