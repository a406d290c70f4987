"""The books of thousands of layers answer what looking at each of them would."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mirrord.checkouts.templates.layers import Layer, chain_of
from mirrord.checkouts.templates.registry import CANDIDATES_PER_DEPTH, MirrorTemplates
from mirrord.host.trash import Trash


def books() -> MirrorTemplates:
    return MirrorTemplates(Path("owner__name"), Trash())


def grown(seed: int, count: int = 60) -> tuple[MirrorTemplates, dict[str, Layer]]:
    """Layers on layers, some of them taken away again with all that lies on them; and the same as a
    plain list.
    """
    chance, stock = random.Random(seed), books()
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
        stock.enter(layer)
        if number % 5 == 0:
            for tree in stock.above(chance.choice(list(plain))):
                assert stock.remove(tree).parent.name == plain.pop(tree).name
    return stock, plain


@pytest.mark.parametrize("seed", range(8))
def test_the_books_say_what_the_list_says(seed: int) -> None:
    """After any order of adding and taking away."""
    stock, plain = grown(seed)
    assert stock.layers == plain
    assert stock.own_bytes == sum(layer.size_bytes for layer in plain.values())
    for tree in plain:
        assert stock.above(tree) == {
            each for each, layer in plain.items() if plain[tree] in chain_of(layer, plain)
        }


@pytest.mark.parametrize("seed", range(8))
def test_what_is_near_is_the_nearest_of_each_depth(seed: int) -> None:
    """With all that they lie on, and without what is not proven."""
    stock, plain = grown(seed)
    unproven = stock.unproven = set(random.Random(seed).sample(sorted(plain), 3))
    whole = [
        layer
        for layer in plain.values()
        if not unproven & {each.tree for each in chain_of(layer, plain)}
    ]
    for time in range(-1, 21):
        candidates = stock.candidates(time)
        assert all(chain == chain_of(chain[0], plain) for chain in candidates)
        for depth in {layer.depth for layer in plain.values()}:
            away = sorted(abs(layer.time - time) for layer in whole if layer.depth == depth)
            found = [abs(top.time - time) for top, *_ in candidates if top.depth == depth]
            assert found == away[:CANDIDATES_PER_DEPTH]


def test_a_worker_is_told_of_few_layers_however_many_there_are() -> None:
    """A thousand variants of one tree: the keyframe, and the nearest variants."""
    stock = books()
    stock.enter(Layer("k" * 40, None, "", 0, 1, 0, 0, 0))
    for number in range(1000):
        stock.enter(Layer(f"{number:040}", "k" * 40, "", number, 2, 0, 0, 0))
    candidates = stock.candidates(500)
    assert [layer.time for layer in candidates[0]] == [500, 0]
    assert len(candidates) == 1 + CANDIDATES_PER_DEPTH


def test_a_layer_whose_base_is_gone_is_not_whole() -> None:
    """It is not offered to be built on; that is no error."""
    stock = books()
    stock.enter(Layer("k" * 40, None, "", 0, 1, 0, 0, 0))
    stock.enter(Layer("d" * 40, "k" * 40, "", 0, 2, 0, 0, 0))
    stock.remove("k" * 40)
    assert not stock.is_whole("d" * 40)
    assert stock.candidates(0) == []
