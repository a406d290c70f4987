"""The verdict on a run of tests: by the runner's own report where it has one, else by its log.

The report comes through a pipe, from a plugin of pytest that the tree can neither name nor write
(`reporter.py`). Everything else that a run leaves, its log and its exit status, may be the words of
the code under test: where they contradict the report, or each other, the findings say so. Does no
requests.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ProofFailedError
from ..presence import matching
from ..testlogs import Outcome, Outcomes, Parser

_FINDINGS_MAX = 20
# a parser of others may take any time for a line, and the code under test may print millions
_LINES_S = 10.0
_PYTEST = re.compile(r"(?:^|[\s/])(?:pytest|py\.test)(?=\s|$)")
_WORDS = {"passed": "PASSED", "xfailed": "XFAIL", "xpassed": "XPASS", "failed": "FAILED"}
_AROUND = {"failed": "ERROR", "xfailed": "XFAIL"}  # in setup and teardown
_RANKS = {"failed": 0, "skipped": 1, "xfailed": 2, "xpassed": 3, "passed": 3}
_FAILED = {Outcome.FAILED, Outcome.ERROR}


class Reporter:
    """The plugin for one run: its module has a name, and its lines a key, that nobody knows."""

    def __init__(self) -> None:
        self.module, self.key = f"report_{os.urandom(8).hex()}", os.urandom(32).hex().encode()

    @property
    def text(self) -> bytes:
        return _plugin()

    @property
    def setup(self) -> list[str]:
        """Lines of a script that is beside its pipe and its directory, which are named after it."""
        return [
            'export MIRRORD_REPORT="$PWD/$0.report"',
            'export PYTHONPATH="$PWD/$0.d${PYTHONPATH:+:$PYTHONPATH}"',
            f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:+$PYTEST_ADDOPTS }}-p {self.module}"',
        ]

    def read(self, lines: bytes) -> PluginReport:
        """Read what came through the pipe; other lines than the plugin's are a finding."""
        report = PluginReport()
        for line in lines.splitlines():
            key, _, text = line.partition(b" ")
            if key == self.key:
                report.add(*json.loads(text))
            else:
                report.note("something else than the runner wrote into its report")
        return report


@cache
def _plugin() -> bytes:
    return Path(__file__).with_name("reporter.py").read_bytes()


def can_report(environment: Path | None) -> bool:
    """Return whether an environment's pytest can load the plugin: 2.8, on Python 3.6, or later."""
    if environment is None:
        return False
    for path in matching(environment, "lib/python3.*/site-packages/pytest-*-info"):
        python = path.parts[-3].rpartition(".")[2]
        version = re.match(r"pytest-(\d+)\.(\d+)", path.name)
        if version and python.isdigit() and int(python) >= 6:
            return (int(version[1]), int(version[2])) >= (2, 8)
    return False


class PluginReport:
    """What the plugin reported: the phases of each test, notes, and pytest's exit status."""

    def __init__(self) -> None:
        self.began = False
        self.exit_status: int | None = None
        self.findings: dict[str, None] = {}
        self._tests: dict[str, list[str]] = {}

    def add(self, kind: str, *fields: Any) -> None:
        if self.exit_status is not None:
            self.note("the report goes on after its end")
        if kind == "begin":
            self.began = True
        elif kind == "end":
            self.exit_status = fields[0]
        elif kind == "note":
            self.note(fields[0])
        else:
            self._add_phase(*fields)

    def note(self, finding: str) -> None:
        if len(self.findings) < _FINDINGS_MAX:
            self.findings[finding] = None

    def _add_phase(self, test: str, phase: str, raised: str | None, told: str, by: str) -> None:
        """Add a phase by the worse of what it raised and what hooks made of it."""
        # pytest-rerunfailures tells `rerun`, then runs all phases of the test again
        if phase == "setup" or told == "rerun":
            self._tests[test] = []
        if told == "rerun":
            return
        if raised is None:
            self.note(f"{test} was reported and did not run")
        outcome = told if raised == "elsewhere" else raised or "failed"
        if _RANKS.get(told, 0) > _RANKS[outcome]:
            self.note(f"{test}: a hook turned {outcome} into {told}")
        elif told in _RANKS:
            outcome = told
        if by:
            self.note(f"{test}: {outcome} by {by}")
        words = _WORDS if phase == "call" else _AROUND
        if word := words.get(outcome):
            self._tests.setdefault(test, []).append(word)

    @property
    def failed(self) -> int:
        return sum(bool({"FAILED", "ERROR"} & {*words}) for words in self._tests.values())

    def summary(self) -> str:
        """Return the summary that pytest -rA prints, for a parser with its quirks.

        Skipped tests are in none.
        """
        return "".join(f"{word} {test}\n" for test, words in self._tests.items() for word in words)


