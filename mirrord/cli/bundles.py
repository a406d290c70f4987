"""`mirrord bundle …`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from ..errors import UsageError
from ..protocol import Operation
from .mirrors import Name, NoWait
from .output import count, facts, size
from .parameters import Argument, Option
from .progress import finish, watching
from .session import Session


def create(
    session: Session,
    name: Name,
    file: Annotated[Path, Argument(help="What to write; it appears when it is whole.")],
    since: Annotated[
        str | None,
        Option(
            metavar="RECORD", help="Only what came after this ref record: an id, a time, or latest."
        ),
    ] = None,
) -> None:
    """The file holds all refs, pins, kept refs, the ref history, and the rows of datasets that name the mirror, patches included:
    keep it as private as the mirror. git can verify, clone and fetch from it. Prints the record to make the next one since."""
    if not file.parent.is_dir():
        raise UsageError(
            f"cannot write {file}: there is no directory {file.parent}", hint="make it first"
        )
    with session.client() as client, watching(session, f"bundling {name}") as watch:
        made = client.create_bundle(name, file, since=since, progress=watch)
    pairs = [
        ("file", made.file),
        ("mirror", made.mirror),
        ("size", size(made.size_bytes)),
        ("record", made.record),
    ]
    session.answer(made, lambda: facts([*pairs, ("since", made.since)]))


def import_file(
    session: Session,
    file: Annotated[Path, Argument(help="A bundle of mirrord, or of git.")],
    mirror: Annotated[
        str | None,
        Option(metavar="NAME", help="Into which mirror; default: the one that the bundle is of."),
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """A mirror that is not here is made. In one that is, refs are made or move forward; where the bundle's differ otherwise, they
    are kept beside. A damaged or hostile file changes nothing."""
    if not file.is_file():
        raise UsageError(f"cannot import {file}: it is not a file", hint="name a bundle file")
    with session.client() as client:
        with watching(session, f"sending {file.name}") as watch:
            operation = client.import_bundle(file, mirror=mirror, progress=watch)
        ended = operation if no_wait else finish(session, client, operation)
    session.answer(ended, lambda: _imported(ended))


def _imported(operation: Operation) -> Iterator[str]:
    result = operation.result
    if result is None:
        yield f"operation {operation.id} {operation.state}"
        return
    made = "made" if result["created"] else "added to"
    yield f"{made} mirror {result['mirror']}: {result['summary']}, {len(result['kept'])} kept, {count(result['pins'], 'pin')}"
    for name, rows in result["datasets"].items():
        yield f"dataset {name}: {count(rows, 'instance')} added"
    for name in result["datasets_refused"]:
        yield f"dataset {name}: another of that name is here; its pins are yours now"
