"""`audit`, `heal`, `du`, `gc`."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

from ...errors import UsageError
from ...model import AuditLevel, CommitRole
from ...presence import is_file
from ...protocol import Audit, Garbage, Operation, Repair, Usage
from ...quoting import quote_name
from ..output import cell, count, listing, size, table
from ..session import Argument, NoWait, Option, Session
from ..waiting import exit_as, finish, started, watching

Names = Annotated[list[str] | None, Argument("Mirrors; default: all.", "[NAME]...", "mirror")]


def audit(
    session: Session,
    names: Names = None,
    dataset: Annotated[
        str | None, Option("Only commits that this dataset records.", "NAME", names="dataset")
    ] = None,
    level: Annotated[
        AuditLevel | None, Option("Level of the checks; default: as configured.")
    ] = None,
    no_heal: Annotated[bool, Option("Report only, repair nothing.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Prints a line for each finding, then a total; repairs go to stderr. Status 8 if a finding is
    neither healed nor accepted by [audit] accept.
    """
    heal = False if no_heal else None
    operation = session.client.start_audit(*names or (), dataset=dataset, level=level, heal=heal)
    finished = _finish_audit(session, operation, no_wait)
    if finished:
        for line in _repair_lines(finished):
            session.note(line)
        session.answer(finished, audit_lines(finished))
        exit_as(finished)


def _finish_audit(session: Session, operation: Operation, no_wait: bool) -> Audit | None:
    if no_wait:
        session.answer(operation, started(operation))
        return None
    ended = finish(session, operation)
    return session.client.get_audit(str((ended.result or {})["id"]))


def _repair_lines(report: Audit) -> Iterator[str]:
    for repair in report.repairs:
        yield from map(cell, _describe_repair(repair))


def audit_lines(report: Audit) -> Iterator[str]:
    for f in report.findings:
        commit = f" {f.commit}" if f.commit else ""
        instances = f" ({', '.join(f.instances)})" if f.instances else ""
        only = f", {', '.join(f.roles)} only" if f.roles and CommitRole.BASE not in f.roles else ""
        kind = f"{f.kind}{only}{', accepted' if f.accepted else ''}{instances}"
        yield cell(f"{f.mirror}{commit} {kind}: {f.detail or 'no detail'}")
    judged = Counter(report.counts) + Counter(report.pinned)
    states = ", ".join(f"{number:,} {state}" for state, number in judged.items())
    total, pinned = sum(report.counts.values()), sum(report.pinned.values())
    unserved = f"; {count(len(report.affected), 'instance')} cannot be served"
    affected = unserved if report.affected else ""
    accepted = len(report.findings) - report.open_count
    is_open = f"; {count(report.open_count, 'finding')}" if report.open_count else ""
    is_open += f"; {count(accepted, 'finding')} accepted" if accepted else ""
    healed = f"; {report.healed} of them healed" if report.healed else ""
    besides = f" and {pinned:,} only pinned" if pinned else ""
    scope = f"{count(total, 'recorded commit')}{besides} in {count(len(report.mirrors), 'mirror')}"
    yield f"{scope} at level {report.level}: {states or 'nothing'}{healed}{affected}{is_open}"


def _describe_repair(repair: Repair) -> Iterator[str]:
    for donor, number in repair.objects.items():
        yield f"{repair.mirror} healed: {count(number, 'object')} from {donor}"
    for file in repair.files:
        yield f"{repair.mirror} healed: moved corrupt file {quote_name(file)} to {repair.kept_in}"
    if repair.history:
        yield f"{repair.mirror} ref history: {repair.history}"
    for donor, reason in repair.refusals.items():
        yield f"{repair.mirror} not healed from {donor}: {reason}"
    for ref in repair.refs:
        yield f"{repair.mirror} healed: restored lost ref {quote_name(ref)}"
    if repair.unhealed_count:
        listed = ", ".join(repair.unhealed[:3]) + (", …" if repair.unhealed_count > 3 else "")
        fact = f"no donor has {count(repair.unhealed_count, 'object')} ({listed})"
        remedy = f"retried later, or now with `mirrord heal {repair.mirror} --bundle FILE`"
        yield f"{repair.mirror} not healed: {fact}; {remedy}"
    if repair.error:
        yield f"{repair.mirror} not healed: {repair.error}"


def heal(
    session: Session,
    names: Names = None,
    bundle: Annotated[
        Path | None, Option("Bundle of any repository, as another donor.", "FILE")
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Prints repairs and open findings, and exits, as `mirrord audit` does. Bundles in bundles/ of
    the state directory are always donors.
    """
    mirrors = names or []
    if bundle and len(mirrors) != 1:
        fact = f"{len(mirrors)} mirrors are named"
        raise UsageError(f"cannot heal with {bundle}: {fact}", hint="name one mirror")
    if bundle and not is_file(bundle):
        raise UsageError(f"cannot heal with {bundle}: it is not a file", hint="name a bundle file")
    if bundle is None:
        operation = session.client.start_heal(*names or ())
    else:
        with watching(session, f"sending {bundle.name}") as watch:
            operation = session.client.heal_with_bundle(mirrors[0], bundle, progress=watch)
    finished = _finish_audit(session, operation, no_wait)
    if finished:
        session.answer(finished, chain(_repair_lines(finished), audit_lines(finished)))
        exit_as(finished)


_VERBOSE_HELP = "Show a line for each mirror, dataset, template, checkout and so on."


def du(
    session: Session,
    verbose: Annotated[bool, Option(_VERBOSE_HELP, flags="--verbose -v")] = False,
) -> None:
    """SHARED bytes are also in other lines of the same kind; RECLAIMABLE is what gc would free.
    Users see their own checkouts, administrators everything.
    """
    usage = session.client.usage(verbose=verbose)
    session.answer(usage, _usage_lines(usage))
    if usage.partial:
        session.note(
            f"{count(usage.partial, 'line')} could not be read completely, and may be larger"
        )


def _usage_lines(usage: Usage) -> Iterator[str]:
    header = ("KIND", "COUNT", "USED", "SIZE", "RECLAIMABLE")
    totals = [
        (entry.kind, entry.count, entry.used, size(entry.size_bytes), size(entry.reclaimable_bytes))
        for entry in usage.totals
    ]
    both = size(usage.size_bytes), size(usage.reclaimable_bytes)
    yield from table(header, [*totals, ("all", None, None, *both)])
    yield ""
    yield f"{size(usage.disk_free_bytes)} of {size(usage.disk_bytes)} free"
    for total in usage.totals:
        rows = [entry for entry in usage.rows if entry.kind == total.kind]
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
    garbage = session.client.gc(dry_run=dry_run)
    session.answer(garbage, _gc_lines(garbage))


def _gc_lines(garbage: Garbage) -> Iterator[str]:
    if garbage.dropped:
        yield from listing(garbage.dropped, "KIND NAME COUNT SIZE=size_bytes")
        yield ""
    yield f"{'would free' if garbage.dry_run else 'freed'} {size(garbage.freed_bytes)}"
