"""What one mirror's templates take and need, to tell what goes with each store, and how long each is worth keeping.

A store goes with the layers and packs that no other store needs. While nobody asks for it, it stays for a time in proportion to
what making it again would take; shorter where much goes with it, so that a few do not hold on to what hundreds were laid on. Seen
anew whenever the bounds are looked at; owns nothing on disk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from heapq import heapify, heappop, heappush
from pathlib import Path

from ..model import MirrorName
from .gitdir import Gitdir
from .layer import Layer
from .shelf import Shelf

STAY_MIN = timedelta(hours=1)
STAY_MAX = timedelta(days=7)
_STAY_PER_SECOND = timedelta(hours=12)
_REST_SHARE = 1 / 6  # of one whole tree and closure, beside them
_REST_BYTES = 3 * 1024**2  # or that much, where it is more
_LIGHT_SHARE = 1 / 32  # of one whole tree and closure: what takes no more stays its full time
_LIGHT_BYTES = 512 * 1024  # or that much, where it is more
_STORE_BYTES = 64 * 1024  # what a store takes beside what its packs and layers weigh: directories and small files, a block each


def stay(seconds: float) -> timedelta:
    """How long what takes so many seconds to make stays while nobody asks for it: half a day for each, from an hour to a week."""
    return min(max(seconds * _STAY_PER_SECOND, STAY_MIN), STAY_MAX)


class Account:
    """The stores of one mirror, each with the time of its last use. `rest_bytes` is what may stay of what nobody asks for.

    `_holders` are the stores that need a layer (by its tree) or a pack (by its name); `changed` are those that came to be alone
    with one since this was last emptied. To be made in a thread: it looks at everything.
    """

    def __init__(self, name: MirrorName, shelf: Shelf, stores: Sequence[tuple[Gitdir, float]]) -> None:
        self.name = name
        self.shelf = shelf
        self.stores = {store.path: store for store, _ in stores}
        self.used_at = {store.path: max(at, shelf.used_at.get(store.path, 0.0)) for store, at in stores}
        self.changed: set[Path] = set()
        self._layers = {store.path: self._chain(store) for store, _ in stores}
        self._holders: defaultdict[str, set[Path]] = defaultdict(set)
        for store, _ in stores:
            for each in (*self._layers[store.path], *store.packs):
                self._holders[each].add(store.path)
        sizes = {pack: size for store, _ in stores for pack, size in zip(store.packs, store.pack_sizes, strict=True)}
        self._packs_bytes = sum(sizes.values())
        one = self._one_bytes()
        self.rest_bytes = one + max(int(one * _REST_SHARE), _REST_BYTES)
        self._light_bytes = max(one * _LIGHT_SHARE, _LIGHT_BYTES)

    @property
    def size_bytes(self) -> int:
        return self.shelf.size_bytes() + self._packs_bytes + len(self.stores) * _STORE_BYTES

    def needs(self, tree: str) -> bool:
        """Whether a store shows the layer of a tree, or one that lies on it."""
        return bool(self._holders[tree])

    def seconds(self, store: Gitdir) -> float:
        """What making a store again would take: beside it one layer is made, not each of those that go with it now."""
        return max([store.seconds, *(layer.seconds for layer in self._lone_layers(store))])

    def lone_bytes(self, store: Gitdir) -> int:
        """About what goes with a store."""
        layers = sum(layer.size_bytes + layer.shared_bytes for layer in self._lone_layers(store))
        return _STORE_BYTES + layers + self._lone_packs_bytes(store)

    def stays_until(self, store: Gitdir) -> float:
        """When a store's time is over: the whole of what its making is worth where little goes with it, else a share of that."""
        share = min(self._light_bytes / self.lone_bytes(store), 1.0)
        return self.used_at[store.path] + stay(self.seconds(store) * share).total_seconds()

    def forget(self, store: Gitdir) -> None:
        """Take a store out, with what only it needs."""
        self._packs_bytes -= self._lone_packs_bytes(store)
        del self.stores[store.path], self.used_at[store.path]
        for each in (*self._layers.pop(store.path), *store.packs):
            self._holders[each].discard(store.path)
            if len(self._holders[each]) == 1:
                self.changed |= self._holders[each]
        self.changed.discard(store.path)

    def _one_bytes(self) -> int:
        """What the largest whole tree with its closure takes."""
        shown = [(self.shelf.layers.get(store.tree), store) for store in self.stores.values()]
        return max(((layer.whole_bytes if layer else 0) + store.size_bytes for layer, store in shown), default=0)

    def _lone_layers(self, store: Gitdir) -> list[Layer]:
        """The layers that no other store shows."""
        lone = (self.shelf.layers.get(tree) for tree in self._layers[store.path] if len(self._holders[tree]) == 1)
        return [layer for layer in lone if layer]

    def _lone_packs_bytes(self, store: Gitdir) -> int:
        sizes = zip(store.packs, store.pack_sizes, strict=True)
        return sum(size for pack, size in sizes if len(self._holders[pack]) == 1)

    def _chain(self, store: Gitdir) -> list[str]:
        try:
            return [layer.tree for layer in self.shelf.chain(store.tree)]
        except KeyError:  # never made, or out of use
            return []


class Departures:
    """The stores of an account in the order in which their time is over.

    The last ones on a layer take it with them, so the others' going can prolong a store's time, or shorten it. The queue has that
    store twice then, and where it stands at the former time it is passed over. To be made in a thread, too.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._queue = [self._entry(path) for path in account.stores]
        heapify(self._queue)

    def next(self, now: float | None = None) -> Gitdir | None:
        """The next one whose time is over, once; of some that are over at one time the one that frees most."""
        now = time.time() if now is None else now
        while self._account.changed:
            heappush(self._queue, self._entry(self._account.changed.pop()))
        while self._queue and self._queue[0][0] < now:
            entry = heappop(self._queue)
            path = entry[-1]
            if path in self._account.stores and entry == self._entry(path):
                return self._account.stores[path]
        return None

    def _entry(self, path: Path) -> tuple[float, int, Path]:
        store = self._account.stores[path]
        return self._account.stays_until(store), -self._account.lone_bytes(store), path
