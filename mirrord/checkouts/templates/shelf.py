"""What of a mirror's templates is on disk, and who uses it: the books of the template store.

Owns the list of layers below `templates/<mirror>/`, their last use, and the counts of checkouts that hold a
directory. Built from the directories when the daemon starts: what a killed build left is removed, what has no sound record is
removed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...host.remains import Remains
from ..files.blobs import Blobs
from ..files.manifest import Manifest
from .layer import Layer, blobs_path, chain_of, files_path, index_path, read_record
from .layer_index import LayerIndex

_BUILDING, _RETIRED = ".building-", ".retired-"


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
        if path.name.startswith((_BUILDING, _RETIRED)):
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
    target = path.with_name(f"{_RETIRED}{secrets.token_hex(8)}")
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