VerdictBy = Literal["report", "log"]


class Verdict(NamedTuple):
    """The outcomes of a run, by the runner's `report` or its `log`, and what contradicts them."""

    by: VerdictBy
    outcomes: Outcomes
    findings: list[str]


def judge_run(
    command: str,
    report: PluginReport | None,
    log: str,
    exit_status: int | None,
    parser: Parser,
    tests: Collection[str],
) -> Verdict:
    """Judge a run of `tests`. `report` is None where the environment has no pytest that can, and
    `exit_status` where it is not the runner's.
    """
    logged = parser(log)
    # a parser of another runner's log cannot read the summary of the report
    reads_pytest = parser("PASSED a::b") == {"a::b": Outcome.PASSED}
    if report and reads_pytest and (report.began or _PYTEST.search(command)):
        outcomes = parser(report.summary())
        for finding in _contradictions(report, outcomes, logged, exit_status, tests):
            report.note(finding)
        return Verdict("report", outcomes, [*report.findings])
    findings = _contradictions_in(log, logged, exit_status, parser, tests)
    return Verdict("log", logged, [*findings])


def _contradictions(
    report: PluginReport,
    outcomes: Outcomes,
    logged: Outcomes,
    exit_status: int | None,
    tests: Collection[str],
) -> Iterator[str]:
    if not report.began:
        yield "pytest sent no report"
    elif report.exit_status is None:
        yield f"pytest did not finish: exit status {exit_status}"
    elif exit_status is not None and report.exit_status != exit_status:
        yield f"exit status {exit_status}, but pytest reported {report.exit_status}"
    elif exit_status == 0 and report.failed:
        yield f"exit status 0, but {report.failed} tests failed"
    for test in tests:
        told, truth = logged.get(test), outcomes.get(test)
        if told is Outcome.PASSED and truth is not Outcome.PASSED:
            yield f"{test}: passed in the log, {truth or 'not passed'} in the report"
        elif told in _FAILED and truth is Outcome.PASSED:
            yield f"{test}: {told} in the log, passed in the report"


def _contradictions_in(
    log: str, logged: Outcomes, exit_status: int | None, parser: Parser, tests: Collection[str]
) -> Iterator[str]:
    """Yield what a log says against itself or the exit status."""
    failed = [test for test, outcome in logged.items() if outcome in _FAILED]
    if failed and exit_status == 0:
        yield f"exit status 0, but the log has {len(failed)} failed tests"
    if exit_status and logged and not failed:
        yield f"exit status {exit_status}, but the log has no failed test"
    wanted, both = {*tests}, dict[str, set[Outcome]]()
    lines, ends = log.split("\n"), time.monotonic() + _LINES_S
    for number, line in enumerate(lines):
        if time.monotonic() > ends:
            yield f"compared with each other were {number} of the log's {len(lines)} lines"
            break
        with suppress(ProofFailedError):  # a parser of others may want more than a line
            for test, outcome in parser(line).items():
                if test in wanted:
                    both.setdefault(test, set()).add(outcome)
    twice = [test for test, told in both.items() if {Outcome.PASSED, Outcome.FAILED} <= told]
    yield from (f"{test}: passed and failed in the log" for test in twice[:_FINDINGS_MAX])
