"""Which layers a commit needs: chains stay short, and neighbours share them."""

from __future__ import annotations

from mirrord.model import CommitId
from mirrord.templates.chains import (
    CHAIN_LIMIT,
    NEIGHBOURS,
    ROOT_MARGINS,
    STRIDES,
    PackLayer,
    chain,
    choose_root,
    grid,
    plan,
    plan_far,
    previous,
)


def test_the_grid_reaches_every_depth_with_few_waypoints() -> None:
    """At any distance, the way-points between root and commit leave room in the chain."""
    for depth in (0, 1, 31, 32, 255, 256, 4095, 4096, 65_535, 65_536, 400_000):
        waypoints = list(grid(0, depth))
        assert waypoints == sorted(waypoints)
        assert not waypoints or depth - waypoints[-1] < STRIDES[-1]
        length, at = 1, waypoints[-1] if waypoints else 0
        while at:
            length, at = length + 1, previous(at)
        assert length < CHAIN_LIMIT


def test_a_root_is_lower_after_one_that_was_too_high() -> None:
    line = [CommitId(f"{number:040}") for number in range(20_000)]
    roots = {CommitId("f" * 40): PackLayer(CommitId("f" * 40), None, 0)}
    assert choose_root({}, line, ()) == ROOT_MARGINS[0]
    assert choose_root(roots, line, ()) == ROOT_MARGINS[1]
    assert choose_root({}, line[:5], ()) == 4
    assert choose_root(roots, line, {line[7], line[3]}) == 7


def test_a_first_commit_needs_two_packs() -> None:
    """The root is one wide step below it; way-points are built when neighbours need them."""
    line = [CommitId(f"{number:040}") for number in range(ROOT_MARGINS[0] + 1)]
    first = plan({}, line)
    assert [(layer.commit, layer.base) for layer in first] == [
        (line[-1], None),
        (line[0], line[-1]),
    ]
    layers = {layer.commit: layer for layer in first}
    neighbour = plan(layers, line[10:])
    assert [layer.depth for layer in neighbour] == [*range(32, 246, 32), 246]


def test_a_far_commit_needs_two_packs_and_one_each_4096_steps() -> None:
    """Each way-point is a walk of git; those near the commit are laid after the answer."""
    line = [CommitId(f"{number:040}") for number in range(10_001)]
    root = PackLayer(line[-1], None, 0)
    planned = plan_far({root.commit: root}, line)
    assert [layer.depth for layer in planned] == [4096, 8192, 10_000 - NEIGHBOURS, 10_000]
    assert len(chain({layer.commit: layer for layer in [root, *planned]}, line[0])) <= 5


def test_neighbours_of_a_far_commit_stand_on_its_packs() -> None:
    """Not on the way-point that a grid from the root would have: 4,000 steps were packed once more for each."""
    line = [CommitId(f"{number:040}") for number in range(10_001)]
    root = PackLayer(line[-1], None, 0)
    layers = {root.commit: root} | {it.commit: it for it in plan_far({root.commit: root}, line)}
    for planned in (plan(layers, line[1 : NEIGHBOURS + 1], ahead=True), plan(layers, line[10:])):
        below = layers | {layer.commit: layer for layer in planned}
        spans = [it.depth - below[it.base].depth for it in planned if it.base]
        assert len(spans) == len(planned)
        assert max(spans) <= NEIGHBOURS


def test_a_parent_that_has_a_layer_is_not_packed_again() -> None:
    """Variants where a way-point would be: the second brings the parent's layer, the third finds it."""
    line = [CommitId(f"{number:040}") for number in range(ROOT_MARGINS[0] + 1)]
    layers: dict[CommitId, PackLayer] = {}
    counts = []
    for variant in "abc":
        planned = plan(
            layers, [CommitId(variant * 40), *(line[1:2] if line[1] in layers else line[1:])]
        )
        layers |= {layer.commit: layer for layer in planned}
        counts.append(len(planned))
    assert counts == [2, 2, 1]


def test_recorded_commits_in_turn_stand_on_each_other() -> None:
    """Each object is packed once, until a chain is full: then about once more, and no chain is longer."""
    line = [CommitId(f"{number:040}") for number in range(40_000)]
    layers: dict[CommitId, PackLayer] = {}
    spans = []
    for depth in range(0, 40_000, 90):
        at = len(line) - 1 - depth
        below = next((n for n in range(at + 1, len(line)) if line[n] in layers), at)
        for layer in plan(layers, line[at : below + 1], straight=True):
            layers[layer.commit] = layer
            spans.append(layer.depth - (layers[layer.base].depth if layer.base else 0))
        if depth == 90 * (CHAIN_LIMIT - 1):
            assert spans[1:] == [90] * (CHAIN_LIMIT - 1)
    assert max(len(chain(layers, commit)) for commit in layers) == CHAIN_LIMIT
    assert sum(spans) < 3 * 40_000


def test_a_far_recorded_commit_has_waypoints_of_the_second_grid_below_it() -> None:
    line = [CommitId(f"{number:040}") for number in range(1001)]
    planned = plan({}, line, straight=True)
    assert [layer.depth for layer in planned] == [0, 256, 512, 768, 1000]
