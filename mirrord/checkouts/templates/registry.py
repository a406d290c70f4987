"""The templates on disk and in use: their layers, last uses, and the checkouts that hold them.

Read from `templates/<mirror>/` when the daemon starts, which removes half-built layers and those
without a sound record. A layer is removed by renaming it out of use at once; its files are deleted
when no checkout holds them any more.
"""

import os
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import anyio.to_thread

from ...errors import IntegrityError, InvalidNameError, NotFoundError
from ...git.turns import Turns
from ...git.workers import Workers
from ...host.trash import TRASH_PREFIX, Trash, new_trash
from ...model import MirrorName
from ...telemetry import log
from ..files.manifest import Manifest
from ..files.tree import Blobs
from .layers import PER_DEPTH, Layer, blobs_path, chain_of, read_record, verify_layer

_BUILDING = ".building-"
_TIMEOUT = timedelta(minutes=10)


@dataclass
class MirrorTemplates:
    """One mirror's layers by tree. `unproven` are trees whose layer was proven in an earlier boot
    only.

    `own_bytes` is the sum of the layers' own bytes; `shared_bytes`, the size of the files that they
    share, is a guess until it `is_weighed`. `used_at` has the time when a sealed store was used, or
    a layer made. Take a turn of `changes` before changing layers, by `enter` and `remove` only.
    """

    directory: Path
    trash: Trash
    layers: dict[str, Layer] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    used_at: dict[Path, float] = field(default_factory=dict)
    own_bytes: int = 0
    shared_bytes: int = 0
    is_weighed: bool = False
    changes: Turns = field(default_factory=Turns)

    @property
    def trees(self) -> Path:
        return self.directory / "trees"

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.shared_bytes

    def load(self) -> None:
        """Read the layers on disk; remove what is not whole."""
        if not self.trees.is_dir():
            return
        for path in sorted(self.trees.iterdir()):
            if path.name.startswith((_BUILDING, TRASH_PREFIX)):
                self.trash.remove(path)
            elif (
                (record := read_record(path))
                and (path / "files").is_dir()
                and (path / "index/.git/index").is_file()
                and Manifest.is_current(path / "manifest")
            ):
                layer, is_proven = record
                self.enter(layer, (path / "layer.json").stat().st_mtime)
                if not is_proven:
                    self.unproven.add(layer.tree)
            else:
                with suppress(OSError):
                    self.trash.discard(path)

    def files(self, tree: str) -> Path:
        """The directory of a layer for overlayfs: one path for all templates that show it."""
        return self.trees / self.layers[tree].name / "files"

    def index(self, tree: str) -> Path:
        """The directory with the index of a layer and those below it: one more for overlayfs."""
        return self.files(tree).with_name("index")

    def chain(self, tree: str) -> list[Layer]:
        """A layer and those it lies on, top first; KeyError where one is gone."""
        return chain_of(self.layers[tree], self.layers)

    def carries(self, tree: str) -> bool:
        """Whether another layer lies on this one."""
        return any(layer.base == tree for layer in self.layers.values())

    def above(self, tree: str) -> set[str]:
        """A tree and all whose layers lie on it, however high."""
        found = more = {tree}
        while more:
            more = {each for each, layer in self.layers.items() if layer.base in found} - found
            found = found | more
        return found

    def is_whole(self, tree: str) -> bool:
        """Whether a layer and all below it exist and are proven."""
        try:
            return self.unproven.isdisjoint(layer.tree for layer in self.chain(tree))
        except KeyError:
            return False

    def near(self, time: int) -> list[Layer]:
        """Return the whole layers to build on, with those below them: PER_DEPTH of each depth, the
        nearest in time.
        """
        found: dict[str, Layer] = {}
        seen: Counter[int] = Counter()
        for layer in sorted(self.layers.values(), key=lambda layer: abs(layer.time - time)):
            if seen[layer.depth] < PER_DEPTH and self.is_whole(layer.tree):
                seen[layer.depth] += 1
                found |= {each.tree: each for each in self.chain(layer.tree)}
        return list(found.values())

    def new_path(self) -> Path:
        """A path to build a layer at."""
        self.trees.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.trees / f"{_BUILDING}{secrets.token_hex(8)}"

    def add(self, built: Path, layer: Layer) -> None:
        """Publish a built layer, in place of what may be left of a former one."""
        target = self.trees / layer.name
        with suppress(OSError):
            self.trash.discard(target)
        built.rename(target)
        self.enter(layer, time.time())
        self.shared_bytes += layer.shared_bytes
        self.unproven.discard(layer.tree)

    def enter(self, layer: Layer, used_at: float) -> None:
        """Note a layer on disk, in place of the former one of its tree."""
        if layer.tree in self.layers:
            self.own_bytes -= self.layers[layer.tree].size_bytes
        self.layers[layer.tree] = layer
        self.own_bytes += layer.size_bytes
        self.used_at[self.files(layer.tree)] = used_at

    def remove(self, tree: str) -> Path:
        """Forget a layer, not those above it; answers the path of its files."""
        files, layer = self.files(tree), self.layers.pop(tree)
        self.own_bytes -= layer.size_bytes
        self.shared_bytes -= layer.shared_bytes
        self.is_weighed = False
        self.unproven.discard(tree)
        self.used_at.pop(files, None)
        return files


