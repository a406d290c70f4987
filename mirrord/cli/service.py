"""`mirrord serve`, `status` and `events`: the daemon itself."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from ..errors import NoDaemonError
from . import operations
from .output import count, facts, problem_of, size, table, when
from .parameters import Option, read_duration
from .session import Session, print_line

if TYPE_CHECKING:
    from ..protocol import Event, Mirror, Operation, Status

_ASK_AGAIN_S = 0.1
_SHOWN = 10  # rows; of longer tables only problems are shown, where not all are asked for


def serve(session: Session) -> None:
    """Stops on SIGTERM and SIGINT; reads its configuration again on SIGHUP."""
    named = [("--config", session.config), ("--socket", session.socket)]
    arguments = [word for option, value in named if value for word in (option, value)]
    sys.stdout.flush()
    # -P: load nothing from the directory that it is started in.
    command = [sys.executable, "-P", "-m", "mirrord.daemon", *arguments]
    os.execv(sys.executable, command)  # noqa: S606


def status(
    session: Session,
    wait: Annotated[
        str | None,
        Option(metavar="DURATION", help="Wait so long for a starting daemon, such as 30s."),
    ] = None,
    every: Annotated[bool, Option("--all", help="Show every mirror, dataset and job.")] = False,
) -> None:
    """Of more than ten mirrors or datasets, and of jobs, those with a problem."""
    client = session.client
    patience = read_duration(wait, "--wait") or timedelta()
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            found = client.status()
            break
        except NoDaemonError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_ASK_AGAIN_S)
    known = client.list_operations() if found.operations_running else []
    running = [each for each in known if each.state == "running"]
    session.answer(found, _described(found, running, every))


def _described(found: Status, running: list[Operation], every: bool) -> Iterator[str]:
    reasons = f": {'; '.join(found.health.reasons)}" if found.health.reasons else ""
    since = f"pid {found.pid}, uid {found.uid}, since {when(found.started_at)}"
    held = f"{found.checkout_count} of at most {found.checkout_max}, backend {found.backend}"
    queued = f"{found.operations_queued} waiting for their turn"
    instances = sum(each.instance_count for each in found.datasets)
    yield from facts(
        [
            ("daemon", f"mirrord {found.version}, {since}"),
            ("health", f"{found.health.status}{reasons}"),
            ("state", found.state_dir),
            ("configuration", found.config_path or "defaults"),
            ("mirrors", _counted(found.mirrors)),
            ("datasets", f"{len(found.datasets):,} with {count(instances, 'instance')}"),
            ("checkouts", held),
            ("operations", f"{found.operations_running} running, {queued}"),
            ("last audit", _last_audit(found)),
            ("jobs", _next_job(found)),
        ]
    )

    yield from _shown(operations.rows(running), len(running), every)
    header = ["MIRROR", "STATE", "REFS", "PINS", "SIZE", "SYNCED", "PROBLEM"]
    mirrors = [
        (m.name, m.state, m.ref_count, m.pin_count, size(m.size_bytes), m.synced_at, problem_of(m))
        for m in found.mirrors
        if every or len(found.mirrors) <= _SHOWN or problem_of(m)
    ]
    yield from _shown(table(header, mirrors), len(mirrors), every)
    header = ["DATASET", "FORMAT", "INSTANCES", "BAD ROWS", "UNPINNED", "IMPORTED"]
    datasets = [
        (d.name, d.format, d.instance_count, d.fault_count, d.unpinned_count, d.imported_at)
        for d in found.datasets
        if every or len(found.datasets) <= _SHOWN or d.fault_count or d.unpinned_count
    ]
    yield from _shown(table(header, datasets), len(datasets), every)
    jobs = [
        (job.name, job.next_at, job.last_at, job.last_error)
        for job in found.jobs
        if every or job.last_error
    ]
    yield from _shown(table(("JOB", "NEXT", "LAST", "PROBLEM"), jobs), len(jobs), every)


def _shown(lines: Iterator[str], row_count: int, every: bool) -> Iterator[str]:
    """A table after an empty line, or the first rows of it."""
    shown = row_count if every else min(row_count, _SHOWN)
    if row_count:
        yield from ["", *islice(lines, 1 + shown)]
    if row_count > shown:
        yield f"… and {row_count - shown:,} more: mirrord status --all"


def _counted(mirrors: list[Mirror]) -> str:
    states = Counter(mirror.state for mirror in mirrors)
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    pins, disk = sum(m.pin_count for m in mirrors), sum(m.size_bytes or 0 for m in mirrors)
    return f"{counts}; {count(pins, 'pin')}, {size(disk)}" if mirrors else "none"


def _next_job(found: Status) -> str:
    planned = [(job.next_at, job.name) for job in found.jobs if job.next_at]
    first = min(planned, default=None)
    return f"{len(found.jobs):,}{f', next {first[1]} at {when(first[0])}' if first else ''}"


def _last_audit(found: Status) -> str:
    audit = found.last_audit
    if audit is None:
        return "none yet"
    states = ", ".join(f"{number:,} {state}" for state, number in audit.counts.items() if number)
    text = f"{when(audit.finished_at)} at level {audit.level}: {states or 'nothing recorded'}"
    if audit.affected_count:
        text += f"; {count(audit.affected_count, 'instance')} cannot be served"
    return f"{text}; {count(audit.open_count, 'finding')}" if audit.open_count else text


def reload(session: Session) -> None:
    """Prints the settings that changed; those that need a restart go to stderr.

    An invalid file changes nothing: status 2.
    """
    answer = session.client.reload()
    session.answer(answer, answer.applied)
    for key in answer.refused:
        session.note(f"{key} needs a restart")


def events(
    session: Session,
    follow: Annotated[
        bool,
        Option("--follow", "-f", help="Print new events, through restarts of the daemon."),
    ] = False,
    after: Annotated[str | None, Option(metavar="BOOT:ID", help="Start after this event.")] = None,
) -> None:
    """Prints those since the daemon's start. With --json, one object per line."""
    for event in session.client.events(after=after, follow=follow):
        as_json = json.dumps(event.to_json(), ensure_ascii=False)
        print_line(as_json if session.json else _event_line(event))


def _event_line(event: Event) -> str:
    words = [when(event.at), event.name]
    for name, value in event.to_json()["fields"].items():
        # a word stays a word; anything else becomes JSON, so that a line splits at its spaces
        is_word = isinstance(value, str) and value and value.isprintable() and " " not in value
        said = value if is_word else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        words.append(f"{name}={said}")
    return " ".join(words)
