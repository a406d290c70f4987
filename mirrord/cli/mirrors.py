"""`mirrord mirror …`, `refs …`, `bundle …`, `restore`, `pin`, `unpin`, `pins`, `audit`, `heal`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

from ..errors import IntegrityError, MirrordError, UsageError, from_problem
from ..model import AuditLevel, CommitRole
from ..protocol import Audit, BundleImported, Mirror, Operation, RefDiff, Repair, Restored
from ..quoting import quote_name
from .checkouts import restore_paths
from .operations import conclude, exit_as, finish, finish_all, started, watching
from .output import cell, count, facts_of, listing, problem_of
from .session import Argument, MirrorArgument, NoWait, Option, Session

Repos = Annotated[list[str], Argument("owner/name; [upstream] url is the upstream.", "REPO...")]
RecordArgument = Annotated[str, Argument("A record, by id or time (ISO 8601).")]
_LOSS_HELP = "Follow an upstream that lost most of its refs; the mirror keeps their tips."
AcceptLoss = Annotated[bool, Option(_LOSS_HELP)]
CommitArgument = Annotated[str, Argument("A full commit id.")]


def add(
    session: Session,
    repos: Repos,
    url: Annotated[str | None, Option("Another upstream, for a single REPO.", "URL")] = None,
    no_wait: NoWait = False,
) -> None:
    """An existing mirror with the same upstream is synced again."""
    if url and len(repos) > 1:
        hint = "add them one by one, each with its own --url"
        raise UsageError("cannot use one --url for several mirrors", hint=hint)
    _start_all(session, (partial(session.client.add_mirror, repo, url) for repo in repos), no_wait)


def sync(
    session: Session,
    names: Annotated[list[str] | None, Argument("Mirrors; default: all.", "[NAME]...")] = None,
    accept_loss: AcceptLoss = False,
    no_wait: NoWait = False,
) -> None:
    """A mirror has one sync at a time; requests during it share its result."""
    if accept_loss and not names:
        hint = "name the mirrors whose upstream you checked"
        raise UsageError("cannot use --accept-loss for all mirrors", hint=hint)
    client = session.client
    wanted = names or [mirror.name for mirror in client.list_mirrors()]
    starts = (partial(client.sync_mirror, name, accept_loss=accept_loss) for name in wanted)
    _start_all(session, starts, no_wait)


def _start_all(session: Session, starts: Iterable[Callable[[], Operation]], no_wait: bool) -> None:
    """Start operations and wait for them; print their mirrors, or the running operations."""
    operations: list[Operation] = []
    status = 0
    for start in starts:
        try:
            operations.append(start())
        except MirrordError as error:
            session.fail(error)
            status = status or error.exit_status
    if not no_wait:
        operations, failed = finish_all(session, operations)
        status = status or failed

    def lines() -> Iterator[str]:
        if any(operation.state == "running" for operation in operations):
            yield from listing(operations, "OPERATION=id KIND SUBJECT STATE")
        elif operations:
            subjects = {operation.subject.lower() for operation in operations}
            yield from _mirror_table(
                m for m in session.client.list_mirrors() if m.name.lower() in subjects
            )

    session.answer(operations, lines())
    for operation in operations:
        if to := (operation.result or {}).get("redirected_to"):
            remedy = "to follow it, remove the mirror and add it again"
            session.note(f"{operation.subject}: upstream redirects to {to}; {remedy}")
    if status:
        raise SystemExit(status)


def list_all(session: Session) -> None:
    mirrors = session.client.list_mirrors()
    session.answer(mirrors, _mirror_table(mirrors))


def _mirror_table(mirrors: Iterable[Mirror]) -> Iterator[str]:
    counts = "REFS=ref_count PINS=pin_count KEPT=kept_count SIZE=size_bytes"
    columns = f"MIRROR=name STATE {counts} SYNCED=synced_at PROBLEM"
    return listing(mirrors, columns, PROBLEM=problem_of)


def show(session: Session, name: MirrorArgument) -> None:
    """Status 8 if git cannot open the mirror."""
    mirror = session.client.get_mirror(name)
    session.answer(mirror, _mirror_lines(mirror))
    if mirror.error and isinstance(from_problem({"code": mirror.error.code}), IntegrityError):
        raise SystemExit(IntegrityError.exit_status)


def _mirror_lines(mirror: Mirror) -> Iterator[str]:
    counts = "refs=ref_count pins=pin_count kept_refs=kept_count size=size_bytes"
    branch = "default_branch=default_branch:name"
    names = f"mirror=name upstream=url state {branch} {counts} synced=synced_at"
    yield from facts_of(
        mirror, f"{names} attempted=attempted_at problem=error.detail hint=error.hint"
    )
    if mirror.ref_faults:
        yield ""
        yield from listing(mirror.ref_faults, "REF_NOT_TAKEN=ref:name COMMIT=commit:short REASON")


def remove(session: Session, name: MirrorArgument) -> None:
    """Remove the datasets that pin its commits first."""
    session.client.remove_mirror(name)
    session.answer(None, [])
    session.note(f"removed mirror {name}")


# -- pins


def pin(
    session: Session,
    name: MirrorArgument,
    commit: CommitArgument,
    reason: Annotated[str, Option("Reason, shown by `mirrord pins`.", "REASON")] = "",
) -> None:
    """Fetches the commit if the mirror lacks it, and pins it once its closure is verified."""
    made = session.client.pin(name, commit, reason)
    session.answer(made, [f"pinned {made.commit} of {made.mirror} for {made.owner}"])


def unpin(
    session: Session,
    name: MirrorArgument,
    commit: CommitArgument,
    owner: Annotated[
        str | None,
        Option("dataset/NAME or person/UID, for administrators; default: you.", "OWNER"),
    ] = None,
) -> None:
    """Pins of other owners still keep the commit alive."""
    session.client.unpin(name, commit, owner)
    session.answer(None, [])
    session.note(f"unpinned {commit} of {name}")


def pins(
    session: Session,
    name: Annotated[str | None, Argument("Mirror; default: all.", "[NAME]")] = None,
) -> None:
    found = session.client.list_pins(name)
    session.answer(found, listing(found, "MIRROR COMMIT OWNER SINCE=created_at REASON"))


# -- the ref history


def refs_log(session: Session, name: MirrorArgument) -> None:
    """Newest first. Each sync that changes a ref makes a record."""
    records = session.client.log_refs(name)
    session.answer(records, listing(records, "RECORD=id AT REFS=ref_count SUMMARY"))


def refs_diff(session: Session, name: MirrorArgument, a: RecordArgument, b: RecordArgument) -> None:
    found = session.client.diff_refs(name, a, b)
    session.answer(found, _change_lines(found))


def refs_restore(
    session: Session, name: MirrorArgument, at: RecordArgument, no_wait: NoWait = False
) -> None:
    """Prints the moved refs. Their old tips are kept. The next sync follows upstream again."""
    conclude(session, session.client.restore_refs(name, at), no_wait, RefDiff, _change_lines)


def _change_lines(found: RefDiff) -> Iterator[str]:
    columns = "CHANGE=kind OLD=old:short NEW=new:short OLD_TIP REF=ref:name"
    return listing(found.changes, columns, OLD_TIP=lambda each: "kept" if each.kept else None)


# -- bundles


def bundle(
    session: Session,
    name: MirrorArgument,
    file: Annotated[Path, Argument("File to write; it appears once it is complete.")],
    since: Annotated[
        str | None,
        Option("Only what is newer than this record: an id, a time, or latest.", "RECORD"),
    ] = None,
) -> None:
    """The file has refs, pins, kept refs, ref history, and the dataset rows of the mirror. It is as
    private as the mirror: rows have patches. git can verify it, clone it and fetch from it. Prints
    the record to name in the next --since.
    """
    if not file.parent.is_dir():
        fact = f"there is no directory {file.parent}"
        raise UsageError(f"cannot write {file}: {fact}", hint="create it first")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a directory", hint="name a file in it")
    with watching(session, f"bundling {name}") as watch:
        made = session.client.create_bundle(name, file, since=since, progress=watch)
    session.answer(made, facts_of(made, "file mirror size=size_bytes record since"))


def bundle_import(
    session: Session,
    file: Annotated[Path, Argument("A bundle of mirrord or git.")],
    mirror: Annotated[
        str | None, Option("Mirror to import into; default: the bundle's.", "NAME")
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Creates a missing mirror. In an existing one refs are added or fast-forwarded; refs that
    differ otherwise become kept refs. A damaged or hostile file changes nothing.
    """
    if not file.is_file():
        raise UsageError(f"cannot import {file}: it is not a file", hint="name a bundle file")
    with watching(session, f"sending {file.name}") as watch:
        operation = session.client.import_bundle(file, mirror=mirror, progress=watch)
    conclude(session, operation, no_wait, BundleImported, _bundle_lines)


