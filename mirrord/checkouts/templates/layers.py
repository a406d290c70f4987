"""The layers of overlay templates: one as its record says, and the index of those a mirror has.

A layer is `trees/<tree>` (a keyframe: a whole tree) or `trees/<tree>@<base tree>` (a delta), with
`layer.json`, `files` and `index` for overlayfs, and the private manifest. Loads no libgit2: the
daemon keeps the records in memory, workers build the layers.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from ...host.processes import boot_id

NEAR = 2


@dataclass(frozen=True, slots=True)
class Layer:
    """`base` is the tree that a delta lies on; `depth` counts layers down to the keyframe, itself
    included. `time` is the commit's. `size_bytes` are the layer's own, `shared_bytes` those of the
    shared files that it was the first to have, `whole_bytes` those of its keyframe.
    """

    tree: str
    base: str | None
    commit: str
    time: int
    depth: int
    size_bytes: int
    shared_bytes: int
    whole_bytes: int
    removed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tree}@{self.base}" if self.base else self.tree

    @property
    def whiteouts(self) -> list[bytes]:
        """The paths that a delta hides; recorded as latin-1 text, which holds any bytes."""
        return [path.encode("latin-1") for path in self.removed]


def files_path(trees: Path, layer: Layer) -> Path:
    """The directory of files, for overlayfs."""
    return trees / layer.name / "files"


def index_path(layer: Path) -> Path:
    """The directory of a layer with `.git/index`: one more for overlayfs, on top."""
    return layer / "index"


def blobs_path(trees: Path) -> Path:
    """The files that layers share."""
    return trees.parent / "blobs"


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """The layer and those below it, top first; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`, with the boot in which the layer was proven.

    Nothing is flushed, so a power failure may tear a layer: after a boot it is proven again.
    """
    temporary = directory / "layer.json.new"
    temporary.write_text(json.dumps({**asdict(layer), "boot": boot_id()}), encoding="utf-8")
    temporary.rename(directory / "layer.json")


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """The layer of a directory, and whether it was proven in this boot; None without a record."""
    try:
        record = json.loads((directory / "layer.json").read_text(encoding="utf-8"))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None


class LayerIndex(dict[str, Layer]):
    """Layers by tree, with thousands of which no question looks at all. Touches no disk.

    Change it by `add` and `remove` only. `size_bytes` is the sum of their own bytes.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._above: defaultdict[str, set[str]] = defaultdict(set)
        self._times: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)

    def add(self, layer: Layer) -> None:
        """Add a layer, in place of the former one of its tree."""
        if layer.tree in self:
            self.remove(layer.tree)
        self[layer.tree] = layer
        self.size_bytes += layer.size_bytes
        insort(self._times[layer.depth], (layer.time, layer.tree))
        if layer.base is not None:
            self._above[layer.base].add(layer.tree)

    def remove(self, tree: str) -> Layer:
        """Remove a layer; those above it stay."""
        layer = self.pop(tree)
        self.size_bytes -= layer.size_bytes
        times = self._times[layer.depth]
        del times[bisect_left(times, (layer.time, tree))]
        if layer.base is not None:
            self._above[layer.base].discard(tree)
            if not self._above[layer.base]:
                del self._above[layer.base]
        return layer

    def above(self, tree: str) -> set[str]:
        """A tree and all whose layers lie on it, however high."""
        found, left = {tree}, [tree]
        while left:
            more = self._above.get(left.pop(), set()) - found
            found |= more
            left += more
        return found

    def carries(self, tree: str) -> bool:
        """Whether another layer lies on this one."""
        return tree in self._above

    def is_whole(self, tree: str, unproven: Container[str] = ()) -> bool:
        """Whether a layer and all below it exist and are proven."""
        try:
            chain = chain_of(self[tree], self)
        except KeyError:
            return False
        return all(layer.tree not in unproven for layer in chain)

    def near(self, time: int, unproven: Container[str] = ()) -> list[Layer]:
        """The layers to build on: of each depth the nearest NEAR in time that are whole, each with
        those below it.
        """
        found: dict[str, Layer] = {}
        for times in self._times.values():
            at = bisect_left(times, (time, ""))
            nearest = heapq.merge(
                reversed(times[:at]), times[at:], key=lambda each: abs(each[0] - time)
            )
            whole = (tree for _, tree in nearest if self.is_whole(tree, unproven))
            for tree in islice(whole, NEAR):
                found |= {each.tree: each for each in chain_of(self[tree], self)}
        return list(found.values())
