"""Whose prepared layers a grade may have: who wrote one counts, not who saved it.

A layer that somebody else wrote than the one who saved it, such as an agent, is part of the change
that is graded, with all layers that are over it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..checkouts.lease import Base, SavedLayer


@dataclass(frozen=True, slots=True)
class Layered:
    """The base that a grade has, and the layers that are part of the change, top first."""

    base: Base
    judged: tuple[SavedLayer, ...] = ()


def split(base: Base, is_admin: Callable[[int], bool], builder: int) -> Layered:
    """Split the layers of a base: those of administrators, of builds, and of the one who saved the
    top one stay in it.
    """
    if base.saved is None:
        return Layered(base)
    trusted = {base.saved.saved_by, builder}
    layers = [*_iter_stack(base.saved)]
    untrusted = [
        place
        for place, layer in enumerate(layers)
        if layer.written_by not in trusted and not is_admin(layer.written_by)
    ]
    if not untrusted:
        return Layered(base)
    below = layers[untrusted[-1]].below
    if below and base.environment is None:
        below = below._replace(environment_layers=())
    return Layered(replace(base, saved=below), tuple(layers[: untrusted[-1] + 1]))


def _iter_stack(top: SavedLayer) -> Iterator[SavedLayer]:
    layer: SavedLayer | None = top
    while layer is not None:
        yield layer
        layer = layer.below
