"""The threat model names existing tests and every attack of the red team."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from redteam.__main__ import ATTACKS

PROJECT = Path(__file__).parents[2]


def rows(file: str) -> list[list[str]]:
    """The cells of a file's table, without its head."""
    lines = (PROJECT / file).read_text().splitlines()
    return [line[2:-2].split(" | ") for line in lines if line.startswith("| ")][1:]


def proofs() -> dict[str, list[str]]:
    """Return the tests of each attack."""
    return {
        attack: re.findall(r"`([^`]+)`", tests) for attack, tests in rows("tests/redteam/proofs.md")
    }


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((PROJECT / "tests" / file).read_bytes())
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_attack_has_proofs() -> None:
    attacks = [f"{attacker}: {attack}" for attacker, attack, _ in rows("docs/threat-model.md")]
    assert [re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", attack) for attack in attacks] == [*proofs()]


def test_every_proof_of_the_threat_model_exists() -> None:
    listed = proofs()
    assert len(listed) > 50
    for attack, names in listed.items():
        assert names, attack
        for name in names:
            file, _, test = name.partition("::")
            assert name.startswith("redteam ") or test in functions_of(file), (attack, name)


def test_every_attack_that_is_tried_is_in_the_threat_model() -> None:
    listed = {name for names in proofs().values() for name in names if name.startswith("redteam ")}
    assert listed == {f"redteam {attack.name}" for attack in ATTACKS}
