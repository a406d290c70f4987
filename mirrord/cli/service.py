"""`mirrord serve`, `status` and `events`: the daemon itself."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from ..errors import NoDaemonError
from . import operations
from .output import count, facts, size, table, when
from .parameters import Option, read_duration
from .session import Session, print_line

if TYPE_CHECKING:
    from ..protocol import Event, Operation, Status

_ASK_AGAIN_S = 0.1


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
) -> None:
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
    session.answer(found, _described(found, running))


def _described(found: Status, running: list[Operation]) -> Iterator[str]:
    reasons = f": {'; '.join(found.health.reasons)}" if found.health.reasons else ""
    since = f"pid {found.pid}, uid {found.uid}, since {when(found.started_at)}"
    held = f"{found.checkout_count} of at most {found.checkout_max}, backend {found.backend}"
    queued = f"{found.operations_queued} waiting for their turn"
    yield from facts(
        [
            ("daemon", f"mirrord {found.version}, {since}"),
            ("health", f"{found.health.status}{reasons}"),
            ("state", found.state_dir),
            ("configuration", found.config_path or "defaults"),
            ("checkouts", held),
            ("operations", f"{found.operations_running} running, {queued}"),
            ("last audit", _last_audit(found)),
        ]
    )
    if running:
        yield ""
        yield from operations.rows(running)
    if found.mirrors:
        yield ""
        mirrors = [
            (m.name, m.state, m.ref_count, m.pin_count, size(m.size_bytes), m.synced_at)
            for m in found.mirrors
        ]
        yield from table(("MIRROR", "STATE", "REFS", "PINS", "SIZE", "SYNCED"), mirrors)
    if found.datasets:
        yield ""
        header = ["DATASET", "FORMAT", "INSTANCES", "BAD ROWS", "UNPINNED", "IMPORTED"]
        datasets = (
            (d.name, d.format, d.instance_count, d.fault_count, d.unpinned_count, d.imported_at)
            for d in found.datasets
        )
        yield from table(header, datasets)
    if found.jobs:
        yield ""
        jobs = [(job.name, job.next_at, job.last_at, job.last_error) for job in found.jobs]
        yield from table(("JOB", "NEXT", "LAST", "PROBLEM"), jobs)


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
