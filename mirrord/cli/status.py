"""`status`, `fleet`, `du`, `gc`, `serve`, `reload`, `events`."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Annotated, NamedTuple

from ..errors import IntegrityError, NoDaemonError, ResourceError, UsageError
from ..protocol import Event, Garbage, Mirror, Operation, Status, Usage
from . import operations
from .output import cell, count, facts, facts_of, listing, problem_of, size, table, when
from .session import Option, Session, as_json, print_line, read_duration

# while a daemon starts; nothing tells that its socket will exist
_POLL_S = 0.1
# one request each; the daemon counts anew every five seconds
_WATCH_S = 2.0
_ROWS_SHOWN = 10  # without --all, longer tables show only rows with problems
# of mirrors with the same problem, in one line
_NAMES_SHOWN = 3
# of [checkouts] max: the last tenth is when an operator can still act
_NEARLY_FULL = 0.9
# SGR: red and yellow, of every terminal's 16 colours
_COLOURS = {"degraded": 31, "problem": 31, "warning": 33}
_WARNING = "warning: "


class Attention(NamedTuple):
    """Something that needs attention; `action` is the command to start with."""

    kind: str
    fact: str
    action: str = ""


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
    watch: Annotated[bool, Option("Repeat every two seconds.")] = False,
) -> None:
    """Prints first what needs attention, each with a command to start with. Of jobs, and of more
    than ten mirrors or datasets, it shows those with a problem.
    """
    if watch and check:
        raise UsageError("cannot use --watch with --check: a status ends the verb")
    if watch and session.json:
        raise UsageError(
            "cannot use --watch with --json: an answer has many lines",
            hint="`mirrord top --json` prints one object per line",
        )
    found = _wait_for_status(session, wait)
    while True:
        _print_status(session, found, every=every, problems=problems)
        if check and any(each.kind != "warning" for each in problems_of(found)):
            raise SystemExit(IntegrityError.exit_status)
        if not watch:
            return
        time.sleep(_WATCH_S)
        try:
            found = session.client.status()
        except (NoDaemonError, ResourceError) as error:
            session.note(f"mirrord: {error.message}")
            continue
        print_line("\x1b[H\x1b[2J" if sys.stdout.isatty() else "")


def fleet(session: Session) -> None:
    """They share catalog and store; also lists their claims."""
    found = session.client.fleet()
    if not found.store:
        session.answer(found, ["not a fleet: [store] url is not set"])
        return
    node_names = {node.holder: node.name for node in found.nodes}
    lines = [*facts_of(found, "node store fault generations behind"), ""]
    columns = "node=name id version seen mirrors behind fault"
    lines += listing(found.nodes, columns, seen=lambda node: f"{node.age_s:.0f} s")
    if found.claims:
        lines += [
            "",
            *listing(
                found.claims,
                "work node epoch left",
                left=lambda claim: f"{claim.left_s:.0f} s",
                node=lambda claim: node_names.get(claim.holder, claim.holder),
            ),
        ]
    session.answer(found, lines)


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


def _print_status(session: Session, found: Status, *, every: bool, problems: bool) -> None:
    attention = list(problems_of(found))
    if problems and session.json:
        session.print_json([each._asdict() for each in attention])
    elif problems:
        session.answer(None, _attention_lines(attention))
    else:
        known = session.client.list_operations() if found.operations_running else []
        running = [each for each in known if each.state == "running"]
        session.answer(found, _status_lines(found, attention, running, every))


# -- what needs attention --------------------------------------------------------------------------


def problems_of(found: Status) -> Iterator[Attention]:
    """Yield what needs attention, the worst first."""
    reasons = found.health.reasons
    for reason in reasons:
        if not reason.startswith(_WARNING):
            yield Attention("degraded", reason, _action_for(reason))
    yield from _audit_problems(found)
    yield from _mirror_problems(found.mirrors)
    for dataset in found.datasets:
        faults = [(dataset.fault_count, "bad row"), (dataset.unpinned_count, "unpinned commit")]
        if fact := ", ".join(count(number, noun) for number, noun in faults if number):
            show = f"mirrord dataset show {dataset.name}"
            yield Attention("problem", f"dataset {dataset.name}: {fact}", show)
    for job in found.jobs:
        if job.last_error and not job.name.startswith("sync/"):  # a problem of its mirror
            yield Attention(
                "problem", f"job {job.name}: {job.last_error}", "mirrord operations list"
            )
    if found.checkout_count > found.checkout_max * _NEARLY_FULL:
        fact = f"{found.checkout_count:,} of at most {found.checkout_max:,} checkouts are held"
        yield Attention("problem", fact, "mirrord top")
    for reason in reasons:
        if reason.startswith(_WARNING):
            yield Attention("warning", reason)


def _action_for(reason: str) -> str:
    if "nearly full" in reason or "inodes" in reason:
        return "mirrord du; mirrord gc"
    if "can be synced" in reason:
        return "mirrord mirror list"
    if reason.startswith("dataset "):
        return f"mirrord dataset show {reason.split()[1].rstrip(':')}"
    return "journalctl -t mirrord -p warning"


def _audit_problems(found: Status) -> Iterator[Attention]:
    audit = found.last_audit
    if audit is None:
        return
    at = when(audit.finished_at)
    if audit.affected_count:
        fact = f"{count(audit.affected_count, 'instance')} cannot be served (audit of {at})"
        yield Attention("problem", fact, "mirrord audit; mirrord heal")
    elif audit.open_count:
        fact = f"{count(audit.open_count, 'finding')} of the audit of {at}"
        yield Attention("problem", fact, "mirrord audit")
    if audit.left_count:
        fact = f"the audit of {at} could not check {count(audit.left_count, 'mirror')}"
        yield Attention("problem", fact, "mirrord audit")


def _mirror_problems(mirrors: Sequence[Mirror]) -> Iterator[Attention]:
    """Yield one for each kind of problem of mirrors."""
    by_problem: dict[str, list[str]] = {}
    for mirror in mirrors:
        if problem := problem_of(mirror):
            by_problem.setdefault(problem, []).append(mirror.name)
    for problem, names in sorted(by_problem.items(), key=lambda item: -len(item[1])):
        more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        fact = f"{count(len(names), 'mirror')}: {problem}: {', '.join(names[:_NAMES_SHOWN])}{more}"
        yield Attention("problem", fact, f"mirrord mirror show {names[0]}")


def _attention_lines(problems: list[Attention]) -> Iterator[str]:
    for each in problems:
        kind = f"{each.kind}:"
        if sys.stdout.isatty():
            kind = f"\x1b[{_COLOURS[each.kind]}m{kind}\x1b[0m"
        yield f"{kind} {cell(each.fact.removeprefix(_WARNING))}"
        if each.action:
            yield f"  -> {cell(each.action)}"


# -- the whole status ------------------------------------------------------------------------------


def _status_lines(
    found: Status, problems: list[Attention], running: list[Operation], every: bool
) -> Iterator[str]:
    yield from _attention_lines(problems[:_ROWS_SHOWN])
    if len(problems) > _ROWS_SHOWN:
        yield f"… and {len(problems) - _ROWS_SHOWN:,} more: mirrord status --problems"
    if problems:
        yield ""
    yield from _summary(found)
    yield from _first_rows(operations.operation_table(running), len(running), every)
    all_mirrors = every or len(found.mirrors) <= _ROWS_SHOWN
    mirrors = [each for each in found.mirrors if all_mirrors or problem_of(each)]
    columns = "MIRROR=name STATE REFS=ref_count PINS=pin_count SIZE=size_bytes SYNCED=synced_at"
    lines = listing(mirrors, f"{columns} PROBLEM", PROBLEM=problem_of)
    yield from _first_rows(lines, len(mirrors), every)
    all_datasets = every or len(found.datasets) <= _ROWS_SHOWN
    datasets = [d for d in found.datasets if all_datasets or d.fault_count or d.unpinned_count]
    columns = "DATASET=name FORMAT INSTANCES=instance_count BAD_ROWS=fault_count"
    lines = listing(datasets, f"{columns} UNPINNED=unpinned_count IMPORTED=imported_at")
    yield from _first_rows(lines, len(datasets), every)
    jobs = [job for job in found.jobs if every or job.last_error]
    lines = listing(jobs, "JOB=name NEXT=next_at LAST=last_at PROBLEM=last_error")
    yield from _first_rows(lines, len(jobs), every)


def _summary(found: Status) -> Iterator[str]:
    since = f"pid {found.pid}, uid {found.uid}, since {when(found.started_at)}"
    held = f"{found.checkout_count:,} of at most {found.checkout_max:,}, backend {found.backend}"
    queued = f"{found.operations_queued:,} queued"
    instances = sum(each.instance_count for each in found.datasets)
    return facts(
        [
            ("daemon", f"mirrord {found.version}, {since}"),
            ("health", found.health.status),
            ("state", found.state_dir),
            ("configuration", found.config_path or "defaults"),
            ("mirrors", _count_mirrors(found.mirrors)),
            ("datasets", f"{len(found.datasets):,} with {count(instances, 'instance')}"),
            ("checkouts", held),
            ("operations", f"{found.operations_running:,} running, {queued}"),
            ("last audit", _describe_audit(found)),
            ("jobs", _describe_jobs(found)),
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


def _describe_jobs(found: Status) -> str:
    planned = [(job.next_at, job.name) for job in found.jobs if job.next_at]
    first = min(planned, default=None)
    return f"{len(found.jobs):,}{f', next {first[1]} at {when(first[0])}' if first else ''}"


def _describe_audit(found: Status) -> str:
    audit = found.last_audit
    if audit is None:
        return "none yet"
    states = ", ".join(f"{number:,} {state}" for state, number in audit.counts.items() if number)
    mirrors = f"{audit.mirror_count:,} of {count(len(found.mirrors), 'mirror')}"
    text = f"{when(audit.finished_at)}, {mirrors} at level {audit.level}"
    text += f": {states or 'nothing recorded'}"
    if audit.affected_count:
        text += f"; {count(audit.affected_count, 'instance')} cannot be served"
    return f"{text}; {count(audit.open_count, 'finding')}" if audit.open_count else text


# -- disk ------------------------------------------------------------------------------------------

_VERBOSE_HELP = "Show a line for each mirror, dataset, template, checkout and so on."


def du(
    session: Session,
    verbose: Annotated[bool, Option(_VERBOSE_HELP, flags="--verbose -v")] = False,
) -> None:
    """SHARED bytes are also in other lines of the same kind; RECLAIMABLE is what gc would free.
    Users see their own checkouts, administrators everything.
    """
    found = session.client.usage(verbose=verbose)
    session.answer(found, _usage_lines(found))
    if found.partial:
        session.note(
            f"{count(found.partial, 'line')} could not be read completely, and may be larger"
        )


def _usage_lines(found: Usage) -> Iterator[str]:
    header = ("KIND", "COUNT", "USED", "SIZE", "RECLAIMABLE")
    totals = [
        (each.kind, each.count, each.used, size(each.size_bytes), size(each.reclaimable_bytes))
        for each in found.totals
    ]
    both = size(found.size_bytes), size(found.reclaimable_bytes)
    yield from table(header, [*totals, ("all", None, None, *both)])
    yield ""
    yield f"{size(found.disk_free_bytes)} of {size(found.disk_bytes)} free"
    for total in found.totals:
        rows = [each for each in found.rows if each.kind == total.kind]
        if rows:
            yield ""
            columns = "SIZE=size_bytes SHARED=shared_bytes RECLAIMABLE=reclaimable_bytes CHECKOUTS"
            yield from listing(rows, f"{total.kind.upper()}=name {columns} LAST_USED=used_at")


def gc(
    session: Session,
    dry_run: Annotated[bool, Option("Print what would be removed, and remove nothing.")] = False,
) -> None:
    """These are templates, sealed stores and closure packs that no checkout needs, released trees,
    leftovers and trash, but nothing that is recorded, pinned or leased. The next checkout of a
    removed template takes as long as the first.
    """
    found = session.client.gc(dry_run=dry_run)
    session.answer(found, _gc_lines(found))


def _gc_lines(found: Garbage) -> Iterator[str]:
    if found.dropped:
        yield from listing(found.dropped, "KIND NAME COUNT SIZE=size_bytes")
        yield ""
    yield f"{'would free' if found.dry_run else 'freed'} {size(found.freed_bytes)}"


# -- the daemon itself -----------------------------------------------------------------------------


def serve(session: Session) -> None:
    """Stops on SIGTERM and SIGINT; reloads its configuration on SIGHUP."""
    options = [("--config", session.config), ("--socket", session.socket)]
    arguments = [word for option, value in options if value for word in (option, value)]
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
