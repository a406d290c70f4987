"""`mirrord mirror …`, `refs …`, `bundle …`, `pin`, `unpin` and `pins`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import IntegrityError, MirrordError, UsageError, from_problem
from ..protocol import RefDiff
from .operations import finish, finish_all, started, watching
from .output import count, facts, problem_of, short, size, table
from .parameters import Argument, MirrorArgument, NoWait, Option
from .session import Session

if TYPE_CHECKING:
    from ..protocol import Mirror, Operation

_REPOS_HELP = "owner/name; the upstream is the configured one."
Repos = Annotated[list[str], Argument(metavar="REPO...", help=_REPOS_HELP)]
RecordArgument = Annotated[str, Argument(help="A record: its id, or a time in ISO 8601.")]
_LOSS_HELP = "Follow an upstream that lost most of its refs; the mirror keeps them."
AcceptLoss = Annotated[bool, Option("--accept-loss", help=_LOSS_HELP)]
CommitArgument = Annotated[str, Argument(help="A full commit id.")]


def add(
    session: Session,
    repos: Repos,
    url: Annotated[str | None, Option(help="Another upstream for this one REPO.")] = None,
    no_wait: NoWait = False,
) -> None:
    """A mirror that exists already, with the same upstream, is synced again."""
    if url and len(repos) > 1:
        hint = "add them one by one, each with its own --url"
        raise UsageError("cannot give several mirrors one URL", hint=hint)
    _run(session, (partial(session.client.add_mirror, repo, url) for repo in repos), no_wait)


def sync(
    session: Session,
    names: Annotated[list[str] | None, Argument(metavar="[NAME]...", help="Default: all.")] = None,
    accept_loss: AcceptLoss = False,
    no_wait: NoWait = False,
) -> None:
    """One sync runs per mirror; requests during it share its result."""
    if accept_loss and not names:
        hint = "name those whose upstream you looked at"
        raise UsageError("cannot accept the loss of every mirror", hint=hint)
    client = session.client
    wanted = names or [mirror.name for mirror in client.list_mirrors()]
    starts = (partial(client.sync_mirror, name, accept_loss=accept_loss) for name in wanted)
    _run(session, starts, no_wait)


def _run(session: Session, starts: Iterable[Callable[[], Operation]], no_wait: bool) -> None:
    """Start all, wait for all; print the mirrors, or the operations that still run."""
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

    def shown() -> Iterator[str]:
        if any(operation.state == "running" for operation in operations):
            rows = [(each.id, each.kind, each.subject, each.state) for each in operations]
            yield from table(("OPERATION", "KIND", "SUBJECT", "STATE"), rows)
        elif operations:
            subjects = {operation.subject.lower() for operation in operations}
            yield from _lines(
                m for m in session.client.list_mirrors() if m.name.lower() in subjects
            )

    session.answer(operations, shown())
    for operation in operations:
        if to := (operation.result or {}).get("redirected_to"):
            keeps = "the mirror keeps its URL until it is removed and added again"
            session.note(f"{operation.subject}: upstream redirects to {to}; {keeps}")
    if status:
        raise SystemExit(status)


def list_all(session: Session) -> None:
    mirrors = session.client.list_mirrors()
    session.answer(mirrors, _lines(mirrors))


def _lines(mirrors: Iterable[Mirror]) -> Iterator[str]:
    rows = []
    for m in mirrors:
        counts = (m.ref_count, m.pin_count, m.kept_count)
        rows.append((m.name, m.state, *counts, size(m.size_bytes), m.synced_at, problem_of(m)))
    return table(("MIRROR", "STATE", "REFS", "PINS", "KEPT", "SIZE", "SYNCED", "PROBLEM"), rows)


def show(session: Session, name: MirrorArgument) -> None:
    """Status 8 when git cannot open the mirror."""
    mirror = session.client.get_mirror(name)
    session.answer(mirror, _described(mirror))
    if mirror.error and isinstance(from_problem({"code": mirror.error.code}), IntegrityError):
        raise SystemExit(IntegrityError.exit_status)


def _described(mirror: Mirror) -> Iterator[str]:
    yield from facts(
        [
            ("mirror", mirror.name),
            ("upstream", mirror.url),
            ("state", mirror.state),
            ("default branch", mirror.default_branch),
            ("refs", mirror.ref_count),
            ("pins", mirror.pin_count),
            ("kept refs", mirror.kept_count),
            ("size", size(mirror.size_bytes)),
            ("synced", mirror.synced_at),
            ("attempted", mirror.attempted_at),
            ("problem", mirror.error and mirror.error.detail),
            ("hint", mirror.error and mirror.error.hint),
        ]
    )
    if mirror.ref_faults:
        yield ""
        rows = [(fault.ref, short(fault.commit), fault.reason) for fault in mirror.ref_faults]
        yield from table(("REF NOT TAKEN", "COMMIT", "REASON"), rows)


def remove(session: Session, name: MirrorArgument) -> None:
    """A mirror with pins or checkouts is refused: remove the datasets first."""
    session.client.remove_mirror(name)
    session.answer(None, [])
    session.note(f"removed mirror {name}")


# -- pins


def pin(
    session: Session,
    name: MirrorArgument,
    commit: CommitArgument,
    reason: Annotated[str, Option(help="Why; shown in `mirrord pins`.")] = "",
) -> None:
    """Fetches the commit when the mirror lacks it, and pins it once its closure is verified."""
    made = session.client.pin(name, commit, reason)
    session.answer(made, [f"pinned {made.commit} of {made.mirror} for {made.owner}"])


def unpin(
    session: Session,
    name: MirrorArgument,
    commit: CommitArgument,
    owner: Annotated[
        str | None,
        Option(help="dataset/NAME or person/UID; default: you. Others need an administrator."),
    ] = None,
) -> None:
    """A pin of another owner keeps the commit alive."""
    session.client.unpin(name, commit, owner)
    session.answer(None, [])
    session.note(f"unpinned {commit} of {name}")


def pins(
    session: Session,
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Default: all mirrors.")] = None,
) -> None:
    found = session.client.list_pins(name)
    rows = [(each.mirror, each.commit, each.owner, each.created_at, each.reason) for each in found]
    session.answer(found, table(("MIRROR", "COMMIT", "OWNER", "SINCE", "REASON"), rows))


# -- the ref history


def refs_log(session: Session, name: MirrorArgument) -> None:
    """Newest first; each sync that changed something makes a record."""
    records = session.client.log_refs(name)
    rows = [(record.id, record.at, record.ref_count, record.summary) for record in records]
    session.answer(records, table(("RECORD", "AT", "REFS", "SUMMARY"), rows))


def refs_diff(session: Session, name: MirrorArgument, a: RecordArgument, b: RecordArgument) -> None:
    found = session.client.diff_refs(name, a, b)
    session.answer(found, _changes(found))


def refs_restore(
    session: Session, name: MirrorArgument, at: RecordArgument, no_wait: NoWait = False
) -> None:
    """Prints the moved refs. Their old tips are kept; the next sync follows upstream again."""
    operation = session.client.restore_refs(name, at)
    ended = operation if no_wait else finish(session, operation)

    result = ended.result
    session.answer(ended, _changes(RefDiff.from_json(result)) if result else started(ended))


def _changes(found: RefDiff) -> Iterator[str]:
    rows = [
        (each.kind, short(each.old), short(each.new), "kept" if each.kept else None, each.ref)
        for each in found.changes
    ]
    return table(("CHANGE", "OLD", "NEW", "OLD TIP", "REF"), rows)


# -- bundles


def bundle(
    session: Session,
    name: MirrorArgument,
    file: Annotated[Path, Argument(help="The file to write; it appears when it is whole.")],
    since: Annotated[
        str | None,
        Option(metavar="RECORD", help="Only what is newer than this record: id, time, or latest."),
    ] = None,
) -> None:
    """The file holds refs, pins, kept refs, ref history, and the dataset rows of the mirror.

    The rows include patches: keep it as private as the mirror. git can verify, clone and fetch from
    it. Prints the record that the next --since can name.
    """
    if not file.parent.is_dir():
        fact = f"there is no directory {file.parent}"
        raise UsageError(f"cannot write {file}: {fact}", hint="make it first")
    with watching(session, f"bundling {name}") as watch:
        made = session.client.create_bundle(name, file, since=since, progress=watch)
    known: dict[str, object] = {
        "file": made.file,
        "mirror": made.mirror,
        "size": size(made.size_bytes),
    }
    known |= {"record": made.record, "since": made.since}
    session.answer(made, facts(known.items()))


def bundle_import(
    session: Session,
    file: Annotated[Path, Argument(help="A bundle of mirrord, or of git.")],
    mirror: Annotated[
        str | None,
        Option(metavar="NAME", help="Into this mirror; default: the one that the bundle names."),
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Makes a missing mirror. In an existing one refs are added or fast-forwarded.

    Refs of the bundle that differ otherwise become kept refs. A damaged or hostile file changes
    nothing.
    """
    if not file.is_file():
        raise UsageError(f"cannot import {file}: it is not a file", hint="name a bundle file")
    with watching(session, f"sending {file.name}") as watch:
        operation = session.client.import_bundle(file, mirror=mirror, progress=watch)
    ended = operation if no_wait else finish(session, operation)
    session.answer(ended, _imported(ended))


def _imported(operation: Operation) -> Iterator[str]:
    result = operation.result
    if result is None:
        yield from started(operation)
        return
    made = "made" if result["created"] else "added to"
    counts = f"{len(result['kept'])} kept, {count(result['pins'], 'pin')}"
    yield f"{made} mirror {result['mirror']}: {result['summary']}, {counts}"
    for name, rows in result["datasets"].items():
        yield f"dataset {name}: {count(rows, 'instance')} added"
    for name in result["datasets_refused"]:
        yield f"dataset {name}: another dataset has this name; its pins are yours now"