def _bundle_lines(result: BundleImported) -> Iterator[str]:
    verb = "created" if result.created else "merged into"
    counts = f"{len(result.kept)} kept, {count(result.pins, 'pin')}"
    yield f"{verb} mirror {result.mirror}: {result.summary}, {counts}"
    for name, rows in result.datasets.items():
        yield f"dataset {name}: {count(rows, 'instance')} added"
    for name in result.datasets_refused:
        yield f"dataset {name}: another dataset has this name; you own its pins now"


_RESTORE_HELP = (
    "A checkout, and paths from the top of the commit's tree; with --from-store mirrors, default:"
    " all."
)


def restore(
    session: Session,
    targets: Annotated[list[str] | None, Argument(_RESTORE_HELP, "[ID PATH...|MIRROR...]")] = None,
    commit: Annotated[
        str | None,
        Option("Pinned commit, or a role of the instance's commits, such as gold.", "SHA"),
    ] = None,
    from_store: Annotated[bool, Option("Restore mirrors, pins and rows from [store] url.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Files need a checkout in the grader view.

    With --from-store, existing data stays, and the restored mirrors are audited. A failed mirror
    does not stop the others; run the command again to retry it.
    """
    if from_store:
        if commit:
            hint = "restore files of a checkout without --from-store"
            raise UsageError("cannot use --commit with --from-store", hint=hint)
        _restore_mirrors(session, targets or [], no_wait)
    elif commit and targets and len(targets) > 1:
        restore_paths(session, targets[0], commit, targets[1:])
    else:
        hint = "`mirrord restore ID PATH... --commit SHA`, or `--from-store` for mirrors"
        raise UsageError("cannot restore: a checkout, a path or a commit is missing", hint=hint)


def _restore_mirrors(session: Session, names: list[str], no_wait: bool) -> None:
    operation = session.client.start_restore(*names)
    if no_wait:
        session.answer(operation, started(operation))
        return
    result = Restored.from_json(finish(session, operation).result)
    for each in result.failed:
        session.fail(from_problem(each.error.to_json()))
    session.answer(result, _restore_lines(result))
    exit_as(result)


def _restore_lines(result: Restored) -> Iterator[str]:
    for each in result.mirrors:
        yield from _bundle_lines(each)
    if result.audit:
        yield from _audit_lines(result.audit)
        yield f"audit {result.audit.id}"


Names = Annotated[list[str] | None, Argument("Mirrors; default: all.", "[NAME]...")]


def audit(
    session: Session,
    names: Names = None,
    dataset: Annotated[
        str | None, Option("Only commits that this dataset records.", "NAME")
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
    found = _finish_audit(session, operation, no_wait)
    if found:
        for line in _repair_lines(found):
            session.note(line)
        session.answer(found, _audit_lines(found))
        exit_as(found)


def _finish_audit(session: Session, operation: Operation, no_wait: bool) -> Audit | None:
    if no_wait:
        session.answer(operation, started(operation))
        return None
    ended = finish(session, operation)
    return session.client.get_audit(str((ended.result or {})["id"]))


def _repair_lines(found: Audit) -> Iterator[str]:
    for repair in found.repairs:
        yield from map(cell, _describe_repair(repair))


def _audit_lines(found: Audit) -> Iterator[str]:
    for f in found.findings:
        commit = f" {f.commit}" if f.commit else ""
        instances = f" ({', '.join(f.instances)})" if f.instances else ""
        only = f", {', '.join(f.roles)} only" if f.roles and CommitRole.BASE not in f.roles else ""
        kind = f"{f.kind}{only}{', accepted' if f.accepted else ''}{instances}"
        yield cell(f"{f.mirror}{commit} {kind}: {f.detail or 'no detail'}")
    states = ", ".join(f"{number:,} {state}" for state, number in found.counts.items() if number)
    total = sum(found.counts.values())
    unserved = f"; {count(len(found.affected), 'instance')} cannot be served"
    affected = unserved if found.affected else ""
    accepted = len(found.findings) - found.open_count
    is_open = f"; {count(found.open_count, 'finding')}" if found.open_count else ""
    is_open += f"; {count(accepted, 'finding')} accepted" if accepted else ""
    healed = f"; {found.healed} of them healed" if found.healed else ""
    scope = f"{count(total, 'recorded commit')} in {count(len(found.mirrors), 'mirror')}"
    yield f"{scope} at level {found.level}: {states or 'nothing'}{healed}{affected}{is_open}"


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
    if bundle and not bundle.is_file():
        raise UsageError(f"cannot heal with {bundle}: it is not a file", hint="name a bundle file")
    if bundle is None:
        operation = session.client.start_heal(*names or ())
    else:
        with watching(session, f"sending {bundle.name}") as watch:
            operation = session.client.heal_with_bundle(mirrors[0], bundle, progress=watch)
    found = _finish_audit(session, operation, no_wait)
    if found:
        session.answer(found, chain(_repair_lines(found), _audit_lines(found)))
        exit_as(found)
