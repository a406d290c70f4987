"""`mirrord operation …`."""

from typing import Annotated

from ...protocol import Operation
from ..output import cell, facts_of
from ..session import Argument, Option, Session, as_json, print_line
from ..waiting import amount, exit_as_verb, finish, operation_table

Id = Annotated[str, Argument("Id of an operation, as in `mirrord operation list`.", "ID")]


def list_all(
    session: Session,
    running: Annotated[bool, Option("Only running operations.")] = False,
) -> None:
    """Users see their own operations, administrators all. A restart clears the list."""
    known = [o for o in session.client.list_operations() if not running or o.state == "running"]
    session.answer(known, operation_table(known))


def show(session: Session, operation_id: Id) -> None:
    """With --json, the result is included."""
    found = session.client.get_operation(operation_id)
    names = "operation=id kind subject state progress started=started_at ended=finished_at"
    names += " problem=error.detail hint=error.hint"
    session.answer(found, facts_of(found, names, progress=amount(found.progress) or None))


def wait(
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


def cancel(session: Session, operation_id: Id) -> None:
    """Finished parts (mirrors, pins, rows) stay."""
    found = session.client.cancel_operation(operation_id)
    session.answer(found, [_line(found)])
