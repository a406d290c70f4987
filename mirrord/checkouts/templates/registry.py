"""The shelves of all mirrors: which templates are there, who holds them, and how they go.

Owns removal: a layer goes by being renamed out of use at once, and is deleted when no checkout holds it any more. Keeps the
store within its bounds and takes what is damaged out of use; never builds.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import structlog

from ...errors import IntegrityError, InvalidNameError, NotFoundError
from ...git.turns import Turns
from ...git.workers import Workers
from ...host.trash import PREFIX, Remains
from ...model import MirrorName
from ..files.blobs import Blobs
from ..files.manifest import Manifest
from .layers import Layer, LayerIndex, blobs_path, chain_of, files_path, index_path, read_record

_BUILDING = ".building-"


class Retired(NamedTuple):
    """A directory out of use: what checkouts may still hold it as, and what it is called now."""

    origin: Path
    path: Path


@dataclass
class MirrorTemplates:
    """One mirror's layers. `unproven` are trees whose layer was proven in an earlier boot only; `shared_bytes` is what the files
    take that layers share, but for those of an earlier daemon before it `is_weighed`.
    """

    directory: Path
    remains: Remains
    layers: LayerIndex = field(default_factory=LayerIndex)
    unproven: set[str] = field(default_factory=set)
    used_at: dict[Path, float] = field(default_factory=dict)
    shared_bytes: int = 0
    is_weighed: bool = False
    _files: dict[str, Path] = field(default_factory=dict)  # one path for all templates that show it

    @property
    def blobs(self) -> Blobs:
        return Blobs(blobs_path(self.trees))

    @property
    def trees(self) -> Path:
        return self.directory / "trees"

    def files(self, tree: str) -> Path:
        """The directory of a layer that overlayfs gets."""
        found = self._files.get(tree)
        if found is None:
            found = self._files[tree] = files_path(self.trees, self.layers[tree])
        return found

    def index(self, tree: str) -> Path:
        """The directory with the index of what a layer and those below it show."""
        return index_path(self.trees / self.layers[tree].name)

    def is_there(self, tree: str) -> bool:
        """Whether a layer has what overlayfs gets of it."""
        return self.files(tree).is_dir() and (self.index(tree) / ".git" / "index").is_file()

    def chain(self, tree: str) -> list[Layer]:
        """A layer and those it lies on, top first."""
        return chain_of(self.layers[tree], self.layers)

    def near(self, time: int) -> list[Layer]:
        """What a new layer of that time may lie on, with what that lies on; one may have been deleted behind our back."""
        return self.layers.near(time, self.unproven)

    def is_whole(self, tree: str) -> bool:
        """Whether a layer and all below it are proven and there."""
        return self.layers.is_whole(tree, self.unproven)

    def used(self, path: Path) -> None:
        self.used_at[path] = time.time()

    def building(self) -> Path:
        """A fresh name to build a layer at."""
        self.trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.trees / f"{_BUILDING}{secrets.token_hex(8)}"

    def add_layer(self, built: Path, layer: Layer) -> None:
        """Publish a built layer: from here on it is there."""
        target = self.trees / layer.name
        _put_away(target, self.remains)
        built.rename(target)
        self.layers.add(layer)
        self._files.pop(layer.tree, None)
        self.shared_bytes += layer.shared_bytes
        self.unproven.discard(layer.tree)
        self.used(self.files(layer.tree))

    def retire(self, tree: str) -> list[Retired]:
        """Take a layer and all that lies on it out of use at once.

        A mounted overlay keeps the directories it has open, whatever they are called now.
        """
        retired: list[Retired] = []
        for each in self.layers.above(tree) & self.layers.keys():
            origin = self.files(each)
            self.layers.remove(each)
            self._files.pop(each, None)
            self.unproven.discard(each)
            self.used_at.pop(origin, None)
            retired += _rename_away(origin, origin.parent)
        return retired

    def size_bytes(self) -> int:
        return self.layers.size_bytes + self.shared_bytes


class RefCounts:
    """How many checkouts use each directory."""

    def __init__(self) -> None:
        self._counts: Counter[Path] = Counter()

    def add(self, paths: tuple[Path, ...]) -> None:
        self._counts.update(paths)

    def drop(self, paths: tuple[Path, ...]) -> None:
        self._counts.subtract(paths)
        for path in paths:
            if self._counts[path] <= 0:
                del self._counts[path]

    def __contains__(self, path: Path) -> bool:
        return path in self._counts


def load_shelf(directory: Path, remains: Remains) -> MirrorTemplates:
    """Read what is on disk, and remove what is not whole."""
    shelf = MirrorTemplates(directory, remains)
    for path in _children(shelf.trees):
        if path.name.startswith((_BUILDING, PREFIX)):
            remains.remove(path)
    for path in _children(shelf.trees):
        record = read_record(path)
        if record is None or not _is_whole(path):
            _put_away(path, remains)
            continue
        layer, proven = record
        shelf.layers.add(layer)
        shelf.used_at[shelf.files(layer.tree)] = (path / "layer.json").stat().st_mtime
        if not proven:
            shelf.unproven.add(layer.tree)
    return shelf


def _is_whole(layer: Path) -> bool:
    is_there = (layer / "files").is_dir() and (index_path(layer) / ".git" / "index").is_file()
    return is_there and Manifest.is_current(layer / "manifest")


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _rename_away(origin: Path, path: Path) -> list[Retired]:
    """Rename a directory out of use; nothing where it is gone already."""
    target = path.with_name(f"{PREFIX}{secrets.token_hex(8)}")
    try:
        os.rename(path, target)
    except FileNotFoundError:
        return []
    return [Retired(origin, target)]


def _put_away(path: Path, remains: Remains) -> None:
    """Remove what lies where something else may come to lie; a disk that does not even rename it is asked again then."""
    with suppress(OSError):
        for each in _rename_away(path, path):
            remains.remove(each.path)


_VERIFY = "mirrord.checkouts.templates.stack:verify_layer"
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
