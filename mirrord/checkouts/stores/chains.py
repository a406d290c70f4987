"""Chains of pack layers: which layers a commit needs, decided without a look at the disk."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model import CommitId

CHAIN_LIMIT = 96
STRIDES = (65536, 4096, 256, 32)
SHORT = 16  # first-parent steps
NARROW = 4  # way-points laid ahead for neighbours: so many to a step of the narrowest grid
MARGINS = (256, 8192)


@dataclass(frozen=True, slots=True)
class PackLayer:
    """`depth` counts first-parent steps from the root layer. One only planned has no pack yet."""

    commit: CommitId
    base: CommitId | None
    depth: int
    pack: str = ""
    object_count: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "PackLayer":
        """What a record says, which another version may have written; TypeError of a torn one."""
        return cls(**{name: facts[name] for name in cls.__slots__ if name in facts})


Layers = Mapping[CommitId, PackLayer]


def chain(layers: Layers, commit: CommitId) -> list[PackLayer]:
    """The layers from the root up to `commit`; KeyError where one is missing."""
    found = [layers[commit]]
    while (base := found[-1].base) is not None:
        found.append(layers[base])
    return found[::-1]


def choose_root(known: Layers, line: Sequence[CommitId], recorded: Collection[CommitId]) -> int:
    """The position on `line`, newest first, of the commit whose whole closure is packed.

    The oldest recorded commit: every later one then shares its pack. Where none is older than the
    one asked for, some steps below it, so that its older neighbours share too; more of them with
    each root that was placed too high.
    """
    oldest = max((position for position, at in enumerate(line) if at in recorded), default=0)
    roots = sum(layer.base is None for layer in known.values())
    return oldest or min(MARGINS[min(roots, len(MARGINS) - 1)], len(line) - 1)


def plan(
    known: Layers, line: Sequence[CommitId], *, ahead: bool = False, straight: bool = False
) -> list[PackLayer]:
    """The layers to build for the first of `line`, each after those it stands on.

    `line` is first parents, newest first; its last commit has a layer, or becomes a root. `ahead`
    puts way-points all along it, closer than the grid: fewer objects between two neighbours. A
    `straight` step has none within a step of the second grid: as recorded commits are mostly asked
    for oldest first, each stands on the one before, and no object is packed twice.
    """
    planned: dict[CommitId, PackLayer] = {}
    layers = dict(known)

    def add(commit: CommitId, base: PackLayer | None, depth: int) -> None:
        layers[commit] = planned[commit] = PackLayer(commit, base.commit if base else None, depth)

    def waypoint_at(depth: int) -> PackLayer:
        """The layer at `depth`: planned, or further down the chain that the line starts with."""
        if depth in on_line and on_line[depth] in layers:
            return layers[on_line[depth]]
        return next(layer for layer in reversed(chain(layers, line[-1])) if layer.depth <= depth)

    if line[-1] not in layers:
        add(line[-1], None, 0)
    start = layers[line[-1]].depth
    end = start + len(line) - 1
    on_line = {start + steps: at for steps, at in enumerate(reversed(line))}
    step = max(1, STRIDES[-1] // NARROW)
    depths: Iterable[int] = grid(start, end)
    if ahead:
        depths = range(start - start % step + step, end + 1, step)
    elif straight:
        is_near = end - start <= STRIDES[-2]
        depths = () if is_near else [depth for depth in depths if depth % STRIDES[-2] == 0]
    for depth in depths:
        if depth < end and on_line[depth] not in layers:
            add(
                on_line[depth],
                waypoint_at(previous(depth) if is_waypoint(depth) else depth - step),
                depth,
            )
    if line[0] in layers:
        return list(planned.values())
    if is_waypoint(end) and not straight:
        base = waypoint_at(previous(end))
    else:
        base = choose_base(layers, next(at for at in line[1:] if at in layers), end)
    # another commit in just this place is a variant of this one: they should share their parent
    has_sibling = any(at.base == base.commit and at.depth == end for at in known.values())
    if base.commit != line[1] and has_sibling:
        if line[1] not in layers:
            add(line[1], base, end - 1)
        base = layers[line[1]]
    add(line[0], base, end)
    return list(planned.values())


def choose_base(layers: Layers, nearest: CommitId, depth: int) -> PackLayer:
    """The layer for a step to `depth`: the nearest, or where its chain is full one further down.

    That packs the least again for each place that it makes free in the chain: with thousands of
    commits asked for in turn an object is in about three packs.
    """
    standing = chain(layers, nearest)
    if len(standing) < CHAIN_LIMIT:
        return standing[-1]
    lower = enumerate(standing[: CHAIN_LIMIT * 3 // 4])
    return min(lower, key=lambda at: (depth - at[1].depth) / (len(standing) - at[0]))[1]


def grid(start: int, end: int) -> Iterator[int]:
    """Depths of the way-points from `start` to `end`: each stride's after the wider one's last."""
    for stride in STRIDES:
        for depth in range(start - start % stride + stride, end + 1, stride):
            start = depth
            yield depth


def is_short(layers: Layers, layer: PackLayer) -> bool:
    """Whether a layer is so near to its base that a git takes longer to start than to pack it."""
    return layer.base is not None and layer.depth - layers[layer.base].depth <= SHORT


def is_waypoint(depth: int) -> bool:
    return depth % STRIDES[-1] == 0


def previous(depth: int) -> int:
    """The way-point below a way-point."""
    return depth - next(stride for stride in STRIDES if depth % stride == 0)
