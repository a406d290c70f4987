"""Logs: structlog set up once per process, one request id that follows a request, secrets masked before a line is written.

Owns the processors, the request id (one of structlog's context variables: tasks inherit it, worker calls carry it) and the bridge
from the standard library's logging. Never raises to a caller because a line could not be written: a full disk under stderr must
not stop a checkout. Workers call `configure` too, so that their lines look the same.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Hashable, MutableMapping
from functools import partial
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

_SELDOM_S = 60.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"]*@")
_HIDDEN_WORDS = r"(?:access_|private_|auth_)?token|password|passwd|secret|api_?key|authorization"
_SECRET_PAIR = re.compile(rf"(?i)\b({_HIDDEN_WORDS})(\s*[=:]\s*)(?:basic |bearer )?[^\s&'\"]+")


_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}


# -- request ids ------------------------------------------------------------------------------------------------------


def new_request_id() -> str:
    return f"{random.getrandbits(64):016x}"  # no system call: each lets go of the interpreter, and waits for it again


def usable_request_id(text: str) -> bool:
    """Whether a client's own id may be taken: short, and nothing in it that could forge a log line or a header."""
    return bool(_REQUEST_ID.fullmatch(text))


def bind_request(identity: str) -> None:
    """Everything that the present task logs from now on, and what it starts, carries this request id."""
    structlog.contextvars.bind_contextvars(request_id=identity)


# -- secrets ----------------------------------------------------------------------------------------------------------


def masked(text: str) -> str:
    """Hide what stands between `://` and `@` in URLs, and the values of words such as `token=`."""
    if "@" in text:
        text = _USERINFO.sub(r"\g<scheme>***@", text)
    if "=" in text or ":" in text:
        text = _SECRET_PAIR.sub(r"\1\2***", text)
    return text


def _masked_value(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: _masked_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked_value(inner) for inner in value]
    if isinstance(value, BaseException):
        return masked(repr(value))
    return value


def _mask_secrets(
    _logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for key, value in event.items():
        event[key] = _masked_value(value)
    return event


# -- set-up -----------------------------------------------------------------------------------------------------------


def configure(level: Level = "info", form: Format = "auto", stream: TextIO | None = None) -> None:
    """Set up logging of this process to `stream` (default stderr): JSON lines, or coloured text on a terminal.

    May be called again: a reload changes the level of every logger there is.
    """
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            *_shared_processors(),
            *(_console_renderer(out) if console else _json_renderer()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _LineWriter(out),
        cache_logger_on_first_use=False,
    )
    _bridge_standard_logging(number)


def _shared_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _json_renderer() -> list[Processor]:
    return [
        structlog.processors.format_exc_info,
        _mask_secrets,
        structlog.processors.JSONRenderer(default=str),
    ]


def _console_renderer(out: TextIO) -> list[Processor]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [structlog.processors.format_exc_info, _mask_secrets, renderer]


class _LineWriter:
    """One line per event, unbuffered; a line that cannot be written is lost, not raised."""

    def __init__(self, out: TextIO) -> None:
        self._write = _writer(out)
        self.debug, self.info, self.warning, self.error, self.critical = (
            partial(self._line, priority(level, out))
            for level in ("debug", "info", "warning", "error", "critical")
        )
        self.msg = self.log = self.info
        self.warn, self.exception, self.fatal = self.warning, self.error, self.critical

    def _line(self, prefix: str, line: str) -> None:
        try:
            self._write(f"{prefix}{line}\n")
        except (OSError, ValueError):  # ENOSPC, EPIPE; ValueError when the stream was closed
            pass


def priority(level: str, out: TextIO) -> str:
    """What a line of this level begins with on `out`: sd-daemon(3)'s prefix where that is the journal, else nothing."""
    try:
        found = os.fstat(out.fileno())
    except (OSError, ValueError):
        return ""
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return f"<{_PRIORITIES[level]}>" if is_journal else ""


def _writer(out: TextIO) -> Callable[[str], int]:
    """Straight to the descriptor where there is one: a stream keeps what a full disk refused, and grows."""
    try:
        descriptor = out.fileno()
    except OSError:
        return out.write
    return lambda text: os.write(descriptor, text.encode("utf-8", "backslashreplace"))


# -- lines that a client could repeat for ever ------------------------------------------------------------------------


class Seldom:
    """Says when to log what may happen thousands of times a second: once a minute for each key, with how often it happened."""

    def __init__(self) -> None:
        self._told: dict[Hashable, tuple[float, int]] = {}

    def count(self, key: Hashable) -> int:
        """Count one more; how often it happened since the last line, where it is time for another, else 0."""
        now = time.monotonic()
        told_at, count = self._told.get(key, (now - _SELDOM_S, 0))
        is_time = now - told_at >= _SELDOM_S
        self._told[key] = (now, 0) if is_time else (told_at, count + 1)
        return count + 1 if is_time else 0


# -- the standard library's logging -----------------------------------------------------------------------------------


class _Bridge(logging.Handler):
    """Libraries log with `logging`; their lines come out as ours, named by their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, "text": record.getMessage()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        structlog.get_logger().log(record.levelno, "library.logged", **fields)


_QUIET = {
    "uvicorn.access": logging.CRITICAL,
    "uvicorn.error": logging.ERROR,
    "apscheduler": logging.WARNING,
    "watchdog": logging.WARNING,
    "asyncio": logging.WARNING,
}


def _bridge_standard_logging(level: int) -> None:
    root = logging.getLogger()
    root.handlers = [_Bridge()]
    root.setLevel(max(level, logging.INFO))
    for name, floor in _QUIET.items():
        logging.getLogger(name).setLevel(max(level, floor))
    logging.captureWarnings(True)
