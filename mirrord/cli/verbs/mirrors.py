"""`mirrord mirror …`, `refs …`, `pin`, `unpin`, `pins`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated

from ...errors import IntegrityError, MirrordError, UsageError, from_problem
from ...protocol import Mirror, Operation, RefDiff
from ..output import facts_of, listing, problem_of
from ..session import Argument, MirrorArgument, NoWait, Option, Session
from ..waiting import conclude, finish_all

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
