"""What one mirror's templates take and need, to tell what goes with each store, and how long each is worth keeping.

A store goes with the layers and packs that no other store needs. While nobody asks for it, it stays for a time in proportion to
what making it again would take. Seen anew whenever the bounds are looked at; owns nothing on disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from heapq import heapify, heappop, heappush

from ..model import MirrorName
from .gitdir import Gitdir
from .shelf import Shelf

STAY_MIN = timedelta(hours=1)
STAY_MAX = timedelta(days=7)
_STAY_PER_SECOND = timedelta(hours=12)
_REST_SHARE = 0.25  # of one whole tree and closure, beside them
_REST_BYTES = 4 * 1024**2  # or that much, where it is more
_STORE_BYTES = 56 * 1024  # what a store takes beside what is in its packs: directories and small files, a block each


def stay(seconds: float) -> timedelta:
    """How long what takes so many seconds to make stays while nobody asks for it: half a day for each, from an hour to a week."""
    return min(max(seconds * _STAY_PER_SECOND, STAY_MIN), STAY_MAX)


class Account:
    """The stores of one mirror, each with the time of its last use. `rest_bytes` is what may stay of what nobody asks for.

    `_needs` and `_packs` count the stores that need one. To be made in a thread: it looks at everything.
    """

    def __init__(self, name: MirrorName, shelf: Shelf, stores: Sequence[tuple[Gitdir, float]]) -> None:
        self.name = name
        self.shelf = shelf
        self.stores = {store.path: store for store, _ in stores}
        self.used_at = {store.path: max(at, shelf.used_at.get(store.path, 0.0)) for store, at in stores}
        self._chains = {store.path: self._chain(store) for store, _ in stores}
        self._needs = Counter(tree for chain in self._chains.values() for tree in chain)
        self._packs: Counter[str] = Counter()
        self._packs_bytes = 0
        for store, _ in stores:
            for pack, size in zip(store.packs, store.pack_sizes, strict=True):
                self._packs_bytes += 0 if self._packs[pack] else size
                self._packs[pack] += 1
        self.rest_bytes = self._rest_bytes()

    @property
    def size_bytes(self) -> int:
        return self.shelf.size_bytes() + self._packs_bytes + len(self.stores) * _STORE_BYTES

    def needs(self, tree: str) -> bool:
        """Whether a store shows the layer of a tree, or one that lies on it."""
        return self._needs[tree] > 0

    def seconds(self, store: Gitdir) -> float:
        """What making a store again would take, with the layers that go with it: both are made at once."""
        lone = [self.shelf.layers.get(tree) for tree in self._chains[store.path] if self._needs[tree] == 1]
        return max(store.seconds, sum(layer.seconds for layer in lone if layer))

    def stays_until(self, store: Gitdir) -> float:
        return self.used_at[store.path] + stay(self.seconds(store)).total_seconds()

    def forget(self, store: Gitdir) -> None:
        del self.stores[store.path], self.used_at[store.path]
        self._needs.subtract(self._chains.pop(store.path))
        for pack, size in zip(store.packs, store.pack_sizes, strict=True):
            self._packs[pack] -= 1
            self._packs_bytes -= 0 if self._packs[pack] else size

    def _rest_bytes(self) -> int:
        shown = [(self.shelf.layers.get(store.tree), store) for store in self.stores.values()]
        one = max((layer.whole_bytes + store.size_bytes for layer, store in shown if layer), default=0)
        return one + max(int(one * _REST_SHARE), _REST_BYTES)

    def _chain(self, store: Gitdir) -> list[str]:
        try:
            return [layer.tree for layer in self.shelf.chain(store.tree)]
        except KeyError:  # never made, or out of use
            return []


class Departures:
    """The stores of an account in the order in which their time is over.

    The last ones on a layer take it with them, so the others' going can prolong a store's time: it is asked for again when it is
    that store's turn. To be made in a thread, too.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._queue = [(account.stays_until(store), path) for path, store in account.stores.items()]
        heapify(self._queue)

    def next(self, now: float | None = None) -> Gitdir | None:
        """The next one whose time is over, once."""
        now = time.time() if now is None else now
        while self._queue and self._queue[0][0] < now:
            until, path = heappop(self._queue)
            later = self._account.stays_until(self._account.stores[path])
            if later <= until:
                return self._account.stores[path]
            heappush(self._queue, (later, path))
        return None
