"""The layers of overlay templates on disk and the checkouts that hold them.

Reads `templates/<mirror>/` when the daemon starts, and removes half-built layers and those without
a sound record. A discarded layer is renamed at once; its files are deleted when no checkout holds
them.
"""

import os
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from ..errors import IntegrityError, InvalidNameError, NotFoundError
from ..host.trash import TRASH_PREFIX, Trash, new_trash
from ..model import MirrorName
from ..presence import is_dir, is_file
from ..telemetry import log
from ..trees.manifest import Manifest
from ..trees.sharing import SharedFiles
from ..workers.pool import Workers
from ..workers.turns import Turns
from .layers import Layer, blobs_path, chain_of, read_record, verify_layer

# each costs a tree difference before a layer is built
CANDIDATES_PER_DEPTH = 2
_BUILDING = ".building-"


@dataclass
class MirrorTemplates:
    """The layers of one mirror, by tree.

    `unproven` are trees whose layer was last proven in an earlier boot. `own_bytes` is the sum of
    the layers' own bytes; `shared_bytes`, the size of the files that they share, is an estimate
    until `is_measured`. Take a turn of `changes` before you change layers, by `enter` and `remove`.
    """

    directory: Path
    trash: Trash
    layers: dict[str, Layer] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    own_bytes: int = 0
    shared_bytes: int = 0
    is_measured: bool = False
    changes: Turns = field(default_factory=Turns)

    @property
    def trees(self) -> Path:
        return self.directory / "trees"

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.shared_bytes

    def load(self) -> None:
        """Read the layers on disk; remove incomplete ones, and keep those that cannot be read."""
        if not is_dir(self.trees):
            return
        for path in sorted(self.trees.iterdir()):
            if path.name.startswith((_BUILDING, TRASH_PREFIX)):
                self.trash.remove(path)
                continue
            try:
                self._load(path)
            except OSError as error:  # a checkout may show it
                log.warning("layer.unreadable", path=str(path), error=str(error))

    def _load(self, path: Path) -> None:
        record = read_record(path)
        if (
            record
            and is_dir(path / "files")
            and is_file(path / "index/.git/index")
            and Manifest.is_current(path / "manifest")
        ):
            layer, is_proven = record
            self.enter(layer)
            if not is_proven:
                self.unproven.add(layer.tree)
        else:
            self.trash.discard(path)

    def files(self, tree: str) -> Path:
        """Return the directory of a layer for overlayfs; all templates with the layer share it."""
        return self.trees / self.layers[tree].name / "files"

    def index(self, tree: str) -> Path:
        """Return the directory, also for overlayfs, with the index of the tree."""
        return self.files(tree).with_name("index")

    def chain(self, tree: str) -> list[Layer]:
        """Return a layer and those below it, top first; KeyError where one is gone."""
        return chain_of(self.layers[tree], self.layers)

    def above(self, tree: str) -> set[str]:
        """Return a tree and all trees whose layers stand on it, at any height."""
        trees = more = {tree}
        while more:
            more = {other for other, layer in self.layers.items() if layer.base in trees} - trees
            trees = trees | more
        return trees

    def is_whole(self, tree: str) -> bool:
        """Return whether a layer and all below it exist and are proven."""
        try:
            return self.unproven.isdisjoint(layer.tree for layer in self.chain(tree))
        except KeyError:
            return False

    def candidates(self, time: int) -> list[list[Layer]]:
        """Return whole layers to build on, each with those below it, top first.

        Of each depth CANDIDATES_PER_DEPTH, those nearest to `time`; the nearest comes first.
        """
        stacks: list[list[Layer]] = []
        per_depth: Counter[int] = Counter()
        for layer in sorted(self.layers.values(), key=lambda layer: abs(layer.time - time)):
            if per_depth[layer.depth] < CANDIDATES_PER_DEPTH and self.is_whole(layer.tree):
                per_depth[layer.depth] += 1
                stacks.append(self.chain(layer.tree))
        return stacks

    def new_path(self) -> Path:
        self.trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.trees / f"{_BUILDING}{secrets.token_hex(8)}"

    def add(self, built: Path, layer: Layer) -> None:
        """Publish a built layer; replaces what an earlier one left."""
        target = self.trees / layer.name
        with suppress(OSError):
            self.trash.discard(target)
        built.rename(target)
        self.enter(layer)
        self.shared_bytes += layer.shared_bytes
        self.unproven.discard(layer.tree)

    def enter(self, layer: Layer) -> None:
        """Record a layer that is on disk; replaces the earlier one of its tree."""
        if layer.tree in self.layers:
            self.own_bytes -= self.layers[layer.tree].size_bytes
        self.layers[layer.tree] = layer
        self.own_bytes += layer.size_bytes

    def remove(self, tree: str) -> Path:
        """Remove a layer from the record, not those above it; returns the path of its files."""
        files, layer = self.files(tree), self.layers.pop(tree)
        self.own_bytes -= layer.size_bytes
        self.shared_bytes -= layer.shared_bytes
        self.is_measured = False
        self.unproven.discard(tree)
        return files


