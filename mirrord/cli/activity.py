"""`mirrord status --watch`: show the daemon's activity, through its restarts."""

import pwd
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache

import mirrord

from ..errors import MirrordError, NoDaemonError, ResourceError
from ..protocol import Activity, EndpointActivity
from .output import ago, cell, count, cut, seconds, size, styled, table
from .session import Session, as_json, print_line
from .waiting import amount

# a line and its style, as of `styled`
Line = tuple[str, str]
_BOLD, _RED = "1", "31"
# a shorter pause shows nothing that a person can read, and each picture is a request
_INTERVAL_MIN = timedelta(milliseconds=100)


def watch(session: Session, interval: timedelta) -> None:
    """Show the activity on a terminal until the user quits; print each update elsewhere."""
    pause = max(interval, _INTERVAL_MIN)
    # show a restart instead of waiting for it
    with mirrord.Client(
        session.socket, config=session.config, timeout=timedelta(seconds=10), patience=timedelta()
    ) as client:
        client.activity()  # raise if no daemon runs, or if it refuses
        if session.json or not sys.stdout.isatty():
            for answer in _each(client, pause, _sleep):
                if isinstance(answer, MirrordError):
                    session.note(f"mirrord: {answer.message}")
                else:
                    _print(session, answer)
        else:
            _show(client, pause)


def _each(
    client: mirrord.Client, pause: timedelta, wait: Callable[[float], bool]
) -> Iterator[Activity | MirrordError]:
    """Yield the activity, or the error, after each pause until `wait` returns True."""
    while True:
        try:
            yield client.activity()
        except (NoDaemonError, ResourceError) as error:
            yield error
        if wait(pause.total_seconds()):
            return


def _print(session: Session, activity: Activity) -> None:
    if session.json:
        print_line(as_json(activity))
        return
    for line, _ in render(activity):
        print_line(line)
    print_line("")


def _show(client: mirrord.Client, pause: timedelta) -> None:
    """Update the terminal's alternate screen until the user quits."""
    last: list[Line] = []
    # xterm's alternate screen, and no cursor there; each update goes home (ECMA-48)
    _write("\x1b[?1049h\x1b[?25l")
    try:
        with _keys() as wait:
            for answer in _each(client, pause, wait):
                width, height = shutil.get_terminal_size()
                if isinstance(answer, MirrordError):
                    status = cut(f"waiting for the daemon: {answer.message}", width)
                    lines = [(status, _RED), *last[1:]]
                else:
                    lines = last = render(answer, width, height)
                rows = [f"{styled(text, style) if style else text}\x1b[K" for text, style in lines]
                _write("\x1b[H" + "\n".join(rows) + "\x1b[J")
    except KeyboardInterrupt:
        return
    finally:
        _write("\x1b[?25h\x1b[?1049l")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _sleep(pause: float) -> bool:
    time.sleep(pause)
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for seconds, and returns whether q was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return

    def wait(pause: float) -> bool:
        deadline = time.monotonic() + pause
        while (left := deadline - time.monotonic()) > 0:
            # "" is the end of input: the terminal has gone
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in {"q", "Q", ""}:
                return True
        return False

    before = termios.tcgetattr(sys.stdin)
    try:
        # not raw: Ctrl-C stays a signal
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# -- one update: totals, then as many rows of each list as fit -------------------------------------


def render(activity: Activity, width: int = sys.maxsize, height: int = sys.maxsize) -> list[Line]:
    """Return lines that fit a screen; each list gets a fair share of the rows."""
    head = [*_totals(activity)]
    lists = [[*rows] for rows in (_endpoints(activity), _owners(activity), _work(activity))]
    lists = [rows for rows in lists if len(rows) > 1]
    left = height - len(head)
    for number, rows in enumerate(sorted(lists, key=len)):
        room = left // (len(lists) - number) - 1  # after an empty line
        if len(rows) > room:
            rows[max(room - 1, 1) :] = [f"… {len(rows) - max(room - 1, 1)} more"]
        left -= len(rows) + 1
    lines = head + [
        line
        for rows in lists
        for line in [("", ""), (rows[0], _BOLD), *((text, "") for text in rows[1:])]
    ]
    return [(cut(text, width), style) for text, style in lines[:height]]