@dataclass(eq=False, repr=False)
class TemplateRegistry:
    """The layers of all mirrors, below `store`. Belongs to the event loop's thread.

    `held` counts the checkouts that use a directory.
    """

    store: Path
    workers: Workers
    trash: Trash

    def __post_init__(self) -> None:
        self.held: Counter[Path] = Counter()
        self._mirrors: dict[str, MirrorTemplates] = {}
        self._retired: dict[Path, Path] = {}

    async def open(self) -> None:
        """Read what is on disk."""
        self.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in self.names():
            await anyio.to_thread.run_sync(self.get(name).load)

    def names(self) -> list[MirrorName]:
        """The mirrors that have anything on disk."""
        found = []
        for path in sorted(self.store.iterdir()):
            with suppress(InvalidNameError):
                if path.is_dir():
                    found.append(MirrorName.parse(path.name))
        return found

    @property
    def size_bytes(self) -> int:
        """Of the layers that are known."""
        return sum(each.size_bytes for each in self._mirrors.values())

    def get(self, name: MirrorName) -> MirrorTemplates:
        if (found := self._mirrors.get(name.key)) is None:
            found = self._mirrors[name.key] = MirrorTemplates(self.store / str(name), self.trash)
        return found

    async def weigh(self) -> None:
        """Weigh the shared files where layers went, or an earlier daemon left some; remove those
        that no layer has.
        """
        for each in list(self._mirrors.values()):
            if not each.is_weighed:
                async with each.changes.turn():
                    weigh = Blobs(blobs_path(each.trees)).weigh
                    each.shared_bytes, each.is_weighed = await anyio.to_thread.run_sync(weigh)

    def retire(self, templates: MirrorTemplates, tree: str) -> None:
        """Take a layer and all above it out of use by renaming them; `sweep` deletes them.

        A mounted overlay keeps the directories it has open, whatever their names.
        """
        for each in templates.above(tree) & templates.layers.keys():
            files, target = templates.remove(each), new_trash(templates.trees)
            with suppress(FileNotFoundError):
                os.rename(files.parent, target)
                self._retired[target] = files

    async def sweep(self) -> None:
        """Delete the retired layers that no checkout holds."""
        free = [path for path, files in self._retired.items() if files not in self.held]
        for path in free:
            del self._retired[path]
        for path in free:
            await anyio.to_thread.run_sync(self.trash.remove, path)

    async def is_sound(self, templates: MirrorTemplates, tree: str) -> bool:
        """Read a layer again and compare it with its record."""
        try:
            chain = templates.chain(tree)
            await self.workers.run(verify_layer, templates.trees, chain, timeout=_TIMEOUT)
        except (IntegrityError, NotFoundError, KeyError) as error:  # KeyError: its base is gone
            mirror = templates.directory.name
            log.warning("template.refused", mirror=mirror, tree=tree, error=str(error))
            return False
        return True
