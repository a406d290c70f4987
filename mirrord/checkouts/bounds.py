"""How much is kept of the templates: whole ones go, the least recently used first.

Owns the two bounds of the store. `template_bytes` is for all of it, and only what a checkout holds may exceed it. What nobody
asked for within a week stays only while its mirror takes little more than one whole tree and one whole closure do. A sealed store
goes, and with it the layers and the closure packs that no other store needs. All of it can be made again from the mirror, in
tens of milliseconds where its neighbours are there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import anyio.to_thread

from ..config import Settings
from ..jobs.events import Events
from ..model import MirrorName
from .gitdir import Gitdir, note_uses
from .gitdirs import Gitdirs
from .shelf import Shelf
from .shelves import Shelves

REST = timedelta(days=7)
_REST_SHARE = 0.25  # of one whole tree and closure, beside them
_REST_BYTES = 4 * 1024**2  # or that much, where it is more
_FULL_SHARE = 0.9
_STORE_BYTES = 80 * 1024  # what a store takes beside what is in its packs: directories and small files, a block each
_NEW = timedelta(minutes=10)  # a layer without a store may be one whose store is being built


@dataclass
class _Account:
    """What one mirror's stores need, to tell what goes with each. `packs` and `trees` count the stores that have one."""

    name: MirrorName
    shelf: Shelf
    stores: dict[Gitdir, float]
    packs: Counter[str] = field(default_factory=Counter)
    trees: Counter[str] = field(default_factory=Counter)
    packs_bytes: int = 0

    def __post_init__(self) -> None:
        for store in self.stores:
            self.trees[store.tree] += 1
            for name, size in zip(store.packs, store.pack_sizes, strict=True):
                self.packs_bytes += size if name not in self.packs else 0
                self.packs[name] += 1

    @property
    def size_bytes(self) -> int:
        return self.shelf.size_bytes() + self.packs_bytes + len(self.stores) * _STORE_BYTES

    @property
    def rest_bytes(self) -> int:
        """What may stay of what nobody asks for."""
        layers = self.shelf.layers
        one = max((layers[s.tree].whole_bytes + s.size_bytes for s in self.stores if s.tree in layers), default=0)
        return one + max(int(one * _REST_SHARE), _REST_BYTES)

    def oldest_first(self) -> list[Gitdir]:
        return sorted(self.stores, key=lambda store: self.stores[store])

    def forget(self, store: Gitdir) -> None:
        del self.stores[store]
        self.trees[store.tree] -= 1
        for name, size in zip(store.packs, store.pack_sizes, strict=True):
            self.packs[name] -= 1
            self.packs_bytes -= 0 if self.packs[name] else size


class Bounds:
    """Keeps the template store within its bounds. Belongs to the event loop's thread."""

    def __init__(self, *, settings: Callable[[], Settings], shelves: Shelves, gitdirs: Gitdirs, events: Events) -> None:
        self._settings = settings
        self._shelves = shelves
        self._gitdirs = gitdirs
        self._events = events
        self._noted_at = time.time()

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`."""
        used = sum(account.size_bytes for account in await self._accounts())
        return used > self._settings().checkouts.template_bytes * _FULL_SHARE

    async def evict(self) -> int:
        """Drop what is over the bounds; answers how many templates went."""
        unused_since = time.time() - REST.total_seconds()
        await self._shelves.trim_indexes(unused_since)
        accounts = await self._accounts()
        await self._note_uses(accounts)
        there = sum(len(account.stores) for account in accounts)
        for account in accounts:
            await self._drop_strays(account)
            await self._rest(account, unused_since)
        await self._make_room(accounts)
        evicted = there - sum(len(account.stores) for account in accounts)
        if evicted:
            for account in accounts:
                await self._gitdirs.drop_unneeded_packs(account.name)
            self._events.publish("templates.evicted", count=evicted, size_bytes=sum(each.size_bytes for each in accounts))
        return evicted

    async def _accounts(self) -> list[_Account]:
        """What there is, seen anew: each mirror with its stores and their last use."""
        await self._shelves.weigh()
        accounts = []
        for name in self._shelves.names():
            shelf = self._shelves.get(name)
            stores = {s: max(at, shelf.used_at.get(s.path, 0.0)) for s, at in await self._gitdirs.stores(name)}
            accounts.append(await anyio.to_thread.run_sync(_Account, name, shelf, stores))
        return accounts

    async def _rest(self, account: _Account, unused_since: float) -> None:
        rest_bytes = account.rest_bytes
        for store in account.oldest_first():
            if account.stores[store] >= unused_since or account.size_bytes <= rest_bytes:
                break
            await self._drop(account, store)

    async def _make_room(self, accounts: list[_Account]) -> None:
        limit = self._settings().checkouts.template_bytes
        if sum(account.size_bytes for account in accounts) <= limit:
            return
        used_at = [(at, number, store) for number, each in enumerate(accounts) for store, at in each.stores.items()]
        for _, number, store in sorted(used_at, key=lambda item: item[:2]):
            if sum(account.size_bytes for account in accounts) <= limit:
                break
            await self._drop(accounts[number], store)

    async def _drop(self, account: _Account, store: Gitdir) -> None:
        """Remove a store that no checkout holds, and the layers that only it needs."""
        shelf = account.shelf
        async with self._shelves.lock(shelf):
            if store.path in self._shelves.holds or shelf.used_at.get(store.path, 0.0) > account.stores[store]:
                return
            account.forget(store)
            shelf.used_at.pop(store.path, None)
            await self._gitdirs.drop(store)
            await self._drop_layers(account, store.tree)

    async def _drop_layers(self, account: _Account, tree: str | None) -> None:
        """Take a layer out of use, and then those it lay on, as far as nobody needs them."""
        while tree and not account.trees[tree] and self._shelves.is_bare(account.shelf, tree):
            base = account.shelf.layers[tree].base
            await self._shelves.retire(account.shelf, tree)
            tree = base

    async def _drop_strays(self, account: _Account) -> None:
        """Layers without a store: of a build that failed, or of a store that somebody deleted."""
        shelf = account.shelf
        before = time.time() - _NEW.total_seconds()
        for tree in [tree for tree in shelf.layers if not account.trees[tree]]:
            async with self._shelves.lock(shelf):
                if tree in shelf.layers and shelf.used_at.get(shelf.files(tree), 0.0) < before:
                    await self._drop_layers(account, tree)

    async def _note_uses(self, accounts: list[_Account]) -> None:
        """Keep for the next daemon what was used since the last time."""
        used = {store: at for account in accounts for store, at in account.stores.items() if at > self._noted_at}
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)
