"""`mirrord pin`, `unpin` and `pins`."""

from __future__ import annotations

from typing import Annotated

from .mirrors import Name
from .output import table
from .parameters import Argument, Option
from .session import Session

Commit = Annotated[str, Argument(help="A full commit id.")]


def pin(
    session: Session,
    name: Name,
    commit: Commit,
    reason: Annotated[str, Option(help="Why; shown in `mirrord pins`.")] = "",
) -> None:
    """The commit is fetched when the mirror lacks it, and pinned only once its closure was verified."""
    with session.client() as client:
        made = client.pin(name, commit, reason)
    session.answer(made, lambda: [f"pinned {made.commit} of {made.mirror} for {made.owner}"])


def unpin(
    session: Session,
    name: Name,
    commit: Commit,
    owner: Annotated[
        str | None,
        Option(help="dataset/NAME or person/UID; yourself by default, others as an administrator."),
    ] = None,
) -> None:
    """A pin of another owner keeps the commit alive."""
    with session.client() as client:
        client.unpin(name, commit, owner)
    if session.json:
        session.print_json(None)
    session.note(f"unpinned {commit} of {name}")


def list_all(
    session: Session,
    name: Annotated[str | None, Argument(help="Of which mirror; default: all.")] = None,
) -> None:
    with session.client() as client:
        pins = client.list_pins(name)
    rows = [(pin.mirror, pin.commit, pin.owner, pin.created_at, pin.reason) for pin in pins]
    session.answer(pins, lambda: table(("MIRROR", "COMMIT", "OWNER", "SINCE", "REASON"), rows))
