"""Logs: structlog, set up once per process; request ids; masking of secrets.

A line that cannot be written is lost without an error: a full disk under stderr must not stop a
checkout. The daemon's lines are written by a thread, at once with an error, and at the end.
"""

import atexit
import logging
import os
import random
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

from .quoting import as_utf8

# the one logger: events tell lines apart, not modules
log = structlog.get_logger()

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# Upstreams choose some of this text, and it is masked on the event loop: all take linear time.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"]+")
# a host that no user name looks like: an @ further on is part of the path
_PLAIN_HOST = re.compile(r"(?:(?:[A-Za-z0-9-]+\.)+[A-Za-z0-9-]+|localhost|\[[0-9A-Fa-f:.]+\])?/")
_QUERY = re.compile(
    r"([?&;](?=[^=\s?&;'\"]*(?:token|key|secret|passw|pwd|sig|auth|credential))[^=\s?&;'\"]*=)"
    r"[^&;#\s'\"]+",
    re.IGNORECASE,
)
_HIDDEN_WORDS = r"(?:access_|private_|auth_)?token|password|passwd|secret|api_?key|authorization"
_SECRET_PAIR = re.compile(rf"(?i)\b({_HIDDEN_WORDS})(\s*[=:]\s*)(?:basic |bearer )?[^\s&'\"]+")


def new_request_id() -> str:
    # `random` makes no system call; one would release the interpreter lock and wait for it again
    return f"{random.getrandbits(64):016x}"


def usable_request_id(text: str) -> bool:
    """Return whether a client's id is short, and cannot forge a log line or a header."""
    return bool(_REQUEST_ID.fullmatch(text))


def bind_request(identity: str) -> None:
    """Add a request id to every line of this task and of the tasks it starts."""
    structlog.contextvars.bind_contextvars(request_id=identity)


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """Hide `secrets`, credentials in URLs, and the values of words such as `token=`."""
    if "@" in text:
        text = _URL.sub(lambda match: without_userinfo(match[0]), text)
    if "=" in text:
        text = _QUERY.sub(r"\1***", text)
    if "=" in text or ":" in text:
        text = _SECRET_PAIR.sub(r"\1\2***", text)
    for secret in secrets:
        if len(secret) > 3:  # a shorter one protects nothing, and would blank half the sentence
            text = text.replace(secret, "***")
    return text


def mask_url(url: str) -> str:
    """Hide the secrets of a text that is one URL, valid or not."""
    return masked(without_userinfo(url))


def without_userinfo(url: str) -> str:
    """Hide user and password of a URL. A password may have a `/`, `@` or `:` that is not encoded.

    git and curl take such a URL for another one; people write it all the same.
    """
    scheme, _, rest = url.partition("://")
    userinfo, at, address = rest.rpartition("@")
    if not at or _PLAIN_HOST.match(rest):
        return url
    if scheme.lower() in {"ssh", "git+ssh", "ssh+git"}:  # the user is part of the address
        user, colon, _ = userinfo.partition(":")
        return f"{scheme}://{user}{':***' if colon else ''}@{address}"
    return f"{scheme}://***@{address}"


_HARMLESS = re.compile(r"[\w ./-]*", re.ASCII)  # ids, names, paths: `masked` looks for = @ and :


def _masked_value(value: Any) -> Any:
    if isinstance(value, str):
        return value if _HARMLESS.fullmatch(value) else as_utf8(masked(value))
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, dict):
        return {key: _masked_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked_value(inner) for inner in value]
    if isinstance(value, BaseException):
        return as_utf8(masked(repr(value)))
    return value


def configure(
    level: Level = "info",
    form: Format = "auto",
    stream: TextIO | None = None,
    *,
    buffered: bool = False,
) -> None:
    """Log to `stream` (default stderr): JSON lines, or coloured text on a terminal.

    `buffered` lines are written by a thread, unless somebody watches: on a terminal, or with
    PYTHONUNBUFFERED. May be called again: a reload changes the level.
    """
    out = stream or sys.stderr
    renderer: Processor = structlog.processors.JSONRenderer(default=str)
    if form == "console" or (form == "auto" and out.isatty()):
        plain = structlog.dev.plain_traceback
        colors = out.isatty() and not os.environ.get("NO_COLOR")
        renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    number = logging.getLevelNamesMapping()[level.upper()]
    is_watched = out.isatty() or bool(os.environ.get("PYTHONUNBUFFERED"))
    writer = _LineWriter(out, _buffer() if buffered and not is_watched else None)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lambda _logger, _method, event: _masked_value(event),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: writer,
        # so that a reload changes the level of loggers that exist
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_Bridge()]
    root.setLevel(max(number, logging.INFO))
    for name, floor in _QUIET.items():
        logging.getLogger(name).setLevel(max(number, floor))
    logging.captureWarnings(True)


