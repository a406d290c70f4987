"""How much is kept of the templates: whole ones go, and what is cheap to make again goes soon.

Owns the two bounds of the store. `template_bytes` is for all of it: the least recently used go first, and only what a checkout
holds may exceed it. What nobody asked for during a time that depends on what it took to make and what goes with it
(`account.py`) stays only while its mirror takes little more than one whole tree and one whole closure do. A sealed store goes,
and with it the layers and the closure packs that no other store needs. All of it can be made again from the mirror.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio.to_thread

from ..config import Settings
from ..jobs.events import Events
from ..model import CommitId, History, MirrorName
from .account import Account, Departures, stay
from .gitdir import Gitdir, note_uses
from .gitdirs import Gitdirs
from .shelves import Shelves

_FULL_SHARE = 0.9
_BRIEF = timedelta(hours=3)
_NEW = timedelta(minutes=10)  # a layer without a store may be one whose store is being built


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

    async def is_plenty(self, name: MirrorName) -> bool:
        """Whether a mirror has more than what may stay of what nobody asks for."""
        account = await self._account(name)
        return account.size_bytes > account.rest_bytes

    def is_brief(self, name: MirrorName, commit: CommitId, history: History) -> bool:
        """Whether a template was made so quickly that it is let go within hours unless somebody asks for it."""
        store, layers = self._gitdirs.find(name, commit, history), self._shelves.get(name).layers
        if store is None:
            return False
        tree_seconds = layers[store.tree].seconds if store.tree in layers else 0.0
        return stay(max(store.seconds, tree_seconds)) < _BRIEF

    async def evict(self) -> set[Path]:
        """Drop what is over the bounds; answers the stores that went."""
        accounts = await self._accounts()
        await self._note_uses(accounts)
        there = {path for account in accounts for path in account.stores}
        for account in accounts:
            await self._drop_strays(account)
            await self._rest(account)
        await self._make_room(accounts)
        evicted = there.difference(*(account.stores for account in accounts))
        if evicted:
            for account in accounts:
                await self._gitdirs.drop_unneeded_packs(account.name)
            size_bytes = sum(account.size_bytes for account in accounts)
            self._events.publish("templates.evicted", count=len(evicted), size_bytes=size_bytes)
        return evicted

    async def _accounts(self) -> list[Account]:
        """What there is, seen anew."""
        await self._shelves.weigh()
        return [await self._account(name) for name in self._shelves.names()]

    async def _account(self, name: MirrorName) -> Account:
        return await anyio.to_thread.run_sync(Account, name, self._shelves.get(name), await self._gitdirs.stores(name))

    async def _rest(self, account: Account) -> None:
        """Let go of what was not asked for in its time, as far as there is plenty; the last store stays, whatever it lies on."""
        if account.size_bytes <= account.rest_bytes:
            return
        departures = await anyio.to_thread.run_sync(Departures, account)
        while len(account.stores) > 1 and account.size_bytes > account.rest_bytes and (store := departures.next()):
            await self._drop(account, store)

    async def _make_room(self, accounts: list[Account]) -> None:
        limit = self._settings().checkouts.template_bytes
        if sum(account.size_bytes for account in accounts) <= limit:
            return
        used_at = [(at, number, path) for number, each in enumerate(accounts) for path, at in each.used_at.items()]
        for _, number, path in sorted(used_at):
            if sum(account.size_bytes for account in accounts) <= limit:
                break
            await self._drop(accounts[number], accounts[number].stores[path])

    async def _drop(self, account: Account, store: Gitdir) -> None:
        """Remove a store that no checkout holds, and the layers that only it needs."""
        shelf = account.shelf
        async with self._shelves.lock(shelf):
            if store.path in self._shelves.holds or shelf.used_at.get(store.path, 0.0) > account.used_at[store.path]:
                return
            account.forget(store)
            shelf.used_at.pop(store.path, None)
            gone = self._gitdirs.retire(store)
            self._drop_layers(account, store.tree)
        await self._gitdirs.remove(gone)
        await self._shelves.sweep()

    def _drop_layers(self, account: Account, tree: str | None) -> None:
        """Take a layer out of use, and then those it lay on, as far as nobody needs them."""
        while tree and not account.needs(tree) and self._shelves.is_bare(account.shelf, tree):
            base = account.shelf.layers[tree].base
            self._shelves.take_out(account.shelf, tree)
            tree = base

    async def _drop_strays(self, account: Account) -> None:
        """Layers without a store: of a build that failed, or of a store that somebody deleted."""
        shelf = account.shelf
        before = time.time() - _NEW.total_seconds()
        for tree in [tree for tree in shelf.layers if not account.needs(tree)]:
            async with self._shelves.lock(shelf):
                if tree in shelf.layers and shelf.used_at.get(shelf.files(tree), 0.0) < before:
                    self._drop_layers(account, tree)
        await self._shelves.sweep()

    async def _note_uses(self, accounts: list[Account]) -> None:
        """Keep for the next daemon what was used since the last time."""
        used = {each.stores[path]: at for each in accounts for path, at in each.used_at.items() if at > self._noted_at}
        self._noted_at = time.time()
        await anyio.to_thread.run_sync(note_uses, used)
