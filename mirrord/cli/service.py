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
from .durations import read_duration
from .output import count, facts, size, table, when
from .parameters import Option
from .session import Session, plain, print_line

if TYPE_CHECKING:
    from .. import Client
    from ..protocol import Event, Operation, Status

_ASK_AGAIN_S = 0.1


def serve(session: Session) -> None:
    """Stops on SIGTERM and SIGINT, reads its configuration again on SIGHUP."""
    named = [("--config", session.config), ("--socket", session.socket)]
    arguments = [word for option, value in named if value for word in (option, value)]
    sys.stdout.flush()
    isolated = [
        sys.executable,
        "-P",
        "-m",
        "mirrord.daemon",
    ]  # nothing is loaded from the directory that it was started in
    os.execv(sys.executable, [*isolated, *arguments])  # noqa: S606


def status(
    session: Session,
    wait: Annotated[
        str | None,
        Option(
            metavar="DURATION", help="Wait that long for a daemon that is starting, such as 30s."
        ),
    ] = None,
) -> None:
    with session.client() as client:
        found = _ask_until(client, read_duration(wait, "--wait") or timedelta())
        running = (
            [each for each in client.list_operations() if each.state == "running"]
            if found.operations_running
            else []
        )
    session.answer(found, lambda: _described(found, running))


def _ask_until(client: Client, patience: timedelta) -> Status:
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            return client.status()
        except NoDaemonError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_ASK_AGAIN_S)


def _described(found: Status, running: list[Operation]) -> Iterator[str]:
    reasons = f": {'; '.join(found.health.reasons)}" if found.health.reasons else ""
    yield from facts(
        [
            (
                "daemon",
                f"mirrord {found.version}, pid {found.pid}, uid {found.uid}, since {when(found.started_at)}",
            ),
            ("health", f"{found.health.status}{reasons}"),
            ("state", found.state_dir),
            ("configuration", found.config_path or "defaults"),
            (
                "checkouts",
                f"{found.checkout_count} of at most {found.checkout_max}, backend {found.backend}",
            ),
            (
                "operations",
                f"{found.operations_running} running, {found.operations_queued} waiting for their turn",
            ),
            ("last audit", _last_audit(found)),
        ]
    )
    if running:
        yield ""
        yield from operations.rows(running)
    yield from _mirrors(found)
    yield from _datasets(found)
    yield from _jobs(found)


def _last_audit(found: Status) -> str:
    audit = found.last_audit
    if audit is None:
        return "none yet"
    states = (
        ", ".join(f"{number:,} {state}" for state, number in audit.counts.items() if number)
        or "nothing recorded"
    )
    affected = (
        f"; {count(audit.affected_count, 'instance')} cannot be served"
        if audit.affected_count
        else ""
    )
    affected += f"; {count(audit.open_count, 'finding')}" if audit.open_count else ""
    return f"{when(audit.finished_at)} at level {audit.level}: {states}{affected}"


def _mirrors(found: Status) -> Iterator[str]:
    if found.mirrors:
        yield ""
        rows = [
            (m.name, m.state, m.ref_count, m.pin_count, size(m.size_bytes), m.synced_at)
            for m in found.mirrors
        ]
        yield from table(("MIRROR", "STATE", "REFS", "PINS", "SIZE", "SYNCED"), rows)


def _datasets(found: Status) -> Iterator[str]:
    if found.datasets:
        yield ""
        rows = [
            (
                d.name,
                d.format,
                d.instance_count,
                d.commit_count,
                d.fault_count,
                d.unpinned_count,
                d.imported_at,
            )
            for d in found.datasets
        ]
        yield from table(
            ("DATASET", "FORMAT", "INSTANCES", "COMMITS", "BAD ROWS", "UNPINNED", "IMPORTED"), rows
        )


def _jobs(found: Status) -> Iterator[str]:
    if found.jobs:
        yield ""
        yield from table(
            ("JOB", "NEXT", "LAST", "PROBLEM"),
            [(j.name, j.next_at, j.last_at, j.last_error) for j in found.jobs],
        )


def reload(session: Session) -> None:
    """Prints the settings that changed; those that need a restart go to stderr. A bad file changes nothing, and is status 2."""
    with session.client() as client:
        answer = client.reload()
    session.answer(answer, lambda: answer.applied)
    for key in answer.refused:
        session.note(f"{key} needs a restart")


def events(
    session: Session,
    follow: Annotated[
        bool,
        Option(
            "--follow", "-f", help="Print new events as they come, through restarts of the daemon."
        ),
    ] = False,
    after: Annotated[str | None, Option(metavar="BOOT:ID", help="Start after this event.")] = None,
) -> None:
    """Without --follow: what the daemon remembers since it started. With --json, one object a line."""
    with session.client() as client:
        for event in client.events(after=after, follow=follow):
            print_line(
                json.dumps(event.to_json(), ensure_ascii=False)
                if session.json
                else _event_line(event)
            )


def _event_line(event: Event) -> str:
    members = plain(event)["fields"]
    return " ".join(
        [
            when(event.at),
            event.name,
            *(f"{name}={_field(value)}" for name, value in members.items()),
        ]
    )


def _field(value: object) -> str:
    """A word as it is, everything else as JSON, so that a line falls apart at its spaces."""
    if isinstance(value, str) and value and value.isprintable() and " " not in value:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
