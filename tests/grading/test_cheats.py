"""Known cheats, planted in an agent's checkout: all are named, and none that is dropped changes the
outcome of a real pytest run in the grader's tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from graded_project import CHEATS, HIDDEN, HONEST, GradingLab, grading_lab, outcome, write

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GradingLab]:
    with grading_lab(tmp_path_factory.mktemp("cheats")) as lab:
        yield lab


def test_there_are_many() -> None:
    assert len(CHEATS) >= 30
    assert sum(cheat.works for cheat in CHEATS.values()) >= 18


def test_the_honest_wrong_solution_fails(lab: GradingLab) -> None:
    with lab.agent() as checkout, checkout.grade() as grade:
        assert outcome(grade.path) == HONEST
        assert grade.steering == []
        assert grade.report.changed == 1


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_one_and_is_named(lab: GradingLab, name: str) -> None:
    cheat = CHEATS[name]
    with lab.agent(cheat) as checkout:
        with checkout.grade() as grade:  # as configured: it reports
            assert not cheat.inert or outcome(grade.path) == HONEST
            assert cheat.rules <= {found.rule for found in grade.steering}
            assert all(found.action != "dropped" for found in grade.steering)
        if cheat.works:  # in the agent's own tree
            for path, content in HIDDEN.items():
                write(checkout.path / path, content)
            assert outcome(checkout.path)[0] == 0


_ALONE = ("tests behind a link",)  # there are no tests beside it


@pytest.mark.parametrize("names", [CHEATS.keys() - _ALONE, _ALONE], ids=["together", "alone"])
def test_what_is_dropped_changes_nothing(lab: GradingLab, names: Collection[str]) -> None:
    cheats = [cheat for name, cheat in CHEATS.items() if name in names]
    with lab.agent(*cheats) as checkout, checkout.grade(policy="drop") as grade:
        assert outcome(grade.path) == HONEST
        assert {found.action for found in grade.steering} <= {"dropped", "left", "restored"}
        for cheat in cheats:
            assert cheat.rules <= {found.rule for found in grade.steering}
