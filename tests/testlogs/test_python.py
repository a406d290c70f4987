"""Test logs: SWE-bench's rules, and the expectations of a dataset."""

from __future__ import annotations

import pytest

from mirrord.testlogs import (
    Outcome,
    Want,
    arguments_of,
    find_parser,
    iter_misses,
    outcome_of,
    parser_of_repo,
)

PASSED, FAILED, SKIPPED, ERROR = Outcome

PYTEST = """
tests/test_a.py F.s [100%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_params[a b]
PASSED tests/test_a.py::test_path[/tmp/x/y.py]
SKIPPED [1] tests/test_a.py:3: no network
SKIPPED tests/test_a.py::test_skipped
XFAIL tests/test_a.py::test_known - it is
FAILED tests/test_a.py::test_two - assert 1 == 2 - no
ERROR tests/test_b.py - ImportError: x
ERROR: not a test
================== 1 failed, 3 passed, 1 skipped in 0.10s ===================
"""


def parsed(name: str, log: str) -> dict[str, Outcome]:
    parser = find_parser(name)
    assert parser is not None
    return parser(log)


def test_ids_in_a_pytest_summary_end_at_a_space() -> None:
    start = "tests/test_a.py::"
    assert parsed("parse_log_flask", PYTEST) == {
        f"{start}test_one": PASSED,
        f"{start}test_params[a": PASSED,
        f"{start}test_path[/tmp/x/y.py]": PASSED,
        f"{start}test_skipped": SKIPPED,
        f"{start}test_known": PASSED,
        f"{start}test_two": FAILED,
        "tests/test_b.py": ERROR,
    }


def test_two_projects_have_special_ids() -> None:
    assert "tests/test_a.py::test_path[/y.py]" in parsed("pytest_options", PYTEST)
    whole = parsed("pytest_v2", PYTEST + "\x1b[32mPASSED\x1b[0m tests/c.py::test\nold.py::t PASSED")
    assert whole["tests/test_a.py::test_params[a b]"] is PASSED
    assert whole["tests/test_a.py::test_two"] is FAILED
    assert (whole["tests/c.py::test"], whole["old.py::t"]) == (PASSED, PASSED)


def test_unittest_and_django_are_read() -> None:
    log = """
test_a (m.T.test_a) ... ok
test_b (m.T) ... FAIL
test_c (m.T) ... skipped 'no'
test_d (m.T) ... ERROR
test_e (m.T) ... System check identified no issues (0 silenced)
ok
A docstring. ... ok
FAIL: test_b (m.T)
"""
    assert parsed("django", log) == {
        "test_a (m.T.test_a)": PASSED,
        "test_b (m.T)": FAILED,
        "test_c (m.T)": SKIPPED,
        "test_d (m.T)": ERROR,
        "test_e (m.T)": PASSED,
        "A docstring.": PASSED,
        "test_b": FAILED,
    }


def test_sympy_is_read() -> None:
    log = """
test_sin ok
test_cos F
test_tan E
test_sec f
________ sympy/core/tests/test_a.py:test_cos ________
"""
    assert parsed("sympy", log) == {
        "test_sin": PASSED,
        "test_cos": FAILED,
        "test_tan": ERROR,
        "sympy/core/tests/test_a.py:test_cos": FAILED,
    }


@pytest.mark.parametrize(
    ("repo", "name"),
    [("psf/requests", "requests"), ("pvlib/pvlib-python", "pvlib"), ("a/b", "pytest")],
)
def test_a_repository_has_its_parser(repo: str, name: str) -> None:
    assert parser_of_repo(repo) == name


def test_a_truncated_id_means_all_with_that_prefix() -> None:
    found = {"t[log(a b)]": PASSED, "t[log(a c)]": PASSED, "t[x y]": PASSED, "t[x z]": FAILED}
    assert outcome_of("t[log(a", found) is PASSED
    assert outcome_of("t[x", found) is None
    assert outcome_of("t", found) is None
    tap = {"adds": PASSED, "later": SKIPPED}
    assert (outcome_of("- adds", tap), outcome_of("- later # SKIP why", tap)) == (PASSED, SKIPPED)


def test_an_absent_test_failed_and_a_skipped_one_is_kept() -> None:
    found = {"a": PASSED, "b": SKIPPED, "c": FAILED}
    tests = ["a", "b", "c", "d"]
    assert [(miss.test, miss.outcome) for miss in iter_misses(tests, found, Want.PASS)] == [
        ("b", SKIPPED),
        ("c", FAILED),
        ("d", None),
    ]
    assert [miss.test for miss in iter_misses(tests, found, Want.FAIL)] == ["a"]
    assert [miss.test for miss in iter_misses(tests, found, Want.KEEP)] == ["c", "d"]


def test_the_files_of_a_test_patch_are_arguments() -> None:
    patch = "".join(
        f"diff --git a/{path} b/{path}\n" for path in ("tests/a/test_b.py", "tests/c.json")
    )
    assert arguments_of(patch, "psf/requests") == ["tests/a/test_b.py"]
    assert arguments_of(patch, "django/django") == ["a.test_b"]
