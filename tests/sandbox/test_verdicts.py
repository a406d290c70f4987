"""The verdict on a run: what the runner reported counts, and what contradicts it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirrord.sandbox.verdicts import Reporter, Verdict, can_report, judge_run
from mirrord.testlogs import Outcome, find_parser

A, B = "tests/test_a.py::test_a", "tests/test_a.py::test_b"
PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
HONEST = f"PASSED {A}\nFAILED {B} - assert 0\n"


def phases(test: str, raised: str | None, told: str | None = None, by: str = "") -> list[Any]:
    around = [["test", test, when, "passed", "passed", ""] for when in ("setup", "teardown")]
    return [around[0], ["test", test, "call", raised, told or raised, by], around[1]]


def judged(
    *lines: list[Any], log: str = HONEST, status: int = 1, foreign: bytes = b"", command: str = "pytest -rA"
) -> Verdict:  # fmt: skip
    reporter, parser = Reporter(), find_parser("pytest")
    assert parser
    sent = b"".join(reporter.key + b" " + json.dumps(line).encode() + b"\n" for line in lines)
    return judge_run(command, reporter.read(sent + foreign), log, status, parser, [A, B])


BEGIN, END = ["begin", "9.2"], ["end", 1]
WHOLE = [BEGIN, *phases(A, "passed"), *phases(B, "failed"), END]


def test_a_report_that_nothing_contradicts_has_no_finding() -> None:
    assert judged(*WHOLE) == ("report", {A: PASSED, B: FAILED}, [])


@pytest.mark.parametrize(
    ("lines", "options", "finding"),
    [
        (WHOLE, {"log": f"PASSED {A}\nPASSED {B}\n"}, f"{B}: passed in the log, failed in the report"),
        (WHOLE, {"log": f"FAILED {A}\nFAILED {B}\n"}, f"{A}: failed in the log, passed in the report"),
        (WHOLE, {"status": 0}, "exit status 0, but pytest reported 1"),
        ([*WHOLE[:-1], ["end", 0]], {"status": 0}, "exit status 0, but 1 tests failed"),
        (WHOLE[:-1], {}, "pytest did not finish: exit status 1"),
        (WHOLE, {"foreign": b'k ["end", 0]\n'}, "something else than the runner wrote into its report"),
        ([*WHOLE, *phases(B, "passed")], {}, "the report goes on after its end"),
        ([*WHOLE[:-1], ["note", "x was replaced"], END], {}, "x was replaced"),
        ([BEGIN, *phases(A, "passed"), *phases(B, "failed", "passed"), END], {}, f"{B}: a hook turned failed into passed"),
        ([BEGIN, *phases(A, "passed"), *phases(B, "failed", "xfailed"), END], {}, f"{B}: a hook turned failed into xfailed"),
        ([BEGIN, *phases(A, "passed"), *phases(B, None, "passed"), END], {}, f"{B} was reported and did not run"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(
    lines: list[list[Any]], options: dict[str, Any], finding: str
) -> None:
    verdict = judged(*lines, **options)
    assert finding in verdict.findings
    assert verdict.by == "report"
    if lines is not WHOLE or "foreign" in options:
        assert verdict.outcomes.get(B) is (PASSED if "after its end" in finding else FAILED)


def test_who_skipped_a_test_or_expected_its_failure_is_named() -> None:
    """And a skip is no pass, as it is in no log of pytest's."""
    lines = [BEGIN, *phases(A, "skipped", by="src/a.py"), *phases(B, "xfailed", by="src/a.py"), END]
    verdict = judged(*lines, log="")
    assert verdict.outcomes == {B: PASSED}
    assert verdict.findings == [f"{A}: skipped by src/a.py", f"{B}: xfailed by src/a.py"]


def test_the_worst_phase_counts_and_a_rerun_begins_again() -> None:
    torn = ["test", A, "teardown", "failed", "failed", ""]
    again = [*phases(B, "failed", "rerun")[:2], *phases(B, "passed")]
    verdict = judged(BEGIN, *phases(A, "passed")[:2], torn, *again, END, log="")
    assert verdict.outcomes == {A: Outcome.ERROR, B: PASSED}


def test_a_pytest_that_sends_nothing_has_passed_nothing() -> None:
    """But for a command that is not pytest's: there the log counts, and the verdict says so."""
    assert judged(log=f"PASSED {A}\n").outcomes == {}
    assert "pytest sent no report" in judged(log=f"PASSED {A}\n").findings
    assert judged(command="tox -e py")[:2] == ("log", {A: PASSED, B: FAILED})
    assert judged(*WHOLE, command="tox -e py").by == "report"


@pytest.mark.parametrize(
    ("log", "status", "findings"),
    [
        (HONEST, 1, []),
        (HONEST + f"PASSED {B}\n", 1, ["exit status 1, but the log has no failed test", f"{B}: passed and failed in the log"]),
        (HONEST, 0, ["exit status 0, but the log has 1 failed tests"]),
        (f"PASSED {A}\n", 0, []),
        ("", 2, []),
    ],
)  # fmt: skip
def test_a_log_is_held_to_itself_and_to_the_exit_status(
    log: str, status: int, findings: list[str]
) -> None:
    parser = find_parser("pytest")
    assert parser
    verdict = judge_run("bin/test", None, log, status, parser, [A, B])
    assert (verdict.by, verdict.findings) == ("log", findings)


def test_a_slow_parser_is_not_called_for_all_lines_and_the_findings_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("mirrord.sandbox.verdicts.time.monotonic", lambda: float(next(clock)))
    called: list[str] = []

    def parser(text: str) -> dict[str, Outcome]:
        called.append(text)
        return {}

    verdict = judge_run("bin/test", None, "line\n" * 99, 0, parser, [A])
    assert verdict.findings == ["compared with each other were 10 of the log's 100 lines"]
    assert called.count("line") == 10


@pytest.mark.parametrize(
    ("path", "can"),
    [
        ("python3.11/site-packages/pytest-9.2.0.dist-info", True),
        ("python3.6/site-packages/pytest-2.8.7.egg-info", True),
        ("python3.6/site-packages/pytest-2.7.3.dist-info", False),
        ("python3.5/site-packages/pytest-6.1.0.dist-info", False),
        ("python3.11/site-packages/pytest_xdist-3.8.0.dist-info", False),
    ],
)
def test_which_environments_can_report(tmp_path: Path, path: str, can: bool) -> None:
    assert not can_report(None)
    (tmp_path / "lib" / path).mkdir(parents=True)
    assert can_report(tmp_path) is can
