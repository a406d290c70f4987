"""The registry of a mirror's layers agrees with a plain list of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mirrord.host.trash import Trash
from mirrord.templates.layers import Layer, chain_of
from mirrord.templates.registry import CANDIDATES_PER_DEPTH, MirrorTemplates


def empty() -> MirrorTemplates:
    return MirrorTemplates(Path("owner__name"), Trash())


def grown(seed: int, count: int = 60) -> tuple[MirrorTemplates, dict[str, Layer]]:
    """Return random layers, some removed with all above them, as a registry and as a plain dict."""
    chance, registry = random.Random(seed), empty()
    plain: dict[str, Layer] = {}
    for number in range(count):
        base = chance.choice([None, *plain.values()])
        layer = Layer(
            tree=f"{number:040}",
            base=base.tree if base else None,
            commit="",
            time=chance.randrange(20),
            depth=base.depth + 1 if base else 1,
            size_bytes=chance.randrange(100),
            shared_bytes=0,
            whole_bytes=0,
        )
        plain[layer.tree] = layer
        registry.enter(layer)
        if number % 5 == 0:
            for tree in registry.above(chance.choice(list(plain))):
                assert registry.remove(tree).parent.name == plain.pop(tree).name
    return registry, plain


@pytest.mark.parametrize("seed", range(8))
def test_the_registry_agrees_with_a_list(seed: int) -> None:
    """After any order of adding and removing."""
    registry, plain = grown(seed)
    assert registry.layers == plain
    assert registry.own_bytes == sum(layer.size_bytes for layer in plain.values())
    for tree in plain:
        assert registry.above(tree) == {
            each for each, layer in plain.items() if plain[tree] in chain_of(layer, plain)
        }


@pytest.mark.parametrize("seed", range(8))
def test_candidates_are_the_nearest_of_each_depth(seed: int) -> None:
    """With the layers below them, and without unproven ones."""
    registry, plain = grown(seed)
    unproven = registry.unproven = set(random.Random(seed).sample(sorted(plain), 3))
    whole = [
        layer
        for layer in plain.values()
        if not unproven & {each.tree for each in chain_of(layer, plain)}
    ]
    for time in range(-1, 21):
        candidates = registry.candidates(time)
        assert all(chain == chain_of(chain[0], plain) for chain in candidates)
        for depth in {layer.depth for layer in plain.values()}:
            away = sorted(abs(layer.time - time) for layer in whole if layer.depth == depth)
            found = [abs(top.time - time) for top, *_ in candidates if top.depth == depth]
            assert found == away[:CANDIDATES_PER_DEPTH]


def test_a_worker_gets_few_candidates_of_many_layers() -> None:
    """A thousand variants of one tree: the keyframe, and the nearest variants."""
    registry = empty()
    registry.enter(Layer("k" * 40, None, "", 0, 1, 0, 0, 0))
    for number in range(1000):
        registry.enter(Layer(f"{number:040}", "k" * 40, "", number, 2, 0, 0, 0))
    candidates = registry.candidates(500)
    assert [layer.time for layer in candidates[0]] == [500, 0]
    assert len(candidates) == 1 + CANDIDATES_PER_DEPTH


def test_a_layer_whose_base_is_gone_is_not_whole() -> None:
    """It is no candidate, and no error."""
    registry = empty()
    registry.enter(Layer("k" * 40, None, "", 0, 1, 0, 0, 0))
    registry.enter(Layer("d" * 40, "k" * 40, "", 0, 2, 0, 0, 0))
    registry.remove("k" * 40)
    assert not registry.is_whole("d" * 40)
    assert registry.candidates(0) == []
