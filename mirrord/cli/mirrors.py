"""`mirrord mirror …`"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ..errors import IntegrityError, MirrordError, UsageError, from_problem
from .output import count, facts, short, size, table
from .parameters import Argument, Option
from .progress import finish_all
from .session import Session

if TYPE_CHECKING:
    from .. import Client
    from ..protocol import Mirror, Operation

Name = Annotated[str, Argument(help="owner/name or owner__name, in any letter case.")]
NoWait = Annotated[bool, Option("--no-wait", help="Answer with the operation at once.")]


def add(
    session: Session,
    repos: Annotated[
        list[str],
        Argument(metavar="REPO...", help="owner/name; the upstream is the configured one."),
    ],
    url: Annotated[str | None, Option(help="Another upstream for this one REPO.")] = None,
    no_wait: NoWait = False,
) -> None:
    """A mirror that is there already, with the same upstream, is synced again."""
    if url and len(repos) > 1:
        raise UsageError(
            "cannot give several mirrors one URL",
            hint="add them one by one, each with its own --url",
        )
    with session.client() as client:
        _run(session, client, (partial(client.add_mirror, repo, url) for repo in repos), no_wait)


def sync(
    session: Session,
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Which; default: all.")
    ] = None,
    accept_loss: Annotated[
        bool,
        Option(
            "--accept-loss",
            help="Follow an upstream that lost most of what it had; the mirror keeps it.",
        ),
    ] = False,
    no_wait: NoWait = False,
) -> None:
    """One sync runs per mirror, however many ask; whoever asks meanwhile gets the one that runs."""
    if accept_loss and not names:
        raise UsageError(
            "cannot accept the loss of every mirror", hint="name those whose upstream you looked at"
        )
    with session.client() as client:
        wanted = names or [mirror.name for mirror in client.list_mirrors()]
        _run(
            session,
            client,
            (partial(client.sync_mirror, name, accept_loss=accept_loss) for name in wanted),
            no_wait,
        )


def _run(
    session: Session, client: Client, starts: Iterable[Callable[[], Operation]], no_wait: bool
) -> None:
    operations: list[Operation] = []
    status = 0
    for start in starts:
        try:
            operations.append(start())
        except MirrordError as error:
            session.fail(error)
            status = status or error.exit_status
    if not no_wait:
        operations, failed = finish_all(session, client, operations)
        status = status or failed
    session.answer(operations, lambda: _ended(client, operations))
    for operation in operations:
        if to := (operation.result or {}).get("redirected_to"):
            session.note(
                f"{operation.subject}: upstream redirects to {to}; a mirror keeps its URL until it is added anew"
            )
    if status:
        raise SystemExit(status)


def _ended(client: Client, operations: list[Operation]) -> Iterator[str]:
    if any(operation.state == "running" for operation in operations):
        rows = [
            (operation.id, operation.kind, operation.subject, operation.state)
            for operation in operations
        ]
        yield from table(("OPERATION", "KIND", "SUBJECT", "STATE"), rows)
    elif operations:
        subjects = {operation.subject.lower() for operation in operations}
        yield from _lines(
            mirror for mirror in client.list_mirrors() if mirror.name.lower() in subjects
        )


def list_all(session: Session) -> None:
    with session.client() as client:
        mirrors = client.list_mirrors()
    session.answer(mirrors, lambda: _lines(mirrors))


def _lines(mirrors: Iterable[Mirror]) -> Iterator[str]:
    rows = [
        (
            m.name,
            m.state,
            m.ref_count,
            m.pin_count,
            m.kept_count,
            size(m.size_bytes),
            m.synced_at,
            _problem(m),
        )
        for m in mirrors
    ]
    return table(("MIRROR", "STATE", "REFS", "PINS", "KEPT", "SIZE", "SYNCED", "PROBLEM"), rows)


def _problem(mirror: Mirror) -> str | None:
    if mirror.error:
        return mirror.error.code
    return f"{count(len(mirror.ref_faults), 'ref')} not taken" if mirror.ref_faults else None


def show(session: Session, name: Name) -> None:
    """Status 8 when git cannot open the mirror."""
    with session.client() as client:
        mirror = client.get_mirror(name)
    session.answer(mirror, lambda: _described(mirror))
    _must_be_openable([mirror])


def _must_be_openable(mirrors: Iterable[Mirror]) -> None:
    """End with status 8 where git cannot open one of them."""
    problems = (from_problem({"code": m.error.code}) for m in mirrors if m.error)
    if any(isinstance(problem, IntegrityError) for problem in problems):
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
            ("problem", mirror.error.detail if mirror.error else None),
            ("hint", mirror.error.hint if mirror.error else None),
        ]
    )
    if mirror.ref_faults:
        yield ""
        yield from table(
            ("REF NOT TAKEN", "COMMIT", "REASON"),
            [(f.ref, short(f.commit), f.reason) for f in mirror.ref_faults],
        )


def remove(session: Session, name: Name) -> None:
    """A mirror with pins or checkouts is refused: remove the datasets first."""
    with session.client() as client:
        client.remove_mirror(name)
    _removed(session, f"removed mirror {name}")


def _removed(session: Session, text: str) -> None:
    if session.json:
        session.print_json(None)
    session.note(text)
