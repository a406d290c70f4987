"""The shelves of all mirrors: which templates are there, who holds them, and how they go.

Owns removal: a layer goes by being renamed out of use at once, and is deleted when no checkout holds it any more. Keeps the
store within its bounds and takes what is damaged out of use; never builds.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ...errors import IntegrityError, InvalidNameError, NotFoundError
from ...git.turns import Turns
from ...git.workers import Workers
from ...host.remains import Remains
from ...model import MirrorName
from ..files.blobs import Blobs
from .layer import blobs_path
from .shelf import MirrorTemplates, RefCounts, Retired, load_shelf

_VERIFY = "mirrord.checkouts.templates.verify:verify_layer"
_TIMEOUT = timedelta(minutes=10)

log = structlog.get_logger()


class TemplateRegistry:
    """All shelves below `store`. All methods belong to the event loop's thread; whoever changes a shelf holds its lock."""

    def __init__(self, store: Path, workers: Workers) -> None:
        self.holds = RefCounts()
        self.remains = Remains()
        self._store = store
        self._workers = workers
        self._shelves: dict[str, MirrorTemplates] = {}
        self._locks: dict[str, Turns] = {}
        self._retired: list[Retired] = []

    async def open(self) -> None:
        """Read what is on disk."""
        self._store.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._shelves = await anyio.to_thread.run_sync(_load_all, self._store, self.remains)

    def names(self) -> list[MirrorName]:
        """The mirrors of which anything is there."""
        found = (path.name for path in self._store.iterdir() if path.is_dir())
        return [name for name in map(_parse, found) if name]

    def get(self, name: MirrorName) -> MirrorTemplates:
        if (found := self._shelves.get(name.key)) is None:
            found = self._shelves[name.key] = MirrorTemplates(self._store / str(name), self.remains)
        return found

    def all(self) -> list[MirrorTemplates]:
        return list(self._shelves.values())

    def lock(self, shelf: MirrorTemplates) -> AbstractAsyncContextManager[None]:
        """Held while layers are added to a shelf or taken from it."""
        return self._locks.setdefault(shelf.directory.name.lower(), Turns()).turn()

    def size_bytes(self) -> int:
        """What trees and indexes take."""
        return sum(shelf.size_bytes() for shelf in self._shelves.values())

    async def weigh(self) -> None:
        """See what shared files take where that is not known, as of an earlier daemon, and remove those that no layer has."""
        for shelf in self.all():
            if not shelf.is_weighed:
                async with self.lock(shelf):
                    shelf.shared_bytes, shelf.is_weighed = await anyio.to_thread.run_sync(
                        shelf.blobs.weigh
                    )

    async def mend(self) -> bool:
        """Remove what could not be removed before; answers whether nothing is left."""
        return await anyio.to_thread.run_sync(self.remains.retry)

    # -- going ------------------------------------------------------------------------------------------------------------

    def is_bare(self, shelf: MirrorTemplates, tree: str) -> bool:
        """Whether nothing lies on a layer that is there, and no checkout uses it."""
        return (
            tree in shelf.layers
            and not shelf.layers.carries(tree)
            and shelf.files(tree) not in self.holds
        )

    def is_held(self, shelf: MirrorTemplates, tree: str) -> bool:
        """Whether a checkout uses a layer or one that lies on it."""
        return any(
            shelf.files(each) in self.holds
            for each in shelf.layers.above(tree)
            if each in shelf.layers
        )

    async def retire(self, shelf: MirrorTemplates, tree: str) -> None:
        """Take a layer and all that lies on it out of use; what a checkout holds stays on disk until it lets go."""
        self.take_out(shelf, tree)
        await self.sweep()

    def take_out(self, shelf: MirrorTemplates, tree: str) -> None:
        """The same, and leave it to the next `sweep` to delete it."""
        self._retired += shelf.retire(tree)

    async def sweep(self) -> None:
        """Delete what was retired and is no longer held."""
        free = [each for each in self._retired if each.origin not in self.holds]
        self._retired = [each for each in self._retired if each.origin in self.holds]
        for each in free:
            shelf = self._shelves[each.path.parent.parent.name.lower()]
            freed = await anyio.to_thread.run_sync(_remove_layer, each.path, self.remains)
            shelf.shared_bytes -= freed or 0
            shelf.is_weighed = shelf.is_weighed and freed is not None

    async def is_sound(self, shelf: MirrorTemplates, tree: str) -> bool:
        """Read a layer again and compare it with its record."""
        try:
            await self._workers.call(_VERIFY, shelf.trees, shelf.chain(tree), timeout=_TIMEOUT)
        except (
            IntegrityError,
            NotFoundError,
            KeyError,
        ) as error:  # KeyError: what it lies on is gone
            log.warning(
                "template.refused", mirror=shelf.directory.name, tree=tree, error=str(error)
            )
            return False
        return True


def _remove_layer(path: Path, remains: Remains) -> int | None:
    """Delete a layer that is out of use; answers the bytes of shared files that nothing else had, where known."""
    freed = Blobs(blobs_path(path.parent)).let_go(path)
    remains.remove(path)
    return freed


def _parse(directory: str) -> MirrorName | None:
    try:
        return MirrorName.parse(directory)
    except InvalidNameError:
        return None


def _load_all(store: Path, remains: Remains) -> dict[str, MirrorTemplates]:
    return {
        path.name.lower(): load_shelf(path, remains)
        for path in sorted(store.iterdir())
        if path.is_dir()
    }
