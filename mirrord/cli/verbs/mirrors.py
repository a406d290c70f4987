"""`mirrord mirror …`, `pin …`, `ref …`, `bundle …`, `credential …`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from ...errors import IntegrityError, MirrordError, UsageError, from_problem
from ...presence import is_dir, is_file
from ...protocol import BundleImported, Mirror, Operation, RefDiff, Restored
from ..output import count, facts_of, listing, problem_of
from ..session import Argument, MirrorArgument, NoWait, Option, Session
from ..waiting import conclude, exit_as, finish, finish_all, started, watching
from .datasets import lacking_lines
from .upkeep import audit_lines

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


def set_url(
    session: Session,
    name: MirrorArgument,
    url: Annotated[str, Argument("The new upstream.", "URL")],
    accept_loss: Annotated[
        bool, Option("Take an upstream that lacks recorded commits; the mirror keeps them.")
    ] = False,
    no_wait: NoWait = False,
) -> None:
    """The upstream must have every recorded commit. The mirror is kept, and synced."""
    start = partial(session.client.set_url, name, url, accept_loss=accept_loss)
    _start_all(session, [start], no_wait)


def sync(
    session: Session,
    names: Annotated[
        list[str] | None, Argument("Mirrors; default: all.", "[NAME]...", "mirror")
    ] = None,
    accept_loss: AcceptLoss = False,
    retry_faults: Annotated[
        bool, Option("Ask at once for refs that upstream could not give lately.")
    ] = False,
    no_wait: NoWait = False,
) -> None:
    """A mirror has one sync at a time; requests during it share its result."""
    if accept_loss and not names:
        hint = "name the mirrors whose upstream you checked"
        raise UsageError("cannot use --accept-loss for all mirrors", hint=hint)
    client = session.client
    wanted = names or [mirror.name for mirror in client.list_mirrors()]
    start = partial(client.sync_mirror, accept_loss=accept_loss, retry_faults=retry_faults)
    _start_all(session, (partial(start, name) for name in wanted), no_wait)


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
            remedy = f"`mirrord mirror set-url {operation.subject} {to}` asks there at once"
            session.note(f"{operation.subject}: upstream redirects to {to}; {remedy}")
    if status:
        raise SystemExit(status)


def list_all(session: Session) -> None:
    mirrors = session.client.list_mirrors()
    session.answer(mirrors, _mirror_table(mirrors))


def _mirror_table(mirrors: Iterable[Mirror]) -> Iterator[str]:
    counts = "SIZE=size_bytes PINS=pin_count REFS=ref_count KEPT=kept_count"
    columns = f"MIRROR=name STATE SYNCED=synced_at PROBLEM {counts}"
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
        columns = "REF_NOT_TAKEN=ref:name COMMIT=commit:short ASKED=asked_at REASON"
        yield from listing(mirror.ref_faults, columns)


def remove(session: Session, name: MirrorArgument) -> None:
    """Remove the datasets that pin its commits first."""
    session.client.remove_mirror(name)
    session.answer(None, [])
    session.note(f"removed mirror {name}")


def check_credential(
    session: Session, url: Annotated[str, Argument("An upstream's URL; it need not be mirrored.")]
) -> None:
    """Status 6 if the upstream does not accept it."""
    check = session.client.check_credential(url)
    entry = check.credential or "none: no [[credential]] has a prefix of this URL"
    secret = check.secret or "none"
    accepted = "yes" if check.accepted else "no"
    session.answer(
        check,
        [f"credential  {entry}", f"secret      {secret}", f"accepted    {accepted}"],
    )
    if check.error:
        raise from_problem(check.error.to_json())


def pin(
    session: Session,
    name: MirrorArgument,
    commit: CommitArgument,
    reason: Annotated[str, Option("Reason, shown by `mirrord pin list`.", "REASON")] = "",
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


def list_pins(
    session: Session,
    name: Annotated[str | None, Argument("Mirror; default: all.", "[NAME]", "mirror")] = None,
) -> None:
    pins = session.client.list_pins(name)
    session.answer(pins, listing(pins, "MIRROR COMMIT OWNER SINCE=created_at REASON"))


def log_refs(session: Session, name: MirrorArgument) -> None:
    """Newest first. Each sync that changes a ref makes a record."""
    records = session.client.log_refs(name)
    session.answer(records, listing(records, "RECORD=id AT SUMMARY REFS=ref_count"))


def diff_refs(session: Session, name: MirrorArgument, a: RecordArgument, b: RecordArgument) -> None:
    difference = session.client.diff_refs(name, a, b)
    session.answer(difference, _change_lines(difference))


def restore_refs(
    session: Session, name: MirrorArgument, at: RecordArgument, no_wait: NoWait = False
) -> None:
    """Prints the moved refs. Their old tips are kept. The next sync follows upstream again."""
    conclude(session, session.client.restore_refs(name, at), no_wait, RefDiff, _change_lines)


def _change_lines(difference: RefDiff) -> Iterator[str]:
    columns = "CHANGE=kind OLD=old:short NEW=new:short OLD_TIP REF=ref:name"
    return listing(
        difference.changes, columns, OLD_TIP=lambda change: "kept" if change.kept else None
    )


def create_bundle(
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
    if not is_dir(file.parent):
        fact = f"there is no directory {file.parent}"
        raise UsageError(f"cannot write {file}: {fact}", hint="create it first")
    if is_dir(file):
        raise UsageError(f"cannot write {file}: it is a directory", hint="name a file in it")
    with watching(session, f"bundling {name}") as watch:
        made = session.client.create_bundle(name, file, since=since, progress=watch)
    session.answer(made, facts_of(made, "file mirror size=size_bytes record since"))


def import_bundle(
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
    if not is_file(file):
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
    if result.submodules:
        yield f"with {count(len(result.submodules), 'mirror')} of submodules"
    if result.lfs_objects:
        yield f"with {count(result.lfs_objects, 'LFS object')}"
    yield from lacking_lines(result.needs) if result.needs else ()


def restore_mirrors(
    session: Session,
    names: Annotated[
        list[str] | None, Argument("Mirrors; default: all.", "[NAME]...", "mirror")
    ] = None,
    from_store: Annotated[bool, Option("From [store] url, the only source.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Restores mirrors, pins and rows. Existing data stays, and the restored mirrors are audited. A
    failed mirror does not stop the others; run the command again to retry it.
    """
    if not from_store:
        hint = "add --from-store; `mirrord bundle import` restores a mirror from a file"
        raise UsageError("cannot restore mirrors: no source is named", hint=hint)
    operation = session.client.start_restore(*names or ())
    if no_wait:
        session.answer(operation, started(operation))
        return
    result = Restored.from_json(finish(session, operation).result)
    for failure in result.failed:
        session.fail(from_problem(failure.error.to_json()))
    session.answer(result, _restore_lines(result))
    exit_as(result)


def _restore_lines(result: Restored) -> Iterator[str]:
    for imported in result.mirrors:
        yield from _bundle_lines(imported)
    if result.audit:
        yield from audit_lines(result.audit)
        yield f"audit {result.audit.id}"
