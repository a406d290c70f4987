"""Tables and times, on a terminal and in a pipe."""

import os
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import pytest

from mirrord.cli.output import moment, table
from mirrord.cli.waiting import progress_line
from mirrord.model import utc_now
from mirrord.protocol import Progress

ROWS = [["a" * 16, "b" * 60, "c" * 30, "1,234"], ["d" * 16, "e" * 10, "", "7"]]
HEADER = ["ID", "PATH", "PROBLEM", "COUNT"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    return monkeypatch


def _lines(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    return [line.removeprefix("\x1b[1m").removesuffix("\x1b[0m") for line in table(HEADER, ROWS)]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20])
def test_a_table_fits_the_terminal(width: int, terminal: pytest.MonkeyPatch) -> None:
    """What other verbs take, in the first column, is never cut; what is cut or left out says so."""
    lines = _lines(width, terminal)
    assert all(len(line) <= width for line in lines)
    assert [line.split()[0] for line in lines] == ["ID", "a" * 16, "d" * 16]
    assert ("…" in lines[0] + lines[1]) == (width < 117)
    shown = {40: ["ID", "PATH", "…"], 20: ["ID", "…"]}.get(width, HEADER)
    assert lines[0].split() == shown


def test_a_pipe_gets_whole_cells_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "b" * 60 in list(table(HEADER, ROWS))[1]
    assert moment(utc_now()).count(":") >= 2


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        (timedelta(minutes=12, milliseconds=500), "12m 0s ago"),
        (timedelta(days=3, hours=2, minutes=30), "3d 2h ago"),
        (-timedelta(hours=2, minutes=5, milliseconds=-500), "in 2h 4m"),
    ],
)
def test_a_terminal_gets_ages(
    passed: timedelta, expected: str, terminal: pytest.MonkeyPatch
) -> None:
    del terminal
    assert moment(utc_now() - passed) == expected


@pytest.mark.parametrize("width", [150, 105, 75, 60, 40, 10])
def test_a_line_of_progress_has_name_bar_rate_and_the_time_left(width: int) -> None:
    """It fits the terminal, and no name in it draws anything."""
    progress = Progress(done=30, total=90, unit="commits", note="o__r\x1b[2J: " + "x" * 90)
    line = progress_line("dataset.import d", progress, 60.0, width)
    assert len(line) <= width
    assert "\x1b" not in line
    if width >= 60:
        assert line.startswith("dataset.import d")
        assert line.endswith("  0.5/s  1m 0s  2m 0s left")
        assert line.count("─") == 2 * line.count("━") > 0
    if width >= 75:
        assert "  30/90 com" in line


def test_progress_without_a_total_promises_nothing() -> None:
    assert progress_line("sync o__r", Progress(), 1.0, 80) == "sync o__r  1s"


_ANSWER = """
from mirrord.cli.output import table
from mirrord.cli.session import Session
Session().answer(None, table(["FORMAT"], [["generic"]] * 9))
"""


def _typed(terminal_lines: int, **environment: str) -> str:
    """Return what a verb writes to a terminal of so many lines: a table of ten."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        size = {"LINES": str(terminal_lines), "COLUMNS": "80", "TERM": "xterm"}
        command = [sys.executable, "-c", _ANSWER]
        subprocess.run(
            command,
            stdin=theirs,
            stdout=theirs,
            check=True,
            env={**os.environ, "NO_COLOR": "", **size, **environment},
        )
        os.close(theirs)
        written = b""
        with suppress(OSError):  # EIO is the end of a terminal
            while part := screen.read(65536):
                written += part
    return written.decode()


def test_a_list_that_is_longer_than_the_terminal_goes_through_the_pager() -> None:
    """As git's, and NO_COLOR is heard."""
    assert "GENERIC" in _typed(5, PAGER="tr a-z A-Z")
    short = _typed(500, PAGER="tr a-z A-Z")
    assert ("generic" in short, "\x1b[1mFORMAT" in short) == (True, True)
    assert "\x1b" not in _typed(500, NO_COLOR="1")