# one write for each line was a seventh of the daemon's processor time
BUFFERED_S = 0.1
_BUFFERED_LINES = 2000  # more wait for the writing, as they did without a buffer


class _Buffer:
    """Lines on their way to stderr, in order. A chunk that cannot be written is lost."""

    def __init__(self) -> None:
        self._descriptor = sys.stderr.fileno()
        self._lines: deque[bytes] = deque()
        self._filled = threading.Event()
        self._writing = threading.Lock()
        self._is_open = True
        threading.Thread(target=self._work, name="log", daemon=True).start()
        atexit.register(self.close)

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        if not self._is_open or len(self._lines) > _BUFFERED_LINES:
            self.flush()
        elif not self._filled.is_set():
            self._filled.set()

    def flush(self) -> None:
        """Write what there is, in chunks that a pipe does not mix with the lines of workers."""
        with self._writing:
            chunk = b""
            while self._lines:
                line = self._lines.popleft()
                if chunk and len(chunk) + len(line) > select.PIPE_BUF:
                    self._write(chunk)
                    chunk = b""
                chunk += line
            if chunk:
                self._write(chunk)

    def close(self) -> None:
        """Write all, and from now on each line at once."""
        self._is_open = False
        self._filled.set()
        self.flush()

    def _write(self, chunk: bytes) -> None:
        with suppress(OSError):  # ENOSPC, EPIPE
            os.write(self._descriptor, chunk)

    def _work(self) -> None:
        while self._is_open:
            self._filled.wait()
            time.sleep(BUFFERED_S / 2)
            self._filled.clear()  # before the flush: a line after it fills the buffer anew
            self.flush()


# one for the process, however often it is configured
_buffer = cache(_Buffer)


def flush() -> None:
    """Write the lines that are buffered; before a process ends without Python's own end."""
    if _buffer.cache_info().currsize:
        _buffer().flush()


class _LineWriter:
    """Writes a line per event, at once or through a buffer. What cannot be written is lost."""

    def __init__(self, out: TextIO, buffer: _Buffer | None) -> None:
        # to the descriptor: a text stream would keep what a full disk refuses, and grow
        try:
            descriptor = out.fileno()
        except OSError:
            self._write: Callable[[str], object] = out.write
        else:
            add = buffer.add if buffer else partial(os.write, descriptor)
            self._write = lambda text: add(text.encode("utf-8", "backslashreplace"))
        self.debug, self.info, self.warning, self.error, self.critical = (
            partial(self._line, priority(level, out), level in {"error", "critical"})
            for level in ("debug", "info", "warning", "error", "critical")
        )
        self.msg = self.log = self.info
        self.warn, self.exception, self.fatal = self.warning, self.error, self.critical

    def _line(self, prefix: str, is_error: bool, line: str) -> None:
        with suppress(OSError, ValueError):  # ENOSPC, EPIPE; ValueError of a closed stream
            self._write(f"{prefix}{line}\n")
        if is_error:
            flush()


# syslog's, which journald reads from `<N>` at the start of a line (sd-daemon(3))
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}


def priority(level: str, out: TextIO) -> str:
    """Return the level's prefix (sd-daemon(3)) if `out` is the journal, else an empty string."""
    try:
        st = os.fstat(out.fileno())
    except (OSError, ValueError):
        return ""
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{st.st_dev}:{st.st_ino}"
    return f"<{_PRIORITIES[level]}>" if is_journal else ""


class Seldom:
    """Limits logs of frequent events: one line a minute for each key, with a count."""

    def __init__(self) -> None:
        self._logged: dict[Hashable, tuple[float, int]] = {}

    def count(self, key: Hashable) -> int:
        """Count one event. Return how many since the last line if a line is due, else 0."""
        now = time.monotonic()
        logged_at, count = self._logged.get(key, (now - 60, 0))
        is_due = now - logged_at >= 60
        self._logged[key] = (now, 0) if is_due else (logged_at, count + 1)
        return count + 1 if is_due else 0


class _Bridge(logging.Handler):
    """Turns the `logging` records of libraries into lines like ours, with the logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        fields |= {"logger": record.name, "text": record.getMessage()}
        log.log(record.levelno, "library.logged", **fields)


_QUIET = {
    "uvicorn.access": logging.CRITICAL,
    "uvicorn.error": logging.ERROR,
    "apscheduler": logging.WARNING,
    "watchdog": logging.WARNING,
    # an error at one clean stop in 30, where an event arrives as its thread ends
    "watchdog.observers.inotify": logging.CRITICAL,
    "asyncio": logging.WARNING,
}


def elapsed_s(began: float) -> float:
    """Return the seconds since `began`, of `time.perf_counter`."""
    return round(time.perf_counter() - began, 6)