@dataclass(eq=False, repr=False)
class TemplateRegistry:
    """The layers of all mirrors, below `root`. Belongs to the event loop's thread.

    `held` counts the checkouts that use a directory.
    """

    root: Path
    workers: Workers
    trash: Trash

    def __post_init__(self) -> None:
        self.held: Counter[Path] = Counter()
        self._mirrors: dict[str, MirrorTemplates] = {}
        self._discarded: dict[Path, Path] = {}

    async def open(self) -> None:
        """Read the layers on disk."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in self.names():
            await anyio.to_thread.run_sync(self.get(name).load)

    def names(self) -> list[MirrorName]:
        """Return the mirrors that have a directory on disk."""
        names = []
        for path in sorted(self.root.iterdir()):
            with suppress(InvalidNameError):
                if is_dir(path):
                    names.append(MirrorName.parse(path.name))
        return names

    @property
    def size_bytes(self) -> int:
        return sum(mirror.size_bytes for mirror in self._mirrors.values())

    def get(self, name: MirrorName) -> MirrorTemplates:
        if (templates := self._mirrors.get(name.key)) is None:
            templates = self._mirrors[name.key] = MirrorTemplates(self.root / str(name), self.trash)
        return templates

    async def measure(self) -> None:
        """Measure the shared files of mirrors whose layers changed; remove those of no layer."""
        for mirror in list(self._mirrors.values()):
            if not mirror.is_measured:
                async with mirror.changes.turn():
                    collect = SharedFiles(blobs_path(mirror.trees)).collect
                    mirror.shared_bytes, mirror.is_measured = await anyio.to_thread.run_sync(
                        collect
                    )

    def discard(self, templates: MirrorTemplates, tree: str) -> None:
        """Take a layer and all above it out of use by renaming them; `sweep` deletes them.

        A mounted overlay keeps the directories that it has open, whatever their names.
        """
        for upper in templates.above(tree) & templates.layers.keys():
            files, target = templates.remove(upper), new_trash(templates.trees)
            with suppress(FileNotFoundError):
                os.rename(files.parent, target)
                self._discarded[target] = files

    async def sweep(self) -> None:
        """Delete the discarded layers that no checkout holds."""
        # forgotten before the first await: another sweep may begin there
        free = [path for path, files in self._discarded.items() if files not in self.held]
        for path in free:
            del self._discarded[path]
        for path in free:
            await anyio.to_thread.run_sync(self.trash.remove, path)

    async def is_sound(self, templates: MirrorTemplates, tree: str) -> bool:
        """Read a layer again and compare it with its record."""
        try:
            chain = templates.chain(tree)
            await self.workers.run(verify_layer, templates.trees, chain)
        except (IntegrityError, NotFoundError, KeyError) as error:  # KeyError: its base is gone
            mirror = templates.directory.name
            log.warning("template.refused", mirror=mirror, tree=tree, error=str(error))
            return False
        return True
