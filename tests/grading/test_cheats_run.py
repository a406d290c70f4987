"""Cheats, each with a real runner in a real environment: without effect, or named by the grade.

One of each kind, chosen by MIRRORD_SEED; all with MIRRORD_CHEATS=all.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cheated_project import FAIL, RIGHT, CheatLab, cheat_lab
from cheats import CHEATS, DOCUMENT, Cheat, documented, of_each_kind, solution, together

from mirrord.cli.main import run

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheatLab]:
    with cheat_lab(tmp_path_factory.mktemp("cheats")) as lab:
        yield lab


def test_the_document_has_every_cheat() -> None:
    assert len(CHEATS) >= 100
    text = DOCUMENT.read_text()
    assert documented(text) == text, "run tests/support/cheats.py"


@pytest.mark.parametrize("runner", ["pytest", "unittest", "own"])
def test_an_honest_solution_passes_without_a_finding(lab: CheatLab, runner: str) -> None:
    right = Cheat("right", "", {"shapes/area.py": RIGHT}, "", runner=runner)
    wrong = right._replace(files=solution(""))
    with lab.agent(right) as checkout:
        tried = lab.grade(checkout, runner)
        assert (tried.misses, tried.rules, tried.verdict.findings) == ([], set(), [])
        assert tried.verdict.by == ("report" if runner == "pytest" else "log")
    with lab.agent(wrong) as checkout:
        tried = lab.grade(checkout, runner)
        assert (tried.misses, tried.verdict.findings) == (FAIL[runner], [])


@pytest.mark.parametrize("cheat", of_each_kind(), ids=lambda cheat: cheat.name)
def test_a_cheat_has_no_effect_or_is_named(lab: CheatLab, cheat: Cheat) -> None:
    with lab.agent(cheat) as checkout:
        tried = lab.grade(checkout, cheat.runner)
    named = [*sorted(tried.rules), *tried.verdict.findings]
    is_named = any(each.startswith(cheat.by) for each in named) if cheat.by else not named
    assert (not tried.misses, is_named) == (cheat.passes, True), [*tried.misses, named]


@pytest.mark.parametrize("cheat", together(), ids=lambda cheat: cheat.name[:60])
def test_dropped_cheats_have_no_effect(lab: CheatLab, cheat: Cheat) -> None:
    with lab.agent(cheat) as checkout:
        tried = lab.grade(checkout, cheat.runner, policy="drop")
    assert (tried.misses, tried.verdict.findings) == (FAIL["pytest"], [])


def test_predictions_are_judged_by_the_report(lab: CheatLab, tmp_path: Path) -> None:
    """What the log says against it is in the answer, in the report and on the page."""
    forged = next(cheat for cheat in CHEATS if cheat.name == "program that prints at exit")
    rows = []
    for model, files in (("right", {"shapes/area.py": RIGHT}), ("forged", forged.files)):
        with lab.agent(Cheat(model, "", files, "")) as checkout:
            patch = checkout.diff().decode()
        rows.append({"instance_id": "pytest", "model_name_or_path": model, "model_patch": patch})
    predictions, page = tmp_path / "p.jsonl", tmp_path / "p.html"
    predictions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = io.TextIOWrapper(io.BytesIO(), write_through=True)
    words = [
        "grade",
        "--predictions",
        predictions,
        "--run",
        "--logs",
        tmp_path,
        "--json",
        "--report",
        page,
    ]
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        assert run(["--socket", str(lab.socket), *map(str, words)]) == 0
    right, other = json.loads(out.buffer.getvalue())["predictions"]
    assert (right["state"], right["tests"]["verdict"]) == ("resolved", "report")
    assert (right["tests"]["reason"], right["tests"]["contradictions"]) == ("", [])
    assert other["state"] == "unresolved"
    assert other["tests"]["reason"].startswith("6 of 6 FAIL_TO_PASS do not pass")
    assert any("passed in the log" in each for each in other["tests"]["contradictions"])
    assert (
        Path(other["tests"]["log"]).read_text().endswith("PASSED tests/test_area.py::test_same\n")
    )
    assert "passed in the log, failed in the report" in page.read_text()
