"""`mirrord operations …`: background work of the daemon, whoever started it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from .output import cell, facts, table
from .parameters import Argument, Option
from .progress import amount, finish
from .session import Session, plain, print_line

if TYPE_CHECKING:
    from ..protocol import Operation

Id = Annotated[
    str, Argument(metavar="ID", help="An operation's id, as `mirrord operations list` shows it.")
]


def list_all(
    session: Session,
    running: Annotated[bool, Option("--running", help="Only those that have not ended.")] = False,
) -> None:
    """Lists your own; an administrator sees everybody's. A restart clears the list."""
    with session.client() as client:
        known = [
            each for each in client.list_operations() if not running or each.state == "running"
        ]
    session.answer(known, lambda: rows(known))


def rows(operations: Iterable[Operation]) -> Iterator[str]:
    """A table of operations."""
    header = ("OPERATION", "KIND", "SUBJECT", "STATE", "PROGRESS", "STARTED")
    return table(
        header,
        [(o.id, o.kind, o.subject, o.state, amount(o.progress), o.started_at) for o in operations],
    )


def show(session: Session, operation_id: Id) -> None:
    """With --json, shows its result too."""
    with session.client() as client:
        found = client.get_operation(operation_id)
    pairs = [
        ("operation", found.id),
        ("kind", found.kind),
        ("subject", found.subject),
        ("state", found.state),
        ("progress", amount(found.progress) or None),
        ("started", found.started_at),
        ("ended", found.finished_at),
        ("problem", found.error.detail if found.error else None),
        ("hint", found.error.hint if found.error else None),
    ]
    session.answer(found, lambda: facts(pairs))


def watch(session: Session, operation_id: Id) -> None:
    """Prints a line for each change; ends with the status of the verb that started it."""
    printed = ""

    def show_change(found: Operation) -> None:
        nonlocal printed
        line = json.dumps(plain(found), ensure_ascii=False) if session.json else _line(found)
        if line != printed:
            printed = line
            print_line(line)

    with session.client() as client:
        client.wait(operation_id, progress=show_change)


def _line(found: Operation) -> str:
    words = found.kind, cell(found.subject), found.state, amount(found.progress)
    return " ".join(filter(None, words))


def wait(session: Session, operation_id: Id) -> None:
    """Ends with the status of the verb that started it."""
    with session.client() as client:
        ended = finish(session, client, client.get_operation(operation_id))
    session.answer(ended, lambda: [_line(ended)])


def cancel(session: Session, operation_id: Id) -> None:
    """Finished parts stay: mirrors, pins and rows."""
    with session.client() as client:
        found = client.cancel_operation(operation_id)
    session.answer(found, lambda: [_line(found)])
