"""`mirrord pin`, `unpin` and `pins`."""

from __future__ import annotations

from typing import Annotated

import typer

from .mirrors import Name
from .output import table
from .session import Session

Commit = Annotated[str, typer.Argument(help="A full commit id.")]


def pin(
    ctx: typer.Context,
    name: Name,
    commit: Commit,
    reason: Annotated[str, typer.Option(help="Why; shown in `mirrord pins`.")] = "",
) -> None:
    """The commit is fetched when the mirror lacks it, and pinned only once its closure was verified."""
    session = Session.of(ctx)
    with session.client() as client:
        made = client.pin(name, commit, reason)
    session.answer(made, lambda: [f"pinned {made.commit} of {made.mirror} for {made.owner}"])


def unpin(
    ctx: typer.Context,
    name: Name,
    commit: Commit,
    owner: Annotated[
        str | None, typer.Option(help="dataset/NAME or person/UID; yourself by default, others as an administrator.")
    ] = None,
) -> None:
    """A pin of another owner keeps the commit alive."""
    session = Session.of(ctx)
    with session.client() as client:
        client.unpin(name, commit, owner)
    if session.json:
        session.print_json(None)
    session.note(f"unpinned {commit} of {name}")


def list_all(
    ctx: typer.Context, name: Annotated[str | None, typer.Argument(help="Of which mirror; default: all.")] = None
) -> None:
    session = Session.of(ctx)
    with session.client() as client:
        pins = client.list_pins(name)
    rows = [(pin.mirror, pin.commit, pin.owner, pin.created_at, pin.reason) for pin in pins]
    session.answer(pins, lambda: table(("MIRROR", "COMMIT", "OWNER", "SINCE", "REASON"), rows))
