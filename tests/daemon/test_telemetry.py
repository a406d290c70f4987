"""Logs: one JSON object a line, with the request id and without secrets; logging never fails."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest
import structlog

from mirrord import telemetry


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """A stream that receives all logs during one test."""
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    stream = io.StringIO()
    telemetry.configure("info", "json", stream)
    yield stream
    structlog.reset_defaults()
    logging.getLogger().handlers, logging.getLogger().level = handlers, level
    logging.captureWarnings(False)


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_json_with_event_level_and_utc_time(out: io.StringIO) -> None:
    structlog.get_logger().info("mirror.synced", mirror="a__b", duration_s=1.5)
    (line,) = lines(out)
    assert line.pop("timestamp").endswith("Z")  # type: ignore[attr-defined]
    assert line == {"event": "mirror.synced", "mirror": "a__b", "duration_s": 1.5, "level": "info"}


def test_a_bound_request_id_is_on_every_line_of_its_context(out: io.StringIO) -> None:
    """And on no other."""
    log = structlog.get_logger()

    def request() -> None:
        telemetry.bind_request("r-1")
        log.info("a.b")

    copy_context().run(request)
    log.info("c.d")
    assert [line.get("request_id") for line in lines(out)] == ["r-1", None]


@pytest.mark.parametrize(
    "text",
    [
        "https://user:s3cret@host/x.git",
        "https://s3cret@host/x.git",
        "fatal: unable to access 'https://u:s3cret@p@host/x'",
        "https://user:ab/cds3cret@host/x.git",
        "https://user:12/ab@s3cret:%=@host/x.git",
        "https://ab/cds3cret@host/x.git",
        "https://host/x?access_token=s3cret&y=1",
        "Authorization: Basic s3cret",
        "password = s3cret",
    ],
)
def test_secrets_are_masked_everywhere(out: io.StringIO, text: str) -> None:
    """In the message, in fields, in nested fields, in exceptions."""
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger().exception("a.b", url=text, facts={"urls": [text]})
    assert "s3cret" not in out.getvalue()
    assert "s3cret" not in telemetry.masked(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("https://me:a/b@host/x", "https://***@host/x"),
        ("https://host.example/a@b", "https://host.example/a@b"),
        ("file:///srv/a@b", "file:///srv/a@b"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("ssh://git:pw@host/x", "ssh://git:***@host/x"),
        ("https://host/x?private_token=abc&b=c", "https://host/x?private_token=***&b=c"),
        ("unable to access 'https://a:b@c/': no", "unable to access 'https://***@c/': no"),
        ("nothing here", "nothing here"),
    ],
)
def test_secrets_of_urls_are_masked(text: str, expected: str) -> None:
    assert telemetry.masked(text) == expected


def test_a_url_without_a_secret_is_not_changed() -> None:
    assert (
        telemetry.masked("https://github.com/psf/requests.git and a@b.c")
        == "https://github.com/psf/requests.git and a@b.c"
    )


def test_libraries_log_in_the_same_form(out: io.StringIO) -> None:
    logging.getLogger("some.library").warning("it is %s", "odd")
    (line,) = lines(out)
    assert (line["event"], line["logger"], line["text"], line["level"]) == (
        "library.logged",
        "some.library",
        "it is odd",
        "warning",
    )


def test_a_line_that_cannot_be_written_is_lost_silently() -> None:
    """A full disk under the log must not stop a checkout."""
    with open("/dev/full", "w") as full:
        telemetry.configure("info", "json", full)
        structlog.get_logger().info("a.b")
        structlog.reset_defaults()
        logging.getLogger().handlers = []
        logging.captureWarnings(False)


def test_a_reload_changes_the_level_of_existing_loggers(out: io.StringIO) -> None:
    log = structlog.get_logger()
    log.debug("a.b")
    telemetry.configure("debug", "json", out)
    log.debug("c.d")
    assert [line["event"] for line in lines(out)] == ["c.d"]


@pytest.mark.parametrize(
    ("text", "usable"),
    [("abc-1.2_X", True), ("", False), ("a b", False), ("x" * 65, False), ("a\n", False)],
)
def test_only_harmless_request_ids_are_accepted(text: str, usable: bool) -> None:
    """An id ends up in headers and log lines."""
    assert telemetry.usable_request_id(text) is usable


_PROGRAM = """
import os, signal, sys
from mirrord import telemetry
telemetry.configure("info", "json", buffered=True)
for number in range(5000):
    telemetry.log.info("a.b", number=number)
    if number % 1000 == 999:
        telemetry.log.error("c.d", number=number)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(0)", 0),
        ("raise RuntimeError", 1),
        ("telemetry.flush(); os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),  # an error was the last line
    ],
)
def test_lines_that_a_thread_writes_are_whole_in_order_and_all_there(
    end: str, status: int, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as file:
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(end=end)],
            stderr=file, env={**os.environ, "PYTHONUNBUFFERED": ""}, check=False,
        )  # fmt: skip
    found = [line for line in (tmp_path / "log").read_text().splitlines() if line[0] == "{"]
    logged = [(line["event"], line["number"]) for line in map(json.loads, found)]
    wanted = [(event, n) for n in range(5000) for event in _events_of(n)]
    assert (ran.returncode, logged) == (status, wanted)


def _events_of(number: int) -> list[str]:
    return ["a.b", "c.d"] if number % 1000 == 999 else ["a.b"]


def test_a_line_is_written_without_another_or_an_end() -> None:
    program = (
        'telemetry.configure("info", "json", buffered=True); telemetry.log.info("a.b"); input()'
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"from mirrord import telemetry; {program}"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as waiting:  # fmt: skip
        assert waiting.stderr is not None
        assert b"a.b" in waiting.stderr.readline()
        waiting.kill()
