"""Evict templates: least recently used first over `template_bytes` and where the disk is nearly
full, those unused for `template_ttl`, and on request all that no checkout needs.

A sealed store goes, and with it the layers and the closure packs that no other store needs; never
what a checkout holds. The last store of a mirror outlives its time, so that the next checkout is
not a very first one. All of it can be made again from the mirror.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from ...config import Settings
from ...jobs.events import Events
from ...model import History, MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import SealedStore, StoreKey, note_uses
from .layers import Layer
from .registry import MirrorTemplates, TemplateRegistry

_NEW_S = 600.0  # a younger layer without a store may have one that is being built
_IN_USE_S = 600.0  # a nearly full disk takes none used since: its next checkout would be refused
_STORE_BYTES = 64 * 1024  # directories and small files of a store, a block each


class TemplateWeight(NamedTuple):
    """What the template of a store takes; `shared_bytes` are those that another one needs, too.

    A file that layers share counts with the layer that was the first to have it.
    """

    store: SealedStore
    used_at: float
    is_needed: bool
    size_bytes: int
    shared_bytes: int


class MirrorWeight(NamedTuple):
    """What the templates of a mirror take, and how much of that `collect` would free."""

    name: MirrorName
    size_bytes: int
    free_bytes: int
    templates: list[TemplateWeight]


@dataclass(eq=False, repr=False)
class Eviction:
    """Belongs to the event loop's thread."""

    settings: Callable[[], Settings]
    registry: TemplateRegistry
    stores: StoreBuilder
    events: Events

    def __post_init__(self) -> None:
        self._noted_at = time.time()
        self.evicted = 0
        self.size_bytes: int | None = None
        """Of all templates, when they were looked at last, every few minutes."""

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`."""
        used = sum(each.size_bytes for each in await self._inventories())
        return used > self.settings().checkouts.template_bytes * 0.9

    async def evict(self, short_bytes: int = 0) -> int:
        """Evict what is over the bounds, and what else frees `short_bytes` and was not used lately;
        answers how many stores went.
        """
        evicted = gone = await self._evict_once(short_bytes)
        while gone:  # again: shared files weigh more than was guessed
            gone = await self._evict_once()
            evicted += gone
        return evicted

    async def _evict_once(self, short_bytes: int = 0) -> int:
        inventories = await self._inventories()
        stores = [(each, *found) for each in inventories for found in each.used_at.items()]
        # for the next daemon
        used = {each.stores[path]: at for each, path, at in stores if at > self._noted_at}
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)

        settings = self.settings().checkouts
        now, evicted = time.time(), 0
        oldest, idle = now - settings.template_ttl.total_seconds(), now - _IN_USE_S
        wanted_bytes = sum(e.size_bytes for e in inventories) - short_bytes
        for each, path, used_at in sorted(stores, key=itemgetter(2)):
            size_bytes = sum(e.size_bytes for e in inventories)
            is_late = used_at < oldest and len(each.stores) > 1
            is_short = size_bytes > wanted_bytes and used_at < idle
            if not is_late and not is_short and size_bytes <= settings.template_bytes:
                continue
            if await self._evict_store(each, path, used_at) is not None:
                evicted += 1
        for each in inventories:
            await self._evict_strays(each)
            if len(each.stores) < len(each.used_at):
                await self.stores.evict_packs(each.name)
        self._publish(inventories, evicted)
        return evicted

    async def collect(self, keep: Collection[StoreKey]) -> dict[MirrorName, tuple[int, int]]:
        """Evict every template but those held, named by `keep` or used since, and what belongs to
        none; answers how many went by mirror, and their bytes.
        """
        began, collected = time.time(), dict[MirrorName, tuple[int, int]]()
        inventories = await self._inventories()
        for each in inventories:
            unused = each.unused(keep, ())  # what is held is asked for in its turn
            stores = [(path, each.used_at[path]) for path in unused if each.used_at[path] < began]
            freed = [await self._evict_store(each, path, used_at) for path, used_at in stores]
            strays_bytes = await self._evict_strays(each)
            packs_bytes = await self.stores.evict_packs(each.name)
            gone = [size for size in freed if size is not None]
            collected[each.name] = len(gone), sum(gone) + strays_bytes + packs_bytes
        self._publish(inventories, sum(count for count, _ in collected.values()))
        return collected

    async def weigh(self, keep: Collection[StoreKey]) -> list[MirrorWeight]:
        """What the templates of each mirror take, and what `collect` would free of that."""
        found = []
        for each in await self._inventories():
            packs = self.stores.known_packs(each.name)
            held = frozenset([*self.registry.held, *self.stores.held])
            found.append(await anyio.to_thread.run_sync(_weighed, each, keep, held, packs))
        return found

    async def _evict_store(self, inventory: "_Inventory", path: Path, used_at: float) -> int | None:
        """Evict a store unless it was used since, or is held; answers the bytes of what went with
        it, closure packs excepted, or None.
        """
        templates = inventory.templates
        async with templates.changes.turn():
            is_used = templates.used_at.get(path, 0.0) > used_at
            if is_used or path in self.registry.held or path in self.stores.held:
                return None
            templates.used_at.pop(path, None)
            before = templates.size_bytes
            store = inventory.remove(path)
            retired = self.stores.discard(store)
            self._retire_layers(inventory, store.tree)
            freed = _STORE_BYTES + before - templates.size_bytes
            if store.history is History.SQUASHED:  # its pack is shared by none
                freed += store.size_bytes
        await self.stores.remove(retired)
        await self.registry.sweep()
        return freed

    def _publish(self, inventories: "Sequence[_Inventory]", count: int) -> None:
        self.evicted += count
        if count:
            left = sum(each.size_bytes for each in inventories)
            self.events.publish("templates.evicted", count=count, size_bytes=left)

    async def _evict_strays(self, inventory: "_Inventory") -> int:
        """Evict layers without a store: of a build that failed, or of a store that is gone; answers
        their bytes.
        """
        templates, freed = inventory.templates, 0
        for layer in inventory.strays():
            async with templates.changes.turn():
                if layer.tree in templates.layers:
                    before = templates.size_bytes
                    self._retire_layers(inventory, layer.tree)
                    freed += before - templates.size_bytes
        await self.registry.sweep()
        return freed

    def _retire_layers(self, inventory: "_Inventory", tree: str | None) -> None:
        """Take a layer out of use, and those below it, as far down as no store needs them."""
        templates = inventory.templates
        while (
            tree is not None
            and tree in templates.layers
            and not inventory.needed[tree]
            and not templates.carries(tree)
            and templates.files(tree) not in self.registry.held
        ):
            base = templates.layers[tree].base
            self.registry.retire(templates, tree)
            tree = base

    async def _inventories(self) -> "list[_Inventory]":
        await self.registry.weigh()
        found = []
        for name in self.registry.names():
            templates, stores = self.registry.get(name), await self.stores.list_stores(name)
            found.append(await anyio.to_thread.run_sync(_Inventory, name, templates, stores))
        self.size_bytes = sum(each.size_bytes for each in found)
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
        last = templates.used_at
        self.used_at = {store.path: max(at, last.get(store.path, 0.0)) for store, at in stores}
        self.needed: Counter[str | None] = Counter()
        self._packs_bytes = 0
        for store, _ in stores:
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
        """The stores that nothing holds and `keep` does not name, least recently used first."""
        return [
            path
            for path in sorted(self.stores, key=lambda path: self.used_at[path])
            if path not in held and self.stores[path].key not in keep
        ]

    def strays(self) -> list[Layer]:
        """Layers without a store that are not new."""
        templates, before = self.templates, time.time() - _NEW_S
        return [
            layer
            for tree, layer in list(templates.layers.items())
            if not self.needed[tree] and templates.used_at.get(templates.files(tree), 0.0) < before
        ]

    def chain(self, store: SealedStore) -> list[Layer]:
        try:
            return self.templates.chain(store.tree)
        except KeyError:  # never made, or out of use
            return []


def _weighed(
    inventory: _Inventory,
    keep: Collection[StoreKey],
    held: Collection[Path],
    packs: Mapping[str, int],
) -> MirrorWeight:
    """By the records alone. `packs` are the closure packs that are known, of stores and others."""
    unused = set(inventory.unused(keep, held))
    sizes, kept = dict(packs), set[str]()
    found = []
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
        found.append(TemplateWeight(store, used_at, path not in unused, size, shared))
    for layer in inventory.strays():
        sizes[layer.tree] = layer.size_bytes + layer.shared_bytes
    spare = sum(size for pack, size in packs.items() if not inventory.needed[pack])
    free = sum(size for part, size in sizes.items() if part not in kept)
    total = inventory.size_bytes + spare
    return MirrorWeight(inventory.name, total, free + _STORE_BYTES * len(unused), found)