def _totals(activity: Activity) -> Iterator[Line]:
    up = ago(activity.at - activity.started_at)
    now = activity.at.astimezone().strftime("%H:%M:%S%z")
    style = _RED if activity.status != "ok" else _BOLD
    yield (
        f"mirrord {activity.version}, pid {activity.pid}, up {up}, {activity.status}, at {now}",
        style,
    )
    for reason in activity.reasons[:2]:
        yield f"! {cell(reason)}", _RED if not reason.startswith("warning") else ""
    if len(activity.reasons) > 2:
        yield f"! and {len(activity.reasons) - 2} more: mirrord status --problems", ""
    total = activity.requests
    failed = f", {total.failed:,} failed" if total.failed else ""
    times = f"p50 {_time(total.p50_s)}, p99 {_time(total.p99_s)}"
    open_ = count(activity.connections, "connection")
    yield f"requests    {_rate(total)}/s, {times}{failed}; {open_}", ""
    queues = ", ".join(f"{n:,} {name}" for name, n in sorted(activity.queues.items()) if n)
    yield f"checkouts   {activity.checkouts:,} of at most {activity.checkouts_max:,}", ""
    yield (
        f"workers     {activity.workers_busy} busy of {activity.workers}; waiting: {queues or '-'}",
        "",
    )
    free = f"{size(activity.disk_free_bytes)} free of {size(activity.disk_bytes)}"
    yield f"disk        {free}, {size(activity.disk_reserve_bytes)} reserved", ""
    for entry in activity.caches:
        asked = entry.hits + entry.misses
        hits = f"{entry.hits / asked:.1%} of {asked:,} hit" if asked else "not used yet"
        bounds = f"{size(entry.size_bytes)} of {size(entry.limit_bytes)}, "
        room = f"{bounds}{entry.evictions:,} evicted, " if entry.limit_bytes is not None else ""
        yield f"{entry.name:<10}  {room}{hits}", ""
    if activity.refusals:
        codes = ", ".join(f"{n:,} {code}" for code, n in activity.refusals.items())
        yield f"refused     {codes}", ""


def _endpoints(activity: Activity) -> Iterator[str]:
    header = ("ENDPOINT", "REQUESTS", "A SECOND", "P50", "P99", "FAILED")
    rows = [
        (e.endpoint, f"{e.requests:,}", _rate(e), _time(e.p50_s), _time(e.p99_s), e.failed or "-")
        for e in activity.endpoints
    ]
    return table(header, rows, bold=False)


def _owners(activity: Activity) -> Iterator[str]:
    header = ("OWNER", "CHECKOUTS", "CONNECTIONS", "REQUESTS", "WORKERS", "WAITING")
    rows = [
        (
            "all others" if owner.uid is None else _user(owner.uid),
            *(n or "-" for n in (owner.checkouts, owner.connections, owner.requests)),
            *(n or "-" for n in (owner.running, owner.waiting)),
        )
        for owner in activity.owners
    ]
    return table(header, rows, bold=False)


def _work(activity: Activity) -> Iterator[str]:
    """Yield operations, running ones first, and the calls of workers."""
    rows = [
        (
            ago(activity.at - operation.started_at),
            "-",
            amount(replace(operation.progress, note="")),
            f"{operation.kind} {operation.subject} {operation.progress.note}".strip(),
        )
        for operation in activity.operations
    ]
    rows += [
        (
            ago(activity.at - call.since),
            "-" if call.uid is None else _user(call.uid),
            "",
            f"worker: {call.function}",
        )
        for call in activity.calls
    ]
    return table(("SINCE", "FOR", "DONE", "WORK"), rows, bold=False)


def _rate(endpoint: EndpointActivity) -> str:
    return f"{endpoint.per_second:,.1f}"


def _time(duration: float | None) -> str:
    return "-" if duration is None else seconds(duration)


@cache
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
