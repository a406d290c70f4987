"""Which layers a mirror has, with thousands of them: by tree, by what lies on what, and by the time of their commits.

Owns the books that follow from the list of layers, so that no question about one layer looks at all. Pure: touches no disk.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from .layer import Layer, chain_of

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
