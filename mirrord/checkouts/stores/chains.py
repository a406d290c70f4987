"""How closure packs stand on one another: which layers a commit needs, and which of them are there.

A layer is one pack: the closure of its commit without the closure of its base layer's commit. Way-points on a grid along the
first-parent line carry the distance, so that no chain is longer than CHAIN_LIMIT and neighbours share all but their last layer.
Pure: decides, and touches no disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...model import CommitId

CHAIN_LIMIT = 48
STRIDES = (65536, 4096, 256, 32)
NARROW = 4  # way-points to a step of the narrowest grid where what a neighbour needs is laid ahead
MARGINS = (256, 8192)


@dataclass(frozen=True, slots=True)
class Layer:
    """`depth` counts first-parent steps from the root layer's commit, `length` the layers of the chain that ends here.

    A layer that is only planned has no pack yet.
    """

    commit: CommitId
    base: CommitId | None
    depth: int
    length: int
    pack: str = ""
    object_count: int = 0
    size_bytes: int = 0


Layers = Mapping[CommitId, Layer]


def chain(layers: Layers, commit: CommitId) -> list[Layer]:
    """The layers from the root up to `commit`; KeyError where one is missing."""
    found, at = list[Layer](), commit
    while True:
        found.append(layers[at])
        base = layers[at].base
        if base is None:
            return found[::-1]
        at = base


def choose_root(known: Layers, line: Sequence[CommitId], recorded: Collection[CommitId]) -> int:
    """The position on `line`, newest first, of the commit whose whole closure is packed.

    The oldest recorded commit: every later one then shares its pack. Where none is older than the one asked for, some steps
    below it, so that its older neighbours share too; more of them with each root that lies too high.
    """
    oldest = max((position for position, at in enumerate(line) if at in recorded), default=0)
    roots = sum(layer.base is None for layer in known.values())
    return oldest or min(MARGINS[min(roots, len(MARGINS) - 1)], len(line) - 1)


def plan(known: Layers, line: Sequence[CommitId], *, ahead: bool = False) -> list[Layer]:
    """The layers to build for the first of `line`, each after those it stands on.

    `line` is first parents, newest first; its last commit has a layer, or becomes a root. `ahead` puts way-points all along it,
    closer to each other than the grid: fewer objects are between a neighbour and the next.
    """
    planned: dict[CommitId, Layer] = {}
    layers = dict(known)

    def add(commit: CommitId, base: Layer | None, depth: int) -> None:
        length = base.length + 1 if base else 1
        layers[commit] = planned[commit] = Layer(
            commit, base.commit if base else None, depth, length
        )

    if line[-1] not in layers:
        add(line[-1], None, 0)
    start = layers[line[-1]].depth
    end = start + len(line) - 1
    on_line = {start + steps: at for steps, at in enumerate(reversed(line))}
    step = max(1, STRIDES[-1] // NARROW)
    for depth in range(start - start % step + step, end + 1, step) if ahead else grid(start, end):
        if depth < end and on_line[depth] not in layers:
            below = previous(depth) if is_waypoint(depth) else depth - step
            add(on_line[depth], _waypoint_at(layers, on_line, below), depth)
    if line[0] not in layers:
        base = (
            _waypoint_at(layers, on_line, previous(end))
            if is_waypoint(end)
            else _nearest(layers, line)
        )
        if base.commit != line[1] and _has_sibling(known, base, end):
            if line[1] not in layers:
                add(line[1], base, end - 1)
            base = layers[line[1]]
        add(line[0], base, end)
    return list(planned.values())


def _has_sibling(known: Layers, base: Layer, depth: int) -> bool:
    """Whether another commit was packed in just this place: as variants of one commit are, which should share their parent."""
    return any(layer.base == base.commit and layer.depth == depth for layer in known.values())


def _waypoint_at(layers: Layers, on_line: Mapping[int, CommitId], depth: int) -> Layer:
    """The layer on this line at `depth`: a planned one, or one further down the chain that the line starts with."""
    if depth in on_line and on_line[depth] in layers:
        return layers[on_line[depth]]
    below = chain(layers, on_line[min(on_line)])
    return next(layer for layer in reversed(below) if layer.depth <= depth)


def _nearest(layers: Layers, line: Sequence[CommitId]) -> Layer:
    """The nearest layer below the end of `line` whose chain has room for one more."""
    known = (layers[at] for at in line[1:] if at in layers)
    below = reversed(chain(layers, line[-1]))
    return next(layer for layer in (*known, *below) if layer.length < CHAIN_LIMIT)


def grid(start: int, end: int) -> Iterator[int]:
    """Depths of the way-points above `start` and up to `end`: for each stride those after the last one of the wider stride."""
    for stride in STRIDES:
        for depth in range(start - start % stride + stride, end + 1, stride):
            start = depth
            yield depth


def is_short(layers: Layers, layer: Layer) -> bool:
    """Whether a layer lies no further from its base than one step of the narrowest grid: it holds few objects, as a rule."""
    return layer.base is not None and layer.depth - layers[layer.base].depth <= STRIDES[-1]


def is_waypoint(depth: int) -> bool:
    return depth % STRIDES[-1] == 0


def previous(depth: int) -> int:
    """The way-point below a way-point."""
    return depth - next(stride for stride in STRIDES if depth % stride == 0)
