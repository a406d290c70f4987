"""`mirrord refs …`"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from ..protocol import Operation, RefDiff
from .mirrors import Name, NoWait
from .output import short, table
from .parameters import Argument
from .progress import finish
from .session import Session

At = Annotated[str, Argument(help="A record: its id, or a time in ISO 8601.")]


def log(session: Session, name: Name) -> None:
    """Newest first; a record is made by each sync that changed something."""
    with session.client() as client:
        records = client.log_refs(name)
    rows = [(record.id, record.at, record.ref_count, record.summary) for record in records]
    session.answer(records, lambda: table(("RECORD", "AT", "REFS", "SUMMARY"), rows))


def diff(session: Session, name: Name, a: At, b: At) -> None:
    with session.client() as client:
        found = client.diff_refs(name, a, b)
    session.answer(found, lambda: _changes(found))


def restore(session: Session, name: Name, at: At, no_wait: NoWait = False) -> None:
    """Prints what moved. Tips that this moves away from are kept; the next sync brings upstream's refs back."""
    with session.client() as client:
        operation = client.restore_refs(name, at)
        ended = operation if no_wait else finish(session, client, operation)
    session.answer(ended, lambda: _restored(ended))


def _restored(operation: Operation) -> Iterator[str]:
    if operation.result is None:
        yield f"operation {operation.id} {operation.state}"
        return
    yield from _changes(RefDiff.from_json(operation.result))


def _changes(found: RefDiff) -> Iterator[str]:
    rows = [
        (
            change.kind,
            short(change.old),
            short(change.new),
            "kept" if change.kept else None,
            change.ref,
        )
        for change in found.changes
    ]
    return table(("CHANGE", "OLD", "NEW", "OLD TIP", "REF"), rows)
