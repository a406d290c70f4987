"""`mirrord bundle …`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from ..errors import UsageError
from ..protocol import Operation
from .output import count, facts, size
from .parameters import Argument, MirrorArgument, NoWait, Option
from .progress import finish, watching
from .session import Session


def create(
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
    with session.client() as client, watching(session, f"bundling {name}") as watch:
        made = client.create_bundle(name, file, since=since, progress=watch)
    pairs: list[tuple[str, object]] = [("file", made.file), ("mirror", made.mirror)]
    pairs += [("size", size(made.size_bytes)), ("record", made.record), ("since", made.since)]
    session.answer(made, lambda: facts(pairs))


def import_file(
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
    counts = f"{len(result['kept'])} kept, {count(result['pins'], 'pin')}"
    yield f"{made} mirror {result['mirror']}: {result['summary']}, {counts}"
    for name, rows in result["datasets"].items():
        yield f"dataset {name}: {count(rows, 'instance')} added"
    for name in result["datasets_refused"]:
        yield f"dataset {name}: another dataset has this name; its pins are yours now"
