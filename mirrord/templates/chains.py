"""Plans chains of pack layers: which layers a commit needs. Pure; never reads the disk."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model import CommitId

# packs that git may have to search for one object; a longer chain goes on from a lower layer
CHAIN_LIMIT = 96
# first-parent steps between way-points, coarse to fine; neighbours share the coarse layers
STRIDES = (65536, 4096, 256, 32)
SHORT = 16  # first-parent steps
AHEAD_STRIDE = STRIDES[-1] // 4  # of way-points packed for neighbours after a first checkout
NEIGHBOURS = 256  # older commits that are likely asked for after one
# of the first root below the requested commit, and of later ones (`choose_root`)
ROOT_MARGINS = (NEIGHBOURS, 8192)


@dataclass(frozen=True, slots=True)
class PackLayer:
    """`depth` counts first-parent steps from the root layer. A planned layer has no pack yet."""

    commit: CommitId
    base: CommitId | None
    depth: int
    pack: str = ""
    object_count: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "PackLayer":
        """Read a record, maybe of another version; TypeError where a field is missing."""
        return cls(**{name: record[name] for name in cls.__slots__ if name in record})

    def packed(self, pack: str, object_count: int, size_bytes: int) -> "PackLayer":
        return replace(self, pack=pack, object_count=object_count, size_bytes=size_bytes)


Layers = Mapping[CommitId, PackLayer]


def chain(layers: Layers, commit: CommitId) -> list[PackLayer]:
    """Return the layers from the root up to `commit`; KeyError where one is missing."""
    chained = [layers[commit]]
    while (base := chained[-1].base) is not None:
        chained.append(layers[base])
    return chained[::-1]


def choose_root(layers: Layers, line: Sequence[CommitId], recorded: Collection[CommitId]) -> int:
    """Return the position on `line`, newest first, of the commit whose whole closure is packed.

    It is the oldest recorded commit, so that all later ones share its pack. Where there is none,
    it lies 256 steps below the requested commit, so that older neighbours share it; 8192 once a
    root turned out too high.
    """
    oldest = max(
        (position for position, commit in enumerate(line) if commit in recorded), default=0
    )
    roots = sum(layer.base is None for layer in layers.values())
    return oldest or min(ROOT_MARGINS[min(roots, len(ROOT_MARGINS) - 1)], len(line) - 1)


class _Line:
    """First parents, newest first, and the layers that they have or are to get."""

    def __init__(self, existing: Layers, line: Sequence[CommitId]) -> None:
        self.line, self.existing, self.layers = line, existing, dict(existing)
        self.planned: dict[CommitId, PackLayer] = {}
        if line[-1] not in self.layers:
            self.add(line[-1], None, 0)
        self.start = self.layers[line[-1]].depth
        self.end = self.start + len(line) - 1
        self.at = {self.start + steps: commit for steps, commit in enumerate(reversed(line))}

    def add(self, commit: CommitId, base: PackLayer | None, depth: int) -> None:
        layer = PackLayer(commit, base.commit if base else None, depth)
        self.layers[commit] = self.planned[commit] = layer

    def add_waypoint(self, depth: int) -> None:
        if depth < self.end and self.at[depth] not in self.layers:
            below = previous(depth) if is_waypoint(depth) else depth - AHEAD_STRIDE
            self.add(self.at[depth], self.waypoint_at(below), depth)

    def waypoint_at(self, depth: int) -> PackLayer:
        """Return the layer at `depth`, planned or in the chain below the line.

        A far layer has none near it: a lower one would pack all that is between once more.
        """
        if depth in self.at and self.at[depth] in self.layers:
            return self.layers[self.at[depth]]
        below = chain(self.layers, self.line[-1])
        base = next(layer for layer in reversed(below) if layer.depth <= depth)
        is_far = self.start - base.depth > NEIGHBOURS and len(below) < CHAIN_LIMIT // 2
        return below[-1] if is_far else base

    def add_first(self, *, straight: bool) -> None:
        """Plan the layer of the first commit, on the layers planned before."""
        end = self.end
        if is_waypoint(end) and not straight:
            base = self.waypoint_at(previous(end))
        else:
            nearest = next(commit for commit in self.line[1:] if commit in self.layers)
            base = choose_base(self.layers, nearest, end)
        # another commit at this place, such as an amended one: both then share the parent's layer
        has_sibling = any(
            layer.base == base.commit and layer.depth == end for layer in self.existing.values()
        )
        if base.commit != self.line[1] and has_sibling:
            if self.line[1] not in self.layers:
                self.add(self.line[1], base, end - 1)
            base = self.layers[self.line[1]]
        self.add(self.line[0], base, end)


def plan(
    existing: Layers,
    line: Sequence[CommitId],
    *,
    ahead: bool = False,
    straight: bool = False,
    stride: int = STRIDES[-2],
) -> list[PackLayer]:
    """Return the layers to build for the first commit of `line`, each after its base.

    `line` is first parents, newest first; its last commit has a layer or becomes a root. With
    `ahead`, way-points are closer than the grid: fewer objects between two neighbours. A `straight`
    step has none within a `stride`: recorded commits are mostly requested oldest first, so each
    stands on the one before and no object is packed twice.
    """
    made = _Line(existing, line)
    start, end = made.start, made.end
    depths: Iterable[int] = grid(start, end)
    if ahead:
        depths = range(start - start % AHEAD_STRIDE + AHEAD_STRIDE, end + 1, AHEAD_STRIDE)
    elif straight:
        is_near = end - start <= stride
        depths = () if is_near else [depth for depth in depths if depth % stride == 0]
    for depth in depths:
        made.add_waypoint(depth)
    if line[0] not in made.layers:
        made.add_first(straight=straight)
    return list(made.planned.values())


def plan_far(existing: Layers, line: Sequence[CommitId]) -> list[PackLayer]:
    """Return the layers for a commit that is far from what has one, as `plan`.

    One step to where its neighbours begin, and one to it, as from a first root. A way-point each
    256 steps costs a walk of git each: 16 in 4,000 steps of sphinx took 2.4 times as long.
    """
    steps = plan(existing, line[NEIGHBOURS:], straight=True, stride=STRIDES[1])
    layers = {**existing, **{step.commit: step for step in steps}}
    return [*steps, *plan(layers, line[: NEIGHBOURS + 1], straight=True)]


def choose_base(layers: Layers, nearest: CommitId, depth: int) -> PackLayer:
    """Return the layer for a step to `depth`: the nearest, or where its chain is full a lower one.

    The lower one repacks the fewest commits for each freed place in the chain. With thousands of
    commits requested in turn an object is in about three packs.
    """
    whole = chain(layers, nearest)
    if len(whole) < CHAIN_LIMIT:
        return whole[-1]
    lower = enumerate(whole[: CHAIN_LIMIT * 3 // 4])
    return min(lower, key=lambda item: (depth - item[1].depth) / (len(whole) - item[0]))[1]


def grid(start: int, end: int) -> Iterator[int]:
    """Yield the depths of way-points from `start` to `end`: the widest strides come first."""
    for stride in STRIDES:
        for depth in range(start - start % stride + stride, end + 1, stride):
            start = depth
            yield depth


def is_short(layers: Layers, layer: PackLayer) -> bool:
    """Return whether a layer is so near to its base that starting git takes longer than packing."""
    return layer.base is not None and layer.depth - layers[layer.base].depth <= SHORT


def is_waypoint(depth: int) -> bool:
    return depth % STRIDES[-1] == 0


def previous(depth: int) -> int:
    """Return the way-point below a way-point."""
    return depth - next(stride for stride in STRIDES if depth % stride == 0)
