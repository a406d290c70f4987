"""`status`, `serve`, `config reload`, `events`, `operation …`."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Annotated

from ...errors import IntegrityError, NoDaemonError, UsageError
from ...protocol import Event, FleetStatus, Mirror, Operation, Status
from ...units import when
from ..attention import Attention, attention_lines, problems_of
from ..output import cell, count, facts, facts_of, listing, moment, problem_of, size
from ..session import Argument, Option, Session, as_json, print_line, read_duration
from ..waiting import amount, exit_as_verb, finish, operation_table
from .datasets import readiness_of

# while a daemon starts; nothing tells that its socket will exist
_POLL_S = 0.1
_ROWS_SHOWN = 10  # without --all, longer tables show only rows with problems


def status(
    session: Session,
    wait: Annotated[
        str | None, Option("Wait this long for a starting daemon, such as 30s.", "DURATION")
    ] = None,
    every: Annotated[bool, Option("Show every mirror, dataset and job.", flags="--all")] = False,
    problems: Annotated[
        bool, Option("Show only what needs attention; nothing if all is well.")
    ] = False,
    check: Annotated[
        bool, Option("Status 8 if anything needs attention; warnings do not count.")
    ] = False,
    watch: Annotated[bool, Option("Show requests, workers and operations, live.")] = False,
    interval: Annotated[
        str, Option("With --watch: time between updates, such as 500ms.", "DURATION")
    ] = "2s",
) -> None:
    """Prints first what needs attention, each with a command to start with. Of jobs, and of more
    than ten mirrors or datasets, it shows those with a problem.

    With --watch rates and times are of the last minute, and q or Ctrl-C quits. Without a terminal
    it prints every update, with --json as one object per line. Users see their own checkouts, calls
    and operations, and the totals; administrators see all.
    """
    if watch and (check or every or problems):
        raise UsageError("cannot use --watch with --all, --problems or --check")
    pause = read_duration(interval, "--interval")
    current = _wait_for_status(session, wait)
    if watch:
        from .. import activity  # noqa: PLC0415 - other answers need no terminal

        activity.watch(session, pause or timedelta())
        return
    _print_status(session, current, every=every, problems=problems)
    if check and any(problem.kind != "warning" for problem in problems_of(current)):
        raise SystemExit(IntegrityError.exit_status)


def _wait_for_status(session: Session, wait: str | None) -> Status:
    patience = read_duration(wait, "--wait") or timedelta()
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            return session.client.status()
        except NoDaemonError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def _print_status(session: Session, current: Status, *, every: bool, problems: bool) -> None:
    attention = list(problems_of(current))
    if problems and session.json:
        session.print_json([problem._asdict() for problem in attention])
    elif problems:
        session.answer(None, attention_lines(attention))
    else:
        listed = session.client.list_operations() if current.operations_running else []
        running = [operation for operation in listed if operation.state == "running"]
        session.answer(current, _status_lines(current, attention, running, every))


def _status_lines(
    current: Status, problems: list[Attention], running: list[Operation], every: bool
) -> Iterator[str]:
    yield from attention_lines(problems[:_ROWS_SHOWN])
    if len(problems) > _ROWS_SHOWN:
        yield f"… and {len(problems) - _ROWS_SHOWN:,} more: mirrord status --problems"
    if problems:
        yield ""
    yield from _summary(current)
    yield from _first_rows(operation_table(running), len(running), every)
    all_mirrors = every or len(current.mirrors) <= _ROWS_SHOWN
    mirrors = [mirror for mirror in current.mirrors if all_mirrors or problem_of(mirror)]
    columns = (
        "MIRROR=name STATE SYNCED=synced_at PROBLEM SIZE=size_bytes PINS=pin_count REFS=ref_count"
    )
    lines = listing(mirrors, columns, PROBLEM=problem_of)
    yield from _first_rows(lines, len(mirrors), every)
    all_datasets = every or len(current.datasets) <= _ROWS_SHOWN
    datasets = [
        d
        for d in current.datasets
        if all_datasets or d.fault_count or d.unpinned_count or d.not_ready
    ]
    columns = "DATASET=name READY BAD_ROWS=fault_count UNPINNED=unpinned_count"
    columns += " IMPORTED=imported_at FORMAT"
    lines = listing(datasets, columns, READY=readiness_of)
    yield from _first_rows(lines, len(datasets), every)
    jobs = [job for job in current.jobs if every or job.last_error]
    lines = listing(jobs, "JOB=name NEXT=next_at LAST=last_at PROBLEM=last_error")
    yield from _first_rows(lines, len(jobs), every)
    if current.fleet:
        yield from _fleet_lines(current.fleet, every)


def _fleet_lines(fleet: FleetStatus, every: bool) -> Iterator[str]:
    lines = listing(
        fleet.nodes,
        "NODE=name ID VERSION SEEN MIRRORS BEHIND FAULT",
        SEEN=lambda node: f"{node.age_s:.0f} s",
    )
    yield from _first_rows(lines, len(fleet.nodes), every)
    node_names = {node.holder: node.name for node in fleet.nodes}
    lines = listing(
        fleet.claims,
        "CLAIM=work NODE EPOCH LEFT",
        LEFT=lambda claim: f"{claim.left_s:.0f} s",
        NODE=lambda claim: node_names.get(claim.holder, claim.holder),
    )
    yield from _first_rows(lines, len(fleet.claims), every)


def _describe_fleet(fleet: FleetStatus | None) -> str | None:
    if fleet is None:
        return None
    text = f"{count(len(fleet.nodes), 'node')}, this one is {fleet.node}, store {fleet.store}"
    text += f"; {count(fleet.generations, 'published mirror')}, {len(fleet.behind):,} behind here"
    return f"{text}; {fleet.fault}" if fleet.fault else text


def _summary(current: Status) -> Iterator[str]:
    since = f"pid {current.pid}, uid {current.uid}, since {moment(current.started_at)}"
    held = (
        f"{current.checkout_count:,} of at most {current.checkout_max:,}, backend {current.backend}"
    )
    queued = f"{current.operations_queued:,} queued"
    instances = sum(dataset.instance_count for dataset in current.datasets)
    counted = count(instances, "instance")
    if all(dataset.ready_count is not None for dataset in current.datasets):
        ready = sum(dataset.ready_count or 0 for dataset in current.datasets)
        counted = f"{ready:,} of {counted} ready"
    return facts(
        [
            ("daemon", f"mirrord {current.version}, {since}"),
            ("health", current.health.status),
            ("place", current.health.place or "unknown"),
            ("state", current.state_dir),
            ("configuration", current.config_path or "defaults"),
            ("mirrors", _count_mirrors(current.mirrors)),
            ("datasets", f"{len(current.datasets):,} with {counted}"),
            ("checkouts", held),
            ("operations", f"{current.operations_running:,} running, {queued}"),
            ("last audit", _describe_audit(current)),
            ("jobs", _describe_jobs(current)),
            ("fleet", _describe_fleet(current.fleet)),
        ]
    )


def _first_rows(lines: Iterator[str], row_count: int, every: bool) -> Iterator[str]:
    """Yield an empty line and a table, without --all its first rows."""
    shown_count = row_count if every else min(row_count, _ROWS_SHOWN)
    if row_count:
        yield from ["", *islice(lines, 1 + shown_count)]
    if row_count > shown_count:
        yield f"… and {row_count - shown_count:,} more: mirrord status --all"


def _count_mirrors(mirrors: Sequence[Mirror]) -> str:
    states = Counter(mirror.state for mirror in mirrors)
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    pins, disk = sum(m.pin_count for m in mirrors), sum(m.size_bytes or 0 for m in mirrors)
    return f"{counts}; {count(pins, 'pin')}, {size(disk)}" if mirrors else "none"


def _describe_jobs(current: Status) -> str:
    planned = [(job.next_at, job.name) for job in current.jobs if job.next_at]
    first = min(planned, default=None)
    return f"{len(current.jobs):,}{f', next {first[1]} {moment(first[0])}' if first else ''}"


def _describe_audit(current: Status) -> str:
    audit = current.last_audit
    if audit is None:
        return "none yet"
    states = ", ".join(f"{number:,} {state}" for state, number in audit.counts.items() if number)
    mirrors = f"{audit.mirror_count:,} of {count(len(current.mirrors), 'mirror')}"
    text = f"{moment(audit.finished_at)}, {mirrors} at level {audit.level}"
    text += f": {states or 'nothing recorded'}"
    if audit.affected_count:
        text += f"; {count(audit.affected_count, 'instance')} cannot be served"
    return f"{text}; {count(audit.open_count, 'finding')}" if audit.open_count else text


def serve(
    session: Session,
    detach: Annotated[
        bool, Option("Run in the background, and return when it serves; logs to state_dir.")
    ] = False,
) -> None:
    """Stops on SIGTERM and SIGINT; reloads its configuration on SIGHUP.

    `--detach` prints the process to stop, the socket and the log. Services are better kept by
    systemd: `mirrord service install`.
    """
    if detach:
        from . import local  # noqa: PLC0415 - it reads the configuration, as the daemon will

        if local.detach(session):
            return
    options = [("--config", session.config), ("--socket", session.socket)]
    arguments = [word for option, value in options if value for word in (option, value)]
    # exec drops what is buffered
    sys.stdout.flush()
    # -P: import nothing from the current directory.
    command = [sys.executable, "-P", "-m", "mirrord.daemon", *arguments]
    os.execv(sys.executable, command)  # noqa: S606


def reload(session: Session) -> None:
    """Prints the changed settings; stderr lists those that need a restart. An invalid file changes
    nothing (status 2).
    """
    answer = session.client.reload()
    session.answer(answer, answer.applied)
    for key in answer.refused:
        session.note(f"{key} needs a restart")


def events(
    session: Session,
    follow: Annotated[
        bool, Option("Print new events too, through restarts of the daemon.", flags="--follow -f")
    ] = False,
    after: Annotated[str | None, Option("Start after this event.", "BOOT:ID")] = None,
) -> None:
    """Starts with the events since the start of the daemon. With --json, one object per line."""
    for event in session.client.events(after=after, follow=follow):
        print_line(as_json(event) if session.json else _event_line(event))


def _event_line(event: Event) -> str:
    words = [when(event.at), event.name]
    for name, value in event.to_json()["fields"].items():
        # values other than single words become JSON
        is_word = isinstance(value, str) and value and value.isprintable() and " " not in value
        text = value if is_word else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        words.append(f"{name}={text}")
    return " ".join(words)


# -- operations

_ID_HELP = "Id of an operation, as in `mirrord operation list`."
Id = Annotated[str, Argument(_ID_HELP, "ID", "operation")]


def list_operations(
    session: Session,
    running: Annotated[bool, Option("Only running operations.")] = False,
) -> None:
    """Users see their own operations, administrators all. A restart clears the list."""
    operations = [
        o for o in session.client.list_operations() if not running or o.state == "running"
    ]
    session.answer(operations, operation_table(operations))


def show_operation(session: Session, operation_id: Id) -> None:
    """With --json, the result is included."""
    operation = session.client.get_operation(operation_id)
    names = "operation=id kind subject state progress started=started_at ended=finished_at"
    names += " problem=error.detail hint=error.hint"
    session.answer(
        operation, facts_of(operation, names, progress=amount(operation.progress) or None)
    )


def wait_operation(
    session: Session,
    operation_id: Id,
    follow: Annotated[bool, Option("Print a line for each change.", flags="--follow -f")] = False,
) -> None:
    """The exit status is that of the verb that started it."""
    if follow:
        ended = _follow(session, operation_id)
    else:
        ended = finish(session, session.client.get_operation(operation_id))
        session.answer(ended, [_line(ended)])
    exit_as_verb(ended)


def _follow(session: Session, operation_id: str) -> Operation:
    printed = ""

    def show_change(operation: Operation) -> None:
        nonlocal printed
        line = as_json(operation) if session.json else _line(operation)
        if line != printed:
            printed = line
            print_line(line)

    return session.client.wait(operation_id, progress=show_change)


def _line(operation: Operation) -> str:
    words = operation.kind, cell(operation.subject), operation.state, amount(operation.progress)
    return " ".join(filter(None, words))


def cancel_operation(session: Session, operation_id: Id) -> None:
    """Finished parts (mirrors, pins, rows) stay."""
    operation = session.client.cancel_operation(operation_id)
    session.answer(operation, [_line(operation)])
