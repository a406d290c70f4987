"""`mirrord refs …`"""

from __future__ import annotations

from typing import Annotated

import typer

from .mirrors import Name
from .output import short, table
from .progress import finish
from .session import Session

At = Annotated[str, typer.Argument(help="A record: its id, or a time in ISO 8601.")]


def log(ctx: typer.Context, name: Name) -> None:
    session = Session.of(ctx)
    with session.client() as client:
        records = client.log_refs(name)
    rows = [(short(record.id), record.at, record.ref_count, record.summary) for record in records]
    session.answer(records, lambda: table(("RECORD", "AT", "REFS", "SUMMARY"), rows))


def diff(ctx: typer.Context, name: Name, a: At, b: At) -> None:
    session = Session.of(ctx)
    with session.client() as client:
        found = client.diff_refs(name, a, b)
    rows = [
        (change.kind, short(change.old), short(change.new), "kept" if change.kept else "", change.ref) for change in found.changes
    ]
    session.answer(found, lambda: table(("CHANGE", "OLD", "NEW", "OLD TIP", "REF"), rows))


def restore(
    ctx: typer.Context,
    name: Name,
    at: At,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Answer with the operation at once.")] = False,
) -> None:
    """Tips that this moves away from are kept, and the next sync brings upstream's refs back."""
    session = Session.of(ctx)
    with session.client() as client:
        operation = client.restore_refs(name, at)
        ended = operation if no_wait else finish(session, client, operation)
    session.answer(
        ended, lambda: table(("OPERATION", "KIND", "SUBJECT", "STATE"), [(ended.id, ended.kind, ended.subject, ended.state)])
    )
