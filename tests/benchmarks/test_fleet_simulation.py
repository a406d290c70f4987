"""The simulated fleet loses no bytes and no checkouts, whatever its size."""

from __future__ import annotations

import pytest
from fleet_simulation import CLOSURE, HOLDER, Clones, Fleet, Share, Way, World, figures

SCALE = 40, 300, 1  # repositories, instances, seed
NODES = [2, 5, 30]


def ran(way: Way) -> Way:
    way.run()
    return way


def asked(world: World) -> set[tuple[int, int]]:
    """The nodes with the repositories that they are asked for."""
    return {(node, world.instances[it]) for node, its in enumerate(world.asked) for it in its}


def size(world: World, repositories: list[int]) -> float:
    return sum(world.costs[it].pack_bytes for it in repositories)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("way", [Fleet, Clones, Share])
def test_every_first_checkout_ends(way: type[Fleet | Clones | Share], nodes: int) -> None:
    world = World(nodes, *SCALE)
    for is_full in (False, True):
        assert len(ran(way(world, is_full=is_full)).warm) == sum(map(len, world.asked)) > 300


def test_what_a_fleet_takes_from_the_forge_does_not_grow_with_its_nodes() -> None:
    worlds = [World(nodes, *SCALE) for nodes in NODES]
    fleets = [ran(Fleet(world)) for world in worlds]
    whole = size(worlds[0], [*range(40)])
    assert [it.cloned_bytes for it in fleets] == pytest.approx([whole] * len(NODES))
    assert len({it.fetched_bytes for it in fleets}) == 1
    assert len({it.forge_requests for it in fleets}) == 1


@pytest.mark.parametrize("nodes", NODES)
def test_every_byte_of_a_mirror_comes_from_the_store_once_for_each_node_but_one(nodes: int) -> None:
    world = World(nodes, *SCALE)
    for takes_turns in (False, True):
        fleet = Fleet(world, takes_turns=takes_turns)
        fleet.run()
        taken = size(world, [it for node, it in asked(world) if node != HOLDER])
        changes = fleet.shared_out - fleet.closures_out - taken
        assert -1 <= changes <= (nodes - 1) * fleet.fetched_bytes + 1
        mirrors = fleet.shared_in - fleet.closures_in
        assert mirrors == pytest.approx(fleet.cloned_bytes + fleet.fetched_bytes)


@pytest.mark.parametrize("nodes", NODES)
def test_a_closure_is_packed_once_and_taken_by_most_others(nodes: int) -> None:
    world = World(nodes, *SCALE)
    fleet = Fleet(world, is_full=True)
    fleet.run()
    once = sum(CLOSURE * world.costs[it].pack_bytes for it in world.instances)
    every = min(4, nodes) * once
    assert fleet.closures_in + fleet.closures_out == pytest.approx(every)
    assert once <= fleet.closures_in < every  # several nodes may begin at the same moment


@pytest.mark.parametrize("nodes", NODES)
def test_nodes_alone_clone_whatever_each_is_asked_for(nodes: int) -> None:
    world = World(nodes, *SCALE)
    clones = ran(Clones(world))
    assert clones.cloned_bytes == pytest.approx(size(world, [it for _, it in asked(world)]))
    assert clones.cloned_bytes > size(world, [*range(40)])


@pytest.mark.parametrize("nodes", NODES)
def test_a_checkout_is_written_to_a_file_system_once_and_read_by_the_other_nodes(
    nodes: int,
) -> None:
    world = World(nodes, *SCALE)
    share = ran(Share(world, is_full=True))
    trees = [world.costs[it].tree_bytes for it in world.instances]
    assert share.shared_in == pytest.approx(sum(trees) + share.fetched_bytes)
    assert share.shared_out == pytest.approx((min(4, nodes) - 1) * sum(trees))


def test_the_same_seed_gives_the_same_table() -> None:
    once, again, other = (figures(World(3, 40, 300, seed)) for seed in (1, 1, 2))
    assert once == again != other
