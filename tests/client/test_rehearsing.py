"""How the log of an instance's tests is judged, and what is said of a row that does not hold."""

from __future__ import annotations

from pathlib import Path

from mirrord.client.rehearsing import PHASES, command_of, find_flaky, judge_tests, log_path
from mirrord.protocol import Instance, Recipe
from mirrord.testlogs import Outcome, find_parser, lines_about

LOG = """
=================================== FAILURES ===================================
___________________________________ test_two ___________________________________

    def test_two():
>       assert value() == 2
E       assert 1 == 2
E         in: '======'

tests/test_a.py:7: AssertionError
----------------------------- Captured stdout call -----------------------------
noise
_________________________________ test_three ___________________________________
E       KeyError: 'x'
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
FAILED tests/test_a.py::test_two - assert 1 == 2
FAILED tests/test_a.py::test_three - KeyError: 'x'
========================= 2 failed, 1 passed in 0.10s ==========================
"""
BEFORE, AFTER = PHASES


def instance(fail: list[str], keep: list[str], test_patch: str = "") -> Instance:
    return Instance(
        id="a", dataset="d", mirror="o__n", repo="o/n", base_commit=None,
        fail_to_pass=fail, pass_to_pass=keep, test_patch=test_patch,
    )  # fmt: skip


def test_a_row_that_holds_has_nothing_unexpected() -> None:
    parser = find_parser("pytest")
    assert parser
    row = instance(["tests/test_a.py::test_two"], ["tests/test_a.py::test_one"])
    assert judge_tests(BEFORE, row, parser(LOG), LOG) == ([], "")


def test_a_row_that_does_not_hold_says_which_tests_and_why() -> None:
    parser = find_parser("pytest")
    assert parser
    start = "tests/test_a.py::"
    row = instance([f"{start}test_two", f"{start}test_one"], [f"{start}test_gone"])
    found, said = judge_tests(AFTER, row, parser(LOG), LOG)
    assert said == (
        f"1 of 2 FAIL_TO_PASS do not pass, such as {start}test_two and"
        f" 1 of 1 PASS_TO_PASS do not pass, such as {start}test_gone"
    )
    assert found[0].to_json() | {"lines": ...} == {
        "step": "tests after", "test": f"{start}test_two", "expected": "pass",
        "outcome": "failed", "lines": ...,
    }  # fmt: skip
    assert found[0].lines[-3:] == [
        "E       assert 1 == 2",
        "E         in: '======'",
        "tests/test_a.py:7: AssertionError",
    ]
    assert (found[1].outcome, found[1].test) == (None, f"{start}test_gone")
    assert found[1].lines, "the end of the log may say why it is not there"

    passed = judge_tests(BEFORE, row, parser(LOG), LOG)[0][0]
    assert (passed.test, passed.expected, passed.outcome) == (f"{start}test_one", "fail", "passed")


def test_the_lines_about_a_test_are_its_last() -> None:
    log = (
        "test_b (m.T) ... FAIL\n\n======\nFAIL: test_b (m.T)\n------\nTraceback:\n"
        "AssertionError: 1 != 2\n\n======\nRan 1 test in 0.1s\n\nFAILED (failures=1)\n"
    )
    assert lines_about(log, "test_b (m.T)") == ["Traceback:", "AssertionError: 1 != 2"]
    assert lines_about(log, "absent")[-1] == "FAILED (failures=1)"


def test_a_command_names_the_files_of_the_test_patch_or_those_of_the_tests() -> None:
    recipe = Recipe(key="k", python="3.11", test_command="pytest -rA")
    patch = "diff --git a/tests/test a.py b/tests/test a.py\n"
    row = instance(["x/test_b.py::t"], [], patch)
    assert command_of(recipe, row) == "exec 2>&1\npytest -rA 'tests/test a.py'"
    row = instance(["x/test_b.py::t"], ["x/test_b.py::u", "other"])
    assert command_of(recipe, row) == "exec 2>&1\npytest -rA x/test_b.py"


def test_a_log_stays_in_its_directory(tmp_path: Path) -> None:
    path = log_path(tmp_path, "../../etc/passwd", "tests after")
    assert path.parent.parent == tmp_path
    assert path.name == "tests-after.log"
    assert log_path(tmp_path, "..", "tests after").parent.name == "%2E."
    longest = log_path(tmp_path, "ü" * 300, "tests after").parent
    longest.mkdir()
    assert longest.name == "ü" * 100


def test_a_test_that_passes_in_some_runs_only_is_flaky() -> None:
    passed, failed, error = Outcome.PASSED, Outcome.FAILED, Outcome.ERROR
    runs = [
        {"a": passed, "b": passed, "c": failed, "d": passed, "other": passed},
        {"a": passed, "b": failed, "c": error, "other": failed},
    ]
    assert find_flaky(instance(["a", "b"], ["c", "d"]), runs) == ["b", "d"]
