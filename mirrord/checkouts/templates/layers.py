"""One layer of overlay templates, as it is recorded beside its files.

Owns `layer.json` in `trees/<tree>` (a keyframe: a whole tree) and `trees/<tree>@<base tree>` (a
delta), beside `files`, `index` and the private manifest. Loads no libgit2: the daemon keeps these
records in memory, workers build what they describe.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...host.processes import boot_id


@dataclass(frozen=True, slots=True)
class Layer:
    """`base` is the tree that a delta lies on. `depth` counts layers down to the keyframe, itself included. `time` is the
    commit's. `size_bytes` goes with the layer, `shared_bytes` are of files that it was the first to have (`blobs.py`).
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
        """The paths that a delta hides; kept as latin-1 text, which holds any bytes."""
        return [path.encode("latin-1") for path in self.removed]


def files_path(trees: Path, layer: Layer) -> Path:
    """The directory that overlayfs gets."""
    return trees / layer.name / "files"


def index_path(layer: Path) -> Path:
    """The directory of a layer with `.git/index`, which overlayfs gets as one more, on top."""
    return layer / "index"


def blobs_path(trees: Path) -> Path:
    """Where the files are that layers share."""
    return trees.parent / "blobs"


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """The layer and those it lies on, top first, out of `layers` by tree; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`. The boot id says when it was proven: what a power failure may have torn is proven again."""
    record = {**asdict(layer), "boot": boot_id()}
    temporary = directory / "layer.json.new"
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.rename(directory / "layer.json")


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """The layer in a directory, and whether it was proven since this boot; None where there is no sound record."""
    try:
        record = json.loads((directory / "layer.json").read_text(encoding="utf-8"))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None


NEAR = 2


class LayerIndex(Mapping[str, Layer]):
    """Layers by tree. `size_bytes` is what they have to themselves."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._layers: dict[str, Layer] = {}
        self._above: defaultdict[str, set[str]] = defaultdict(set)
        self._times: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)

    def __getitem__(self, tree: str) -> Layer:
        return self._layers[tree]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, layer: Layer) -> None:
        """Take a layer in, in place of the one that its tree had."""
        if layer.tree in self._layers:
            self.remove(layer.tree)
        self._layers[layer.tree] = layer
        self.size_bytes += layer.size_bytes
        insort(self._times[layer.depth], (layer.time, layer.tree))
        if layer.base is not None:
            self._above[layer.base].add(layer.tree)

    def remove(self, tree: str) -> Layer:
        """Forget a layer; what lies on it stays in the books."""
        layer = self._layers.pop(tree)
        self.size_bytes -= layer.size_bytes
        times = self._times[layer.depth]
        del times[bisect_left(times, (layer.time, tree))]
        if layer.base is not None:
            self._above[layer.base].discard(tree)
            if not self._above[layer.base]:
                del self._above[layer.base]
        return layer

    def above(self, tree: str) -> set[str]:
        """A tree and those whose layers lie on it, however high."""
        found, left = {tree}, [tree]
        while left:
            more = self._above.get(left.pop(), set()) - found
            found |= more
            left += more
        return found

    def carries(self, tree: str) -> bool:
        """Whether anything lies on a layer."""
        return tree in self._above

    def near(self, time: int, unproven: Container[str] = ()) -> list[Layer]:
        """What a layer of that time may lie on: the nearest few of each depth that are proven with all below them, and these."""
        found: dict[str, Layer] = {}
        for times in self._times.values():
            for tree in self._nearest(times, time, unproven):
                found |= {layer.tree: layer for layer in chain_of(self._layers[tree], self._layers)}
        return list(found.values())

    def is_whole(self, tree: str, unproven: Container[str] = ()) -> bool:
        """Whether a layer and all below it are there and proven."""
        try:
            return all(
                layer.tree not in unproven for layer in chain_of(self._layers[tree], self._layers)
            )
        except KeyError:
            return False

    def _nearest(
        self, times: list[tuple[int, str]], time: int, unproven: Container[str]
    ) -> list[str]:
        after = bisect_left(times, (time, ""))
        before, found = after - 1, list[str]()
        while len(found) < NEAR and (before >= 0 or after < len(times)):
            is_later = before < 0 or (
                after < len(times) and times[after][0] - time < time - times[before][0]
            )
            tree = times[after if is_later else before][1]
            before, after = (before, after + 1) if is_later else (before - 1, after)
            if self.is_whole(tree, unproven):
                found.append(tree)
        return found
